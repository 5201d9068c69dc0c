"""A model as a folder: ``model.safetensors``, ``config.json`` with all that using the model needs, and a learned prior.

Reading a folder builds only the networks of this package. A decoder of one's own comes from the caller; the folder
merely says which one it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shortrun.core import model as models
from shortrun.core.langevin import Langevin
from shortrun.core.latents import dimensions, shapes_of
from shortrun.files import check_writable, write_atomically, write_json
from shortrun.learners import Method, learner_class
from shortrun.learners.abp import visits
from shortrun.limits import MOST_STEPS, too_large
from shortrun.nets.build import ModelError
from shortrun.priors import GaussianPrior, Prior, prior_class
from shortrun.settings import Count, Positive, check
from shortrun.training.config import network_of

FORMAT = 2
PRIOR = "prior.safetensors"
LIKELIHOODS = ("GaussianModel", "BernoulliModel", "CategoricalModel")


class RunError(ValueError):
    """A run folder or model cannot be used; the message says why."""


@dataclass(frozen=True)
class Description:
    """What a model folder says besides the weights."""

    method: Method
    network: Any
    """Settings of the network."""
    shape: tuple[Count, ...]
    """Of one example."""
    dynamics: Langevin
    """What infers new examples."""
    own_decoder: str | None = None
    """Name of a decoder that is not part of this package."""
    likelihood: str = "GaussianModel"
    """Class of the model, for a decoder of one's own."""
    latent_shapes: tuple[tuple[Count, ...], ...] = ()
    sigma: Positive | None = None
    classes: Count | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """About its training: data, iterations, seconds, seed .."""

    def __post_init__(self) -> None:
        check(self)


MODEL_FILES = {"model.safetensors", PRIOR, "config.json", "README.md", "samples.png", "reconstructions.png"}


def check_folder(folder: Path) -> None:
    """Refuse to save a model into a folder that holds anything else, or that cannot be made."""
    if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - MODEL_FILES):
        raise RunError(f"{folder} holds other things than a saved model; name another folder")
    check_writable(folder)


def name_of(decoder: Any) -> str:
    """How a decoder of one's own is called, as an import path."""
    kind = decoder if hasattr(decoder, "__qualname__") else type(decoder)
    return f"{kind.__module__}:{kind.__qualname__}"


def write_model(folder: Path, model: nn.Module, description: Description, prior: Prior | None = None) -> None:
    values = {"format": FORMAT, **asdict(description), "dynamics": description.dynamics.as_dict()}
    values["model"] = values.pop("network")
    (folder / PRIOR).unlink(missing_ok=True)  # it is that of other weights
    write_atomically(folder / "model.safetensors", _bytes(model))
    write_json(folder / "config.json", values)
    if prior is not None:
        write_prior(folder, prior)


def _bytes(module: nn.Module, metadata: dict[str, str] | None = None) -> bytes:
    tensors = {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}
    return save(tensors, metadata)


def write_prior(folder: Path, prior: Prior) -> None:
    """One file, which also says of what kind it is and how it was fitted."""
    about = {"kind": prior.kind, "size": prior.size, "options": prior.options(), "info": prior.info}
    write_atomically(folder / PRIOR, _bytes(prior, {"prior": json.dumps(about)}))


def read_prior(folder: Path) -> Prior | None:
    """The learned prior of a model, if it has one."""
    path = folder / PRIOR
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["prior"])
        prior = prior_class(about["kind"])(int(about["size"]), **about["options"])
        prior.load_state_dict(load_file(path))
        prior.info = dict(about["info"])
    except KeyError as error:
        raise RunError(f"{path} is not a learned prior: it lacks {error}") from None
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    check_finite(prior.state_dict(), str(path))
    return prior.eval().requires_grad_(False)


def read_description(folder: Path, allow_large: bool = False) -> Description:
    """What ``config.json`` says, checked."""
    path = folder / "config.json"
    try:
        description = _description(json.loads(path.read_text()))
    except KeyError as error:
        raise RunError(f"{path} is not the description of a model: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is not the description of a model: {error}") from None
    steps = description.dynamics.steps
    if (reason := too_large(f"{path}: its chains have {{}} steps", steps, MOST_STEPS, allow_large)) is not None:
        raise RunError(reason)
    return description


def _description(values: Any) -> Description:
    for name, table in (("it", values), *((key, values[key]) for key in ("model", "dynamics", "info"))):
        if not isinstance(table, dict):
            raise TypeError(f"{name} is {table!r}; expected a table of names and values")
    for name in ("steps", "step_size"):
        values["dynamics"][name]  # else they would have the defaults of this version
    method = values["method"]
    network = network_of(method, values["model"])
    dynamics = Langevin.from_dict(values["dynamics"])
    if "format" not in values:  # version 0.1
        kind = values["model"].get("kind", "")
        return Description(
            method, network, tuple(values["image"]), visits(dynamics) if method == "abp" else dynamics,
            kind if ":" in kind else None, sigma=values["sigma"], info=values["info"],
        )  # fmt: skip
    if values["format"] != FORMAT or isinstance(values["format"], bool):
        raise ValueError(f"it has the format {values['format']!r}; this version of shortrun reads {FORMAT}")
    return Description(
        method, network, tuple(values["shape"]), dynamics, values["own_decoder"], values["likelihood"],
        tuple(tuple(shape) for shape in values["latent_shapes"]), values["sigma"], values["classes"], values["info"],
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


def read_model(
    folder: Path, decoder: Any = None, model: Any = None, allow_large: bool = False
) -> tuple[Any, Description, Prior | None]:
    """The model of a folder, what the folder says about it, and its learned prior, if it has one."""
    description = read_description(folder, allow_large)
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        if model is None and description.own_decoder is None and decoder is None:
            _check_size(description, shapes)
        model = build(description, decoder) if model is None else model
        weights = load_file(path)
        model.load_state_dict(weights)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    check_finite(weights, str(path))
    prior = read_prior(folder) or _prior_of_widths(folder, model)
    if prior is not None and prior.size != dimensions(shapes_of(model)):
        raise RunError(f"{folder / PRIOR} is a prior of {prior.size} latents; the model has others")
    return model.eval(), description, prior


def check_finite(tensors: dict[str, Tensor], place: str) -> None:
    for key, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise RunError(f"{place} cannot be used: {key} holds NaN or infinity")


def _check_size(description: Description, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a description that asks for a larger network than the weights are of, before memory is taken for it."""
    try:
        with torch.device("meta"):
            wanted = build(description).state_dict()
    except NotImplementedError:  # a network that cannot be built without numbers
        return
    except (ModelError, ValueError) as error:
        raise RuntimeError(f"config.json describes a network that cannot be built: {error}") from None
    other = [key for key, value in wanted.items() if shapes.get(key) != tuple(value.shape)]
    if other:
        raise RuntimeError(f"config.json describes another network than these weights are of; {other[0]} differs")


def _prior_of_widths(folder: Path, model: Any) -> Prior | None:
    """Before there were learned priors, a model could say how wide each layer of its latents is."""
    values = json.loads((folder / "config.json").read_text())
    widths = values.get("widths") or values.get("spread")
    if not widths:
        return None
    sizes = torch.tensor([dimensions([shape]) for shape in shapes_of(model)])
    each = torch.tensor(widths, dtype=torch.float64).repeat_interleave(sizes)
    return GaussianPrior.of(torch.zeros_like(each), each.square().diag()).eval().requires_grad_(False)
