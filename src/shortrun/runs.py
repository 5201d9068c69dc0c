"""A run is a folder: ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``pictures/``, ``model/``.

Checkpoints and models are safetensors with JSON beside or inside them; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shortrun.config import Method, ModelConfig, model_from_plain, to_plain
from shortrun.langevin import Langevin
from shortrun.learners import METHODS
from shortrun.learners.base import widen
from shortrun.model import Latents

KEEP_CHECKPOINTS = 2
SHIPPED = Path(__file__).parent / "pretrained"


class RunError(ValueError):
    """A run folder or model cannot be used; the message says why."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file, flush it to disk, rename: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, values: Any) -> None:
    write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object per line; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# --- models ----------------------------------------------------------------------------------------


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    method: Method,
    config: ModelConfig,
    image: tuple[int, int, int],
    dynamics: Langevin,
    spread: Sequence[float] = (),
    info: dict[str, Any] | None = None,
) -> None:
    """Write ``model.safetensors`` and ``config.json``."""
    folder = Path(folder)
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    description = {
        "method": method,
        "model": to_plain(config),
        "image": list(image),
        "sigma": float(model.sigma),  # type: ignore[arg-type]
        "dynamics": {"steps": dynamics.steps, "step_size": dynamics.step_size, "noise": dynamics.noise},
        "spread": list(spread),
        "info": info or {},
    }
    write_atomically(folder / "model.safetensors", save(tensors))
    write_json(folder / "config.json", description)


class Pretrained:
    """A trained model with its method and the dynamics that was tuned for it."""

    def __init__(self, model: Any, dynamics: Langevin, description: dict[str, Any]) -> None:
        self.model, self.dynamics = model, dynamics
        self.spread: tuple[float, ...] = tuple(description.get("spread", ()))
        self.name: Method = description["method"]
        self.method = METHODS[self.name]
        self.image: tuple[int, int, int] = tuple(description["image"])
        self.config = model_from_plain(description["model"])
        self.info: dict[str, Any] = description["info"]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device | str) -> Pretrained:
        self.model = self.model.to(device)
        return self

    def sample_latents(self, count: int, generator: torch.Generator) -> Latents:
        """Latents to make samples of: from the prior, in the width that the latents had in training."""
        return widen(self.model.sample_prior(count, generator), self.spread)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED.iterdir() if p.is_dir()) if SHIPPED.is_dir() else []


def from_pretrained(name: str | Path) -> Pretrained:
    """Load a model: the name of a shipped one, a run folder, a folder with a saved model, or a hub name."""
    path = Path(name).expanduser()
    for folder in (path / "model", path, SHIPPED / str(name)):
        if (folder / "config.json").is_file():
            return _load_model(folder)
    if path.exists():
        raise RunError(f"{path} holds no model: expected config.json and model.safetensors there or in model/")
    if str(name).count("/") == 1 and not str(name).startswith((".", "/")):
        from huggingface_hub import snapshot_download

        return _load_model(Path(snapshot_download(str(name))))
    raise RunError(
        f"{name} is neither a run folder, nor a saved model, nor a shipped one ({', '.join(shipped_models())})"
    )


def _load_model(folder: Path) -> Pretrained:
    description = json.loads((folder / "config.json").read_text())
    config = model_from_plain(description["model"])
    method = METHODS[description["method"]]
    model: nn.Module = method.build(config, tuple(description["image"]), description["sigma"])
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise RunError(f"{folder / 'model.safetensors'} cannot be read: {error}") from None
    return Pretrained(model.eval(), Langevin(**description["dynamics"]), description)


# --- checkpoints -----------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    iteration: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: dict[str, torch.Generator],
    extra: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """One file with all that resuming needs; older ones beyond the last two are removed afterwards."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": value for key, value in slots.items()}
    tensors |= {f"generator.{key}": value.get_state() for key, value in generators.items()}
    tensors |= {f"extra.{key}": value for key, value in extra.items()}
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    path = folder / f"checkpoint-{iteration:08d}.safetensors"
    write_atomically(path, save(plain, {"state": json.dumps({**state, "iteration": iteration})}))
    for old in list_checkpoints(folder)[:-KEEP_CHECKPOINTS]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: dict[str, torch.Generator],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore the newest checkpoint that can be read; returns its state and the extra tensors of the method."""
    for path in reversed(list_checkpoints(folder)):
        try:
            with safe_open(path, "pt") as file:
                state: dict[str, Any] = json.loads(file.metadata()["state"])
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError):
            continue
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}, "generator": {}, "extra": {}}
        for key, value in tensors.items():
            kind, _, rest = key.partition(".")
            parts[kind][rest] = value
        model.load_state_dict(parts["model"])
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in parts["optimiser"].items():
            index, _, slot = key.partition(".")
            slots.setdefault(int(index), {})[slot] = value
        optimiser.load_state_dict({"state": slots, "param_groups": optimiser.state_dict()["param_groups"]})
        for parameter, values in optimiser.state.items():  # fused optimisers need them to lie as their parameters do
            for name, value in values.items():
                if value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
        for key, generator in generators.items():
            generator.set_state(parts["generator"][key])
        return state, parts["extra"]
    raise RunError(f"{folder} has no readable checkpoint to resume from")
