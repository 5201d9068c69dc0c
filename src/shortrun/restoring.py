"""What a trained model knows of images that were measured: restoration, inpainting, posterior draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shortrun.core.entropy import stability
from shortrun.core.free_energy import Estimation
from shortrun.core.inference import infer_and_mend
from shortrun.core.langevin import Watch
from shortrun.core.latents import Latents, flatten, has_normal_prior, shapes_of
from shortrun.core.model import evaluating, from_bytes
from shortrun.core.target import Target, visible_part
from shortrun.core.tune import Guard, StepSizeError, tune_by_grid
from shortrun.inverse.model import Observed, check_operator, noise_through
from shortrun.inverse.operators import Identity, Mask, Operator, as_operator
from shortrun.inverse.posterior import Posterior
from shortrun.measured import By, Measured, random_source
from shortrun.metrics.chains import effective_sample_size, r_hat
from shortrun.priors import WithPrior
from shortrun.priors.starts import LinearisedMixture, can_guide
from shortrun.processes import flushed_denormals, processes

LONGER = 4
"""How much longer than in training chains are that start from the learned prior and see less than a whole image."""
TUNING_ROWS, TUNING_CHAINS, CURVATURE_POINTS = 2, 4, 8
TRACED = 8  # projections of the latents that R-hat looks at
IDENTITY = Identity()


class Restoring(Measured):
    """What :class:`shortrun.trained.Trained` can do with measurements."""

    def __init__(self) -> None:
        super().__init__()
        self._guides: WeakKeyDictionary[Operator, tuple[Any, LinearisedMixture]] = WeakKeyDictionary()
        self._tuned: WeakKeyDictionary[Any, dict[Any, float]] = WeakKeyDictionary()
        self._wrapped: WeakKeyDictionary[Any, Operator] = WeakKeyDictionary()

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def reconstruct(self, x: Any, **options: Any) -> Tensor:
        raise NotImplementedError

    def decode(self, z: Latents) -> Tensor:
        raise NotImplementedError

    # -- what users call ------------------------------------------------------------------------------

    def restore(
        self,
        y: Any,
        operator: Any = None,
        sigma: float | None = None,
        *,
        draws: int | None = None,
        steps: int | None = None,
        with_prior: bool = True,
        tune: bool = True,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Tensor:
        """Images from measurements ``y = A(x) + noise``: the posterior of ``N(y; A(g(z)), sigma^2 I)``.

        Args:
            y: one measurement per row, in the shape that the operator makes.
            operator: A, any differentiable function from images ``(n, ...)`` in [-1, 1] to measurements; one of
                :mod:`shortrun.inverse`; or a ``deepinv.physics.Physics`` (whose images lie in [0, 1]). None: the image
                itself, so that restoring is denoising.
            sigma: standard deviation of ``y`` around ``A(g(z))``: noise of the measurement and all that the generator
                does not explain. By default what the operator lets pass of the observation noise of the model
                (:meth:`noise_of`).
            draws: None for the best single answer, without noise in the chain; else so many draws from the posterior.
            steps: of the chains; by default four times those of training where they start from the learned prior, else
                as many.
            with_prior: start from the modes of the learned prior that the measurement suggests and drift with that
                prior; else with that of training.
            tune: choose the step size for this operator, once; else that of training.

        Returns:
            Shape ``(n, ...)``, or ``(draws, n, ...)``.
        """
        if draws is not None and draws < 1:
            raise ValueError(f"draws is {draws}; expected one or more, or None for the best single answer")
        found = self._draws(
            y, operator, sigma, draws, steps, with_prior, tune, random_source(seed, rng), trace=False
        )  # fmt: skip
        return found.images[0] if draws is None else found.images

    def posterior(
        self,
        y: Any,
        operator: Any = None,
        sigma: float | None = None,
        *,
        draws: int = 64,
        steps: int | None = None,
        with_prior: bool = True,
        tune: bool = True,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Posterior:
        """Draws from the posterior of each measurement, with their mean, spread, intervals and the diagnostics of the
        chains; the arguments are those of :meth:`restore`.
        """
        if draws < 2:
            raise ValueError(f"draws is {draws}; expected two or more")
        return self._draws(y, operator, sigma, draws, steps, with_prior, tune, random_source(seed, rng), trace=True)

    def inpaint(
        self,
        x: Any,
        mask: Tensor,
        fills: int = 4,
        *,
        keep_known: bool = True,
        by: By = "method",
        with_prior: bool = True,
        steps: int | None = None,
        seed: int = 0,
        rng: torch.Generator | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Infer from the visible pixels alone and paint the rest (paper, Sec. 5.3), several times: :meth:`restore` for
        the operator ``Mask``, with the step size of training and the likelihood of the model.

        Args:
            mask: true where a pixel is visible: see :func:`shortrun.make_mask`.
            fills: how many fills of each example.
            keep_known: copy the visible pixels; else they are re-generated as well.
            by: how latents are inferred: see :data:`By`.
            with_prior: of chains: start from the modes of the learned prior that the visible pixels suggest
                (:mod:`shortrun.priors.starts`), and drift with that prior; else from N(0, I), as in training.
            steps: of the chains. By default four times those of training where they start from the learned prior, whose
                posterior is wide if much is hidden; else as many as in training.
            watch: told of the chains as they go, ``watch(k, z_k, log_joint)``, with the examples of the first fill,
                then of the second ..; encoders have nothing to tell.

        Returns:
            Shape ``(fills, n, ...)``.
        """
        if fills < 1:
            raise ValueError(f"fills is {fills}; expected one or more")
        x, rng = self.prepare(x), random_source(seed, rng)
        seen = visible_part(mask, x)
        own_chains = by in ("method", "draw") and not hasattr(self.model, "encode") and self._runs_dynamics()
        if by == "dynamics" or own_chains:
            found = self._draws(x, Mask(seen), None, fills, steps, with_prior, True, rng, trace=False, told=watch)
            images = found.images
        else:
            visible = torch.where(seen, x, torch.zeros(()).to(x))  # what is hidden never reaches the model
            images = torch.stack(
                [self.reconstruct(visible, mask=mask, by=by, steps=steps, rng=rng) for _ in range(fills)]
            )
        return torch.where(seen, x, images) if keep_known else images

    def noise_of(self, operator: Any = None) -> float:
        """The default of sigma: what the operator lets pass of the observation noise of the model."""
        if not hasattr(self.model, "sigma"):
            raise ValueError(f"{type(self.model).__name__} has no observation noise, so restoring needs a sigma")
        z = self.model.sample_prior(1, torch.Generator().manual_seed(0))
        return noise_through(self.model, self._as_operator(operator), z, torch.Generator().manual_seed(0))

    # -- how it is done -------------------------------------------------------------------------------

    def _draws(
        self, y: Any, operator: Any, sigma: float | None, draws: int | None, steps: int | None, with_prior: bool,
        tune: bool, rng: torch.Generator, trace: bool, told: Watch | None = None,
    ) -> Posterior:  # fmt: skip
        """Ends of chains for measurements; one without noise where ``draws`` is None."""
        self._check_dynamics()
        operator = self._as_operator(operator)
        y, seen = self._measurements(y, operator)
        masked = type(operator) in (Identity, Mask)
        if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"sigma is {sigma!r}; expected a positive number: the noise of y around A(g(z))")
        # What is seen of an image itself is the business of the likelihood of the model.
        own = masked and sigma is None
        level = math.nan
        if not own:
            level = self.noise_of(operator) if sigma is None else float(sigma)
            check_operator(self.model, operator, y)
        observed = self.model if own else Observed(self.model, operator, level)
        prior = self.prior if with_prior else None
        count, chains = len(y), 1 if draws is None else draws
        dynamics, start = self.dynamics, None
        with torch.no_grad(), flushed_denormals():
            guide = None
            if prior is not None:
                guide = self._guide(IDENTITY, math.nan) if masked else self._guide(operator, level)
            if guide is not None:
                everything = torch.ones_like(y, dtype=torch.bool) if seen is None else seen
                starts = guide.draw(y.to(self.device), everything.to(self.device), chains, rng)
                start = tuple(torch.cat(layers) for layers in zip(*starts, strict=True))
                steps = LONGER * dynamics.steps if steps is None else steps
        model = observed if prior is None else WithPrior(observed, prior)
        if tune and not own:
            dynamics = replace(dynamics, step_size=self._step_for(observed, model, operator, level, y, seen))
        if steps is not None:
            if steps < 1:
                raise ValueError(f"steps is {steps}; expected one or more")
            dynamics = dynamics.longer(steps)
        if draws is None:
            dynamics = dynamics.towards_centre()
        watch = _Trace(shapes_of(self.model)) if trace and dynamics.steps >= 2 * self.dynamics.steps else None

        def work(rows: slice, source: torch.Generator) -> list[Tensor]:
            which = torch.arange(rows.start, rows.stop) % count  # rows of the first draw, of the second ..
            part = None if seen is None else seen[which].to(self.device)
            begin = None if start is None else tuple(layer[rows].to(self.device) for layer in start)
            if watch is not None:
                watch.begin()
            with evaluating(model):
                z, *lost = infer_and_mend(
                    model, y[which].to(self.device), dynamics, mask=part, start=begin, rng=source, watch=told or watch
                )
            traces = [] if watch is None else [watch.end()]
            return [self.decode(z).cpu(), *(each.cpu() for each in (*lost, *traces, *z))]

        images, divergent, mended, *rest = processes().in_chunks(chains * count, work, rng)
        diagnostics: dict[str, Tensor] = {}
        if watch is not None:
            diagnostics = _mixing(rest.pop(0).unflatten(0, (chains, count)))
        by_draw = [each.unflatten(0, (chains, count)) for each in (images, divergent, mended, *rest)]
        return Posterior(
            by_draw[0], tuple(by_draw[3:]), dynamics.step_size, dynamics.steps, by_draw[1].double().mean(0),
            by_draw[2].double().mean(0), sigma=float(getattr(self.model, "sigma", math.nan)), **diagnostics,
        )  # fmt: skip

    def _as_operator(self, operator: Any) -> Operator:
        """The same operator for the same function each time, so that what was tuned for it is found again."""
        if operator is None or isinstance(operator, Operator):
            return as_operator(operator)
        try:
            if operator not in self._wrapped:
                self._wrapped[operator] = as_operator(operator)
            return self._wrapped[operator]
        except TypeError:  # it cannot be remembered
            return as_operator(operator)

    def _measurements(self, y: Any, operator: Operator) -> tuple[Tensor, Tensor | None]:
        """Measurements as floats with what is visible of them, checked."""
        if type(operator) in (Identity, Mask):
            y = self.prepare(y, "y")
        else:
            y = from_bytes(torch.as_tensor(y))
            if not y.is_floating_point():
                raise TypeError(f"y has dtype {y.dtype}; expected floating point")
            y = y.to(next(self.model.parameters()).dtype).cpu()
        if y.ndim < 2 or not len(y):
            raise ValueError(f"y has shape {tuple(y.shape)}; expected (n, ...), with at least one measurement")
        seen = None if operator.visible is None else visible_part(operator.visible, y).cpu()
        if seen is not None and not seen.flatten(1).any(1).all():
            raise ValueError("the mask hides everything of an image; nothing could be inferred from it")
        if not (y if seen is None else y[seen]).isfinite().all():
            raise ValueError("y has values that are NaN or infinite where it was measured")
        return (y if seen is None else torch.where(seen, y, 0.0)), seen

    def _guide(self, operator: Operator, sigma: float) -> LinearisedMixture | None:
        """What suggests starts for chains that see what the operator shows; made once for each prior and operator."""
        if not can_guide(self.prior) or not hasattr(self.model, "sigma"):
            return None
        key = (id(self.prior), sigma)
        known = self._guides.get(operator)
        if known is None or known[0] != key:
            if operator is IDENTITY:
                noise = float(self.model.sigma)
                rng = torch.Generator().manual_seed(0)
                guide = LinearisedMixture(self.decode, self.prior, shapes_of(self.model), noise, rng)
            else:
                whole = self._guide(IDENTITY, math.nan)
                assert whole is not None
                guide = whole.through(operator.smooth, self.shape, math.hypot(sigma, operator.rounding))
            known = self._guides[operator] = (key, guide)
        return known[1]

    def _step_for(
        self, observed: Observed, model: Any, operator: Operator, sigma: float, y: Tensor, seen: Tensor | None
    ) -> float:
        """The step size for an operator: that of training in units of the curvature, then by free energy; tuned once.

        The free energy is that with the prior of training, whose entropies are cheap; the step that it finds is bounded
        by the curvature of the learned prior.
        """
        known = self._tuned.setdefault(operator, {})
        key = (sigma, model is observed, self.dynamics.steps)
        if key in known:
            return known[key]
        rng = torch.Generator().manual_seed(0)
        with flushed_denormals(), evaluating(observed):
            z = tuple(layer.to(self.device) for layer in model.sample_prior(CURVATURE_POINTS, rng))
            with torch.no_grad():
                images = self.model.decode(z)
                made = observed.operator.measure(images)
                shown = None if seen is None else seen[torch.arange(len(images)) % len(seen)].to(self.device)
                curvature = _curvature(observed, made, z, shown)
                usual = _curvature(self.model, images, z)
                largest = max(curvature, _curvature(model, made, z, shown))
            guess = 0.7 * self.dynamics.step_size * usual / curvature
            how = Estimation(
                estimator="endpoint" if has_normal_prior(observed) else "auto", chains=TUNING_CHAINS, probes=1, depth=8
            )
            part = None if seen is None else seen[:TUNING_ROWS].to(self.device)
            for _ in range(8):
                try:
                    result = tune_by_grid(
                        observed, y[:TUNING_ROWS].to(self.device), self.dynamics,
                        [guess * factor for factor in (0.6, 1.0, 1.6)], how, mask=part, rng=rng,
                    )  # fmt: skip
                    guess = result.dynamics.step_size
                    break
                except StepSizeError:
                    guess /= 3
            else:
                raise StepSizeError(f"no step size is safe for {operator!r} with sigma = {sigma:g}; try a larger sigma")
        known[key] = min(guess, Guard().limit * (1 + self.dynamics.momentum) / 1.4 / largest)
        return known[key]


def _curvature(model: Any, x: Tensor, z: Latents, mask: Tensor | None = None) -> float:
    """The largest eigenvalue of minus the Hessian of the log joint, at the guard's quantile of some latents."""
    target = Target(model, x, mask, start=z)
    flat = flatten(z)
    probe = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
    values = stability(target, flat, torch.ones_like(flat[:1]), probe)
    return max(float(values.nan_to_num(nan=1.0).quantile(Guard().quantile)), 1.0)


class _Trace:
    """The log joint and several projections of the latents along chains."""

    def __init__(self, shapes: Any) -> None:
        size = sum(math.prod(shape) for shape in shapes)
        rng = torch.Generator().manual_seed(0)
        self.directions = torch.nn.functional.normalize(torch.randn(size, TRACED, generator=rng), dim=0)
        self.points: list[Tensor] = []

    def begin(self) -> None:
        self.points = []

    def __call__(self, k: int, z: Latents, log_joint: Tensor) -> None:
        flat = flatten(z)
        self.points.append(torch.cat([log_joint[:, None], flat @ self.directions.to(flat)], 1))

    def end(self) -> Tensor:
        """Shape ``(chains, numbers, K + 1)``."""
        return torch.stack(self.points, 2)


def _mixing(traces: Tensor) -> dict[str, Tensor]:
    """R-hat and effective sample size of each measurement, from traces ``(draws, n, numbers, K + 1)``."""
    last = traces[..., traces.shape[-1] // 2 :].permute(1, 2, 0, 3)
    return {"r_hat": r_hat(last).amax(1), "effective_draws": effective_sample_size(last).amin(1)}
