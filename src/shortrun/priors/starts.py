r"""Where chains start if only part of an example is visible.

A chain of K steps does not change modes: started from N(0, I) with half a digit hidden, it ends in the nearest digit
and not in the likeliest. The learned prior knows the modes. Within a component j of a mixture the decoder is nearly
linear,

.. math:: g(\mu_j + L_j u) \approx b_j + A_j^T u + \epsilon, \qquad u \sim N(0, I), \quad
          \epsilon \sim N(0, \mathrm{diag}(v_j)) ,

so ``p(x_visible | j)`` and ``p(u | x_visible, j)`` are those of a linear-Gaussian model, in closed form. A start is a
component, chosen by the former, and a draw of u from the latter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shortrun.core.latents import Latents, standard_normal, unflatten
from shortrun.priors.base import GaussianPrior, Prior
from shortrun.priors.mixture import MixturePrior

DRAWS_PER_LATENT = 4
"""Images that the linear map of a component is fitted to, for each latent."""
TEMPERATURE = 12.0
"""Evidences of components are taken to the power of its inverse: the linear model is too sure of itself."""
RIDGE = 1.0
NOISES = 32
"""Draws of what is not linear in the decoder that are sent through an operator."""


class LinearisedMixture:
    """A decoder and a prior of Gaussians as one mixture of linear-Gaussian models of ``(x, z)``.

    Args:
        decode: from latents to the mean of x.
        prior: a mixture, or a Gaussian.
        shapes: of the layers of latents.
        sigma: of the observation noise.
        rng: of the draws that the linear maps are fitted to.
    """

    def __init__(
        self, decode: Callable[[Latents], Tensor], prior: Prior, shapes: Any, sigma: float, rng: torch.Generator
    ) -> None:
        self.shapes, self.sigma = shapes, sigma
        if isinstance(prior, MixturePrior):
            self.log_weights = prior.weights.log()
            self.centres = prior.mean + prior.centres @ prior.factor.T
            self.factors = prior.factor @ prior.factors
        else:
            self.log_weights, self.centres, self.factors = prior.mean.new_zeros(1), prior.mean[None], prior.factor[None]
        size = prior.size
        count = DRAWS_PER_LATENT * size + 2
        parts = []
        for centre, factor in zip(self.centres, self.factors, strict=True):
            u = standard_normal((count, size), centre, rng)
            x = decode(unflatten(centre + u @ factor.T, shapes)).flatten(1)
            parts.append(_linear_map(u, x))
        self.base, self.maps, self.variances = (torch.stack(column) for column in zip(*parts, strict=True))

    def through(self, measure: Callable[[Tensor], Tensor], shape: Sequence[int], sigma: float) -> LinearisedMixture:
        """What is seen of it through an operator, as a mixture of linear-Gaussian models of ``(y, z)``.

        For an operator that is not linear the maps are its differences around each component, and what is not linear
        in the decoder is taken as independent from place to place.

        Args:
            measure: from images to measurements, batch first.
            shape: of one image.
            sigma: of the noise of the measurement.
        """
        seen: LinearisedMixture = copy.copy(self)
        seen.sigma = sigma
        rng = torch.Generator().manual_seed(0)
        parts = []

        def made(images: Tensor) -> Tensor:
            return measure(images.view(-1, *shape)).flatten(1)

        for base, maps, variance in zip(self.base, self.maps, self.variances, strict=True):
            noise = variance.sqrt() * standard_normal((NOISES, len(variance)), base, rng)
            slopes = (made(base + maps) - made(base - maps)) / 2
            left = ((made(base + noise) - made(base - noise)) / 2).square().mean(0)
            parts.append((made(base[None])[0], slopes, left))
        seen.base, seen.maps, seen.variances = (torch.stack(column) for column in zip(*parts, strict=True))
        return seen

    def draw(self, x: Tensor, mask: Tensor, count: int, rng: torch.Generator) -> list[Latents]:
        """``count`` starts of each example; their components are spread as evenly as their probabilities allow."""
        x, seen = x.flatten(1), mask.expand_as(x).flatten(1).bool()
        same = bool((seen == seen[:1]).all())
        results = []
        for rows in [slice(None)] if same else [slice(i, i + 1) for i in range(len(x))]:
            results.append(self._draw(x[rows][:, seen[rows][0]], seen[rows][0], count, rng))
        z = torch.cat(results, 1)
        return [unflatten(each, self.shapes) for each in z]

    def _draw(self, x: Tensor, seen: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Of examples ``(n, visible)`` that hide the same places; shape ``(count, n, d)``."""
        maps = self.maps[:, :, seen]
        precision = 1 / (self.variances[:, seen] + self.sigma**2)
        eye = torch.eye(maps.shape[1], dtype=x.dtype, device=x.device)
        # p(u | x, j) = N(C^-1 A P (x - b), C^-1) with C = I + A P A^T and P = (diag(v) + sigma^2 I)^-1
        factor = torch.linalg.cholesky(eye + (maps * precision[:, None]) @ maps.mT)
        apart = x[None] - self.base[:, None, seen]  # (components, n, visible)
        pull = (apart * precision[:, None]) @ maps.mT
        half = torch.linalg.solve_triangular(factor, pull.mT, upper=False)  # (components, d, n)
        log_evidence = -0.5 * ((apart.square() * precision[:, None]).sum(2) - half.square().sum(1))
        log_volume = 0.5 * precision.log().sum(1) - factor.diagonal(dim1=1, dim2=2).log().sum(1)
        chance = torch.softmax(self.log_weights[:, None] + (log_evidence + log_volume[:, None]) / TEMPERATURE, 0)
        steps = chance.T.cumsum(1)
        offset = torch.special.ndtr(standard_normal((len(x), 1), x, rng))
        at = (offset + torch.arange(count, device=x.device)) / count
        chosen = torch.searchsorted(steps, at.contiguous()).clamp_max(len(chance) - 1)  # (n, count)
        order = torch.rand(len(x), count, generator=rng).to(x.device).argsort(1)
        chosen = chosen.gather(1, order).T  # (count, n)
        rows = torch.arange(len(x), device=x.device)
        noise = standard_normal((count, len(x), maps.shape[1]), x, rng)
        moved = half.permute(0, 2, 1)[chosen, rows] + noise
        u = torch.linalg.solve_triangular(factor.mT[chosen], moved[..., None], upper=True)
        return self.centres[chosen] + (self.factors[chosen] @ u)[..., 0]


def _linear_map(u: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``b``, ``A``, and the variance that is left at each place, for one component."""
    size = u.shape[1]
    inputs = torch.cat([u, torch.ones_like(u[:, :1])], 1)
    ridge = RIDGE * torch.eye(size + 1, dtype=u.dtype, device=u.device)
    ridge[-1, -1] = 0
    solution = torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ x)
    left = (x - inputs @ solution).square().sum(0) / (len(u) - size - 1)
    return solution[-1], solution[:-1], left


def can_guide(prior: Prior | None) -> TypeGuard[GaussianPrior | MixturePrior]:
    """Whether the prior is made of Gaussians."""
    return isinstance(prior, (GaussianPrior, MixturePrior))
