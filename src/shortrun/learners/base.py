"""What the training loop asks of a method, and what methods share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shortrun.config import ModelConfig, TrainConfig
from shortrun.generators import build_model
from shortrun.langevin import Langevin, infer, is_divergent, running_best
from shortrun.model import Latents, RandomSource, standard_normal

COMPILED_TOLERANCE = {"no": 1e-3, "bf16": 0.1, "fp16": 0.1}
"""How far compiled gradients may be from those of autograd, relative to the largest, by mixed precision."""
COMPILE_FROM_MINUTES, COMPILE_FROM_UPDATES = 10.0, 20_000


def compile_pays(config: TrainConfig) -> bool:
    """Whether compiling is asked for, or the run is long enough to earn back the half minute that it may take."""
    if config.compile != "auto":
        return config.compile == "on"
    updates = math.inf if config.iterations is None else config.updates_in(config.iterations)
    minutes = math.inf if config.minutes is None else config.minutes
    return minutes >= COMPILE_FROM_MINUTES and updates >= COMPILE_FROM_UPDATES


class NotPossibleError(ValueError):
    """The method cannot do what was asked; the message says why."""


class Batch(NamedTuple):
    """A batch of all processes together."""

    x: Tensor
    mask: Tensor | None
    indices: Tensor
    """Positions in the training set, for methods that remember something about each image."""


class Update(NamedTuple):
    """What one iteration did."""

    loss: float
    """What was minimised, per pixel."""
    divergent: int
    """Chains that diverged; they were taken back to their start and not used."""
    finite: bool
    """Whether loss and gradients were finite; if not, nothing was updated."""
    latent_std: tuple[float, ...]
    """Standard deviation of the inferred latents, per layer; 1 if their aggregate matches the prior."""


class Inferred(NamedTuple):
    z: Latents
    divergent: Tensor
    """Which chains diverged, shape ``(n,)``."""


def widen(z: Latents, spread: Sequence[float]) -> Latents:
    """Each layer times its width, if there is any."""
    return tuple(layer * width for layer, width in zip(z, spread, strict=True)) if spread else z


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in the mode for use instead of learning: batch normalisation neither sees nor learns from the batch."""
    learning = isinstance(model, nn.Module) and model.training
    if learning:
        model.eval()
    try:
        yield
    finally:
        if learning:
            model.train()


class Learner:
    """A method: how its model is built and used (class methods), and one run of learning it (an instance).

    This class is complete for models that are inferred by short run dynamics and sampled from their prior;
    methods that do it in another way override the class methods.
    """

    caution = 1.0
    """Share of the scheduled learning rate that the method dares to use at the moment."""
    no_dynamics: str | None = None
    """Why its latents cannot be inferred by short run dynamics, if they cannot."""

    # -- the model, without training ------------------------------------------------------------------

    @classmethod
    def build(cls, config: ModelConfig, image: tuple[int, int, int], sigma: float) -> nn.Module:
        """The network of this method for images of shape (colours, height, width)."""
        return build_model(config, image, sigma)

    @classmethod
    def sample(cls, model: Any, count: int, generator: RandomSource = None, spread: Sequence[float] = ()) -> Tensor:
        """Images of latents drawn from the prior; or, with ``spread``, from N(0, spread_l^2 I) in each layer."""
        with torch.no_grad(), evaluating(model):
            return model.decoder(widen(model.sample_prior(count, generator), spread))

    @classmethod
    def infer(
        cls, model: Any, x: Tensor, dynamics: Langevin, mask: Tensor | None = None, generator: RandomSource = None
    ) -> Inferred:
        """Latents of ``x`` by the method's own inference; hidden pixels have no influence."""
        with evaluating(model):
            return cls.infer_by_dynamics(model, x, dynamics, mask, generator)

    @classmethod
    def draw(
        cls, model: Any, x: Tensor, dynamics: Langevin, mask: Tensor | None = None, generator: RandomSource = None
    ) -> Inferred:
        """A draw from the method's q(z | x), which is what a chain ends in; an encoder infers the centre instead."""
        return cls.infer(model, x, dynamics, mask, generator)

    @classmethod
    def infer_by_dynamics(
        cls,
        model: Any,
        x: Tensor,
        dynamics: Langevin,
        mask: Tensor | None = None,
        generator: RandomSource = None,
        quiet_steps: int = 0,
    ) -> Inferred:
        """Latents of ``x`` by short run dynamics on the decoder, whatever the method.

        The last ``quiet_steps`` of the K steps take no noise: they end nearer to the centre of q(z | x), as the mean
        of an encoder does, instead of in a draw from it.
        """  # fmt: skip
        if cls.no_dynamics is not None:
            raise NotPossibleError(cls.no_dynamics)
        dynamics = cls.dynamics_for_new_images(dynamics)
        noisy = dynamics.steps - quiet_steps
        z, diagnostics = infer(
            model, x, dynamics.part(0, noisy), mask=mask, generator=generator, return_diagnostics=True
        )
        if not quiet_steps:
            return Inferred(z, diagnostics.divergent[-1])
        # Chains may be off their way here and come back, so only those that are not finite are given up; at the end
        # all are held against their best point, that of either part.
        lost = ~torch.cat([layer.flatten(1) for layer in z], 1).isfinite().all(1)
        start = tuple(layer.masked_fill(lost.view(-1, *[1] * (layer.ndim - 1)), 0.0) for layer in z)
        quiet = dynamics.part(noisy, dynamics.steps, noise=False)
        z, ending = infer(model, x, quiet, mask=mask, start=start, return_diagnostics=True)
        log_joints = torch.cat([diagnostics.log_joint, ending.log_joint])
        dimension = sum(layer[0].numel() for layer in z)
        return Inferred(z, lost | is_divergent(log_joints, running_best(log_joints), dimension)[-1])

    @classmethod
    def dynamics_for_new_images(cls, dynamics: Langevin) -> Langevin:
        """That of training; a method whose chains in training are not from the prior needs another one."""
        return dynamics

    @classmethod
    def lower_bound(cls, model: Any, x: Tensor, dynamics: Langevin, generator: torch.Generator) -> Tensor:
        """A lower bound of log p(x), shape ``(n,)``, for methods that have one.

        Chains have none. Minus the free energy with the conditional entropy, ``E log p(x, z_K) + H(z_0) + E sum_k
        log|det A_k|``, is one only where the map from ``z_0`` to ``z_K`` is one-to-one for given noise: where it folds,
        the log-determinants count the same volume several times, and the sum can exceed log p(x).
        """
        raise NotPossibleError(
            "the density of the end of a chain is not known: its conditional entropy is no lower bound of the true one "
            "where the map of the chain folds, so there is no lower bound of log p(x); annealed importance sampling "
            "estimates it"
        )

    # -- learning -------------------------------------------------------------------------------------

    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator, images: Any = None) -> None:
        self.model, self.config, self.accelerator = model.train(), config, accelerator
        self.dynamics = Langevin(config.steps, config.step_size)
        """What infers latents through the decoder."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimiser: torch.optim.Optimizer = torch.optim.Adam(
            self.parameters, lr=config.learning_rates[0], betas=config.betas, fused=True
        )
        self.compiled = compile_pays(config)
        self.say: Callable[[str], None] = lambda text: None
        """Where messages to the user go."""
        self.last_tuning: dict[str, Any] | None = None
        self.spread: tuple[float, ...] = ()
        """Width of each layer of latents for samples, where it is not that of the prior."""

    def updates_in(self, iterations: int) -> int:
        """Updates of the generator in the first so many iterations."""
        return iterations

    def tell(self, text: str) -> None:
        self.say(text)

    def update(self, batch: Batch, share: float, generator: torch.Generator) -> Update:
        """Learn from a batch; ``share`` is how much of the run is over."""
        raise NotImplementedError

    def tuning_is_due(self, iteration: int) -> bool:
        return False

    def tune(self, batch: Batch, generator: torch.Generator) -> None:
        """Choose the step size; only for methods where :meth:`tuning_is_due`."""

    def prepare(self, batch: Batch, generator: torch.Generator) -> None:
        """Called before each evaluation, with training images: fit whatever using the model needs."""

    def reconstruct(self, x: Tensor, generator: RandomSource) -> Tensor:
        """Decode what the method infers; divergent chains give NaN."""
        with evaluating(self.model):
            z, _ = self.infer(self.model, x, self.dynamics, None, generator)
            with torch.no_grad():
                return self.model.decoder(z)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides model and optimiser."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"step_size": self.dynamics.step_size, "spread": self.spread}

    def load_state(self, state: dict[str, Any]) -> None:
        self.dynamics = Langevin(self.dynamics.steps, state["step_size"])
        self.spread = tuple(state.get("spread", ()))

    # -- several processes ----------------------------------------------------------------------------

    def own(self, batch: Any) -> Any:
        """The share of this process in something that all processes hold or draw in full."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        if world == 1:
            return batch
        if isinstance(batch, Tensor):
            return batch.tensor_split(world)[rank]
        return [batch[i] for i in torch.arange(len(batch)).tensor_split(world)[rank].tolist()]

    def own_batch(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Images and mask of this process, on its device."""
        x = self.own(batch.x).to(self.accelerator.device)
        if batch.mask is None:
            return x, None
        return x, self.own(batch.mask.expand(len(batch.x), *batch.mask.shape[1:])).to(x.device)

    def own_noise(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
        """N(0, 1) noise for the whole batch, drawn alike by all processes, of which each takes its share."""
        return self.own(standard_normal(shape, like, generator))

    def remember(self, table: Tensor, batch: Batch, values: Tensor) -> None:
        """Write what each process found for its share of the batch into a table with a row per training image."""
        rows = self.own(batch.indices)
        if self.accelerator.num_processes > 1:
            gather, pad = self.accelerator.gather, self.accelerator.pad_across_processes
            rows = gather(pad(rows.to(values.device), pad_index=-1))
            values = gather(pad(values))[rows >= 0]
            rows = rows[rows >= 0]
        table[rows.cpu()] = values.detach().cpu()

    def descend(self, loss: Tensor, count: Tensor, gradients: tuple[Tensor, ...], unit: float) -> tuple[float, bool]:
        """One step of the optimiser down ``unit * loss / count``, both summed over the processes.

        ``gradients`` are those of ``loss``. Returns the loss, and whether all was finite; if not, nothing changes.
        """
        parts = [g.float().flatten() for g in gradients]
        flat = torch.cat([*parts, loss.detach().float()[None], count.float()[None]])
        flat = self.accelerator.reduce(flat, "sum")
        scale = unit / flat[-1].clamp_min(1)
        value, gradient = float(flat[-2] * scale), flat[:-2] * scale
        if not (math.isfinite(value) and bool(gradient.isfinite().all())):
            return value, False
        pieces = gradient.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            # The fused optimiser goes through memory in order: a gradient must lie there as its parameter does.
            parameter.grad = torch.empty_like(parameter).copy_(piece.view(parameter.shape))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return value, True

    def weights(self) -> list[Tensor]:
        """All that :meth:`descend` changes: parameters and the state of the optimiser."""
        state = self.optimiser.state
        return [*self.parameters, *(value for p in self.parameters if p in state for value in state[p].values())]

    @torch.no_grad()
    def undo(self, before: Sequence[Tensor]) -> None:
        """Back to what a copy of :meth:`weights` remembers."""
        if len(before) == len(self.parameters):  # the optimiser had not begun
            self.optimiser.state.clear()
        torch._foreach_copy_(self.weights(), list(before))
