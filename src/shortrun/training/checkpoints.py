"""Checkpoints: all that resuming needs, as safetensors with JSON inside; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from shortrun.files import to_json, write_atomically
from shortrun.training.model_folder import RunError, check_finite

KEEP_CHECKPOINTS = 2


class OtherRunError(RunError):
    """The settings are not those that a checkpoint was made with."""


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
        raise RunError(f"it is of another network than the one given: {error}") from None
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in parts["optimiser"].items():
        index, _, slot = key.partition(".")
        slots.setdefault(int(index), {})[slot] = value.clone()
    _check_slots(optimiser, slots)
    optimiser.load_state_dict({"state": slots, "param_groups": optimiser.state_dict()["param_groups"]})
    for parameter, values in optimiser.state.items():  # fused optimisers need them to lie as their parameters do
        for name, value in values.items():
            if value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
    for key, source in sources.items():
        source.set_state(parts["generator"][key])
    return {key: value.clone() for key, value in parts["extra"].items()}


SLOTS = {torch.optim.Adam: {"exp_avg", "exp_avg_sq"}, torch.optim.Adamax: {"exp_avg", "exp_inf"}}
"""What an optimiser keeps of each parameter, in its shape; besides the number of its steps."""


def _check_slots(optimiser: torch.optim.Optimizer, slots: dict[int, dict[str, Tensor]]) -> None:
    """Each parameter has what its optimiser keeps of it, or, before the first update, none has anything."""
    wanted = SLOTS.get(type(optimiser))
    if not slots or wanted is None:
        return
    for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"]):
        found = {name: tuple(value.shape) for name, value in slots.get(index, {}).items()}
        if found != {"step": (), **dict.fromkeys(wanted, tuple(parameter.shape))}:
            raise RunError(f"the state of the optimiser is incomplete: of parameter {index} it has {found}")


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """One file; older ones beyond the last two are removed afterwards."""
    path = folder / f"checkpoint-{checkpoint.state['iteration']:08d}.safetensors"
    write_atomically(path, save(checkpoint.tensors, {"state": to_json(checkpoint.state)}))
    for old in list_checkpoints(folder)[:-KEEP_CHECKPOINTS]:
        old.unlink()
    return path


def read(path: Path) -> Checkpoint:
    """A checkpoint, whose numbers must be finite."""
    with safe_open(path, "pt") as file:
        state: dict[str, Any] = json.loads(file.metadata()["state"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if state["iteration"] < 0 or state["seconds"] < 0:
        raise RunError(f"it is of iteration {state['iteration']}, after {state['seconds']} s")
    check_finite(tensors, str(path))
    return Checkpoint(state, tensors)


def restore(folder: Path, use: Callable[[Checkpoint], None], log: Callable[[str], None]) -> None:
    """Give ``use`` the last checkpoint that it can take: if one cannot be used, the one before it is tried.

    Raises :class:`OtherRunError` at once: an older checkpoint of another run would be no better.
    """
    reasons = []
    for path in reversed(list_checkpoints(folder)):
        try:
            use(read(path))
        except OtherRunError:
            raise
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            lacking = "it lacks " if isinstance(error, KeyError) else ""
            reasons.append(
                f"{path.name} cannot be used: {lacking}{(str(error) or type(error).__name__).splitlines()[0]}"
            )
            continue
        for reason in reasons:
            log(f"{reason}; going on from {path.name}")
        return
    raise RunError(f"{folder} has no checkpoint to resume from" + "".join(f"; {reason}" for reason in reasons))
