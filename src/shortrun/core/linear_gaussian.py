"""Closed forms for the one model where all is known: ``x = W z + b + sigma * noise``, ``z ~ N(0, I)``.

The posterior, the law of the short run ``z_K``, the KL divergence between them and ``log p(x)`` are all
Gaussian algebra, so every estimate in this package can be compared with an exact number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.latents import flatten
from shortrun.core.model import GaussianModel


class Gaussian(NamedTuple):
    """N(mean, covariance): ``mean`` is ``(n, d)``, ``covariance`` is ``(d, d)``, shared by all examples.

    ``logdet`` is that of the covariance, kept apart because a product of determinants stays accurate where
    the determinant of a product underflows.
    """

    mean: Tensor
    covariance: Tensor
    logdet: Tensor

    def entropy(self) -> Tensor:
        """``1/2 logdet(2 pi e C)``, a scalar."""
        d = len(self.covariance)
        return 0.5 * (d * math.log(2 * math.pi * math.e) + self.logdet)

    def kl(self, other: Gaussian) -> Tensor:
        """``KL(self || other)``, shape ``(n,)``."""
        d = len(self.covariance)
        precision = torch.linalg.inv(other.covariance)
        gap = other.mean - self.mean
        quadratic = ((gap @ precision) * gap).sum(-1)
        trace = (precision * self.covariance).sum()
        return 0.5 * (quadratic + trace - d + other.logdet - self.logdet)


class LinearGaussian:
    """The linear-Gaussian model with its exact answers.

    Args:
        weight: W, shape ``(D, d)``.
        sigma: observation noise.
        bias: b, shape ``(D,)``; zero by default.
        latent_shapes: how ``z`` is split into layers, top first; one layer by default.
    """

    def __init__(
        self,
        weight: Tensor,
        sigma: float,
        bias: Tensor | None = None,
        latent_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.weight = weight
        self.sigma = sigma
        self.bias = torch.zeros(len(weight), dtype=weight.dtype) if bias is None else bias
        self.latent_shapes = [tuple(s) for s in latent_shapes or [(weight.shape[1],)]]
        self.sizes = [math.prod(s) for s in self.latent_shapes]
        if sum(self.sizes) != weight.shape[1]:
            raise ValueError(
                f"latent_shapes {self.latent_shapes} hold {sum(self.sizes)} numbers but weight has "
                f"{weight.shape[1]} columns"
            )

    def model(self) -> GaussianModel:
        """The same model, as the rest of the package sees it."""

        def decoder(z: tuple[Tensor, ...]) -> Tensor:
            return flatten(z) @ self.weight.T + self.bias

        model = GaussianModel(decoder, self.latent_shapes, self.sigma).to(self.weight.dtype)
        model.sigma.fill_(self.sigma)  # again, in the precision of the weight
        return model

    @property
    def precision(self) -> Tensor:
        """``P = I + W^T W / sigma^2``, the precision of the posterior, minus the Hessian of the log joint."""
        d = self.weight.shape[1]
        return torch.eye(d, dtype=self.weight.dtype) + self.weight.T @ self.weight / self.sigma**2

    def posterior(self, x: Tensor) -> Gaussian:
        """``p(z | x) = N(P^-1 W^T (x - b) / sigma^2, P^-1)``."""
        covariance = torch.linalg.inv(self.precision)
        logdet = -torch.linalg.slogdet(self.precision)[1]
        return Gaussian(self._pull(x) @ covariance, covariance, logdet)

    def _pull(self, x: Tensor) -> Tensor:
        return (x - self.bias) @ self.weight / self.sigma**2

    def log_evidence(self, x: Tensor) -> Tensor:
        """``log p(x) = log N(x; b, W W^T + sigma^2 I)``, shape ``(n,)``."""
        size = len(self.weight)
        covariance = self.weight @ self.weight.T + self.sigma**2 * torch.eye(size, dtype=self.weight.dtype)
        gap = x - self.bias
        quadratic = (gap * torch.linalg.solve(covariance, gap.T).T).sum(-1)
        logdet = torch.linalg.slogdet(covariance)[1]
        return -0.5 * (quadratic + logdet + size * math.log(2 * math.pi))

    def _step_matrices(self, dynamics: Langevin) -> list[tuple[Tensor, Tensor]]:
        """``(A_k, s_k)`` for each step, with ``A_k = I - diag(s_k) P`` and ``s_k`` of shape ``(d,)``."""
        repeats = torch.tensor(self.sizes)
        table = dynamics.table(len(self.sizes)).to(self.weight.dtype)
        eye = torch.eye(self.weight.shape[1], dtype=self.weight.dtype)
        rows = [row.repeat_interleave(repeats) for row in table]
        return [(eye - s[:, None] * self.precision, s) for s in rows]

    def short_run(self, x: Tensor, dynamics: Langevin) -> Gaussian:
        """The law of ``z_K``: ``m' = A m + s W^T (x - b) / sigma^2``, ``C' = A C A^T + 2 diag(s)``.

        Steps without noise do not have the last term.
        """
        mean = torch.zeros(len(x), self.weight.shape[1], dtype=self.weight.dtype)
        covariance = torch.eye(self.weight.shape[1], dtype=self.weight.dtype)
        pull = self._pull(x)
        logdet = torch.zeros((), dtype=self.weight.dtype)
        if dynamics.momentum:
            return self._with_momentum(pull, dynamics)
        for k, (a, s) in enumerate(self._step_matrices(dynamics)):
            mean = mean @ a.T + pull * s
            covariance = a @ covariance @ a.T
            if dynamics.is_noisy(k):
                covariance = covariance + 2 * torch.diag(s)
                logdet = torch.linalg.slogdet(covariance)[1]
            else:
                logdet = logdet + 2 * torch.linalg.slogdet(a)[1]
        return Gaussian(mean, covariance, logdet)

    def _step_matrices_of_pairs(self, dynamics: Langevin) -> list[tuple[Tensor, Tensor]]:
        """What moves ``(z_k, z_{k-1})`` with momentum, ``[[A_k + beta I, -beta I], [I, 0]]``, and ``s_k``."""
        eye = torch.eye(self.weight.shape[1], dtype=self.weight.dtype)
        beta, lower = dynamics.momentum, torch.cat([eye, 0 * eye], 1)
        return [
            (torch.cat([torch.cat([a + beta * eye, -beta * eye], 1), lower]), s)
            for a, s in self._step_matrices(dynamics)
        ]

    def _with_momentum(self, pull: Tensor, dynamics: Langevin) -> Gaussian:
        """As :meth:`short_run`, by the law of ``(z_k, z_{k-1})``."""
        d, beta = self.weight.shape[1], dynamics.momentum
        eye = torch.eye(d, dtype=self.weight.dtype)
        mean = torch.zeros(len(pull), 2 * d, dtype=self.weight.dtype)
        covariance = eye.repeat(2, 2)  # z_{-1} is z_0
        for k, (both, s) in enumerate(self._step_matrices_of_pairs(dynamics)):
            mean = mean @ both.T + torch.cat([pull * s, torch.zeros_like(pull)], 1)
            covariance = both @ covariance @ both.T
            if dynamics.is_noisy(k):
                covariance[:d, :d] += 2 * (1 - beta) * torch.diag(s)
        covariance = covariance[:d, :d]
        return Gaussian(mean[:, :d], covariance, torch.linalg.slogdet(covariance)[1])

    def conditional_entropy(self, dynamics: Langevin) -> Tensor:
        """``H(z_K | eps) = H(z_0) + log|det dz_K/dz_0|``, which without momentum is a sum of ``log|det A_k|``.

        It is what the paper's estimator converges to.
        """
        d = self.weight.shape[1]
        prior = 0.5 * d * math.log(2 * math.pi * math.e)
        if dynamics.momentum:
            both = torch.eye(d, dtype=self.weight.dtype).repeat(2, 1)  # z_{-1} is z_0
            for matrix, _ in self._step_matrices_of_pairs(dynamics):
                both = matrix @ both
            return prior + torch.linalg.slogdet(both[:d])[1]
        logdets = [torch.linalg.slogdet(a)[1] for a, _ in self._step_matrices(dynamics)]
        return prior + sum(logdets, torch.zeros((), dtype=self.weight.dtype))

    def kl(self, x: Tensor, dynamics: Langevin) -> Tensor:
        """``KL(short run || posterior)``, shape ``(n,)``."""
        return self.short_run(x, dynamics).kl(self.posterior(x))

    def free_energy(self, x: Tensor, dynamics: Langevin) -> Tensor:
        """``E_q[log q(z) - log p(x, z)] = KL - log p(x)`` (paper, Eq. 19), shape ``(n,)``."""
        return self.kl(x, dynamics) - self.log_evidence(x)
