r"""How the short run dynamics changes volume: log-determinants and entropies of ``q_s(z | x)``.

One step is ``z' = z + s R(z) + sqrt(2 s) eps`` with ``R`` the gradient of the log joint. Its Jacobian
``A_k = I + s H(z_k)``, with ``H`` the Hessian of the log joint, needs only ``z_k``; and because
``dF/dz_0 = A_{K-1} ... A_0``, the log-determinant of the paper's Eq. 17 is a sum over steps,

.. math:: \log|\det dF/dz_0| = \sum_k \log|\det A_k| .

It is exact, its memory does not grow with K, and no K-step graph is built. Three entropies come from it:

``"conditional"`` (the paper's, with the noise given):
    ``H(z_0) + E sum_k log|det A_k|``. If the map ``z_0 -> z_K`` is one-to-one for given noise, this is
    ``H(z_K | eps)``; conditioning never adds entropy, so it is a lower bound of the entropy of ``z_K``, the free energy
    computed with it an upper bound, and minus that a lower bound of log p(x). Where the map folds, which it can from
    ``s lambda = 1`` on, several ``z_0`` end in one place, the sum counts that place several times, and none of the
    three holds.
``"averaged"`` (the paper's Eq. 17 to the letter):
    ``-E_{z_0} log E_eps [p(z_0) / |det dF(z_0, eps)/dz_0|]``, several noises inside the logarithm for
    each ``z_0``. By Jensen's inequality it is at most the conditional entropy, which is the case of one
    noise.
``"marginal"`` (the default of this package):
    also counts what the injected noise adds, by following the covariance of the linearised dynamics,
    ``C_{k+1} = A_k C_k A_k^T + 2 s I``; ``H = d/2 log(2 pi e) + 1/2 E logdet C_K``. Exact for a
    linear-Gaussian model.

So ``averaged <= conditional``, which is at most the true entropy where the map does not fold, and ``marginal`` is an
approximation of the true one. :mod:`shortrun.tune` holds it against two upper bounds.

With one step size per layer, ``s`` is a vector, ``A_k = I + diag(s) H`` and ``2 s I`` is ``2 diag(s)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shortrun.langevin import Target, is_divergent
from shortrun.model import RandomSource

Entropy = Literal["conditional", "averaged", "marginal"]
Estimator = Literal["exact", "lanczos", "endpoint"]

# Hessians are built from blocks of about this many rows (chains x columns): large enough to keep the
# processor busy, small enough to bound the memory whatever the number of latents.
HESSIAN_ROWS = 1024
# Krylov steps that find the top eigenvalue for the stability of the chains.
STABILITY_DEPTH = 8
# Matrix-free estimators: eigenvalues of -s H above DEFLATE_CURVATURE, and those of C_K above DEFLATE_COVARIANCE, are
# found one by one. Beyond them log|1 + t| has its singularity at t = -1, or C_K has the many orders of magnitude of
# unstable directions, which no quadrature with a few nodes can follow; below them a few nodes are plenty.
DEFLATE_CURVATURE, DEFLATE_COVARIANCE = 0.8, 2.0
# The covariance of one direction as a function of its curvature is smooth up to where it becomes unstable.
DEFLATE_UNSTABLE = 1.5
CONVERGED = 1e-3  # residual of an eigenvector that counts as found, relative to the threshold
PRECISION = 1e-6  # of its eigenvalue, relative to the threshold
GROWTH = 6  # Krylov steps that are added at a time


class ChainRun(NamedTuple):
    """The end of each chain, with what its way there did to volume; of shape ``(n,)`` but for the first two."""

    z: Tensor
    """``z_K``, flat, shape ``(n, d)``."""
    centre: Tensor
    """``z_{K-1} + s R(z_{K-1})``, shape ``(n, d)``: given the chain so far, ``z_K`` is N(centre, 2 s I)."""
    log_joint: Tensor
    """``log p(x, z_K)``."""
    log_volume: Tensor
    """``sum_k log|det A_k|`` or ``1/2 (logdet C_K - logdet C_0)``: entropy gained since the start."""
    probe_variance: Tensor
    """Squared error of ``log_volume`` due to the probes and their Krylov spaces; zero for the exact estimator."""
    stability: Tensor
    """``s * lambda_max`` at ``z_K``: see :func:`stability`."""
    divergent: Tensor
    """Whether the chain diverged (see :func:`shortrun.langevin.is_divergent`)."""
    start_log_prior: Tensor
    """``log p(z_0)``."""


def run_chains(
    target: Target,
    table: Tensor,
    *,
    noise: bool,
    generator: RandomSource = None,
    marginal: bool = True,
    estimator: Estimator = "exact",
    probes: int = 4,
    depth: int = 12,
) -> ChainRun:
    """Run the dynamics from ``target.start`` and account for volume.

    Args:
        target: the log joint of the chains.
        table: step sizes, shape ``(K, layers)``; if it requires a gradient, so do the results.
        noise: whether noise is injected.
        marginal: follow the covariance instead of the determinant of the noise-given map.
        estimator: ``"exact"``, ``"lanczos"`` or ``"endpoint"``.
        probes, depth: random vectors and the first number of Krylov steps of the matrix-free estimators.
    """
    z = target.flatten(target.start)
    sizes = flat_sizes(target, table)
    # The probes have a generator of their own: both estimators then see the same chains.
    probe_generator = _probe_generator(generator, z.device)
    with torch.no_grad():
        start_log_prior = target.model.log_prior(target.start)
        start_log_joint = target.flat_log_joint(z)
    target.check_start(start_log_joint)
    covariance = _start_covariance(target, z) if marginal else None
    drawn: list[Tensor] = [torch.zeros_like(z)]
    best = start_log_joint

    def draw(like: Tensor) -> Tensor:
        drawn[0] = target.noise(like, generator) if noise else torch.zeros_like(like)
        return drawn[0]

    def follow(log_joint: Tensor) -> None:
        nonlocal best
        best = torch.fmax(best, log_joint.detach())

    chain: _Chain
    if estimator == "exact":
        chain = _run_exact(target, z, sizes, draw, follow, noise, covariance)
    elif estimator == "endpoint":
        chain = _run_endpoint(target, z, sizes, draw, follow, noise, covariance, probe_generator, probes, depth)
    else:
        chain = _run_lanczos(target, z, sizes, draw, follow, noise, covariance, probe_generator, probes, depth)
    with torch.set_grad_enabled(sizes.requires_grad):
        log_joint = target.flat_log_joint(chain.z)
        centre = chain.z if not len(sizes) else chain.z - (2 * sizes[-1]).sqrt() * drawn[0]
    follow(log_joint)
    finite = chain.z.isfinite().all(1) & chain.log_volume.isfinite()
    divergent = is_divergent(log_joint.detach(), best, target.dimension) | ~finite
    probe = _rademacher(tuple(z.shape), z, probe_generator)
    return ChainRun(
        chain.z, centre, log_joint, chain.log_volume, chain.probe_variance,
        stability(target, chain.z.detach(), sizes.detach(), probe), divergent, start_log_prior,
    )  # fmt: skip


def flat_sizes(target: Target, table: Tensor) -> Tensor:
    """Step sizes ``(K, layers)`` as ``(K, d)``."""
    layer_sizes = torch.tensor(target.sizes, device=target.x.device)
    return table.to(target.start[0]).repeat_interleave(layer_sizes, dim=1)


def stability(target: Target, z: Tensor, sizes: Tensor, probe: Tensor) -> Tensor:
    """``s * lambda_max`` of each chain, shape ``(n,)``: how long the steps are for the curvature where the chain ends.

    The largest eigenvalue of ``-S^(1/2) H(z) S^(1/2)`` with ``S = diag(s)``, ``s`` the longest step of the schedule in
    each coordinate; ``z`` is ``z_K``, ``sizes`` has shape ``(K, d)``. A linear model is stable below 2. Tuners and
    training hold the same number against the same limit, that of :class:`shortrun.tune.Guard`.
    """
    if not len(sizes):
        return torch.zeros(len(z), dtype=z.dtype, device=z.device)
    root = sizes.amax(0).sqrt()
    point, _, drift = _differentiable_gradient(target.flat_log_joint, z)
    krylov = lanczos(lambda v: root * _products(drift, point, root * v).detach(), probe[None], STABILITY_DEPTH)
    return -krylov.nodes[0, :, 0].to(z)


class _Chain(NamedTuple):
    z: Tensor
    log_volume: Tensor
    probe_variance: Tensor


class _StartCovariance(NamedTuple):
    """``C_0`` as a matrix ``(n, d, d)``, or None for the identity, and its log-determinant."""

    matrix: Tensor | None
    logdet: Tensor | float


def _start_covariance(target: Target, z: Tensor) -> _StartCovariance:
    """The identity for a N(0, I) prior, else the inverse of minus the Hessian of its log density.

    Directions in which a non-Gaussian prior curves upwards count with the size of their curvature.
    """
    if getattr(target.model, "standard_normal_prior", False):
        return _StartCovariance(None, 0.0)

    def log_prior(flat: Tensor) -> Tensor:
        return target.model.log_prior(target.unflatten(flat))

    _, hessian = gradient_and_hessian(log_prior, z)
    hessian = hessian.double()
    values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
    values = values.abs().clamp_min(1e-12)
    return _StartCovariance((vectors / values[:, None, :]) @ vectors.mT, -values.log().sum(-1))


def _probe_generator(generator: RandomSource, device: torch.device) -> torch.Generator:
    """A generator seeded by ``generator``; of a list all members advance alike, and the first one seeds."""
    sources = generator if isinstance(generator, Sequence) else [generator]
    seeds = [
        torch.randint(2**62, (), generator=source, device=device if source is None else source.device)
        for source in sources
    ]
    return torch.Generator(device=device).manual_seed(int(seeds[0]))


def _rademacher(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, shape, generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def _move(z: Tensor, drift: Tensor, s: Tensor, eps: Tensor) -> Tensor:
    """Eq. 10 on flat latents, differentiable in ``s`` of shape ``(d,)``."""
    return z + s * drift + (2 * s).sqrt() * eps


# --- exact: one Hessian per step -------------------------------------------------------------------


def _differentiable_gradient(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``z`` as a point that can be differentiated at, the value and the gradient there with its graph."""
    if not (torch.is_grad_enabled() and z.requires_grad):
        z = z.detach().requires_grad_()
    with torch.enable_grad():
        value = function(z)
        (gradient,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    return z, value.detach(), gradient


def _products(gradient: Tensor, z: Tensor, vectors: Tensor, create_graph: bool = False) -> Tensor:
    """Hessian-vector products: ``vectors`` is ``(p, n, d)`` and so is the result."""
    if not gradient.requires_grad:  # the log joint is linear here
        return torch.zeros_like(vectors)
    return torch.autograd.grad(
        gradient, z, vectors, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )[0]


def gradient_and_hessian(
    function: Callable[[Tensor], Tensor], z: Tensor, follow: Callable[[Tensor], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient ``(n, d)`` and Hessian ``(n, d, d)`` of ``function: (n, d) -> (n,)``, row by row its own.

    ``follow`` is told the values.

    In a ``torch.enable_grad`` block, with ``z`` requiring a gradient, both can be differentiated further.
    """
    create_graph = torch.is_grad_enabled() and z.requires_grad
    n, d = z.shape
    z, value, gradient = _differentiable_gradient(function, z)
    if follow is not None:
        follow(value)
    columns = torch.eye(d, dtype=z.dtype, device=z.device)
    blocks = [
        _products(gradient, z, block[:, None].expand(-1, n, -1), create_graph)
        for block in columns.split(max(1, HESSIAN_ROWS // n))
    ]
    hessian = torch.cat(blocks).transpose(0, 1)
    return (gradient, hessian) if create_graph else (gradient.detach(), hessian)


class _Recompute(torch.autograd.Function):
    """``function(*tensors)`` whose graph is built again in the backward pass, so memory is that of one step.

    Unlike ``torch.utils.checkpoint`` it differentiates its inputs alone and leaves the ``.grad`` of
    parameters untouched.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.function(*tensors)
        wanted = [i for i, output in enumerate(outputs) if output.requires_grad]
        values = torch.autograd.grad(
            [outputs[i] for i in wanted], tensors, [grads[i] for i in wanted], allow_unused=True
        )
        return None, *values


def _run_exact(
    target: Target,
    z: Tensor,
    sizes: Tensor,
    draw: Callable[[Tensor], Tensor],
    follow: Callable[[Tensor], None],
    noise: bool,
    covariance: _StartCovariance | None,
) -> _Chain:
    n, d = z.shape
    eye = torch.eye(d, dtype=torch.float64, device=z.device)
    if covariance is None:
        state = torch.zeros(n, dtype=torch.float64, device=z.device)  # sum of log|det A_k|
    else:
        state = eye.expand(n, d, d) if covariance.matrix is None else covariance.matrix  # C_k

    def advance(z: Tensor, state: Tensor, s: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        drift, hessian = gradient_and_hessian(target.flat_log_joint, z, follow)
        a = eye + s.double()[:, None] * hessian.double()
        if covariance is None:
            state = state + torch.linalg.slogdet(a)[1]
        else:
            state = a @ state @ a.mT
            if noise:
                state = state + torch.diag(2 * s.double())
        return _move(z, drift, s, eps), state

    for s in sizes:
        arguments = (z, state, s, draw(z.detach()))
        z, state = _Recompute.apply(advance, *arguments) if sizes.requires_grad else advance(*arguments)
    if covariance is not None:
        state = 0.5 * (torch.linalg.slogdet(state)[1] - covariance.logdet)
    return _Chain(z, state.to(z), torch.zeros_like(z[:, 0]).detach())


# --- matrix-free: Lanczos quadrature with Hessian-vector products ----------------------------------


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
            # An exhausted Krylov space leaves rounding noise: cut it off, its quadrature weight is zero.
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
    of shape ``(n, d)`` until each of its eigenvectors above ``beyond`` has converged; they count exactly. What is left
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


def _log_abs(values: Tensor) -> Tensor:
    return values.abs().clamp_min(1e-12).log()


def _inverse(values: Tensor) -> Tensor:
    return values / values.square().clamp_min(1e-12)


def _probe_mean(traces: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over probes and its variance, each ``(n,)``."""
    count = len(traces)
    variance = traces.var(0) / count if count > 1 else torch.full_like(traces[0], torch.nan)
    return traces.mean(0), variance


def _with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """``value`` with the derivative of ``surrogate``."""
    return value.detach() + surrogate - surrogate.detach()


def _run_lanczos(
    target: Target,
    z: Tensor,
    sizes: Tensor,
    draw: Callable[[Tensor], Tensor],
    follow: Callable[[Tensor], None],
    noise: bool,
    covariance: _StartCovariance | None,
    probe_generator: torch.Generator,
    probes: int,
    depth: int,
) -> _Chain:
    """As :func:`_run_exact`, with products ``H v`` alone: :func:`log_trace` says how.

    Derivatives in the step sizes use ``d log|det M| = tr(M^-1 dM)``, with ``M^-1`` from the same Krylov spaces: one
    more product that is differentiated, instead of the derivative of eigenvalues.
    """
    n, d = z.shape
    wants_gradient = sizes.requires_grad
    total = torch.zeros(n, dtype=torch.float64, device=z.device)
    variance, bias = torch.zeros_like(total), torch.zeros_like(total)
    path: list[Tensor] = []
    for s in sizes:
        eps = draw(z.detach())
        with torch.set_grad_enabled(wants_gradient):
            z, value, drift = _differentiable_gradient(target.flat_log_joint, z)
            follow(value)
            path.append(z)
            if covariance is None:
                root = s.detach().sqrt()

                def steepness(v: Tensor, z: Tensor = z, drift: Tensor = drift, root: Tensor = root) -> Tensor:
                    return -root * _products(drift, z, root * v)

                v = _rademacher((probes + 1, n, d), z, probe_generator)
                found = log_trace(steepness, lambda t: _log_abs(1 - t), v[1:], v[0], DEFLATE_CURVATURE, depth)
                step = found.value
                if wants_gradient:
                    # log|det(I + S H)|: pair S^(-1/2) (I + S^(1/2) H S^(1/2))^-1 w with S H S^(1/2) w
                    left = found.left(lambda t: _inverse(1 - t)) / root
                    right = s * _products(drift, z, root * found.right, create_graph=True)
                    step = _with_gradient(step, (left * right).sum((0, 2)))
                total, variance, bias = total + step, variance + found.variance, bias + found.bias
            z = _move(z, drift, s, eps)
            if not wants_gradient:
                z = z.detach()
    if covariance is not None:
        v = _rademacher((probes + 1, n, d), z, probe_generator)
        total, variance = _covariance_logdet(target, path, sizes, noise, covariance, v, depth)
        total, variance = 0.5 * total, 0.25 * variance
    return _Chain(z, total.to(z), (variance + bias.square()).to(z))


def _covariance_logdet(
    target: Target,
    path: list[Tensor],
    sizes: Tensor,
    noise: bool,
    covariance: _StartCovariance,
    probes: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """``logdet C_K - logdet C_0`` and the variance of its estimate.

    ``C_K v`` takes a pass down the chain, ``w_k = A_k^T w_{k+1}``, and one up,
    ``u_{k+1} = A_k u_k + 2 s w_{k+1}``: 2 K products, no matrix.
    """

    def downwards(v: Tensor, create_graph: bool) -> list[Tensor]:
        ways = [v]
        for z, s in zip(reversed(path), reversed(sizes), strict=True):
            z, _, drift = _differentiable_gradient(target.flat_log_joint, z)
            v = v + _products(drift, z, s * v, create_graph)
            ways.append(v)
        return ways[::-1]

    def start_product(v: Tensor) -> Tensor:
        if covariance.matrix is None:
            return v
        return (covariance.matrix.to(v) @ v[..., None])[..., 0]

    def matvec(v: Tensor) -> Tensor:
        ways = downwards(v, False)
        u = start_product(ways[0])
        for z, s, way in zip(path, sizes, ways[1:], strict=True):
            z, _, drift = _differentiable_gradient(target.flat_log_joint, z)
            u = u + s * _products(drift, z, u)
            if noise:
                u = u + 2 * s * way
        return u

    with torch.no_grad():
        found = log_trace(matvec, _log_abs, probes[1:], probes[0], DEFLATE_COVARIANCE, depth)
    value = found.value
    if sizes.requires_grad:
        with torch.enable_grad():
            both = downwards(torch.cat([found.right, found.left(_inverse)]), True)
            right, left = zip(*(way.chunk(2) for way in both), strict=True)
            form = (left[0] * start_product(right[0])).sum((0, 2))
            if noise:
                for s, a, b in zip(sizes, left[1:], right[1:], strict=True):
                    form = form + (2 * s * a * b).sum((0, 2))
            value = _with_gradient(value, form)
    return value - covariance.logdet, found.variance + found.bias.square()


def _run_endpoint(
    target: Target,
    z: Tensor,
    sizes: Tensor,
    draw: Callable[[Tensor], Tensor],
    follow: Callable[[Tensor], None],
    noise: bool,
    covariance: _StartCovariance | None,
    probe_generator: torch.Generator,
    probes: int,
    depth: int,
) -> _Chain:
    """The cheapest estimate: the curvature met at ``z_K`` stands for that of the whole chain.

    With one Hessian all matrices commute and the recursion is one of eigenvalues,
    ``c' = (1 + s h)^2 c + 2 s``, so ``logdet C_K = tr log c_K(H)`` takes a single trace instead of one per step.
    Exact for a linear-Gaussian model; a good guide else, because a chain forgets where it came from.
    """
    if (sizes != sizes[:, :1]).any():
        raise ValueError('estimator="endpoint" needs one step size for all layers')
    if covariance is not None and covariance.matrix is not None:
        raise ValueError('estimator="endpoint" needs a standard normal prior')
    n, d = z.shape
    wants_gradient = sizes.requires_grad
    with torch.set_grad_enabled(wants_gradient):
        for s in sizes:
            eps = draw(z.detach())
            z, value, drift = _differentiable_gradient(target.flat_log_joint, z)
            follow(value)
            z = _move(z, drift if wants_gradient else drift.detach(), s, eps)
        point, _, drift = _differentiable_gradient(target.flat_log_joint, z)
    v = _rademacher((probes + 1, n, d), z, probe_generator)
    steps = sizes[:, 0].double()
    longest = steps.detach().max() if len(steps) else torch.ones((), dtype=torch.float64, device=z.device)

    def steepness(v: Tensor) -> Tensor:
        return -longest.to(v) * _products(drift, point, v).detach()

    def log_factor(t: Tensor) -> Tensor:
        """Log of the factor by which a direction of steepness ``t = -longest * h`` has become wider."""
        curvature = -t / longest
        if covariance is None:
            return sum((_log_abs(1 + s * curvature) for s in steps), torch.zeros_like(curvature))
        spread = torch.ones_like(curvature)
        for s in steps:
            spread = (1 + s * curvature).square() * spread + (2 * s if noise else 0.0)
        return 0.5 * spread.log()

    def slope(t: Tensor) -> Tensor:
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            return torch.autograd.grad(log_factor(t).sum(), t)[0].detach()

    with torch.set_grad_enabled(wants_gradient):
        # its value depends on the steps by the recursion alone, as if H stayed
        beyond = DEFLATE_CURVATURE if covariance is None else DEFLATE_UNSTABLE
        found = log_trace(steepness, log_factor, v[1:], v[0], beyond, depth)
        log_volume = found.value
        if wants_gradient:  # d tr f(H) = tr f'(H) dH: z_K moves with the steps, and H with it
            moved = (found.left(slope) * -longest.to(z) * _products(drift, point, found.right, create_graph=True)).sum(
                (0, 2)
            )
            log_volume = log_volume + moved - moved.detach()
    return _Chain(z, log_volume.to(z), (found.variance + found.bias.square()).to(z))
