r"""Learning with short run MCMC (paper, Sec. 4.4, Algorithm 1).

.. math:: \theta_{t+1} = \theta_t + \eta_t \frac1n \sum_i
          E_{q_s(z_i|x_i)}[\partial_\theta \log p_\theta(x_i, z_i)] .

With ``learn_last = 1`` this is the paper's algorithm: K steps, then one update from ``z_K`` (Eq. 21). With
``learn_last = m`` the generator is updated at each of the last m points of the chain: the backward pass of a
Langevin step yields the gradient of the parameters for half as much again.

With ``step_control = "tuned"`` the step size is Algorithm 1 to the letter: every ``tune_every`` iterations it becomes
the minimiser of the free energy, and nothing else changes it. With ``"follow"`` it follows the curvature in between.
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
from shortrun.entropy import flat_sizes, stability
from shortrun.gradients import Evaluator, Point
from shortrun.langevin import DivergenceError, Langevin, Target, is_divergent
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Learner, Update
from shortrun.model import Latents, standard_normal
from shortrun.parallel import seeded
from shortrun.tune import Guard, StepSizeError, TuneResult, candidates_of, tune_by_gradient, tune_by_grid

# Before, the generator is still so flat that the longest step looks best, and the next iterations make it steep.
FIRST_TUNING = 40
# If more chains than this leave, the iteration is undone. Left alone, updates from chains on the run make the
# generator steeper, more chains leave, and within two iterations its outputs are saturated for good. If they left
# before the first update, the step was too long and is shortened; if after it, the updates were too large, and for a
# while they are smaller: the learning rate halves, and rises again by RECOVERY with each iteration that goes well.
# While the learning rate warms up, the generator takes shape and steps are too long anyway: they are just shortened.
MOST_DIVERGENT, SHORTER, RECOVERY, MOST_CAUTION = 0.25, 0.9, 1.03, 1 / 16
# Between tunings the step follows the curvature: every so many iterations, s * lambda_max of a few chains is led
# towards the limit of the tuner's guard.
GUARD, DIVERGENCE_ALONE = Guard(), Guard(limit=math.inf)
GUARD_EVERY = 4
GUARD_IMAGES = 8
LONGEST_STEP = 0.1
# Probes and first Krylov steps of the estimators that need them, and gradient steps of one tuning.
PROBES, DEPTH, GRADIENT_STEPS = 1, 8, 4
GRADIENT_STEPS_TUNED = 40
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
        unit = {
            "per-pixel": float(self.model.sigma) ** 2 / x[0].numel(),
            "log-joint": 1.0,
            "sum-of-squares": 2 * float(self.model.sigma) ** 2 * count,
        }[self.config.loss]
        follows = self.config.step_control == "follow"
        diverged = early = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        first = best = torch.full((len(x),), -math.inf, device=x.device)
        loss, finite = math.nan, True
        self.evaluator.begin(x, mask)
        before = [tensor.detach().clone() for tensor in self.weights()] if follows else []  # for undo

        def evaluate(k: int, z: Latents) -> Point:
            used = ~diverged if follows else torch.ones_like(diverged)
            return self.evaluator.move(z) if k < moves else self.evaluator.learn(z, used)

        for k in range(self.config.steps + 1):
            point = evaluate(k, z)
            first = point.log_joint if k == 0 else first
            best = torch.fmax(best, point.log_joint)
            # On its way a chain may overshoot and come back, so it is lost only if it is worse than at its start; at
            # its end, if it is worse than its best.
            bad = is_divergent(point.log_joint, best if k == self.config.steps else first, dimension)
            if not follows:
                diverged = bad
            elif bad.any():
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
                unused = diverged if follows else torch.zeros_like(diverged)
                used = torch.where(unused, 0.0, -point.log_joint).sum()
                gradients = tuple(-g for g in point.gradients)
                loss, finite = self.descend(used, (~unused).sum(), gradients, unit)
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

        def settle() -> None:
            self.keep(batch, z)
            if self.config.fit_spread and total < count:
                self._follow_spread(
                    [float(a) / (count - total) / b[0].numel() for a, b in zip(sums[2:], z, strict=True)]
                )

        if not follows:
            self._stop_if_divergent(total, count, finite)
            self.iterations += 1
            settle()
        elif finite:
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
                settle()
                if self.config.tune != "off" and self.iterations % GUARD_EVERY == 0:
                    decaying = self.config.decay and share > DECAY_FROM and self.iterations >= SETTLING
                    self._follow_curvature(x, mask, z, generator, rising=not decaying)
        return Update(loss, total, finite, tuple(float(layer.detach().std()) for layer in z))

    def _stop_if_divergent(self, divergent: int, count: int, finite: bool) -> None:
        """Nothing mends a step that is as tuned: a run whose chains diverge ends, and its last checkpoint stays."""
        if finite and divergent <= count / 2:
            return
        size = self.dynamics.longest
        what = f"{divergent} of {count} chains diverged" if finite else "loss or gradients are not finite"
        advice = (
            "Shorter candidates (--tune-deltas), tuning more often (--tune-every), or a lower learning rate may help; "
            "--step-control follow holds the step at what the curvature allows"
        )
        if self.config.tune == "off":
            advice = "A smaller --step-size may help; --tune grid --step-control follow chooses and holds it for you"
        raise DivergenceError(
            f"{what} after {self.iterations} iterations with the step size s = {size:.4g} (delta = "
            f"{math.sqrt(2 * size):.3g}), and with --step-control tuned nothing changes it. {advice}. The last "
            "checkpoint is kept"
        )

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
        self.dynamics = self.dynamics.scaled(factor)

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
            sizes = flat_sizes(target, self.dynamics.table(len(z)))
            values[rows] = stability(target, target.flatten(target.start), sizes, probes[rows]).to(values)
        values = self.accelerator.reduce(values, "sum")
        steepest = float(values[chosen].quantile(GUARD.quantile))
        if math.isfinite(steepest) and steepest > 0:
            lowest, highest = FIRST_PACE if self.iterations < SETTLING else PACE
            highest = highest if rising else 1.0
            wanted = min(self.target_size / self.dynamics.longest, GUARD.limit / steepest)
            self._scale_steps(min(max(wanted, lowest), highest))

    def tuning_is_due(self, iteration: int) -> bool:
        if self.config.tune not in ("grid", "gradient"):
            return False
        first = iteration == FIRST_TUNING and self.config.step_control == "follow"
        return first or (iteration > 0 and iteration % self.config.tune_every == 0)

    def tune(self, batch: Batch, generator: torch.Generator) -> None:
        """Step (1) of a learning iteration: minimise the free energy over the step size (paper, Eq. 20).

        With ``step_control="tuned"`` that is the step from now on. Else it is what the step is led to. The grid is
        three steps around the present one, and of those whose chains do not diverge the free energy alone decides; but
        the step is not lengthened beyond the limit of the guard. Shortening it is left to the free energy here and to
        the guard between tunings, because a step that yields at once lets the generator become steeper still. If the
        longest candidate is the best, longer ones may be better still: then the guard alone holds the step back until
        the next tuning. If all diverge, shorter ones are tried, and if none will do, everything stays as it was. Each
        process takes its share of the images.
        """
        world = self.accelerator.num_processes
        count = max(self.config.tune_images // world, 1) * world  # equal shares
        mask = None if batch.mask is None else batch.mask[:count]
        x, mask = self.own_batch(Batch(batch.x[:count], mask, batch.indices[:count]))
        sources = self.own(seeded(generator, count))
        self.last_tuning = None
        if self.config.step_control == "tuned":
            result = self._search(x, mask, sources, self.dynamics, None)
            self.dynamics = result.dynamics
            self._remember_tuning(result, result.dynamics)
            return
        tried = self.dynamics
        for _ in range(12):
            try:
                result = self._search(x, mask, sources, tried, DIVERGENCE_ALONE)
                break
            except StepSizeError:
                tried = tried.scaled(0.5)
        else:
            self.tell("tuning found no step size that is safe to use; the step stays as it is")
            return
        sizes = [replace(tried, step_size=size).longest for size in result.step_sizes]
        present = self.dynamics.longest
        allowed = [
            i for i in range(len(sizes)) if sizes[i] <= present * (1 + 1e-9) or result.stability[i] <= GUARD.limit
        ]
        chosen = result.dynamics
        if self.config.tune == "grid":
            passing = [i for i in allowed if not result.ruled_out[i]]
            best = min(passing, key=lambda i: float(result.free_energy[i]), default=None)
            chosen = self.dynamics if best is None else replace(chosen, step_size=result.step_sizes[best])
        elif result.best not in allowed:
            chosen = self.dynamics
        settled = self.iterations >= SETTLING and self.config.tune == "grid"
        if not settled:  # later, the guard leads it there slowly
            self.dynamics = chosen
        longest = self.config.tune == "grid" and sizes[result.best] == max(sizes)
        self.target_size = LONGEST_STEP if longest else chosen.longest
        self._remember_tuning(result, chosen)

    def _search(
        self, x: Tensor, mask: Tensor | None, sources: Any, dynamics: Langevin, guard: Guard | None
    ) -> TuneResult:
        """The free energy over step sizes around ``dynamics``, or over the grid of the configuration."""
        options: dict[str, Any] = {
            "entropy": self.config.entropy, "estimator": self.config.estimator, "samples": self.config.tune_chains,
            "probes": PROBES, "depth": DEPTH, "guard": guard, "mask": mask, "generator": sources,
            "accelerator": self.accelerator,
        }  # fmt: skip
        if self.config.tune == "gradient":
            per = self.config.tune_per
            if per == "layer" and self.config.estimator == "endpoint":  # which knows one step size for all layers
                options["estimator"] = "lanczos"
            steps = GRADIENT_STEPS if self.config.step_control == "follow" else GRADIENT_STEPS_TUNED
            return tune_by_gradient(self.model, x, dynamics, per, iterations=steps, **options)
        candidates = candidates_of(dynamics, self.config.tune_deltas)
        candidates = candidates or [dynamics.scaled(factor).step_size for factor in (1 / 1.4, 1.0, 1.4)]
        return tune_by_grid(self.model, x, dynamics, candidates, **options)

    def _remember_tuning(self, result: TuneResult, chosen: Langevin) -> None:
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
