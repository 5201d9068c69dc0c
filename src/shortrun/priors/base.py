r"""What a learned prior is: a density over all latents side by side, shape ``(n, d)``.

Each kind lives in the coordinates ``y`` in which the Gaussian fitted to the latents is N(0, I),

.. math:: z = m + F y, \qquad p(z) = p(y) / |\det F|, \qquad F F^T = \mathrm{Cov}(z),

so that a direction that the generator stretches a hundredfold is no harder to learn than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from shortrun.core.latents import Rng, standard_normal

PriorKind = Literal["normal", "gaussian", "mixture", "flow", "energy"]
FAR, ROUNDS = 20.0, 10
Report = Callable[[float, str], None]
"""Takes the share of the work that is done, from 0 to 1, and a few words about it."""


class Prior(nn.Module):
    """A learned ``p(z)``; subclasses say what ``p(y)`` is.

    Args:
        size: d, the number of latents.
    """

    kind: ClassVar[PriorKind]
    mean: Tensor
    factor: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("factor", torch.eye(size))
        self.info: dict[str, Any] = {}
        """How it was fitted: number of latents, held-out log density, seconds .."""

    @property
    def size(self) -> int:
        return len(self.mean)

    def options(self) -> dict[str, Any]:
        """What the constructor needs to build it again, besides ``size``."""
        return {}

    # -- the density ----------------------------------------------------------------------------------

    def whiten(self, z: Tensor) -> Tensor:
        """``y = F^-1 (z - m)``."""
        return torch.linalg.solve_triangular(self.factor, (z - self.mean).T, upper=False).T

    def log_density(self, z: Tensor) -> Tensor:
        """``log p(z)``, shape ``(n,)``, normalising constant included."""
        return self.white_log_density(self.whiten(z)) - self.factor.diagonal().log().sum()

    def sample(self, count: int, rng: Rng = None) -> Tensor:
        """Draws from ``p(z)``, shape ``(count, d)``."""
        return self.mean + self.white_sample(count, rng) @ self.factor.T

    def white_log_density(self, y: Tensor) -> Tensor:
        """``log p(y)``, shape ``(n,)``."""
        return standard_log_density(y)

    def white_sample(self, count: int, rng: Rng = None) -> Tensor:
        """Draws from ``p(y)``, shape ``(count, d)``."""
        return standard_normal((count, self.size), self.mean, rng)

    # -- learning -------------------------------------------------------------------------------------

    @torch.no_grad()
    def fit(self, z: Tensor, held_out: Tensor, rng: torch.Generator, report: Report = lambda share, text: None) -> None:
        """Learn from latents ``z``, shape ``(n, d)``; how much to learn is decided by the density of ``held_out``."""
        mean, covariance = z.double().mean(0), shrunk_covariance(z)
        self.mean.copy_(mean)
        self.factor.copy_(torch.linalg.cholesky(covariance))
        self.learn(self.whiten(z.to(self.mean)), self.whiten(held_out.to(self.mean)), rng, report)

    def learn(self, y: Tensor, held_out: Tensor, rng: torch.Generator, report: Report) -> None:
        """Learn ``p(y)``; the Gaussian knows all already."""


def standard_log_density(y: Tensor) -> Tensor:
    """``log N(y; 0, I)``, shape ``(n,)``."""
    return -0.5 * (y.square().sum(1) + y.shape[1] * math.log(2 * math.pi))


def shrunk_covariance(z: Tensor) -> Tensor:
    r"""The covariance of Ledoit and Wolf (2004), in double precision: between the sample's and a multiple of I.

    .. math:: \hat C = (1 - \rho) S + \rho \mu I, \qquad \mu = \mathrm{tr} S / d, \qquad
              \rho = \min\Bigl(1, \frac{\frac1{n^2} \sum_i \|z_i z_i^T - S\|^2}{\|S - \mu I\|^2}\Bigr) .

    With ten thousand latents it is the sample's; with fewer latents than dimensions it still has an inverse.
    """
    z = z.double() - z.double().mean(0)
    count, size = z.shape
    sample = z.T @ z / count
    scale = sample.diagonal().mean()
    target = scale * torch.eye(size, dtype=z.dtype, device=z.device)
    apart = (sample - target).square().sum()
    noise = (z.square().sum(1).square().sum() / count - sample.square().sum()) / count
    share = (noise / apart.clamp_min(1e-300)).clamp(0, 1) if size > 1 else torch.zeros((), dtype=z.dtype)
    ridge = 1e-9 * scale.clamp_min(1e-9) * torch.eye(size, dtype=z.dtype, device=z.device)
    return (1 - share) * sample + share * target + ridge


def are_typical(z: Tensor) -> Tensor:
    """Which latents are not far from all others, shape ``(n,)``; the ends of chains that went astray are.

    Far is ``|y|^2`` beyond its mean under N(0, I) by FAR standard deviations, ``d + FAR sqrt(2 d)``: no cluster of
    images is that far, and a hundredth of such latents would be enough to spoil a covariance. What remains is judged
    again, because outliers hide each other.
    """
    z, size = z.double(), z.shape[1]
    typical = torch.ones(len(z), dtype=torch.bool, device=z.device)
    for _ in range(ROUNDS):
        kept = z[typical]
        factor = torch.linalg.cholesky(shrunk_covariance(kept))
        y = torch.linalg.solve_triangular(factor, (z - kept.mean(0)).T, upper=False)
        new = y.square().sum(0) <= size + FAR * math.sqrt(2 * size)
        if torch.equal(new, typical) or int(new.sum()) < len(z) / 2:
            break
        typical = new
    return typical


class GaussianPrior(Prior):
    """``N(m, R)`` with full covariance, all layers together: the maximum likelihood answer where nothing is skewed."""

    kind = "gaussian"

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> GaussianPrior:
        """With these moments, shapes ``(d,)`` and ``(d, d)``; directions without variance get a little."""
        prior = cls(len(mean)).to(mean.device)
        ridge = 1e-6 * covariance.diagonal().mean().clamp_min(1e-6)
        eye = torch.eye(len(mean), dtype=torch.float64, device=mean.device)
        prior.mean.copy_(mean)
        prior.factor.copy_(torch.linalg.cholesky(covariance.double() + ridge.double() * eye))
        return prior
