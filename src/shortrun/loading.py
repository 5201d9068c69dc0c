"""Where trained models are found: shipped with the package, in a run folder, saved, or on a hub."""

from __future__ import annotations

from pathlib import Path

from shortrun.training.model_folder import RunError

SHIPPED = Path(__file__).parent / "pretrained"


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED.iterdir() if p.is_dir()) if SHIPPED.is_dir() else []


def find_model(name: str | Path) -> Path:
    """The folder with the model of this name, downloaded if it is that of a hub."""
    path = Path(name).expanduser()
    for folder in (path / "model", path, SHIPPED / str(name)):
        if (folder / "config.json").is_file():
            return folder
    if path.exists():
        raise RunError(f"{path} holds no model: expected config.json and model.safetensors there or in model/")
    if str(name).count("/") == 1 and not str(name).startswith((".", "/")):
        from shortrun.hub import download

        return download(str(name))
    raise RunError(
        f"{name} is neither a run folder, nor a saved model, nor a shipped one ({', '.join(shipped_models())})"
    )
