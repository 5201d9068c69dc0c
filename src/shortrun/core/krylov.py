"""Traces of functions of symmetric operators that are known by their products with vectors: Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CONVERGED = 1e-3  # residual of an eigenvector that counts as found, relative to the threshold
PRECISION = 1e-6  # of its eigenvalue, relative to the threshold
GROWTH = 6  # Krylov steps that are added at a time


class Krylov(NamedTuple):
    """``basis^T M basis = T``, its eigenvalues and eigenvectors."""

    basis: Tensor
    """Orthonormal, shape ``(m, p, n, d)``; the first one is the probe, normalised."""
    nodes: Tensor
    """Eigenvalues of T, ascending, shape ``(p, n, m)``."""
    vectors: Tensor
    """Eigenvectors of T in columns, shape ``(p, n, m, m)``."""
    scale: Tensor
    """Squared length of the probe, shape ``(p, n)``."""
    residuals: Tensor
    """``|M y - node y|`` of the vectors ``y`` in the space that belong to the nodes, shape ``(p, n, m)``."""

    def trace(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``v^T f(M) v``, by Gauss quadrature; shape ``(p, n)``. Its mean over probes is ``tr f(M)``."""
        weights = self.vectors[..., 0, :].square()
        return self.scale * (weights * function(self.nodes)).sum(-1)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``f(M) v`` within the Krylov space, shape ``(p, n, d)``."""
        inner = self.vectors[..., 0, :] * function(self.nodes)
        coordinates = (self.vectors @ inner[..., None])[..., 0] * self.scale.sqrt()[..., None]
        return torch.einsum("pnm,mpnd->pnd", coordinates.to(self.basis), self.basis)


class KrylovSpace:
    """``span(v, M v, M^2 v, ..)`` of a symmetric operator, from ``start`` of shape ``(p, n, d)``; it can grow."""

    def __init__(self, matvec: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.matvec, self.dimension = matvec, start.shape[-1]
        self.scale = start.square().sum(-1)
        self.next = start / torch.where(self.scale > 0, self.scale.sqrt(), torch.inf)[..., None]
        self.basis: list[Tensor] = []
        self.diagonal: list[Tensor] = []
        self.side: list[Tensor] = []

    def grow(self, depth: int) -> KrylovSpace:
        """To ``depth`` dimensions, or as many as there are."""
        while len(self.basis) < min(depth, self.dimension):
            self.basis.append(self.next)
            product = self.matvec(self.next)
            self.diagonal.append((product * self.next).sum(-1))
            stacked = torch.stack(self.basis)
            for _ in range(2):  # twice is enough for orthogonality to rounding error
                overlap = (stacked * product).sum(-1, keepdim=True)
                product = product - (overlap * stacked).sum(0)
            length = product.norm(dim=-1)
            # An exhausted Krylov space has nothing but rounding noise: cut it off, its quadrature weight is zero.
            length = torch.where(length > 1e-6 * self.diagonal[0].abs().clamp_min(1e-20), length, 0.0)
            self.side.append(length)
            self.next = product / torch.where(length > 0, length, torch.inf)[..., None]
        return self

    def summary(self, depth: int | None = None) -> Krylov:
        """Eigenvalues and eigenvectors within the first ``depth`` dimensions, by default all."""
        depth = len(self.basis) if depth is None else depth
        tridiagonal = torch.diag_embed(torch.stack(self.diagonal[:depth], -1).double())
        if depth > 1:
            side = torch.stack(self.side[: depth - 1], -1).double()
            tridiagonal = tridiagonal + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
        broken = ~tridiagonal.isfinite().all(-1).all(-1)
        nodes, vectors = torch.linalg.eigh(torch.where(broken[..., None, None], 0.0, tridiagonal))
        nodes = torch.where(broken[..., None], torch.nan, nodes)
        residuals = self.side[depth - 1].double()[..., None] * vectors[..., -1, :].abs()
        if depth == self.dimension:
            residuals = torch.zeros_like(residuals)
        return Krylov(torch.stack(self.basis[:depth]), nodes, vectors, self.scale.double(), residuals)


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, depth: int) -> Krylov:
    """``depth`` Krylov steps of a symmetric operator from ``start`` of shape ``(p, n, d)``."""
    return KrylovSpace(matvec, start).grow(depth).summary()


class LogTrace(NamedTuple):
    """An estimate of ``tr f(M)``, and what is needed to differentiate it."""

    value: Tensor
    """Shape ``(n,)``."""
    variance: Tensor
    """Of the value, over probes; shape ``(n,)``."""
    bias: Tensor
    """What deeper Krylov spaces may still change, shape ``(n,)``. Errors of several steps of a chain add up."""
    left: Callable[[Callable[[Tensor], Tensor]], Tensor]
    """``g -> g(M) w`` for the vectors ``w`` of ``right``, shape ``(q, n, d)``, weighted so that
    ``sum_q (g(M) w)^T X w`` estimates ``tr g(M) X``."""
    right: Tensor
    """Vectors ``w``, shape ``(q, n, d)``."""


def log_trace(
    matvec: Callable[[Tensor], Tensor],
    function: Callable[[Tensor], Tensor],
    probes: Tensor,
    start: Tensor,
    beyond: float,
    depth: int,
) -> LogTrace:
    """``tr f(M)`` of a symmetric operator whose eigenvalues above ``beyond`` are where ``f`` is hard to follow.

    These eigenvalues are at the end of the spectrum, where Krylov spaces find them first. A space grows from ``start``
    of shape ``(n, d)`` until each of its eigenvectors above ``beyond`` has converged; they count exactly. The rest
    is Gauss quadrature with ``probes`` ``(p, n, d)`` that have no part in these directions (Hutchinson), with Krylov
    spaces of ``depth`` dimensions or more, until growing no longer matters beside the spread over probes. No space
    grows beyond d dimensions, where it is exact.
    """
    dimension = start.shape[-1]
    space, reach = KrylovSpace(matvec, start[None]), depth
    while True:
        krylov = space.grow(reach).summary()
        found = krylov.nodes > beyond
        if reach >= dimension or not (found & (krylov.residuals > CONVERGED * beyond)).any():
            break
        reach += GROWTH
    found = (found & (krylov.residuals <= CONVERGED * beyond))[0]  # (n, m)
    columns = found.any(0)
    found, nodes = found[:, columns], krylov.nodes[0][:, columns]
    # eigenvectors as (q, n, d), zero where a chain has fewer of them than others
    vectors = torch.einsum("nmq,mnd->qnd", krylov.vectors[0][..., columns].to(start), krylov.basis[:, 0])
    vectors = vectors * found.T[..., None].to(vectors)

    def without(v: Tensor) -> Tensor:
        return v - torch.einsum("qnd,pnq->pnd", vectors, torch.einsum("qnd,pnd->pnq", vectors, v))

    rest = without(probes)
    spaces = KrylovSpace(lambda v: without(matvec(v)), rest)
    reach = min(depth, dimension)
    spaces.grow(reach)
    while True:
        traces = spaces.summary().trace(function)
        before = spaces.summary(max(1, reach - 2)).trace(function)
        mean, variance = _probe_mean(traces)
        change = (traces - before).mean(0)
        noise = variance.nan_to_num(nan=math.inf).mean()  # over all rows: of a few probes, that of one row says little
        if reach >= dimension or not bool(change.square().nan_to_num(nan=0.0).mean() > 0.01 * noise + 1e-6):
            break
        reach = min(reach + GROWTH, dimension)
        spaces.grow(reach)
    known = torch.where(found, nodes, 0.0)
    at_nodes = torch.where(found, function(known), 0.0)
    # An eigenvalue is known to about the square of its residual; near a singularity of f that matters.
    around = [function(known + sign * PRECISION * beyond) - at_nodes for sign in (-1, 1)]
    unsure = torch.where(found, torch.stack(around).abs().amax(0), 0.0).sum(1)
    # Rounding errors of the largest eigenvalue drown eigenvalues that are smaller by more than the precision.
    largest = known.abs().amax(1) if nodes.shape[1] else torch.zeros_like(unsure)
    drowned = largest * torch.finfo(start.dtype).eps * dimension > 1e-2 * beyond
    bias = torch.where(drowned, torch.inf, change.abs() + unsure).detach()

    def left(slope: Callable[[Tensor], Tensor]) -> Tensor:
        top = torch.where(found, slope(known), 0.0).T[..., None].to(vectors) * vectors
        return torch.cat([top, spaces.summary().apply(slope) / len(probes)])

    return LogTrace(at_nodes.sum(1) + mean, variance.detach(), bias, left, torch.cat([vectors, rest]))


def _probe_mean(traces: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over probes and its variance, each ``(n,)``."""
    count = len(traces)
    variance = traces.var(0) / count if count > 1 else torch.full_like(traces[0], torch.nan)
    return traces.mean(0), variance
