r"""Learning with short run MCMC (paper, Sec. 4.4, Algorithm 1).

.. math:: \theta_{t+1} = \theta_t + \eta_t \frac1n \sum_i
          E_{q_s(z_i|x_i)}[\partial_\theta \log p_\theta(x_i, z_i)] .

With ``learn_last = 1`` this is the paper's algorithm: K steps, then one update from ``z_K`` (Eq. 21). With
``learn_last = m`` the generator is updated at each of the last m points of the chain: the backward pass of a
Langevin step yields the gradient of the parameters for half as much again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from shortrun.config import TrainConfig
from shortrun.entropy import top_curvature
from shortrun.langevin import Langevin, Target, infer, is_divergent
from shortrun.model import Latents, standard_normal
from shortrun.tune import Guard, StepSizeError, tune_by_gradient, tune_by_grid

EARLY_TUNING = (0, 10, 40)
TUNING_IMAGES = 12
# Between tunings the step follows the curvature: every so many iterations, s * lambda_max at the 90 % quantile
# of a few chains is led towards the limit.
GUARD_EVERY = 4
GUARD_IMAGES = 8
GUARD_LIMIT = 2.6
LONGEST_STEP = 0.1
# How much the step may change at once, down and up. It drops fast while the generator takes shape, and slowly
# afterwards: a step that yields to every steepness lets the generator become steeper still, because chains that
# hardly move leave it to the decoder to amplify them; a step that stays makes steepness costly and keeps it smooth.
FIRST_PACE, PACE, SETTLING = (1 / 3, 1.5), (0.995, 1.05), 100


class Update(NamedTuple):
    """What one iteration did."""

    loss: float
    """Mean negative log joint per pixel in units of 1 / sigma^2, at the last point of the chain."""
    divergent: int
    """Chains that diverged; they were taken back to their start and not used."""
    finite: bool
    """Whether loss and gradients were finite; if not, nothing was updated."""
    latent_std: tuple[float, ...]
    """Standard deviation of the inferred latents, per layer; 1 if their aggregate matches the prior."""


class ShortRun:
    """Short run inference and the generator that it learns."""

    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator) -> None:
        self.model, self.config, self.accelerator = model, config, accelerator
        shape = [min(1.0, (config.steps - k) / (config.cool_down + 1)) for k in range(config.steps)]
        self.dynamics = Langevin(
            config.steps, [config.step_size * share for share in shape] if config.cool_down else config.step_size
        )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(self.parameters, lr=config.learning_rates[0], betas=config.betas)
        self.last_tuning: dict[str, Any] | None = None
        self.target_size = config.step_size
        """Where the guard may raise the step to: the tuned one, or the longest if longer was always better."""
        self.iterations = 0

    # -- one iteration --------------------------------------------------------------------------------

    def _own(self, batch: Tensor) -> Tensor:
        """The share of this process in something that all processes hold or draw in full."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return batch if world == 1 else batch.tensor_split(world)[rank]

    def _noise(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
        return self._own(standard_normal(shape, like, generator))

    def update(self, x: Tensor, mask: Tensor | None, generator: torch.Generator) -> Update:
        """Infer the latents of ``x`` and update the generator along the way.

        ``x`` is the whole batch. Each process works on its share, but all draw the noise of the whole batch
        from generators in the same state, so the update does not depend on the number of processes.
        """
        count = len(x)
        z: Latents = tuple(self._own(layer) for layer in self.model.sample_prior(count, generator))
        x = self._own(x).to(self.accelerator.device)
        mask = None if mask is None else self._own(mask.expand(count, *mask.shape[1:])).to(x.device)
        start = z
        first: Tensor | None = None
        diverged = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        sizes = self.dynamics.table(len(z)).tolist()
        dimension = sum(layer[0].numel() for layer in z)
        unit = float(self.model.sigma) ** 2 / x[0].numel()
        loss, finite = math.nan, True
        for k in range(self.config.steps + 1):
            learn = k > self.config.steps - self.config.learn_last
            moving = k < self.config.steps
            leaves = tuple(layer.detach().requires_grad_(moving) for layer in z)
            with self.accelerator.autocast():
                log_joint = self.model.log_prior(leaves) + self.model.log_likelihood(x, leaves, mask)
            log_joint = log_joint.float()
            first = log_joint.detach() if first is None else first
            bad = is_divergent(log_joint.detach(), first, dimension)
            wanted = [*(leaves if moving else ()), *(self.parameters if learn else ())]
            if bad.any():
                # A chain that left must not touch the parameters, nor its NaNs those of others: it goes
                # back to its start, and this point is evaluated again.
                diverged |= bad
                z = tuple(
                    torch.where(bad.view(-1, *[1] * (layer.ndim - 1)), s, layer.detach())
                    for layer, s in zip(z, start, strict=True)
                )
                leaves = tuple(layer.requires_grad_(moving) for layer in z)
                with self.accelerator.autocast():
                    log_joint = self.model.log_prior(leaves) + self.model.log_likelihood(x, leaves, mask)
                log_joint = log_joint.float()
                wanted = [*(leaves if moving else ()), *(self.parameters if learn else ())]
            used = torch.where(diverged, 0.0, log_joint)
            # Chains that are not used for learning still move: their share enters with weight zero in
            # the parameters only, so latents and parameters take one backward pass if all are well.
            if learn and diverged.any():
                drift = torch.autograd.grad(log_joint.sum(), leaves, retain_graph=True) if moving else ()
                gradients = torch.autograd.grad(used.sum(), self.parameters)
            else:
                both = torch.autograd.grad(log_joint.sum(), wanted)
                drift, gradients = both[: len(leaves) if moving else 0], both[len(leaves) if moving else 0 :]
            if learn:
                loss, finite = self._step(used, ~diverged, gradients, unit)
                if not finite:
                    break
            if moving:
                moved = []
                for layer, direction, s in zip(z, drift, sizes[k], strict=True):
                    eps = self._noise((count, *layer.shape[1:]), layer, generator)
                    moved.append(layer.detach() + s * direction.float() + math.sqrt(2 * s) * eps)
                z = tuple(moved)
        total = int(self.accelerator.reduce(diverged.sum().float(), "sum"))
        if self.config.tune != "off" and finite:
            self.iterations += 1
            if total > 0.25 * count:
                self._scale_steps(0.7)
            elif self.iterations % GUARD_EVERY == 0:
                self._follow_curvature(x, mask, z, generator)
        spread = tuple(float(layer.detach().std()) for layer in z)
        return Update(loss, total, finite, spread)

    def _step(self, log_joint: Tensor, used: Tensor, gradients: tuple[Tensor, ...], unit: float) -> tuple[float, bool]:
        """One Adam step up the mean log joint of the used chains of all processes."""
        parts = [g.float().flatten() for g in gradients]
        flat = torch.cat([*parts, log_joint.detach().sum()[None], used.sum().float()[None]])
        flat = self.accelerator.reduce(flat, "sum")
        count = flat[-1].clamp_min(1)
        loss = float(-flat[-2] / count) * unit
        gradient = flat[:-2] * (-unit / count)
        if not (math.isfinite(loss) and bool(gradient.isfinite().all())):
            return loss, False
        pieces = gradient.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss, True

    # -- the step size --------------------------------------------------------------------------------

    def _scale_steps(self, factor: float) -> None:
        table = torch.tensor(self.dynamics.step_size, dtype=torch.float64) * factor
        self.dynamics = replace(self.dynamics, step_size=table)

    def _longest(self) -> float:
        return float(torch.tensor(self.dynamics.step_size, dtype=torch.float64).max())

    def _follow_curvature(self, x: Tensor, mask: Tensor | None, z: Latents, generator: torch.Generator) -> None:
        """Lower the step where the model has become steeper, raise it again where it has become smoother.

        A few chains spread over the whole batch are looked at, the same ones for any number of processes.
        """
        count = self.config.batch
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[:: max(1, count // GUARD_IMAGES)] = True
        own = self._own(chosen)
        probes = standard_normal((count, sum(layer[0].numel() for layer in z)), z[0], generator)
        rows = self._own(torch.arange(count))[own]
        values = torch.zeros(count, device=x.device)
        if len(rows):
            seen = None if mask is None else mask[own]
            target = Target(self.model, x[own], seen, start=tuple(layer[own].detach() for layer in z))
            values[rows] = top_curvature(target, target.flatten(target.start), probes[rows]).to(values)
        values = self.accelerator.reduce(values, "sum")
        steepest = float(values[chosen].quantile(0.9))
        if math.isfinite(steepest) and steepest > 0:
            size = self._longest()
            lowest, highest = FIRST_PACE if self.iterations < SETTLING else PACE
            wanted = min(self.target_size, GUARD_LIMIT / steepest)
            self._scale_steps(min(max(wanted / size, lowest), highest))

    def tuning_is_due(self, iteration: int) -> bool:
        if self.config.tune == "off":
            return False
        return iteration in EARLY_TUNING or (iteration > 0 and iteration % self.config.tune_every == 0)

    def tune(self, x: Tensor, mask: Tensor | None, generator: torch.Generator) -> None:
        """Step (1) of a learning iteration: minimise the free energy over the step size (paper, Eq. 20).

        The grid is three steps around the present one; if the guard rules out all of them, the step is
        shortened until one passes. If the longest one that passes is the best, longer ones may be better
        still: then the guard alone holds the step back until the next tuning.
        """
        x, mask = x[:TUNING_IMAGES], mask if mask is None else mask[:TUNING_IMAGES]
        x = x.to(self.accelerator.device)
        mask = None if mask is None else mask.expand(len(x), *mask.shape[1:]).to(x.device)
        before = self.dynamics
        for _ in range(12):
            try:
                if self.config.tune == "grid":
                    table = torch.tensor(self.dynamics.step_size, dtype=torch.float64)
                    result = tune_by_grid(
                        self.model, x, self.dynamics, [(table * f).tolist() for f in (1 / 1.4, 1.0, 1.4)],
                        estimator="endpoint", samples=1, probes=2, depth=6, guard=Guard(),
                        mask=mask, generator=generator,
                    )  # fmt: skip
                else:
                    result = tune_by_gradient(
                        self.model, x[:4], self.dynamics, self.config.tune_per, estimator="lanczos",
                        samples=1, probes=1, depth=6, iterations=4, mask=mask if mask is None else mask[:4],
                        generator=generator,
                    )  # fmt: skip
                break
            except StepSizeError:
                self._scale_steps(0.5)
        else:
            return
        allowed = (~result.ruled_out).nonzero()[-1].item()
        chosen = result.dynamics
        settled = self.iterations >= SETTLING and self.config.tune == "grid"
        self.dynamics = before if settled else chosen  # once settled, the guard leads it there slowly
        size = float(torch.tensor(chosen.step_size, dtype=torch.float64).max())
        self.target_size = LONGEST_STEP if result.best == allowed else size
        self.last_tuning = {
            "step_sizes": result.step_sizes,
            "free_energy": result.free_energy.tolist(),
            "stability": result.stability.tolist(),
            "ruled_out": result.ruled_out.tolist(),
        }

    # -- use ------------------------------------------------------------------------------------------

    def reconstruct(self, x: Tensor, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Decode the latents that the same short run dynamics infers; divergent chains give NaN."""
        z, _ = infer(self.model, x, self.dynamics, mask=mask, generator=generator, return_diagnostics=True)
        with torch.no_grad():
            return self.model.decoder(z)

    def state(self) -> dict[str, Any]:
        return {
            "step_size": self.dynamics.step_size,
            "target_size": self.target_size,
            "iterations": self.iterations,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.dynamics = replace(self.dynamics, step_size=state["step_size"])
        self.target_size, self.iterations = state["target_size"], state["iterations"]
