"""A model as a folder: ``model.safetensors`` and ``config.json``, which holds all that using the model needs.

Reading a folder builds only the networks of this package. A decoder of one's own comes from the caller; the folder
merely says which one it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from shortrun.core import model as models
from shortrun.core.langevin import Langevin
from shortrun.files import write_atomically, write_json
from shortrun.learners import learner_class
from shortrun.learners.abp import visits
from shortrun.nets.build import ModelError
from shortrun.training.config import network_of

FORMAT = 2
LIKELIHOODS = ("GaussianModel", "BernoulliModel", "CategoricalModel")


class RunError(ValueError):
    """A run folder or model cannot be used; the message says why."""


@dataclass(frozen=True)
class Description:
    """What a model folder says besides the weights."""

    method: str
    network: Any
    """Settings of the network."""
    shape: tuple[int, ...]
    """Of one example."""
    dynamics: Langevin
    """What infers new examples."""
    widths: tuple[float, ...] = ()
    """Of each layer of latents, for samples; empty for those of the prior."""
    own_decoder: str | None = None
    """Name of a decoder that is not part of this package."""
    likelihood: str = "GaussianModel"
    """Class of the model, for a decoder of one's own."""
    latent_shapes: tuple[tuple[int, ...], ...] = ()
    sigma: float | None = None
    classes: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """About its training: data, iterations, seconds, seed .."""


def name_of(decoder: Any) -> str:
    """How a decoder of one's own is called, as an import path."""
    kind = decoder if hasattr(decoder, "__qualname__") else type(decoder)
    return f"{kind.__module__}:{kind.__qualname__}"


def write_model(folder: Path, model: nn.Module, description: Description) -> None:
    values = {"format": FORMAT, **asdict(description), "dynamics": description.dynamics.as_dict()}
    values["model"] = values.pop("network")
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", save(tensors))
    write_json(folder / "config.json", values)


def read_description(folder: Path) -> Description:
    values = json.loads((folder / "config.json").read_text())
    method = values["method"]
    network = network_of(method, values["model"])
    dynamics = Langevin.from_dict(values["dynamics"])
    if "format" not in values:  # version 0.1
        kind = values["model"].get("kind", "")
        return Description(
            method, network, tuple(values["image"]), visits(dynamics) if method == "abp" else dynamics,
            tuple(values.get("spread", ())), kind if ":" in kind else None, sigma=values["sigma"], info=values["info"],
        )  # fmt: skip
    if values["format"] != FORMAT:
        raise RunError(f"{folder} has the format {values['format']}; this version of shortrun reads {FORMAT}")
    return Description(
        method, network, tuple(values["shape"]), dynamics, tuple(values["widths"]), values["own_decoder"],
        values["likelihood"], tuple(tuple(shape) for shape in values["latent_shapes"]), values["sigma"],
        values["classes"], values["info"],
    )  # fmt: skip


def build(description: Description, decoder: Any = None) -> Any:
    """The model of a description, with weights as they come; ``decoder`` where it is not one of this package's."""
    learner = learner_class(description.method)
    sigma = 0.3 if description.sigma is None else description.sigma
    if description.own_decoder is None:
        if decoder is not None:
            raise ModelError(f"this model has a network of this package ({description.method}); it takes no decoder")
        return learner.build(description.network, description.shape, sigma)
    if decoder is None:
        raise ModelError(
            f"this model has a decoder of its own, {description.own_decoder}, which is never imported because a file "
            f"says so. Pass it: load(.., decoder=..) in Python, --decoder {description.own_decoder} on the command line"
        )
    shapes = description.latent_shapes or getattr(decoder, "latent_shapes", ())
    if description.likelihood not in LIKELIHOODS:
        raise ModelError(
            f"this model is a {description.likelihood}, which is not part of this package; pass it: load(.., model=..)"
        )
    if description.likelihood == "CategoricalModel":
        return models.CategoricalModel(decoder, shapes, description.classes or 2)
    if description.likelihood == "BernoulliModel":
        return models.BernoulliModel(decoder, shapes)
    model = models.GaussianModel(decoder, shapes, sigma)
    return learner.adopt(model, description.network, description.shape)


def read_model(folder: Path, decoder: Any = None, model: Any = None) -> tuple[Any, Description]:
    """The model of a folder, and what the folder says about it."""
    try:
        description = read_description(folder)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder / 'config.json'} is not the description of a model: {error!r}") from None
    model = build(description, decoder) if model is None else model
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise RunError(f"{folder / 'model.safetensors'} cannot be read: {error}") from None
    return model.eval(), description
