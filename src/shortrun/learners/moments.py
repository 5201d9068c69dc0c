"""Moments of the latents that learning infers: the Gaussian that samples are drawn from while a run goes on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MEMORY = 0.99
"""Share of the past in the running moments."""


class Moments(NamedTuple):
    """Mean and mean square of the latents at the end of the chains, averaged over the last iterations."""

    mean: Tensor
    """Shape ``(d,)``, all layers side by side, in double precision."""
    square: Tensor
    """``E z z^T``, shape ``(d, d)``."""
    iterations: int = 1

    def covariance(self) -> Tensor:
        return self.square - self.mean[:, None] * self.mean


def averaged_moments(past: Moments | None, mean: Tensor, square: Tensor, memory: float = MEMORY) -> Moments:
    """The moments after an iteration: a plain average first, then one that forgets."""
    if past is None:
        return Moments(mean, square)
    iterations = past.iterations + 1
    share = max(1 / iterations, 1 - memory)
    return Moments(past.mean.to(mean).lerp(mean, share), past.square.to(mean).lerp(square, share), iterations)
