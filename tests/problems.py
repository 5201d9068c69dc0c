"""Test problems with exact answers: small models whose law of ``z_K`` is computed by brute force.

For one or two latents the density of ``z_k`` is carried along on a grid: each step takes the mass at every
grid point to the Gaussian ``N(z + s R(z), 2 s)`` of the dynamics. Nothing of the package's entropy code is
used, so the KL divergence that comes out is an independent truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shortrun as sr


class Problem(NamedTuple):
    name: str
    decoder: Callable[[tuple[Tensor, ...]], Tensor]
    latent_shapes: list[tuple[int, ...]]
    sigma: float
    step_sizes: list[float]
    steps: int = 25

    def model(self) -> sr.GaussianModel:
        model = sr.GaussianModel(self.decoder, self.latent_shapes, self.sigma).double()
        model.sigma.fill_(self.sigma)
        return model

    @property
    def dimension(self) -> int:
        return sum(math.prod(shape) for shape in self.latent_shapes)

    def data(self, count: int, seed: int = 0) -> Tensor:
        """``x`` drawn from the model itself."""
        rng = torch.Generator().manual_seed(seed)
        model = self.model()
        mean = self.decoder(model.sample_prior(count, rng))
        return mean + self.sigma * torch.randn(mean.shape, generator=rng, dtype=torch.float64)


def _grid(lowest: float, highest: float, count: int) -> list[float]:
    ratio = (highest / lowest) ** (1 / (count - 1))
    return [lowest * ratio**i for i in range(count)]


def _tanh(z: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([2 * torch.tanh(1.5 * z[0]), 0.5 * z[0]], 1)


def _sine(z: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([torch.sin(2 * z[0]), 0.7 * z[0]], 1)


def _softplus(z: tuple[Tensor, ...]) -> Tensor:
    return F.softplus(3 * z[0])


def _gelu(z: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([F.gelu(2 * z[0]), 0.3 * z[0]], 1)


def _two_layer(z: tuple[Tensor, ...]) -> Tensor:
    top, noise = z
    lower = torch.tanh(1.5 * top) + 0.5 * torch.exp(0.5 * torch.sin(top)) * noise
    return torch.cat([lower, F.gelu(1.5 * lower + 0.5)], 1)


def _curved(z: tuple[Tensor, ...]) -> Tensor:
    a, b = z[0][:, :1], z[0][:, 1:]
    return torch.cat([a + 0.3 * torch.sin(2 * b), b + 0.25 * a**2], 1)


def _mixed(z: tuple[Tensor, ...]) -> Tensor:
    a, b = z[0][:, :1], z[0][:, 1:]
    hidden = torch.tanh(torch.cat([a + b, a - 0.5 * b, 0.5 * a], 1))
    return hidden @ torch.tensor([[1.0, 0.3], [-0.4, 1.2], [0.8, 0.5]], dtype=a.dtype)


PROBLEMS = [
    Problem("tanh", _tanh, [(1,)], 0.5, _grid(0.005, 0.5, 14)),
    Problem("sine", _sine, [(1,)], 0.4, _grid(0.005, 0.5, 14)),
    Problem("softplus", _softplus, [(1,)], 0.6, _grid(0.005, 0.5, 14)),
    Problem("gelu", _gelu, [(1,)], 0.4, _grid(0.005, 0.5, 14)),
    Problem("two-layer", _two_layer, [(1,), (1,)], 0.5, _grid(0.012, 0.3, 9)),
    Problem("curved 2-D", _curved, [(2,)], 0.3, _grid(0.012, 0.3, 9)),
    Problem("tanh 2-D", _mixed, [(2,)], 0.4, _grid(0.012, 0.3, 9)),
]


FAMILY_KINDS = ("tanh", "sine", "even", "fold", "bump")


def family_member(seed: int, dimension: int) -> Problem:
    """A random model; ``even`` and ``fold`` have posteriors with two modes or more, ``sine`` and ``bump`` often."""
    rng = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    kind, hidden, size = FAMILY_KINDS[seed % 5], 3, dimension + 1
    inward, shift = normal(dimension, hidden), 0.7 * normal(hidden)
    outward, straight = normal(hidden, size) / math.sqrt(hidden), normal(dimension, size) / math.sqrt(dimension)

    def decoder(z: tuple[Tensor, ...]) -> Tensor:
        (flat,) = z
        units = flat @ inward + shift
        if kind == "tanh":
            return 1.5 * torch.tanh(units) @ outward + 0.3 * flat @ straight
        if kind == "sine":
            return torch.sin(1.5 * units) @ outward + 0.3 * flat @ straight
        if kind == "even":
            return torch.tanh(0.5 * (flat @ inward).square()) @ outward + 0.15 * flat @ straight
        if kind == "fold":
            return (flat.square() + 0.05).sqrt() @ straight + 0.1 * flat @ straight
        return torch.exp(-0.5 * units.square()) @ (2 * outward)

    problem = Problem(
        f"{seed}: {kind} {dimension}-D", decoder, [(dimension,)], (0.25, 0.35, 0.5)[seed % 3], [], (6, 10, 16)[seed % 3]
    )
    return problem._replace(step_sizes=_grid_for_curvature(problem))


def _grid_for_curvature(problem: Problem) -> list[float]:
    """Nine steps from 0.06 to 2 over the mean curvature of the posterior, those that the oracle's grid can follow."""
    x, model, count = problem.data(FAMILY_EXAMPLES), problem.model(), 256
    z = model.sample_prior(FAMILY_EXAMPLES * count, torch.Generator().manual_seed(5))[0].requires_grad_()
    repeated = x.repeat_interleave(count, 0)
    log_likelihood = model.log_likelihood(repeated, (z,))
    (slope,) = torch.autograd.grad((model.log_prior((z,)) + log_likelihood).sum(), z, create_graph=True)
    rows = [torch.autograd.grad(slope[:, i].sum(), z, retain_graph=True)[0] for i in range(problem.dimension)]
    steepest = -torch.linalg.eigvalsh(torch.stack(rows, 1))[:, 0].clamp_max(-1)
    weights = torch.softmax(log_likelihood.detach().view(FAMILY_EXAMPLES, count), 1)
    mean = float((weights * steepest.view(FAMILY_EXAMPLES, count)).sum(1).mean())
    shortest = 0.0008 if problem.dimension == 1 else 0.006
    return [s for s in _grid(0.06 / mean, 2 / mean, 9) if s >= shortest]


FAMILY_EXAMPLES = 2


class Oracle:
    """Quadrature for one problem and one observation ``x`` of shape ``(1, D)``."""

    def __init__(self, model: sr.GaussianModel, x: Tensor, extent: float = 6.0, spacing: float = 0.02) -> None:
        self.dimension = sum(math.prod(shape) for shape in model.latent_shapes)
        if self.dimension == 2:
            extent, spacing = 5.0, 0.1
        self.axis = torch.arange(-extent, extent + spacing / 2, spacing, dtype=torch.float64)
        axes = torch.meshgrid(*[self.axis] * self.dimension, indexing="ij")
        self.points = torch.stack([axis.flatten() for axis in axes], 1)
        self.cell = spacing**self.dimension
        self.prior = torch.exp(-0.5 * self.points.square().sum(1)) / (2 * math.pi) ** (self.dimension / 2)
        sizes = [math.prod(shape) for shape in model.latent_shapes]
        points = self.points.clone().requires_grad_()
        layers = tuple(
            part.reshape(-1, *shape) for part, shape in zip(points.split(sizes, 1), model.latent_shapes, strict=True)
        )
        many = x.expand(len(points), *x.shape[1:])
        log_joint = model.log_prior(layers) + model.log_likelihood(many, layers)
        (self.drift,) = torch.autograd.grad(log_joint.sum(), points)
        self.log_joint = log_joint.detach()
        self.log_evidence = torch.logsumexp(self.log_joint, 0) + math.log(self.cell)

    def density(self, step_size: float, steps: int) -> Tensor:
        """The density of ``z_K`` at the grid points."""
        q = self.prior
        targets = self.points + step_size * self.drift
        kernels = [
            torch.exp(-((self.axis - targets[:, i : i + 1]) ** 2) / (4 * step_size))
            / math.sqrt(4 * math.pi * step_size)
            for i in range(self.dimension)
        ]
        for _ in range(steps):
            mass = q * self.cell
            if self.dimension == 1:
                q = mass @ kernels[0]
            else:
                q = (kernels[0].T @ (mass[:, None] * kernels[1])).flatten()
        return q

    def kl(self, step_size: float, steps: int) -> float:
        """``KL(q_K || posterior)``; infinite if mass has left the grid."""
        q = self.density(step_size, steps)
        total = q.sum() * self.cell
        if not abs(total - 1) < 1e-3:
            return math.inf
        inside = q > 1e-300
        log_posterior = self.log_joint - self.log_evidence
        return float(self.cell * (q[inside] * (q[inside].log() - log_posterior[inside])).sum())
