r"""Codes on the unit ball with a Gaussian fitted to them as their prior (Bojanowski et al. 2018)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shortrun.core.inference import Inferred, none_lost
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, Rng, standard_normal
from shortrun.core.model import GaussianModel, NotPossibleError, fit_gaussian

TEST_STEPS, TEST_RATE = 150, 0.05


def to_ball(z: Tensor) -> Tensor:
    """The nearest point of the unit ball."""
    return z / z.norm(dim=1, keepdim=True).clamp_min(1)


def visible_residual(model: Any, x: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
    """``x - g(z)``, zero where a pixel is hidden."""
    residual = x - model.decoder((z,))
    return residual if mask is None else torch.where(mask.expand_as(x), residual, 0.0)


class CodeModel(GaussianModel):
    """A decoder of codes in the unit ball, with ``p(z)`` the Gaussian fitted to the codes of training images."""

    standard_normal_prior = False
    no_dynamics = "short run dynamics needs latents with a normal prior, which glo has not"
    mean: Tensor
    factor: Tensor

    def __init__(self, decoder: Any, latent_shapes: Any, sigma: float) -> None:
        super().__init__(decoder, latent_shapes, sigma)
        size = math.prod(self.latent_shapes[0])
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("factor", torch.eye(size) / math.sqrt(size))

    def fit(self, codes: Tensor) -> None:
        """``p(z) = N(mean, covariance)`` of the codes."""
        mean, factor = fit_gaussian(codes)
        self.mean.copy_(mean)
        self.factor.copy_(factor)

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        noise = standard_normal((n, len(self.mean)), self.mean, rng)
        return (self.mean + noise @ self.factor.T,)

    def log_prior(self, z: Latents) -> Tensor:
        centred = (z[0] - self.mean).T
        standard = torch.linalg.solve_triangular(self.factor, centred, upper=False).T
        log_volume = self.factor.diagonal().log().sum()
        return -0.5 * (standard.square().sum(1) + len(self.mean) * math.log(2 * math.pi)) - log_volume

    def infer(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        """Codes of new images: the best of the unit ball by Adam, from the mean of the training codes."""
        z = to_ball(self.mean.expand(len(x), -1)).clone().requires_grad_()
        optimiser = torch.optim.Adam([z], lr=TEST_RATE)
        for step in range(TEST_STEPS):
            optimiser.param_groups[0]["lr"] = TEST_RATE * (1 - step / TEST_STEPS)
            with torch.enable_grad():
                error = visible_residual(self, x, z, mask).square().sum()
                (z.grad,) = torch.autograd.grad(error, z)
            optimiser.step()
            z.data = to_ball(z.data)
        return Inferred((z.detach(),), *none_lost(x))

    def lower_bound(self, x: Tensor, rng: Rng = None) -> Tensor:
        raise NotPossibleError("glo finds one code per image and no distribution over codes, so it has no lower bound")
