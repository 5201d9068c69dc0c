"""Models on a hub (huggingface_hub, optional): publish with a card, and download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortrun.training.model_folder import PRIOR, RunError

if TYPE_CHECKING:
    from shortrun.trained import Trained

FILES = ["config.json", "model.safetensors", PRIOR]


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RunError("models on a hub need huggingface_hub: pip install 'shortrun[hub]'") from None
    return huggingface_hub


def download(name: str) -> Path:
    """The folder of a published model; only its weights, its description and its learned prior are fetched."""
    return Path(_library().snapshot_download(name, allow_patterns=FILES))


def model_card(trained: Trained, name: str, command: str = "", pictures: tuple[str, ...] = ()) -> str:
    """A page about the model: what it is, its data, the command that trained it, its figures, and how to use it."""
    info = trained.info
    mse = info.get("mse")
    kind = "held-out" if info.get("held_out", True) else "training"
    figures = {
        "data": info.get("data", "unknown"),
        "sha256 of the data": info.get("train_checksum") or "unknown",
        "method": trained.method,
        "examples": " x ".join(map(str, trained.shape)),
        "parameters": f"{trained.parameter_count:,}",
        "latents": ", ".join(str(shape) for shape in getattr(trained.model, "latent_shapes", ())),
        "inference": f"{trained.dynamics.steps} Langevin steps, s = {trained.dynamics.step_size:.4g}",
        "training": "{} iterations, {} s, seed {}".format(
            *(info.get(k, "?") for k in ("iterations", "seconds", "seed"))
        ),
        f"MSE per pixel in [-1, 1], {kind}": "not measured" if mse is None else f"{mse:.4f}",
    }
    own = trained.description.own_decoder
    load = f'sr.load("{name}"' + (f", decoder=...)  # {own}" if own else ")")
    parts = [
        "---\nlibrary_name: shortrun\ntags:\n- generative-model\n- latent-variable-model\n- langevin-dynamics\n---",
        f"# {name}",
        "A generative model without an encoder: latents are inferred by a few Langevin steps "
        "([shortrun](https://pypi.org/project/shortrun/)).",
        "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in figures.items()),
        *(["Trained by:", f"```\n{command}\n```"] if command else []),
        f"```python\nimport shortrun as sr\n\nmodel = {load}\nmodel.sample(16); model.reconstruct(x)\n```",
        *(f"![{picture.removesuffix('.png')}]({picture})" for picture in pictures),
    ]
    return "\n\n".join(parts) + "\n"


def write_folder(trained: Trained, folder: Path, name: str, command: str = "", examples: Any = None) -> None:
    """All that is published: the model, its card, and pictures where the examples are images."""
    trained.save(folder)
    pictures = []
    if len(trained.shape) == 3:
        from shortrun.pictures import save_grid

        save_grid(folder / "samples.png", [("", row) for row in trained.sample(40).split(10)])
        pictures.append("samples.png")
        if examples is not None:
            x = trained.prepare(examples[:10])
            save_grid(folder / "reconstructions.png", [("original", x), ("reconstruction", trained.reconstruct(x))])
            pictures.append("reconstructions.png")
    (folder / "README.md").write_text(model_card(trained, name, command, tuple(pictures)))


def push_to_hub(
    trained: Trained,
    name: str,
    *,
    command: str = "",
    examples: Any = None,
    private: bool = False,
    message: str = "Model trained with shortrun",
    api: Any = None,
) -> str:
    """Publish a model as ``name`` (owner/name), with a generated card; returns its address.

    Args:
        command: what trained it, for the card.
        examples: images whose reconstructions the card may show; mind who owns them.
        private: who may see it.
        api: an ``HfApi``, by default one with the user's own login.
    """
    api = _library().HfApi() if api is None else api
    address = api.create_repo(name, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(trained, Path(folder), name, command, examples)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return str(address)
