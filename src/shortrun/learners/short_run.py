r"""Learning with short run MCMC (paper, Sec. 4.4, Algorithm 1).

.. math:: \theta_{t+1} = \theta_t + \eta_t \frac1n \sum_i
          E_{q_s(z_i|x_i)}[\partial_\theta \log p_\theta(x_i, z_i)] .

With ``learn_last = 1`` this is the paper's algorithm: K steps, then one update from ``z_K`` (Eq. 21). With
``learn_last = m`` the generator is updated at each of the last m points of the chain: the backward pass of a
Langevin step yields the gradient of the parameters for half as much again.

With ``step_control = "tuned"`` the step size is Algorithm 1 to the letter: every ``tune_every`` iterations it becomes
the minimiser of the free energy, and nothing else changes it. With ``"follow"`` it follows the curvature in between
(:mod:`shortrun.learners.adapt`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shortrun.core.entropy import flat_sizes, stability
from shortrun.core.free_energy import Estimation
from shortrun.core.langevin import DivergenceError, Langevin, Point, chain, is_divergent
from shortrun.core.latents import Latents, dimensions, flatten, has_normal_prior, seeded, standard_normal
from shortrun.core.target import Target
from shortrun.core.tune import Guard, StepSizeError, TuneResult, tune_by_gradient, tune_by_grid
from shortrun.learners.adapt import Control, Rules, averaged_moments, chosen_candidate, described, followed_size
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Info, Learner, Moment, State
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.gains import (
    GainRules,
    averaged_slopes,
    followed_gain,
    gain_matrices,
    led_aim,
    led_step,
    slopes_of,
)
from shortrun.learners.gradients import Evaluator
from shortrun.priors import GaussianPrior, Prior

DIVERGENCE_ALONE = Guard(limit=math.inf)
MOST_FOR_GAINS = 1024


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

        warm_up: iterations over which the learning rate rises; the rules of the beginning hold for as long.
        rules: of the controller of the step size.
    """

    Settings = ShortRunSettings
    settings: ShortRunSettings

    def __init__(self, model: Any, dynamics: Langevin | None = None, *, warm_up: int = 0, rules: Rules = Rules(),
                 **options: Any) -> None:  # fmt: skip
        if dynamics is not None:  # its steps are those of the settings, whatever they say
            given = options.get("settings") or self.Settings()
            options["settings"] = replace(given, steps=dynamics.steps, step_size=dynamics.step_size, cool_down=None)
        super().__init__(model, dynamics, **options)
        if self.settings.loss == "sum-of-squares" and not hasattr(model, "sigma"):
            raise ValueError(
                f"loss is sum-of-squares, which needs Gaussian noise; {type(model).__name__} has no sigma. Use "
                "per-pixel or log-joint"
            )
        self.warm_up, self.rules, self.gain_rules = warm_up, rules, GainRules()
        self._evaluator: Evaluator | None = None

    def default_dynamics(self) -> Langevin:
        return self.settings.dynamics()

    def init(self, seed: int = 0, examples: Any = None) -> State:
        state = replace(super().init(seed, examples), control=Control(self.dynamics.step_size))
        return self.with_gains(state) if self.settings.step_control == "gain" else state

    def with_gains(self, state: State) -> State:
        """Gains of one, to be changed by :meth:`follow_gain`."""
        if not (hasattr(self.model, "set_gains") and has_normal_prior(self.model)):
            raise ValueError(
                f"step_control is gain, which needs a decoder with N(0, I) latents; {type(self.model).__name__} has "
                "none. Use follow"
            )
        largest = max(dimensions([shape]) for shape in self.model.latent_shapes)
        if largest > MOST_FOR_GAINS:
            raise ValueError(
                f"step_control is gain, which has a matrix for each layer of latents: one of {largest} is too many, at "
                f"most {MOST_FOR_GAINS} are accepted. Use follow"
            )
        eyes = [torch.eye(dimensions([shape]), dtype=torch.float64) for shape in self.model.latent_shapes]
        if not self.model.gains:
            self.model.set_gains(eyes)
        return replace(state, slopes=tuple(torch.zeros_like(eye) for eye in eyes))

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
        if state.tuned_at < state.iteration and self.tuning_is_due(state):
            state = self.tune(state, batch)
        self.set_rate(state, moment)
        follows, by_gain = self.settings.step_control != "tuned", self.settings.step_control == "gain"
        count, steps, moves = len(batch.x), self.settings.steps, self.moves(state.iteration)
        x, mask = self.own_batch(batch)
        start = self.start(state, batch)
        dimension = dimensions([layer.shape[1:] for layer in start])
        unit = self.unit(x, count)
        evaluator = self.evaluator(x, start)
        evaluator.begin(x, mask)
        # for undo
        before = [tensor.detach().clone() for tensor in self.weights(state.optimiser)] if follows else []
        diverged = early = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        first = best = torch.full((len(x),), -math.inf, device=x.device)

        def evaluate(k: int, z: Latents) -> Point:
            used = ~diverged if follows else torch.ones_like(diverged)
            return evaluator.point(z) if k < moves else evaluator.learning_point(z, used)

        def visit(k: int, z: Latents) -> tuple[Latents, Point]:
            nonlocal first, best, diverged, early
            point = evaluate(k, z)
            first = point.log_joint if k == 0 else first
            best = torch.fmax(best, point.log_joint)
            # On its way a chain may overshoot and come back, so it is lost only if it is worse than at its start; at
            # its end, if it is worse than its best.
            bad = is_divergent(point.log_joint, best if k == steps else first, dimension)
            if not follows:
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
        for k, z, point in chain(start, state.dynamics.table(len(start)).tolist(), visit, noise):  # noqa: B007
            if k >= moves:
                assert point is not None
                unused = diverged if follows else torch.zeros_like(diverged)
                used = torch.where(unused, 0.0, -point.log_joint).sum()
                gradients = tuple(-g for g in point.gradients)
                loss, finite = self.descend(state.optimiser, used, (~unused).sum(), gradients, unit)
                if not finite:
                    break
        kept_z = flatten(z)[~diverged].detach().double()
        counts = torch.stack([diverged.sum().double(), early.sum().double()])
        sums = self.processes.total(torch.cat([counts, kept_z.sum(0), (kept_z.T @ kept_z).flatten()]))
        total, before_updates = int(sums[0]), int(sums[1])
        if not follows:
            self._stop_if_divergent(state, total, count, finite)
        if finite:
            state = replace(state, iteration=state.iteration + 1)
            state, kept = self._judge(state, before, total, before_updates, count) if follows else (state, True)
            if kept:
                self.keep(state, batch, z)
                if total < count:
                    mean, square = (sums[2:] / (count - total)).split([dimension, dimension**2])
                    square = square.view(dimension, dimension)
                    state = replace(state, moments=averaged_moments(self.rules, state.moments, mean, square))
            looks = follows and kept and self.settings.tune != "off"
            if by_gain and kept and (state.iteration <= self.warm_up or state.iteration % self.rules.look_every == 0):
                state = self.follow_gain(state, x, mask, tuple(layer.detach() for layer in z), diverged, count)
            elif looks and not by_gain and state.iteration % self.rules.look_every == 0:
                rising = not (moment.decaying and state.iteration >= self.rules.settling)
                state = self.follow_curvature(state, x, mask, z, count, rising)
        latent_std = tuple(float(layer.detach().std()) for layer in z)
        return state, Info(loss, total, finite, latent_std, state.dynamics.step_size, state.control.curvature)

    def _judge(
        self, state: State, before: list[Tensor], divergent: int, before_updates: int, count: int
    ) -> tuple[State, bool]:
        """Whether an iteration counts; else it is undone, and the step or the learning rate becomes smaller.

        While the learning rate warms up, the generator takes shape and steps are too long anyway: they are just
        shortened.
        """
        warm, limit = state.iteration > self.warm_up, self.rules.most_divergent * count
        control = state.control
        if warm and divergent > limit >= before_updates:
            self.undo(state.optimiser, before)
            caution = max(control.caution / 2, self.rules.most_caution)
            return replace(state, control=control._replace(caution=caution)), False
        if divergent > limit and self.settings.tune != "off":
            if warm or self.settings.step_control == "gain":
                self.undo(state.optimiser, before)
            if self.settings.step_control == "gain":
                return self.with_gain(state, state.control.gain * self.gain_rules.fall), False
            return replace(state, dynamics=state.dynamics.scaled(self.rules.shorter)), False
        caution = min(control.caution * self.rules.recovery, 1.0)
        return replace(state, control=control._replace(caution=caution)), True

    def _stop_if_divergent(self, state: State, divergent: int, count: int, finite: bool) -> None:
        """Nothing mends a step that is as tuned: a run whose chains diverge ends, and its last checkpoint stays."""
        if finite and divergent <= count / 2:
            return
        size = state.dynamics
        what = f"{divergent} of {count} chains diverged" if finite else "loss or gradients are not finite"
        advice = (
            "Shorter candidates (--tune-deltas), tuning more often (--tune-every), or a lower learning rate may help; "
            "--step-control follow holds the step at what the curvature allows"
        )
        if self.settings.tune == "off":
            advice = "A smaller --step-size may help; --tune grid --step-control follow chooses and holds it for you"
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

    def follow_curvature(
        self, state: State, x: Tensor, mask: Tensor | None, z: Latents, count: int, rising: bool = True
    ) -> State:
        """Look at the curvature where a few chains end, and let the step follow (:func:`followed_size`)."""
        curvature = self.curvature(state, x, mask, z, count)
        size = state.dynamics.step_size
        followed = followed_size(self.rules, state.control, size, curvature * size, state.iteration, rising)
        control = state.control._replace(curvature=curvature)
        return replace(state, control=control, dynamics=replace(state.dynamics, step_size=followed))

    def follow_gain(self, state: State, x: Tensor, mask: Tensor | None, z: Latents, lost: Tensor, count: int) -> State:
        """Look at curvature and slopes where the chains end, and let the gains follow (:mod:`.gains`)."""
        curvature = self.curvature(state, x, mask, z, count)
        u = self.processes.own_noise((count, *x.shape[1:]), x, state.rng)
        sums = slopes_of(self.model.decoder, self.model.entering(z), u * ~lost.view(-1, *[1] * (x.ndim - 1)))
        kept = self.processes.total((~lost).sum())
        found = [self.processes.total(part) / kept for part in sums]
        slopes = averaged_slopes(state.slopes, found, state.control.looks)
        control = state.control._replace(curvature=curvature, looks=state.control.looks + 1)
        state = replace(state, slopes=slopes, control=control)
        gain = followed_gain(self.gain_rules, control.gain, curvature, control.aim)
        if state.iteration > self.warm_up:  # before, the generator takes shape
            state = replace(state, control=control._replace(aim=led_aim(self.gain_rules, control.aim, gain)))
        return self.with_gain(state, gain)

    def with_gain(self, state: State, gain: float) -> State:
        sigma = float(getattr(self.model, "sigma", 1.0))
        self.model.set_gains(gain_matrices(self.gain_rules, gain, state.slopes, sigma))
        return replace(state, control=state.control._replace(gain=gain))

    def curvature(self, state: State, x: Tensor, mask: Tensor | None, z: Latents, count: int) -> float:
        """``lambda_max`` at the guard's quantile of a few chains, spread over the whole batch of ``count``."""
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[:: max(1, count // self.rules.look_at)] = True
        own = self.processes.own(chosen)
        probes = standard_normal((count, flatten(z).shape[1]), z[0], state.rng)
        rows = self.processes.own(torch.arange(count))[own]
        values = torch.zeros(count, device=x.device)
        if len(rows):
            seen = None if mask is None else mask[own]
            target = Target(self.model, x[own], seen, start=tuple(layer[own].detach() for layer in z))
            sizes = flat_sizes(target, state.dynamics.table(len(z)))
            values[rows] = stability(target, flatten(target.start), sizes, probes[rows]).to(values)
        values = self.processes.total(values)
        return float(values[chosen].quantile(self.rules.guard.quantile)) / state.dynamics.step_size

    def tuning_is_due(self, state: State) -> bool:
        if self.settings.tune not in ("grid", "gradient"):
            return False
        first = state.iteration == self.rules.first_tuning and self.settings.step_control == "follow"
        return first or (state.iteration > 0 and state.iteration % self.settings.tune_every == 0)

    def tune(self, state: State, batch: Batch | Tensor) -> State:
        """Step (1) of a learning iteration: minimise the free energy over the step size (paper, Eq. 20).

        With ``step_control="tuned"`` that is the step from then on. Else it is what the step is led to: see
        :func:`chosen_candidate`. The grid is three steps around the present one. If the longest candidate is the best,
        longer ones may be better still: then the controller alone holds the step back until the next tuning. If all
        diverge, shorter ones are tried, and if none will do, everything stays as it was. Each process takes its share
        of the images.
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
        if self.settings.step_control == "gain":
            led = led_step(self.gain_rules, state.dynamics, result.dynamics)
            return replace(state, dynamics=led, tuning=described(result, led))
        by_grid = self.settings.tune == "grid"
        best = chosen_candidate(self.rules, result, state.dynamics.step_size, by_grid)
        chosen = state.dynamics if best is None else result.candidates[best]
        longest = by_grid and result.step_sizes[result.best] == max(result.step_sizes)
        control = state.control._replace(target_size=self.rules.longest if longest else chosen.step_size)
        # once it has settled, the controller leads the step there slowly
        settled = state.iteration >= self.rules.settling and by_grid
        dynamics = state.dynamics if settled else chosen
        return replace(state, control=control, dynamics=dynamics, tuning=described(result, chosen))

    def search(self, x: Tensor, mask: Tensor | None, rng: Any, dynamics: Langevin, guard: Guard | None) -> TuneResult:
        """The free energy over step sizes around that of ``dynamics``, or over the candidates of the settings."""
        settings, rules = self.settings, self.rules
        estimator = settings.estimator
        by_layer = settings.tune == "gradient" and settings.tune_per == "layer"
        if estimator == "endpoint" and not has_normal_prior(self.model):  # which it needs
            estimator = "auto"
        elif estimator == "endpoint" and by_layer:  # it knows one step size for all layers
            estimator = "lanczos"
        how = Estimation(
            settings.entropy, estimator, chains=settings.tune_chains, probes=rules.probes, depth=rules.depth
        )
        options: dict[str, Any] = {"guard": guard, "mask": mask, "rng": rng}
        if self.processes.num_processes > 1:
            options["gather"] = self.processes.gather
        if settings.tune == "gradient":
            steps = rules.gradient_steps if settings.step_control == "follow" else rules.gradient_steps_tuned
            return tune_by_gradient(self.model, x, dynamics, settings.tune_per, how, iterations=steps, **options)
        sizes = [delta**2 / 2 for delta in settings.tune_deltas]
        sizes = sizes or [dynamics.step_size * factor for factor in (1 / 1.4, 1.0, 1.4)]
        return tune_by_grid(self.model, x, dynamics, sizes, how, **options)
