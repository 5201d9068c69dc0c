r"""Learning with short run MCMC (paper, Sec. 4.4, Algorithm 1).

.. math:: \theta_{t+1} = \theta_t + \eta_t \frac1n \sum_i
          E_{q_s(z_i|x_i)}[\partial_\theta \log p_\theta(x_i, z_i)] .

With ``learn_last = 1`` this is the paper's algorithm: K steps, then one update from ``z_K`` (Eq. 21). With
``learn_last = m`` the generator is updated at each of the last m points of the chain: the backward pass of a
Langevin step yields the gradient of the parameters for half as much again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from shortrun.config import DECAY_FROM, TrainConfig
from shortrun.entropy import top_curvature
from shortrun.gradients import Evaluator, Point
from shortrun.langevin import Langevin, Target, is_divergent
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Learner, Update
from shortrun.model import Latents, standard_normal
from shortrun.parallel import seeded
from shortrun.tune import Guard, StepSizeError, tune_by_gradient, tune_by_grid

# Before, the generator is still so flat that the longest step looks best, and the next iterations make it steep.
FIRST_TUNING = 40
# If more chains than this leave, the iteration is undone. Left alone, updates from chains on the run make the
# generator steeper, more chains leave, and within two iterations its outputs are saturated for good. If they left
# before the first update, the step was too long and is shortened; if after it, the updates were too large, and for a
# while they are smaller: the learning rate halves, and rises again by RECOVERY with each iteration that goes well.
# While the learning rate warms up, the generator takes shape and steps are too long anyway: they are just shortened.
MOST_DIVERGENT, SHORTER, RECOVERY, MOST_CAUTION = 0.25, 0.9, 1.03, 1 / 16
TUNING_IMAGES = 12
# Between tunings the step follows the curvature: every so many iterations, s * lambda_max at the 90 % quantile
# of a few chains is led towards the limit.
GUARD_EVERY = 4
GUARD_IMAGES = 8
GUARD_LIMIT = 2.6
LONGEST_STEP = 0.1
# How much the step may change at once, down and up, in the beginning and later. It must not drop fast: a step that
# yields to every steepness lets the generator become steeper still, because chains that hardly move leave it to the
# decoder to amplify them; a step that stays makes steepness costly and keeps it smooth.
FIRST_PACE, PACE, SETTLING = (0.97, 1.5), (0.995, 1.05), 100
# Share of the past in the running average of the squared latents.
MEMORY = 0.9


class ShortRun(Learner):
    """Short run inference and the generator that it learns."""

    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator, images: Any = None) -> None:
        super().__init__(model, config, accelerator, images)
        if config.cool_down:
            shape = [min(1.0, (config.steps - k) / (config.cool_down + 1)) for k in range(config.steps)]
            self.dynamics = Langevin(config.steps, [config.step_size * share for share in shape])
        self.target_size = config.step_size
        """Where the guard may raise the step to: the tuned one, or the longest if longer was always better."""
        self.iterations = 0
        own_moves = self.moves * config.batch // accelerator.num_processes
        self.evaluator = Evaluator(
            model, self.parameters, accelerator.autocast, own_moves, self.compiled,
            COMPILED_TOLERANCE[config.mixed_precision], self.tell,
        )  # fmt: skip

    @property
    def moves(self) -> int:
        """Points of a chain before the first update, as things stand."""
        return self.config.steps + 1 - self.config.updates_along(self.iterations)

    def updates_in(self, iterations: int) -> int:
        return self.config.updates_in(iterations)

    # -- one iteration --------------------------------------------------------------------------------

    def start(self, batch: Batch, generator: torch.Generator) -> Latents:
        """z_0 ~ p(z) for the chains of this process."""
        return tuple(self.own(layer) for layer in self.model.sample_prior(len(batch.x), generator))

    def keep(self, batch: Batch, z: Latents) -> None:
        """Chains are not remembered: each begins anew from the prior."""

    def update(self, batch: Batch, share: float, generator: torch.Generator) -> Update:
        """Infer the latents of ``x`` and update the generator along the way.

        Each process works on its share of the batch, but all draw the noise of the whole batch from generators
        in the same state, so the update does not depend on the number of processes.
        """
        count, moves = len(batch.x), self.moves
        x, mask = self.own_batch(batch)
        start = z = self.start(batch, generator)
        sizes = self.dynamics.table(len(z)).tolist()
        dimension = sum(layer[0].numel() for layer in z)
        unit = float(self.model.sigma) ** 2 / x[0].numel()
        diverged = early = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        first: Tensor | None = None
        loss, finite = math.nan, True
        self.evaluator.begin(x, mask)
        before = [tensor.detach().clone() for tensor in self.weights()]

        def evaluate(k: int, z: Latents) -> Point:
            return self.evaluator.move(z) if k < moves else self.evaluator.learn(z, ~diverged)

        for k in range(self.config.steps + 1):
            point = evaluate(k, z)
            first = point.log_joint if first is None else first
            bad = is_divergent(point.log_joint, first, dimension)
            if bad.any():
                # A chain that left must not touch the parameters, nor its NaNs those of others: it goes
                # back to its start, and this point is evaluated again.
                diverged = diverged | bad
                early = diverged if k <= moves else early
                z = tuple(
                    torch.where(bad.view(-1, *[1] * (layer.ndim - 1)), origin, layer)
                    for layer, origin in zip(z, start, strict=True)
                )
                point = evaluate(k, z)
            if k >= moves:
                used = torch.where(diverged, 0.0, -point.log_joint).sum()
                gradients = tuple(-g for g in point.gradients)
                loss, finite = self.descend(used, (~diverged).sum(), gradients, unit)
                if not finite:
                    break
            if k < self.config.steps:
                z = tuple(
                    layer
                    + s * drift.float()
                    + math.sqrt(2 * s) * self.own_noise((count, *layer.shape[1:]), layer, generator)
                    for layer, drift, s in zip(z, point.drift, sizes[k], strict=True)
                )
        squares = [layer[~diverged].double().square().sum() for layer in z]
        sums = self.accelerator.reduce(torch.stack([diverged.sum().double(), early.sum().double(), *squares]), "sum")
        total, before_updates = int(sums[0]), int(sums[1])
        if finite:
            self.iterations += 1
            warm, limit = self.iterations > self.config.warm_up, MOST_DIVERGENT * count
            if warm and total > limit >= before_updates:
                self.undo(before)
                self.caution = max(self.caution / 2, MOST_CAUTION)
            elif total > limit and self.config.tune != "off":
                if warm:
                    self.undo(before)
                self._scale_steps(SHORTER)
            else:
                self.caution = min(self.caution * RECOVERY, 1.0)
                self.keep(batch, z)
                if self.config.fit_spread and total < count:
                    self._follow_spread(
                        [float(a) / (count - total) / b[0].numel() for a, b in zip(sums[2:], z, strict=True)]
                    )
                if self.config.tune != "off" and self.iterations % GUARD_EVERY == 0:
                    decaying = self.config.decay and share > DECAY_FROM and self.iterations >= SETTLING
                    self._follow_curvature(x, mask, z, generator, rising=not decaying)
        return Update(loss, total, finite, tuple(float(layer.detach().std()) for layer in z))

    def _follow_spread(self, mean_squares: Sequence[float]) -> None:
        """Width of the latents at the end of the chains, averaged over the last iterations.

        Long steps keep the generator flat: after a short training the latents of images spread further than N(0, I),
        and samples of the prior lack contrast. Among ``N(0, c_l^2 I)`` the mean square of the inferred latents is the
        most likely ``c_l^2``. Chains still start from N(0, I), as they were trained.
        """
        past = [width**2 for width in self.spread] or mean_squares
        self.spread = tuple(math.sqrt(MEMORY * a + (1 - MEMORY) * b) for a, b in zip(past, mean_squares, strict=True))

    # -- the step size --------------------------------------------------------------------------------

    def _scale_steps(self, factor: float) -> None:
        table = torch.tensor(self.dynamics.step_size, dtype=torch.float64) * factor
        self.dynamics = replace(self.dynamics, step_size=table)

    def _longest(self) -> float:
        return float(torch.tensor(self.dynamics.step_size, dtype=torch.float64).max())

    def _follow_curvature(
        self, x: Tensor, mask: Tensor | None, z: Latents, generator: torch.Generator, rising: bool = True
    ) -> None:
        """Lower the step where the model has become steeper, raise it again where smoother, if ``rising``.

        It must not rise while the learning rate decays: a step at the limit is stable only because the generator
        keeps yielding to it.

        A few chains spread over the whole batch are looked at, the same ones for any number of processes.
        """
        count = self.config.batch
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[:: max(1, count // GUARD_IMAGES)] = True
        own = self.own(chosen)
        probes = standard_normal((count, sum(layer[0].numel() for layer in z)), z[0], generator)
        rows = self.own(torch.arange(count))[own]
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
            highest = highest if rising else 1.0
            wanted = min(self.target_size, GUARD_LIMIT / steepest)
            self._scale_steps(min(max(wanted / size, lowest), highest))

    def tuning_is_due(self, iteration: int) -> bool:
        if self.config.tune not in ("grid", "gradient"):
            return False
        return iteration == FIRST_TUNING or (iteration > 0 and iteration % self.config.tune_every == 0)

    def tune(self, batch: Batch, generator: torch.Generator) -> None:
        """Step (1) of a learning iteration: minimise the free energy over the step size (paper, Eq. 20).

        The grid is three steps around the present one; if the guard rules out all of them, the step is
        shortened until one passes. If the longest one that passes is the best, longer ones may be better
        still: then the guard alone holds the step back until the next tuning. Each process takes its share of
        the images.
        """
        wanted = TUNING_IMAGES if self.config.tune == "grid" else TUNING_IMAGES // 3
        world = self.accelerator.num_processes
        count = max(wanted // world, 1) * world  # equal shares
        mask = None if batch.mask is None else batch.mask[:count]
        x, mask = self.own_batch(Batch(batch.x[:count], mask, batch.indices[:count]))
        sources = self.own(seeded(generator, count))
        before = self.dynamics
        for _ in range(12):
            try:
                if self.config.tune == "grid":
                    table = torch.tensor(self.dynamics.step_size, dtype=torch.float64)
                    result = tune_by_grid(
                        self.model, x, self.dynamics, [(table * f).tolist() for f in (1 / 1.4, 1.0, 1.4)],
                        estimator="endpoint", samples=1, probes=2, depth=6, guard=Guard(),
                        mask=mask, generator=sources, accelerator=self.accelerator,
                    )  # fmt: skip
                else:
                    result = tune_by_gradient(
                        self.model, x, self.dynamics, self.config.tune_per, samples=1, probes=2, depth=6, iterations=4,
                        estimator="lanczos" if self.config.tune_per == "layer" else "endpoint",
                        mask=mask, generator=sources, accelerator=self.accelerator,
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
            "chosen": chosen.step_size,
            "step_sizes": result.step_sizes,
            "free_energy": result.free_energy.tolist(),
            "stability": result.stability.tolist(),
            "ruled_out": result.ruled_out.tolist(),
        }

    def state(self) -> dict[str, Any]:
        own = {"target_size": self.target_size, "iterations": self.iterations, "caution": self.caution}
        return {**super().state(), **own}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.target_size, self.iterations = state["target_size"], state["iterations"]
        self.caution = state.get("caution", 1.0)
