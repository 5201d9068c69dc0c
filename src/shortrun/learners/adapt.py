r"""What lets learning last: a price on steepness, a step that is led slowly, and iterations that can be undone.

Chains that have not arrived fall short, and a generator that learns from them amplifies: it becomes steeper until
chains overshoot. Nothing in the likelihood prevents this, because a posterior draw in a steep direction is as narrow as
the direction is steep. A step that yields to steepness slides to nothing; one that stays ends beyond the verge, where
the steepest images lose their chains. So steepness has a price. With every batch,

.. math:: w\, \log^2 \max(1, s\, u^T H u / c)

joins what the generator descends, for some of the images, with the step size ``s``, the curvature ``H`` at the last
point of the chain that was reached by a full step, and the direction ``u`` in which the gradient has just changed
there: the one in which the chain would overshoot first.
The step stays where the free energy has its minimum, so chains stay on their way for as long as training goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, flatten, unflatten
from shortrun.core.model import DecoderModel
from shortrun.core.tune import TuneResult


@dataclass(frozen=True)
class Rules:
    """What learning goes by: four numbers. docs/lab_notes.md has the runs that they come from."""

    limit: float = 1.5
    """c: what ``s u^T H u`` may be at no price. Chains overshoot from 1 on and diverge from 2 on; ``u`` is not quite
    the steepest direction, so there is some room in between."""
    weight: float = 1000.0
    """w, in nats: what an image pays at e times the limit. More than the few hundred that it gains by being explained,
    so that the bound is one."""
    share: float = 0.25
    """Of the images of a batch that pay. With all of them it learns no better, and paying takes four times as long."""
    pace: float = 1.03
    """By how much a tuning may change the step, and by how much the learning rate recovers with each iteration after
    one that was undone. One tuning compares three steps on a few images and is noisy; ten of them make a third."""


class Control(NamedTuple):
    """State of the controller."""

    caution: float = 1.0
    """Share of the scheduled learning rate that is used at the moment."""
    curvature: float = math.nan
    """``u^T H u`` of the images that pay, at their 90 % quantile, as last seen."""

    def after(self, kept: bool, rules: Rules = Rules()) -> Control:
        """An iteration: the learning rate recovers if it was kept, and is halved if it was undone."""
        return self._replace(caution=min(self.caution * rules.pace, 1.0) if kept else self.caution / 2)


def led_step(rules: Rules, dynamics: Langevin, tuned: Langevin, rate_share: float = 1.0) -> Langevin:
    """The tuned dynamics, with its step no further from that of ``dynamics`` than the pace allows.

    When the learning rate has fallen to ``rate_share`` of the first one, the pace falls with it: the generator has to
    follow.
    """
    ratio, pace = tuned.step_size / dynamics.step_size, rules.pace**rate_share
    return tuned.scaled(min(max(ratio, 1 / pace), pace) / ratio)


def curvature_along(model: Any, x: Tensor, mask: Tensor | None, z: Latents, u: Tensor, length: float) -> Tensor:
    r"""``u^T H u`` for minus the log joint of what the model itself makes of ``z``, shape ``(n,)``.

    It is the second difference of ``U(z) = -log p(x', z)`` with ``x' = decode(z)``,

    .. math:: (U(z + h u) - 2 U(z) + U(z - h u)) / h^2,

    over the length ``h`` of a step. With ``x'`` in the place of ``x`` the residual is zero, and what is left is the
    slope of the generator: for Gaussian noise ``1 + |J u|^2 / sigma^2``. A likelihood of one's own is taken at ``x``:
    it may have a kink where the residual is zero, as that of Laplace noise has. The result can be differentiated with
    respect to the parameters of the model, ``x'`` held fixed as data are.

    Args:
        u: one direction of length 1 for each example, shape ``(n, d)``.
    """
    with torch.no_grad():
        seen = model.decode(z) if isinstance(model, DecoderModel) else x
    flat, shapes = flatten(z).detach(), [layer.shape[1:] for layer in z]
    points = unflatten(torch.cat([flat + length * u, flat, flat - length * u]), shapes)
    masks = None if mask is None else torch.cat([mask.expand_as(x)] * 3)
    log_joint = model.log_prior(points) + model.log_likelihood(torch.cat([seen] * 3), points, masks)
    above, centre, below = log_joint.chunk(3)
    return (2 * centre - above - below) / length**2


def price(rules: Rules, steepness: Tensor) -> Tensor:
    """What each image pays for its ``s u^T H u``, in nats.

    The logarithm keeps a generator that is far too steep, as at the beginning, from being driven into saturation.
    """
    return rules.weight * (steepness / rules.limit).clamp_min(1).log().square()


def changed_direction(drift: Latents, before: Latents) -> Tensor:
    """``u``: where the gradient has changed to since the point before, as vectors of length 1, shape ``(n, d)``.

    One step moves a chain by noise in all directions, and the gradient answers with ``H`` times it: most along the
    steepest ones. So ``u`` is one step of the power method that costs nothing.
    """
    change = (flatten(drift) - flatten(before)).nan_to_num()
    return torch.nn.functional.normalize(change, dim=1)


def priced_rows(rules: Rules, count: int) -> Tensor:
    """Which images of the whole batch pay: spread evenly, at least one; shape ``(count,)``."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[:: max(1, round(1 / rules.share))] = True
    return chosen


def described(result: TuneResult, chosen: Langevin) -> dict[str, Any]:
    """What the log shows of a tuning."""
    return {
        "chosen": chosen.step_size, "step_sizes": result.step_sizes, "free_energy": result.free_energy.tolist(),
        "stability": result.stability.tolist(), "ruled_out": result.ruled_out.tolist(),
    }  # fmt: skip
