"""Checkpoints: all that resuming needs, as safetensors with JSON inside; nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from shortrun.files import write_atomically
from shortrun.training.model_folder import RunError

KEEP_CHECKPOINTS = 2


class Checkpoint(NamedTuple):
    """Copies: what happens to the model later does not change them."""

    state: dict[str, Any]
    """Plain values, as JSON has them; ``iteration`` among them."""
    tensors: dict[str, Tensor]


def take(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    sources: dict[str, torch.Generator],
    memory: dict[str, Tensor],
    state: dict[str, Any],
) -> Checkpoint:
    """A checkpoint of a model, its optimiser, the sources of random numbers, and the tables of the method."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": value for key, value in slots.items()}
    tensors |= {f"generator.{key}": value.get_state() for key, value in sources.items()}
    tensors |= {f"extra.{key}": value for key, value in memory.items()}
    return Checkpoint(state, {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()})


def put_back(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    sources: dict[str, torch.Generator],
) -> dict[str, Tensor]:
    """Restore model, optimiser and random numbers; returns the tables of the method."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}, "generator": {}, "extra": {}}
    for key, value in checkpoint.tensors.items():
        kind, _, rest = key.partition(".")
        parts[kind][rest] = value
    try:
        model.load_state_dict(parts["model"])
    except RuntimeError as error:
        raise RunError(f"the checkpoint is of another network than the one given: {error}") from None
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in parts["optimiser"].items():
        index, _, slot = key.partition(".")
        slots.setdefault(int(index), {})[slot] = value.clone()
    optimiser.load_state_dict({"state": slots, "param_groups": optimiser.state_dict()["param_groups"]})
    for parameter, values in optimiser.state.items():  # fused optimisers need them to lie as their parameters do
        for name, value in values.items():
            if value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
    for key, source in sources.items():
        source.set_state(parts["generator"][key])
    return {key: value.clone() for key, value in parts["extra"].items()}


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """One file; older ones beyond the last two are removed afterwards."""
    path = folder / f"checkpoint-{checkpoint.state['iteration']:08d}.safetensors"
    write_atomically(path, save(checkpoint.tensors, {"state": json.dumps(checkpoint.state)}))
    for old in list_checkpoints(folder)[:-KEEP_CHECKPOINTS]:
        old.unlink()
    return path


def read(folder: Path) -> Checkpoint:
    """The last checkpoint that can be read."""
    for path in reversed(list_checkpoints(folder)):
        try:
            with safe_open(path, "pt") as file:
                state: dict[str, Any] = json.loads(file.metadata()["state"])
                return Checkpoint(state, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError):
            continue
    raise RunError(f"{folder} has no readable checkpoint to resume from")
