r"""The controller: the unit of the latents follows the generator, so that one step size suits the whole run.

Chains that have not arrived fall short, and a generator that learns from them amplifies: whatever the step size, it
becomes steeper until the chains are on the verge of overshooting. So a step that yields to steepness slides to nothing,
and one that stays ends beyond the verge as soon as the noise sigma is annealed or the rate decays. What has no scale of
its own must be given one. Here the step stays and the *gain* yields: the decoder takes ``A_l z_l`` instead of ``z_l``,

.. math:: A_l = g\, (H_l / |H|)^{-p/2}, \qquad H_l = I + \overline{J_l^T J_l} / \sigma^2,

with the Jacobian ``J_l`` of the decoder with respect to what enters it, averaged over images and iterations from random
vector-Jacobian products, and ``|H|`` the largest eigenvalue of all layers. ``g`` is led to where the curvature that
chains meet has its set value. So steepness changes neither the step nor what ``z_0 ~ N(0, I)`` means for the decoder,
and directions of very different slope are inferred at about the same pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents

MEMORY = 0.95
"""Share of the past in the running means of the slopes, per look."""


@dataclass(frozen=True)
class GainRules:
    """What the controller goes by: four numbers. docs/training.md has the runs that they come from."""

    curvature: float = 120.0
    """Where lambda_max is led to, at the 90 % quantile of the chains: the unit of the latents. With the first step of
    .02 it is s * lambda_max = 2.4, the verge."""
    power: float = 0.9
    """p: how much of a change of slope the gain takes up. With 1 nothing holds the slope of the decoder itself, and it
    drifts by orders of magnitude; with 0 there is no gain."""
    pace: float = 1.03
    """By how much the gain and, after an undone iteration, the learning rate may rise at a time. The gain may fall
    seven times as fast: it must keep up with a generator that takes shape."""
    drift: float = 0.006
    """How fast the aim answers to a gain that is not one, as a power of it at each look: within some hundred looks."""

    @property
    def fall(self) -> float:
        return self.pace**-7


def led_aim(rules: GainRules, aim: float, gain: float) -> float:
    """The share of ``rules.curvature`` that is aimed at, after a look that left the gain at ``g``.

    An integral rule: a gain below one says that the generator has become steeper, so longer steps for the curvature are
    called for, and the other way round. It settles where the generator drifts in neither direction.
    """
    return min(max(aim * gain**-rules.drift, 0.6), 1.5)


def followed_gain(rules: GainRules, gain: float, curvature: float, aim: float = 1.0) -> float:
    r"""``g`` after a look that met ``curvature``, which is proportional to its square.

    It is led to where ``curvature = aim * rules.curvature * g^(-2 (1 - p) / p)``, which is ``g^2 ~ slope^-p``.
    """
    if not (math.isfinite(curvature) and curvature > 0):
        return gain
    spring = 2 * (1 - rules.power) / rules.power
    wanted = (aim * rules.curvature * gain**-spring / curvature) ** (1 / (2 + spring))
    return gain * min(max(wanted, rules.fall), rules.pace)


def led_step(rules: GainRules, dynamics: Langevin, tuned: Langevin) -> Langevin:
    """The dynamics, its step led towards that of the last tuning.

    A tuning compares a few steps on a few images and is noisy; at this pace it takes about ten of them for a third.
    """
    ratio = tuned.step_size / dynamics.step_size
    return dynamics.scaled(min(max(ratio, 1 / rules.pace), rules.pace))


def gain_matrices(rules: GainRules, gain: float, slopes: Sequence[Tensor], sigma: float) -> list[Tensor]:
    """``A_l`` for each layer from ``slopes``, the means of ``J_l^T J_l``, in their precision."""
    split = [torch.linalg.eigh(torch.eye(len(slope)).to(slope) + slope / sigma**2) for slope in slopes]
    largest = max(float(values[-1]) for values, _ in split)
    return [gain * (vectors * (values / largest) ** (-rules.power / 2)) @ vectors.mT for values, vectors in split]


def slopes_of(decode: Callable[[Latents], Tensor], entering: Latents, u: Tensor) -> list[Tensor]:
    """Estimates of ``J_l^T J_l``, summed over the examples, in double precision: one product ``J_l^T u`` for each.

    With ``u ~ N(0, I)`` in the space of the data, ``E (J^T u)(J^T u)^T = J^T J``; an example whose ``u`` is zero does
    not count.
    """
    leaves = tuple(layer.detach().requires_grad_() for layer in entering)
    with torch.enable_grad():
        rows = torch.autograd.grad((decode(leaves) * u).sum(), leaves)
    flat = [row.flatten(1).double() for row in rows]
    return [row.T @ row for row in flat]


def averaged_slopes(past: Sequence[Tensor], found: Sequence[Tensor], looks: int) -> tuple[Tensor, ...]:
    """The running means after a look: a plain average first, then one that forgets."""
    share = max(1 / (looks + 1), 1 - MEMORY)
    return tuple(old.to(new).lerp(new, share) for old, new in zip(past, found, strict=True))
