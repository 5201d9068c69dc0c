r"""Learning with short run MCMC (paper, Sec. 4.4, Algorithm 1).

.. math:: \theta_{t+1} = \theta_t + \eta_t \frac1n \sum_i
          E_{q_s(z_i|x_i)}[\partial_\theta \log p_\theta(x_i, z_i)] .

With ``learn_last = 1`` this is the paper's algorithm: K steps, then one update from ``z_K`` (Eq. 21). With
``learn_last = m`` the generator is updated at each of the last m points of the chain: the backward pass of a
Langevin step yields the gradient of the parameters for half as much again.

With ``step_control = "tuned"`` the step size is Algorithm 1 to the letter: every ``tune_every`` iterations it becomes
the minimiser of the free energy, and nothing else changes it. With ``"bound"`` tuning leads it slowly, and a price on
steepness keeps the generator within its reach (:mod:`shortrun.learners.adapt`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shortrun.core.chain import Point, chain
from shortrun.core.free_energy import Estimation
from shortrun.core.langevin import DivergenceError, Langevin, is_divergent
from shortrun.core.latents import Latents, dimensions, flatten, has_normal_prior, seeded
from shortrun.core.tune import Guard, StepSizeError, TuneResult, tune_by_gradient, tune_by_grid
from shortrun.learners.adapt import (
    Rules,
    changed_direction,
    curvature_along,
    described,
    led_step,
    price,
    priced_rows,
)
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Info, Learner, Moment, State
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.gradients import Evaluator, gradients_of
from shortrun.learners.moments import averaged_moments
from shortrun.priors import GaussianPrior, Prior

DIVERGENCE_ALONE = Guard(limit=math.inf)
TUNING = {"probes": 1, "depth": 8}
"""Probes and first Krylov steps of the estimators that need them."""
GRADIENT_STEPS = {"bound": 4, "tuned": 40}
"""Of one tuning by gradient: few where the step is led slowly, more where tuning is all that changes it."""


class ShortRun(Learner):
    """Short run inference and the generator that it learns.

    >>> from shortrun import GaussianModel
    >>> from shortrun.nets.generators import TopDownGenerator
    >>> decoder = TopDownGenerator([2, 4], image=(1, 16, 16), channels=4)
    >>> model = GaussianModel(decoder, decoder.latent_shapes)
    >>> learner = ShortRun(model, Langevin(steps=10, step_size=0.001), learning_rate=1e-3)
    >>> state = learner.init(seed=0)
    >>> state, info = learner.update(state, torch.zeros(4, 1, 16, 16))
    >>> state.iteration, info.divergent
    (1, 0)

    Args: as for :class:`shortrun.learners.base.Learner`, and

        warm_up: iterations over which the learning rate rises, for the setting ``learn_last_later``.
        rules: what keeps learning going.
    """

    Settings = ShortRunSettings
    settings: ShortRunSettings

    def __init__(self, model: Any, dynamics: Langevin | None = None, *, warm_up: int = 0, rules: Rules = Rules(),
                 **options: Any) -> None:  # fmt: skip
        if dynamics is not None:  # its steps are those of the settings, whatever they say
            given = options.get("settings") or self.Settings()
            sizes = {"steps": dynamics.steps, "step_size": dynamics.step_size}
            options["settings"] = replace(given, **sizes, cool_down=None, speed_up=None)
        super().__init__(model, dynamics, **options)
        if self.settings.loss == "sum-of-squares" and not hasattr(model, "sigma"):
            raise ValueError(
                f"loss is sum-of-squares, which needs Gaussian noise; {type(model).__name__} has no sigma. Use "
                "per-pixel or log-joint"
            )
        self.warm_up, self.rules = warm_up, rules
        self._evaluator: Evaluator | None = None

    def default_dynamics(self) -> Langevin:
        return self.settings.dynamics()

    def moves(self, iteration: int) -> int:
        """Points of a chain before the first update."""
        return self.settings.steps + 1 - self.settings.updates_along(iteration, self.warm_up)

    # -- one iteration --------------------------------------------------------------------------------

    def start(self, state: State, batch: Batch) -> Latents:
        """z_0 ~ p(z) for the chains of this process."""
        z = self.model.sample_prior(len(batch.x), state.rng)
        return tuple(self.processes.own(layer.detach()) for layer in z)

    def keep(self, state: State, batch: Batch, z: Latents) -> None:
        """Chains are not remembered: each starts from the prior."""

    def evaluator(self, x: Tensor, z: Latents) -> Evaluator:
        """Made with the first batch, whose size says whether it pays to freeze the generator."""
        if self._evaluator is None:
            self._evaluator = Evaluator(
                self.model, self.parameters, self.processes.autocast, self.moves(0) * len(x),
                dimensions([layer.shape[1:] for layer in z]), self.compiled,
                COMPILED_TOLERANCE[self.processes.mixed_precision], self.log,
            )  # fmt: skip
        return self._evaluator

    def unit(self, x: Tensor, count: int) -> float:
        """What the mean of minus the log joint is multiplied by: see the setting ``loss``."""
        if self.settings.loss == "log-joint":
            return 1.0
        return self.pixel_unit(x) if self.settings.loss == "per-pixel" else 2 * float(self.model.sigma) ** 2 * count

    def update(self, state: State, batch: Batch | Tensor, moment: Moment = Moment()) -> tuple[State, Info]:
        """Infer the latents of the batch and update the generator along the way.

        Each process works on its share of the batch, but all draw the noise of the whole batch from generators
        in the same state, so the update does not depend on the number of processes.
        """
        batch = self.as_batch(batch)
        self.set_rate(state, moment)
        if state.tuned_at < state.iteration and self.tuning_is_due(state):
            state = self.tune(state, batch)
        bounded = self.settings.step_control == "bound"
        count, steps, moves = len(batch.x), self.settings.steps, self.moves(state.iteration)
        # The last point that was reached by a full step: there the gradient changes most along the steepest direction.
        priced = max(moves, steps - self.settings.shorter_steps) if bounded else -1
        x, mask = self.own_batch(batch)
        start = self.start(state, batch)
        dimension = dimensions([layer.shape[1:] for layer in start])
        unit = self.unit(x, count)
        evaluator = self.evaluator(x, start)
        evaluator.begin(x, mask)
        # for undo
        before = [tensor.detach().clone() for tensor in self.weights(state.optimiser)] if bounded else []
        diverged = early = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        first = best = torch.full((len(x),), -math.inf, device=x.device)

        def evaluate(k: int, z: Latents) -> Point:
            used = ~diverged if bounded else torch.ones_like(diverged)
            return evaluator.point(z) if k < moves else evaluator.learning_point(z, used)

        def visit(k: int, z: Latents) -> tuple[Latents, Point]:
            nonlocal first, best, diverged, early
            point = evaluate(k, z)
            first = point.log_joint if k == 0 else first
            best = torch.fmax(best, point.log_joint)
            # On its way a chain may overshoot and come back, so it is lost only if it is worse than at its start; at
            # its end, if it is worse than its best.
            bad = is_divergent(point.log_joint, best if k == steps else first, dimension)
            if not bounded:
                diverged = bad
            elif bad.any():
                # A divergent chain must not touch the parameters, nor its NaNs those of others: it goes
                # back to its start, and this point is evaluated again.
                diverged = diverged | bad
                early = diverged if k <= moves else early
                z = tuple(
                    torch.where(bad.view(-1, *[1] * (layer.ndim - 1)), origin, layer)
                    for layer, origin in zip(z, start, strict=True)
                )
                point = evaluate(k, z)
            return z, point

        def noise(k: int, layer: Tensor) -> Tensor | None:
            shape = (count, *layer.shape[1:])
            return self.processes.own_noise(shape, layer, state.rng) if state.dynamics.is_noisy(k) else None

        loss, finite, z = math.nan, True, start
        drift, curvatures = start, x.new_zeros(0)
        sizes = state.dynamics.table(len(start)).tolist()
        for k, z, point in chain(start, sizes, visit, noise, momentum=state.dynamics.momentum):
            assert point is not None
            if k >= moves:
                unused = diverged if bounded else torch.zeros_like(diverged)
                used = torch.where(unused, 0.0, -point.log_joint).sum()
                gradients = tuple(-g for g in point.gradients)
                if k == priced:
                    direction = changed_direction(point.drift, drift)
                    curvatures, more = self.price_of_steepness(state, x, mask, z, direction, count)
                    gradients = tuple(g + other for g, other in zip(gradients, more, strict=True))
                loss, finite = self.descend(state.optimiser, used, (~unused).sum(), gradients, unit)
                if not finite:
                    break
            drift = point.drift
        kept_z = flatten(z)[~diverged].detach().double()
        counts = torch.stack([diverged.sum().double(), early.sum().double()])
        sums = self.processes.total(torch.cat([counts, kept_z.sum(0), (kept_z.T @ kept_z).flatten()]))
        total, before_updates = int(sums[0]), int(sums[1])
        if not bounded:
            self._stop_if_divergent(state, total, count, finite)
        # If most chains diverged because of the updates, these are undone. If they did so before, the step is too long
        # for the generator as it is: then it becomes shorter, and what was learned is the price of steepness alone.
        kept = not bounded or (finite and not total > count / 2 >= before_updates)
        if not kept:
            self.undo(state.optimiser, before)
        elif before_updates > count / 2 and self.settings.tune != "off":
            state = replace(state, dynamics=state.dynamics.scaled(1 / self.rules.pace))
        state = self.counted(state, kept)
        if kept:
            self.keep(state, batch, z)
            if total < count:
                mean, square = (sums[2:] / (count - total)).split([dimension, dimension**2])
                moments = averaged_moments(state.moments, mean, square.view(dimension, dimension))
                state = replace(state, moments=moments)
        if bounded:
            state = self.with_curvature(state, curvatures)
        latent_std = tuple(float(layer.detach().std()) for layer in z)
        return state, Info(loss, total, kept, latent_std, state.dynamics.step_size, state.control.curvature)

    def _stop_if_divergent(self, state: State, divergent: int, count: int, finite: bool) -> None:
        """Nothing mends a step that is as tuned: a run whose chains diverge ends, and its last checkpoint stays."""
        if finite and divergent <= count / 2:
            return
        size = state.dynamics
        what = f"{divergent} of {count} chains diverged" if finite else "loss or gradients are not finite"
        advice = (
            "Shorter candidates (--tune-deltas), tuning more often (--tune-every), or a lower learning rate may help; "
            "--step-control bound keeps the generator within reach of the step"
        )
        if self.settings.tune == "off":
            advice = "A smaller --step-size may help; --tune grid --step-control bound chooses and holds it for you"
        raise DivergenceError(
            f"{what} after {state.iteration} iterations with the step size s = {size.step_size:.4g} (delta = "
            f"{size.delta:.3g}), and with --step-control tuned nothing changes it. {advice}. The last "
            "checkpoint is kept"
        )

    def prior(self, state: State) -> Prior | None:
        """The Gaussian of the latents of the last iterations."""
        if state.moments is None:
            return None
        return GaussianPrior.of(state.moments.mean, state.moments.covariance()).to(self.parameters[0])

    # -- the step size --------------------------------------------------------------------------------

    def price_of_steepness(
        self, state: State, x: Tensor, mask: Tensor | None, z: Latents, u: Tensor, count: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The curvature of some images along ``u``, and the gradient of the price that they pay for it.

        It is scaled as if all images of the batch paid (:mod:`shortrun.learners.adapt`).
        """
        chosen = priced_rows(self.rules, count)
        own = self.processes.own(chosen).to(x.device)
        if not own.any():
            return x.new_zeros(0), tuple(torch.zeros_like(p) for p in self.parameters)
        size = state.dynamics.step_size
        with torch.enable_grad():
            found = curvature_along(
                self.model, x[own], None if mask is None else mask[own], tuple(layer[own] for layer in z), u[own],
                state.dynamics.delta,
            )  # fmt: skip
            total = price(self.rules, size * found).sum() * (count / int(chosen.sum()))
        return found.detach(), gradients_of(total, self.parameters)

    def with_curvature(self, state: State, found: Tensor) -> State:
        """Note the largest curvature of an iteration, at the guard's quantile of the images that were looked at."""
        # a share without such images is filled up
        gathered = found if self.processes.num_processes == 1 else self.processes.gather_uneven(found, filling=math.nan)
        gathered = gathered[gathered.isfinite()]
        if not len(gathered):
            return state
        value = float(gathered.quantile(Guard().quantile))
        return replace(state, control=state.control._replace(curvature=value))

    def tuning_is_due(self, state: State) -> bool:
        if self.settings.tune not in ("grid", "gradient"):
            return False
        return state.iteration > 0 and state.iteration % self.settings.tune_every == 0

    def tune(self, state: State, batch: Batch | Tensor) -> State:
        """Step (1) of a learning iteration: minimise the free energy over the step size (paper, Eq. 20).

        With ``step_control="tuned"`` that is the step from then on; else the step is led towards it. Unless the
        settings name candidates, the grid is three steps around the present one. If all diverge, shorter ones are
        tried, and if none will do, everything stays as it was. Each process takes its share of the images.
        """
        batch = self.as_batch(batch)
        state = replace(state, tuned_at=state.iteration, tuning=None)
        world = self.processes.num_processes
        wanted = min(self.settings.tune_images, len(batch.x))
        count = max(wanted // world, 1) * world  # equal shares
        x, mask = self.own_batch(Batch(batch.x[:count], None if batch.mask is None else batch.mask[:count]))
        sources = self.processes.own(seeded(state.tuning_rng, count))
        if self.settings.step_control == "tuned":
            result = self.search(x, mask, sources, state.dynamics, None)
            return replace(state, dynamics=result.dynamics, tuning=described(result, result.dynamics))
        tried = state.dynamics
        for _ in range(12):
            try:
                result = self.search(x, mask, sources, tried, DIVERGENCE_ALONE)
                break
            except StepSizeError:
                tried = tried.scaled(0.5)
        else:
            self.log("tuning found no step size that is safe to use; the step stays as it is")
            return state
        rate_share = min(state.optimiser.param_groups[0]["lr"] / self.learning_rate, 1.0)
        led = led_step(self.rules, state.dynamics, result.dynamics, rate_share)
        return replace(state, dynamics=led, tuning=described(result, led))

    def search(self, x: Tensor, mask: Tensor | None, rng: Any, dynamics: Langevin, guard: Guard | None) -> TuneResult:
        """The free energy over step sizes around that of ``dynamics``, or over the candidates of the settings."""
        settings = self.settings
        estimator = settings.estimator
        by_layer = settings.tune == "gradient" and settings.tune_per == "layer"
        if estimator == "endpoint" and not has_normal_prior(self.model):  # which it needs
            estimator = "auto"
        elif estimator == "endpoint" and by_layer:  # it knows one step size for all layers
            estimator = "lanczos"
        how = Estimation(settings.entropy, estimator, chains=settings.tune_chains, **TUNING)
        options: dict[str, Any] = {"guard": guard, "mask": mask, "rng": rng}
        if self.processes.num_processes > 1:
            options["gather"] = self.processes.gather
        if settings.tune == "gradient":
            steps = GRADIENT_STEPS[settings.step_control]
            return tune_by_gradient(self.model, x, dynamics, settings.tune_per, how, iterations=steps, **options)
        sizes = [delta**2 / 2 for delta in settings.tune_deltas]
        sizes = sizes or [dynamics.step_size * factor for factor in (1 / 1.4, 1.0, 1.4)]
        return tune_by_grid(self.model, x, dynamics, sizes, how, **options)
