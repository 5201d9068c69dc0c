"""Short run Langevin dynamics (paper, Sec. 4.1-4.2): K steps from the prior towards the posterior.

With momentum (Chen, Fox & Guestrin 2014: stochastic gradient Hamiltonian Monte Carlo, whose friction is 1 - momentum) a
step also goes on with a share of the one before. Chains that are short of steps gain most: along a direction of little
curvature they arrive several times as fast, and noise and longest stable step change in their favour along steep ones.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.chain import Point, chain, gradient
from shortrun.core.latents import LatentModel, Latents, Rng, flatten
from shortrun.core.target import Target

Watch = Callable[[int, Latents, Tensor], None]
"""Told of each point of the chains: k, z_k, and the log joint there."""
Profile = tuple[float, ...] | tuple[tuple[float, ...], ...]
CENTRE_MOMENTUM = 0.6
"""Without noise momentum may be larger: of .4, .6, .7 and .8 it came closest on training images of three sets."""


@dataclass(frozen=True)
class Langevin:
    r"""Settings of the dynamics (paper, Eq. 10, which is the case of no momentum, beta = 0).

    .. math:: z_0 \sim p(z), \qquad
              z_{k+1} = z_k + s_k \nabla_z \log p(z_k \mid x) + \beta (z_k - z_{k-1})
                        + \sqrt{2 (1 - \beta) s_k}\, \epsilon_k , \qquad z_{-1} = z_0 .

    Args:
        steps: K.
        step_size: s, the longest step. A schedule is accepted too: one number per step; or, for each step, one number
            per layer (top layer first). It is kept as its maximum and a ``profile``.
        profile: how long each step is, relative to the longest one: empty if all are alike, else K numbers, or K
            rows of one number per layer. Only ratios matter; the largest number becomes 1. Drift and noise always
            scale together, so the target stays the posterior.
        noise: whether the noise is injected. Without it the dynamics is gradient ascent from the prior.
        quiet_steps: how many steps at the end take no noise: they end nearer to the centre of q(z | x), as the mean of
            an encoder does, instead of in a draw from it.
        momentum: beta, the share of the last step that the next one goes on with; 0 is the paper's dynamics.

    A linear model with largest curvature lambda is stable for ``s * lambda < 2 (1 + beta)``.

    The authors' training script writes the same step as ``delta^2/2 * gradient + delta * noise``; the
    paper's figures show ``delta``. Hence ``s = delta^2 / 2``:

    >>> round(Langevin.from_delta(0.05, steps=25).step_size, 6)
    0.00125
    >>> Langevin(steps=2, step_size=[0.02, 0.01])
    Langevin(steps=2, step_size=0.02, profile=(1.0, 0.5), noise=True, quiet_steps=0, momentum=0.0)
    """

    steps: int = 25
    step_size: float = 0.01
    profile: Profile = ()
    noise: bool = True
    quiet_steps: int = 0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"steps is {self.steps!r}; expected a whole number, zero or more")
        if not isinstance(self.noise, bool):
            raise TypeError(f"noise is {self.noise!r}; expected True or False")
        quiet = self.quiet_steps
        if not isinstance(quiet, int) or isinstance(quiet, bool) or not 0 <= quiet <= self.steps:
            raise ValueError(f"quiet_steps is {quiet!r}; expected a whole number from 0 to the {self.steps} steps")
        beta = self.momentum
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
            raise ValueError(f"momentum is {beta!r}; expected a number from 0 to below 1")
        size = _numbers("step_size", self.step_size, self.steps)
        profile = _numbers("profile", self.profile, self.steps)
        if not isinstance(profile, tuple):
            raise TypeError(f"profile is {self.profile!r}; expected {self.steps} relative lengths, or none")
        if isinstance(size, tuple):
            if profile:
                raise ValueError("step_size is a schedule and there is a profile as well; give one of them")
            if not size:
                raise ValueError("step_size has no entries; expected a positive number")
            size, profile = _largest(size), size
        object.__setattr__(self, "step_size", size)
        object.__setattr__(self, "profile", _relative(profile))

    @classmethod
    def from_delta(cls, delta: float, steps: int = 25, noise: bool = True) -> Langevin:
        """The dynamics whose noise has standard deviation ``delta`` (the authors' script)."""
        return cls(steps=steps, step_size=delta**2 / 2, noise=noise)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Langevin:
        """The inverse of :meth:`as_dict`; settings that are missing have their defaults."""
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them.

        >>> Langevin(2, [0.02, 0.01]).as_dict()
        {'steps': 2, 'step_size': 0.02, 'profile': [1.0, 0.5], 'noise': True, 'quiet_steps': 0, 'momentum': 0.0}
        """
        profile = [list(row) if isinstance(row, tuple) else row for row in self.profile]
        return {
            "steps": self.steps, "step_size": self.step_size, "profile": profile, "noise": self.noise,
            "quiet_steps": self.quiet_steps, "momentum": self.momentum,
        }  # fmt: skip

    @property
    def delta(self) -> float:
        """``sqrt(2 s)``, the longest step in the convention of the authors' script."""
        return math.sqrt(2 * self.step_size)

    def scaled(self, factor: float) -> Langevin:
        """All steps times ``factor``.

        >>> Langevin(2, [0.5, 0.25]).scaled(2)
        Langevin(steps=2, step_size=1.0, profile=(1.0, 0.5), noise=True, quiet_steps=0, momentum=0.0)
        """
        return replace(self, step_size=self.step_size * factor)

    def towards_centre(self) -> Langevin:
        """The same steps without noise and with more momentum: they end near a mode of q(z | x), as the mean of an
        encoder does, instead of in a draw from it.

        >>> Langevin(2, 0.1).towards_centre()
        Langevin(steps=2, step_size=0.1, profile=(), noise=False, quiet_steps=0, momentum=0.6)
        """
        return replace(self, noise=False, quiet_steps=0, momentum=max(self.momentum, CENTRE_MOMENTUM))

    def is_noisy(self, k: int) -> bool:
        """Whether the step from ``z_k`` to ``z_{k+1}`` takes noise."""
        return self.noise and k < self.steps - self.quiet_steps

    def longer(self, steps: int) -> Langevin:
        """With ``steps`` steps: more or fewer of the longest, and fewer at the front if that does not suffice.

        >>> Langevin(3, 0.1, profile=(0.5, 1.0, 0.5)).longer(5).profile
        (0.5, 1.0, 1.0, 1.0, 0.5)
        """
        kept: list[Any] = list(self.profile)
        if kept:
            first = max(range(len(kept)), key=lambda k: _largest(kept[k]))
            alike = next((k for k in range(first, len(kept)) if kept[k] != kept[first]), len(kept)) - first
            count = max(alike + steps - self.steps, 1)
            kept = [*kept[:first], *[kept[first]] * count, *kept[first + alike :]]
            kept = kept[len(kept) - steps :]
        return replace(self, steps=steps, profile=tuple(kept))

    def table(self, layers: int) -> Tensor:
        """Step sizes as a float64 tensor of shape ``(K, layers)``."""
        profile = torch.tensor(self.profile or (1.0,) * self.steps, dtype=torch.float64)
        if profile.ndim == 2 and profile.shape[1] != layers:
            raise ValueError(f"step_size has {profile.shape[1]} numbers per step but the model has {layers} layers")
        if profile.ndim == 1:
            profile = profile[:, None]
        return (self.step_size * profile).expand(self.steps, layers)


def _numbers(name: str, value: Any, steps: int) -> Any:
    """A positive number; or a tuple of ``steps`` of them, or of ``steps`` rows of equally many; or an empty tuple."""
    if isinstance(value, Tensor):
        value = value.detach().tolist()
    advice = f"expected a positive number, {steps} of them (one per step), or {steps} rows of one number per layer"

    def convert(item: Any, depth: int) -> Any:
        if isinstance(item, Iterable) and not isinstance(item, str | Mapping) and depth < 2:
            return tuple(convert(part, depth + 1) for part in item)
        try:
            number = math.nan if isinstance(item, bool) else float(item)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} contains {item!r}; {advice}")
        return number

    numbers = convert(value, 0)
    if isinstance(numbers, tuple) and numbers:
        widths = {len(row) if isinstance(row, tuple) else 1 for row in numbers}
        kinds = {isinstance(row, tuple) for row in numbers}
        if len(numbers) != steps or len(widths) > 1 or len(kinds) > 1 or 0 in widths:
            raise ValueError(f"{name} has {len(numbers)} entries for {steps} steps; {advice}")
    return numbers


def _largest(numbers: Any) -> float:
    return max(map(_largest, numbers)) if isinstance(numbers, tuple) else numbers


def _relative(profile: Any) -> Any:
    """The profile over its largest number; empty if its steps are all alike."""
    if not profile:
        return ()
    largest = _largest(profile)
    shares = tuple(
        tuple(item / largest for item in row) if isinstance(row, tuple) else row / largest for row in profile
    )
    return () if all(share == 1.0 for share in shares) else shares


def cool_down(steps: int, last: int, first: int = 0) -> tuple[float, ...]:
    """A profile whose ``last`` steps become evenly shorter, and whose ``first`` ones evenly longer.

    Step k has ``min(1, (k + 1) / (first + 1), (K - k) / (last + 1))``.

    >>> cool_down(6, 3, first=1)
    (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)
    """
    for count in (first, last):
        if not 0 <= count < max(steps, 1):
            raise ValueError(f"{count} of {steps} steps cannot be shorter; expected less than the number of steps")
    if not first and not last:
        return ()
    return tuple(min(1.0, (k + 1) / (first + 1), (steps - k) / (last + 1)) for k in range(steps))


class Diagnostics(NamedTuple):
    """What happened along the chains: each field has shape ``(K + 1, n)``, the start included."""

    log_joint: Tensor
    """``log p(x, z_k)``."""
    gradient_norm: Tensor
    """``|grad_z log p(x, z_k)|`` over all layers."""
    divergent: Tensor
    """Whether the chain was off its way at this point: see :func:`is_divergent`. The last row is what counts: with
    long steps a chain may overshoot on its way and come back."""


class DivergenceError(FloatingPointError):
    """Chains diverged and nothing that may be done about it will help; a smaller step size is needed."""


class DivergenceWarning(RuntimeWarning):
    """Chains diverged beyond the range of floating point numbers; a smaller step size is needed."""


def is_divergent(log_joint: Tensor, best: Tensor, dimension: int) -> Tensor:
    """Chains that are not finite, or more than ``d + 10 sqrt(d)`` nats below ``best``, their best log joint so far.

    A posterior sample lies about ``d/2`` nats below the mode of its log joint, give or take ``sqrt(d/2)``. So a
    chain that has arrived does not fall that far below its best, however much it gained before.
    """
    lost = best - log_joint
    return ~(lost <= dimension + 10 * math.sqrt(dimension))


def running_best(log_joints: Tensor) -> Tensor:
    """The best log joint of each chain up to each of its points, shape ``(K + 1, n)``; what is not finite is none."""
    return log_joints.nan_to_num(nan=-math.inf, posinf=-math.inf).cummax(0).values


# --- inference ----------------------------------------------------------------------------------------


def infer(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = None,
    start: Latents | None = None,
    rng: Rng = None,
) -> Latents:
    """Infer the latents of ``x``: a sample ``z_K`` of the short run distribution (paper, Eq. 10 and 12).

    Args:
        model: any :class:`~shortrun.core.latents.LatentModel`.
        x: observed batch, shape ``(n, ...)``, in the dtype and on the device of the model.
        dynamics: number of steps, step size, noise.
        mask: true where a pixel is visible; broadcast to ``x``. Hidden pixels have no influence, and may
            hold anything.
        start: latents to start from instead of ``z_0 ~ p(z)``.
        rng: source of all randomness. A list with one generator per example makes the result for
            an example independent of the batch it came in.

    Returns:
        Tuple of latents, top layer first. If chains diverge until they are no longer finite, a
        :class:`DivergenceWarning` tells how many.

    >>> from shortrun import GaussianModel
    >>> model = GaussianModel(lambda z: z[0] @ torch.ones(2, 3), latent_shapes=[(2,)], sigma=0.5)
    >>> rng = torch.Generator().manual_seed(0)
    >>> z = infer(model, torch.ones(5, 3), Langevin(steps=10, step_size=0.02), rng=rng)
    >>> z[0].shape
    torch.Size([5, 2])
    """
    return _infer(model, x, dynamics, mask, start, rng, evaluate_end=False)[1]


def infer_with_diagnostics(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = None,
    start: Latents | None = None,
    rng: Rng = None,
    watch: Watch | None = None,
) -> tuple[Latents, Diagnostics]:
    """As :func:`infer`, with :class:`Diagnostics` of the chains, at the price of one more evaluation.

    ``watch(k, z_k, log_joint)`` is called at each point, the start and the end included.
    """
    target, z, history = _infer(model, x, dynamics, mask, start, rng, evaluate_end=True, watch=watch)
    log_joints, norms = (torch.stack(column) for column in zip(*history, strict=True))
    divergent = is_divergent(log_joints, running_best(log_joints), target.dimension)
    return z, Diagnostics(log_joints, norms, divergent)


def _infer(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    mask: Tensor | None,
    start: Latents | None,
    rng: Rng,
    evaluate_end: bool,
    watch: Watch | None = None,
) -> tuple[Target, Latents, list[tuple[Tensor, Tensor]]]:
    """The target, ``z_K``, and log joint and length of its gradient at each point that was evaluated."""
    if not isinstance(dynamics, Langevin):
        raise TypeError(f"dynamics is {dynamics!r}; expected Langevin(steps, step_size)")
    history: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode(False), torch.no_grad():
        target = Target(model, x, mask, rng=rng, start=start, evaluations=dynamics.steps)

        def visit(k: int, z: Latents) -> tuple[Latents, Point]:
            point = gradient(target.log_joint, z)
            if k == 0:
                target.check_start(point.log_joint)
            return z, point

        def noise(k: int, layer: Tensor) -> Tensor | None:
            return target.noise(layer, rng) if dynamics.is_noisy(k) else None

        table = dynamics.table(len(target.sizes)).tolist()
        z = target.start
        for k, z, point in chain(target.start, table, visit, noise, evaluate_end, dynamics.momentum):
            if point is not None and watch is not None:
                watch(k, z, point.log_joint)
            if point is not None and evaluate_end:
                history.append((point.log_joint, flatten(point.drift).norm(dim=1)))
    warn_if_not_finite(z, dynamics)
    return target, z, history


def warn_if_not_finite(z: Latents, dynamics: Langevin) -> None:
    finite = flatten(z).isfinite().all(1)
    if not finite.all():
        warnings.warn(
            f"{int((~finite).sum())} of {len(finite)} chains diverged with step size {dynamics.step_size:g}; lower it, "
            "or let tune_by_grid choose it",
            DivergenceWarning,
            stacklevel=4,
        )
