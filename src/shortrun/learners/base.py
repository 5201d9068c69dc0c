"""What learning asks of a method, and what methods share.

A learner is ``init`` and ``update`` over a :class:`State`. The state holds all that changes from update to update
except the parameters, which live in the model; their optimiser and the tables of ``memory`` change in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.latents import Rng
from shortrun.core.model import infer_new
from shortrun.learners.adapt import Control
from shortrun.learners.moments import Moments
from shortrun.nets.build import GeneratorNetwork, Shape, build_model
from shortrun.priors import Prior
from shortrun.processes import Processes

COMPILED_TOLERANCE = {"no": 1e-3, "bf16": 0.1}
"""How far compiled gradients may be from those of autograd, relative to the largest, by mixed precision."""


class Batch(NamedTuple):
    """A batch of all processes together."""

    x: Tensor
    mask: Tensor | None = None
    """True where a place is visible."""
    indices: Tensor | None = None
    """Positions in the training set, for methods that remember something about each example."""


class Moment(NamedTuple):
    """Where in its run an update is."""

    share: float = 0.0
    """How much of the run is over, from 0 to 1."""
    learning_rate: float | None = None
    """What the schedule asks for; by default that of the learner."""


class Info(NamedTuple):
    """What one update of the state did."""

    loss: float
    """What was minimised, per pixel."""
    divergent: int
    """Chains that diverged; they were taken back to their start and not used."""
    kept: bool
    """Whether the update counts; else it was undone, because the loss was not finite or it drove most chains away."""
    latent_std: tuple[float, ...]
    """Standard deviation of the inferred latents, per layer; 1 if their aggregate matches the prior."""
    step_size: float
    """s, the longest step of the chains."""
    curvature: float
    """Of minus the log joint where chains end, in their steepest direction, as last measured; NaN if not yet."""


@dataclass(frozen=True)
class State:
    """All that changes while learning, except the parameters."""

    optimiser: torch.optim.Optimizer
    rng: torch.Generator
    """Of chains, encoders and dequantisation."""
    tuning_rng: torch.Generator
    dynamics: Langevin
    """What infers latents through the decoder."""
    iteration: int = 0
    control: Control = field(default_factory=Control)
    """What keeps learning going: see :mod:`shortrun.learners.adapt`."""
    moments: Moments | None = None
    """Of the latents that were inferred in the last iterations, for samples."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Tables with a row per training example."""
    tuned_at: int = -1
    """Iteration before which the step size was last tuned."""
    tuning: dict[str, Any] | None = None
    """What that tuning found; none if it found no safe step."""

    def as_dict(self) -> dict[str, Any]:
        """The plain values, as JSON has them; tensors and generators are saved beside them."""
        return {
            "dynamics": self.dynamics.as_dict(), "iteration": self.iteration, "control": self.control._asdict(),
            "tuned_at": self.tuned_at, "moments": 0 if self.moments is None else self.moments.iterations,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves of it besides plain values, parameters and generators."""
        own = {} if self.moments is None else {"moments.mean": self.moments.mean, "moments.square": self.moments.square}
        return self.memory | own

    def restored(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> State:
        """With the plain values and tensors of a checkpoint; those of version 0.1 have other names for them."""
        memory = dict(tensors)
        mean, square = (memory.pop(f"moments.{name}", None) for name in ("mean", "square"))
        moments = None if mean is None or square is None else Moments(mean, square, values["moments"])
        if "dynamics" not in values:
            size, steps = values["step_size"], self.dynamics.steps
            values = {
                "dynamics": {"steps": steps, "step_size": size}, "iteration": values.get("iterations", 0),
                "control": {k: values[k] for k in ("caution",) if k in values},
            }  # fmt: skip
        known = values["control"].items()
        control = {key: float(value) for key, value in known if key in Control._fields and value is not None}
        return replace(
            self, dynamics=Langevin.from_dict(values["dynamics"]), iteration=values["iteration"],
            control=Control(**control), moments=moments, memory=memory,
            tuned_at=values.get("tuned_at", -1),
        )  # fmt: skip


class Learner:
    """A method: how its network is built, and how it is learned.

    Args:
        model: what is learned; it is put into training mode.
        dynamics: what infers latents through the decoder; by default that of the settings.
        learning_rate: of the optimiser.
        betas: of Adam.
        settings: of the method.
        processes: those that share the work; by default this one alone, on the device of the model.
        compiled: whether gradients are compiled, which takes up to half a minute once.
        log: takes messages to the user.
    """

    Settings: ClassVar[type[Any]]
    Network: ClassVar[type[Any]] = GeneratorNetwork

    # -- the network ----------------------------------------------------------------------------------

    @classmethod
    def build(cls, network: Any, shape: Shape, sigma: float) -> Any:
        """The model of this method for examples of this shape, such as (colours, height, width)."""
        return cls.adopt(build_model(network, shape, sigma), network, shape)

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> Any:
        """The model of this method around the decoder of ``model``, with an encoder where the method has one."""
        return model

    # -- learning -------------------------------------------------------------------------------------

    def __init__(
        self,
        model: Any,
        dynamics: Langevin | None = None,
        *,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        settings: Any = None,
        processes: Processes | None = None,
        compiled: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model.train()
        self.settings = self.Settings() if settings is None else settings
        self.dynamics = self.default_dynamics() if dynamics is None else dynamics
        self.learning_rate, self.betas, self.compiled, self.log = learning_rate, betas, compiled, log
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no parameters to learn: is its decoder an nn.Module?")
        self.processes = Processes(self.parameters[0].device) if processes is None else processes

    def default_dynamics(self) -> Langevin:
        """That of the settings."""
        return Langevin(self.settings.steps, self.settings.step_size)

    def make_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters, lr=self.learning_rate, betas=self.betas, fused=True)

    def init(self, seed: int = 0, examples: Any = None) -> State:
        """The state before the first update; ``examples`` are the training data, where the method needs them."""
        chains, tuning = (torch.Generator().manual_seed(1000 * seed + i) for i in (1, 2))
        return State(self.make_optimiser(), chains, tuning, self.dynamics)

    def update(self, state: State, batch: Batch | Tensor, moment: Moment = Moment()) -> tuple[State, Info]:
        """Learn from a batch."""
        raise NotImplementedError

    def tuning_is_due(self, state: State) -> bool:
        return False

    def tune(self, state: State, batch: Batch | Tensor) -> State:
        """Choose the step size; only for methods where :meth:`tuning_is_due`."""
        return state

    def ready(self, state: State, batch: Batch, rng: torch.Generator) -> State:
        """Before the model is used or saved, with training examples: fit whatever its use needs."""
        return state

    def prior(self, state: State) -> Prior | None:
        """The law of the latents as learning has seen them so far; None for that of the model."""
        return None

    def dynamics_of_use(self, state: State) -> Langevin:
        """What infers new examples: that of learning, where its chains start from the prior."""
        return state.dynamics

    def reconstruct(self, state: State, x: Tensor, rng: Rng) -> Tensor:
        """Decode what the model infers."""
        z = infer_new(self.model, x, self.dynamics_of_use(state), rng=rng).z
        with torch.no_grad():
            return self.model.decode(z)

    # -- what methods share ---------------------------------------------------------------------------

    def as_batch(self, batch: Batch | Tensor | Sequence[Tensor]) -> Batch:
        """A tensor is a batch without a mask; so is the first of what a DataLoader gives."""
        if isinstance(batch, Batch):
            return batch
        x = batch if isinstance(batch, Tensor) else batch[0]
        return Batch(self.model.prepare(x) if hasattr(self.model, "prepare") else x)

    def own_batch(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Examples and mask of this process, on its device."""
        x = self.processes.own(batch.x).to(self.processes.device)
        if batch.mask is None:
            return x, None
        return x, self.processes.own(batch.mask.expand(len(batch.x), *batch.mask.shape[1:])).to(x.device)

    def indices_of(self, batch: Batch) -> Tensor:
        """Positions in the training set, which a method that remembers its examples cannot do without."""
        if batch.indices is None:
            raise ValueError(
                f"{type(self).__name__} remembers something about each training example, so a batch needs its indices: "
                "Batch(x, None, indices), or pass a tensor or a Dataset to fit instead of a DataLoader"
            )
        return batch.indices

    def counted(self, state: State, kept: bool) -> State:
        """The state after an update: one iteration more, or, if the update was undone, a lower learning rate."""
        return replace(state, iteration=state.iteration + kept, control=state.control.after(kept))

    def set_rate(self, state: State, moment: Moment) -> float:
        """Give the optimiser the learning rate of this moment, with due caution; returns it."""
        rate = self.learning_rate if moment.learning_rate is None else moment.learning_rate
        rate *= state.control.caution
        for group in state.optimiser.param_groups:
            group["lr"] = rate
        return rate

    def descend(
        self, optimiser: torch.optim.Optimizer, loss: Tensor, count: Tensor, gradients: Sequence[Tensor], unit: float
    ) -> tuple[float, bool]:
        """One step of the optimiser down ``unit * loss / count``, both summed over the processes.

        ``gradients`` are those of ``loss``. Returns the loss, and whether all was finite; if not, nothing changes.
        """
        parts = [g.float().flatten() for g in gradients]
        flat = torch.cat([*parts, loss.detach().float()[None], count.float()[None]])
        flat = self.processes.total(flat)
        scale = unit / flat[-1].clamp_min(1)
        value, gradient = float(flat[-2] * scale), flat[:-2] * scale
        if not (math.isfinite(value) and bool(gradient.isfinite().all())):
            return value, False
        pieces = gradient.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            # The fused optimiser goes through memory in order: a gradient must lie there as its parameter does.
            parameter.grad = torch.empty_like(parameter).copy_(piece.view(parameter.shape))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return value, True

    def weights(self, optimiser: torch.optim.Optimizer) -> list[Tensor]:
        """All that :meth:`descend` changes: parameters and the state of the optimiser."""
        state = optimiser.state
        return [*self.parameters, *(value for p in self.parameters if p in state for value in state[p].values())]

    @torch.no_grad()
    def undo(self, optimiser: torch.optim.Optimizer, before: Sequence[Tensor]) -> None:
        """Back to what a copy of :meth:`weights` remembers."""
        if len(before) == len(self.parameters):  # the optimiser had not begun
            optimiser.state.clear()
        torch._foreach_copy_(self.weights(optimiser), list(before))

    def pixel_unit(self, x: Tensor) -> float:
        """``sigma^2 / pixels``: minus the log joint in units of squared error per pixel; without sigma, per place."""
        sigma = getattr(self.model, "sigma", None)
        return (1.0 if sigma is None else float(sigma) ** 2) / x[0].numel()
