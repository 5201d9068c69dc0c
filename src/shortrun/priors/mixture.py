r"""A mixture of Gaussians with full covariances, fitted by expectation-maximisation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.latents import Rng, standard_normal
from shortrun.priors.base import Prior, Report

NUMBERS = (1, 3, 10, 30, 100, 300)
"""Numbers of components that are tried, until the held-out density no longer rises by more than its standard error."""
FEWEST = 40  # latents per component, on average
STRENGTH = 2.5  # of the pull towards the common covariance, in latents per dimension
ROUNDS, LLOYD_ROUNDS, TOLERANCE = 50, 10, 5e-3
ROWS = 1000  # densities are computed for so many latents at a time


class MixturePrior(Prior):
    r"""``p(y) = sum_k w_k N(y; mu_k, L_k L_k^T)``.

    Each covariance is pulled towards the mean one within components, W, as if STRENGTH * d latents had been seen
    there with that covariance (the mode under an inverse Wishart prior):
    ``C_k = (sum_i r_ik (y_i - mu_k)(y_i - mu_k)^T + nu W) / (sum_i r_ik + nu)``. A component of a hundred latents in
    fifty dimensions needs that.
    """

    kind = "mixture"
    weights: Tensor
    centres: Tensor
    factors: Tensor

    def __init__(self, size: int, components: int = 1) -> None:
        super().__init__(size)
        if components < 1:
            raise ValueError(f"components is {components}; expected one or more")
        self._set(
            torch.full((components,), 1 / components), torch.zeros(components, size),
            torch.eye(size).repeat(components, 1, 1),
        )  # fmt: skip

    def _set(self, weights: Tensor, centres: Tensor, factors: Tensor) -> None:
        for name, value in (("weights", weights), ("centres", centres), ("factors", factors)):
            self.register_buffer(name, value.to(self.mean))
        self._known: tuple[Any, Components] | None = None

    def _components(self) -> Components:
        """What densities need, computed again only when a parameter has changed: chains ask at every step."""
        parts = (self.weights, self.centres, self.factors)
        key = tuple((id(part), part._version) for part in parts)
        if self._known is None or self._known[0] != key:
            self._known = (key, _components(*parts))
        return self._known[1]

    @property
    def components(self) -> int:
        return len(self.weights)

    def options(self) -> dict[str, Any]:
        return {"components": self.components}

    def white_log_density(self, y: Tensor) -> Tensor:
        components = self._components()
        parts = [_log_joint(part, components) for part in y.split(ROWS)]
        return torch.logsumexp(torch.cat(parts), 1)

    def white_sample(self, count: int, rng: Rng = None) -> Tensor:
        uniform = torch.special.ndtr(standard_normal((count, 1), self.mean, rng))[:, 0]
        chosen = torch.searchsorted(self.weights.cumsum(0), uniform).clamp_max(self.components - 1)
        noise = standard_normal((count, self.size), self.mean, rng)
        return self.centres[chosen] + torch.einsum("nij,nj->ni", self.factors[chosen], noise)

    def learn(self, y: Tensor, held_out: Tensor, rng: torch.Generator, report: Report) -> None:
        numbers = [k for k in NUMBERS if k == 1 or k * FEWEST <= len(y)]
        best = torch.full((len(held_out),), -math.inf)
        for k in numbers:
            tried = MixturePrior(self.size, k).to(y)
            tried._set(*expectation_maximisation(y, k, rng))
            density = tried.white_log_density(held_out).double().cpu()
            report(k / numbers[-1], f"{k} components: {float(density.mean()):.2f} nats on held-out latents")
            gain = density - best
            if float(gain.mean()) <= float(gain.std()) / math.sqrt(len(gain)):
                break
            best = density
            self._set(tried.weights, tried.centres, tried.factors)


class Components(NamedTuple):
    """A mixture as its densities need it."""

    inverse: Tensor
    """``L_k^-1``, below each other, shape ``(components d, d)``: ``L^-1 y`` for all of them is one product."""
    offset: Tensor
    """``L_k^-1 mu_k``, shape ``(components, d)``."""
    constant: Tensor
    """``log w_k - log|L_k| - d/2 log(2 pi)``."""


def _components(weights: Tensor, centres: Tensor, factors: Tensor) -> Components:
    count, size = centres.shape
    eye = torch.eye(size, dtype=factors.dtype, device=factors.device).expand(count, size, size)
    inverse = torch.linalg.solve_triangular(factors, eye, upper=False)
    log_volume = factors.diagonal(dim1=1, dim2=2).log().sum(1)
    offset = torch.einsum("kij,kj->ki", inverse, centres)
    return Components(inverse.flatten(0, 1), offset, weights.log() - log_volume - 0.5 * size * math.log(2 * math.pi))


def _log_joint(y: Tensor, components: Components) -> Tensor:
    """``log w_k N(y; mu_k, L_k L_k^T)``, shape ``(n, components)``."""
    standard = (y @ components.inverse.T).view(len(y), *components.offset.shape) - components.offset
    return components.constant - 0.5 * standard.square().sum(2)


def expectation_maximisation(y: Tensor, components: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, centres and Cholesky factors, from the clusters of k-means on."""
    count, size = y.shape
    pull = STRENGTH * size
    shares = torch.nn.functional.one_hot(_clusters(y, components, rng), components).to(y)
    before = -math.inf
    for _ in range(ROUNDS):
        counts = shares.sum(0).clamp_min(1e-6)
        centres = shares.T @ y / counts[:, None]
        scatter = torch.stack([((y - c) * r[:, None]).T @ (y - c) for c, r in zip(centres, shares.T, strict=True)])
        common = scatter.sum(0) / count + 1e-6 * torch.eye(size, dtype=y.dtype, device=y.device)
        factors = torch.linalg.cholesky((scatter + pull * common) / (counts + pull)[:, None, None])
        weights = counts / counts.sum()
        components_now = _components(weights, centres, factors)
        joint = torch.cat([_log_joint(part, components_now) for part in y.split(ROWS)])
        density = torch.logsumexp(joint, 1, keepdim=True)
        shares, after = (joint - density).exp(), float(density.mean())
        if abs(after - before) < TOLERANCE:
            break
        before = after
    return weights, centres, factors


def _clusters(y: Tensor, components: int, rng: torch.Generator) -> Tensor:
    """Which of the clusters of k-means each latent is in; their first centres are drawn far apart (k-means++)."""

    def draw(weights: Tensor) -> int:
        return int(torch.multinomial(weights.cpu().double(), 1, generator=rng))

    centres = y[draw(torch.ones(len(y)))][None]
    nearest = (y - centres).square().sum(1)
    for _ in range(components - 1):
        new = y[draw(nearest + 1e-12)]
        nearest = torch.minimum(nearest, (y - new).square().sum(1))
        centres = torch.cat([centres, new[None]])
    for _ in range(LLOYD_ROUNDS):
        cluster = torch.cdist(y, centres).argmin(1)
        members = torch.nn.functional.one_hot(cluster, components).to(y)
        counts = members.sum(0)[:, None]
        centres = torch.where(counts > 0, members.T @ y / counts.clamp_min(1), centres)
    return torch.cdist(y, centres).argmin(1)
