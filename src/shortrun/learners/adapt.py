"""The controller of the step size: pure functions over a small state.

Between tunings the step follows the curvature: every few iterations ``s * lambda_max`` where chains end is led towards
the limit of the tuner's guard. Iterations that drive many chains away are undone; if they diverged before the first
update the step was too long and is shortened, else the updates were too large and the learning rate falls for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.tune import Guard, TuneResult


@dataclass(frozen=True)
class Rules:
    """What the controller goes by. Measured on runs of minutes; see the laboratory notes in docs/training.md."""

    first_tuning: int = 40
    """Iteration of the first tuning. Before, the generator is still so flat that the longest step looks best, and the
    next iterations make it steep."""
    most_divergent: float = 0.25
    """Share of the chains beyond which an iteration is undone. Otherwise updates from chains that diverge make the
    generator steeper, more chains diverge, and within two iterations its outputs are saturated for good."""
    shorter: float = 0.9
    """Factor of the step after an iteration whose chains diverged before the first update."""
    recovery: float = 1.03
    """Factor of the caution after each iteration that goes well."""
    most_caution: float = 1 / 16
    """Lowest share of the learning rate."""
    guard: Guard = field(default_factory=Guard)
    """Its limit is what ``s * lambda_max`` is led to."""
    look_every: int = 4
    """Iterations between two looks at the curvature."""
    look_at: int = 8
    """Chains that are looked at."""
    longest: float = 0.1
    """Where the step may rise to if the longest candidate of a tuning was the best."""
    first_pace: tuple[float, float] = (0.97, 1.5)
    """How much the step may change at a look, down and up, in the beginning. It must not drop fast: a step that yields
    to every steepness lets the generator become steeper still, because chains that hardly move leave it to the
    decoder to amplify them; a step that stays makes steepness costly and keeps it smooth."""
    pace: tuple[float, float] = (0.995, 1.05)
    """The same after ``settling`` iterations."""
    settling: int = 100
    memory: float = 0.99
    """Share of the past in the running moments of the latents."""
    gradient_steps: int = 4
    """Of one tuning by gradient, where the step also follows the curvature."""
    gradient_steps_tuned: int = 40
    """Of one tuning by gradient, where it is all that changes the step."""
    probes: int = 1
    depth: int = 8
    """Probes and first Krylov steps of the estimators that need them."""


class Control(NamedTuple):
    """State of the controller."""

    target_size: float = math.inf
    """Where the step may rise to: the tuned one, or the longest if longer was always better."""
    caution: float = 1.0
    """Share of the scheduled learning rate that is used at the moment."""
    curvature: float = math.nan
    """``lambda_max`` at the guard's quantile of the chains, as last seen."""
    gain: float = 1.0
    """``g``, for learning with gains: see :mod:`shortrun.learners.gains`."""
    aim: float = 1.0
    """Share of the set curvature that the gain is led to."""
    looks: int = 0
    """How often the slopes were looked at."""


def followed_size(
    rules: Rules, control: Control, size: float, steepness: float, iteration: int, rising: bool = True
) -> float:
    """The step after a look that found ``s * lambda_max = steepness``: shorter if that exceeds the limit, else longer.

    It must not rise while the learning rate decays: a step at the limit is stable only because the generator keeps
    yielding to it.
    """
    if not (math.isfinite(steepness) and steepness > 0):
        return size
    lowest, highest = rules.first_pace if iteration < rules.settling else rules.pace
    highest = highest if rising else 1.0
    wanted = min(control.target_size / size, rules.guard.limit / steepness)
    return size * min(max(wanted, lowest), highest)


def chosen_candidate(rules: Rules, result: TuneResult, present: float, by_grid: bool) -> int | None:
    """The candidate to use: of those whose chains do not diverge, the one with the lowest free energy.

    A step is not lengthened beyond the limit of the guard. Shortening it is left to the free energy here and to the
    controller between tunings, because a step that yields at once lets the generator become steeper still. None:
    the present step stays.
    """
    sizes = result.step_sizes
    allowed = [
        i for i in range(len(sizes))
        if sizes[i] <= present * (1 + 1e-9) or result.stability[i] <= rules.guard.limit
    ]  # fmt: skip
    if not by_grid:
        return result.best if result.best in allowed else None
    passing = [i for i in allowed if not result.ruled_out[i]]
    return min(passing, key=lambda i: float(result.free_energy[i]), default=None)


def described(result: TuneResult, chosen: Langevin) -> dict[str, Any]:
    """What the log shows of a tuning."""
    return {
        "chosen": chosen.step_size, "step_sizes": result.step_sizes, "free_energy": result.free_energy.tolist(),
        "stability": result.stability.tolist(), "ruled_out": result.ruled_out.tolist(),
    }  # fmt: skip


class Moments(NamedTuple):
    """Mean and mean square of the latents at the end of the chains, averaged over the last iterations."""

    mean: Tensor
    """Shape ``(d,)``, all layers side by side, in double precision."""
    square: Tensor
    """``E z z^T``, shape ``(d, d)``."""
    iterations: int = 1

    def covariance(self) -> Tensor:
        return self.square - self.mean[:, None] * self.mean


def averaged_moments(rules: Rules, past: Moments | None, mean: Tensor, square: Tensor) -> Moments:
    """The moments after an iteration: a plain average first, then one that forgets."""
    if past is None:
        return Moments(mean, square)
    iterations = past.iterations + 1
    share = max(1 / iterations, 1 - rules.memory)
    return Moments(past.mean.to(mean).lerp(mean, share), past.square.to(mean).lerp(square, share), iterations)
