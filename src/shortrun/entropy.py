r"""How the short run dynamics changes volume: log-determinants and entropies of ``q_s(z | x)``.

One step is ``z' = z + s R(z) + sqrt(2 s) eps`` with ``R`` the gradient of the log joint. Its Jacobian
``A_k = I + s H(z_k)``, with ``H`` the Hessian of the log joint, needs only ``z_k``; and because
``dF/dz_0 = A_{K-1} ... A_0``, the log-determinant of the paper's Eq. 17 is a sum over steps,

.. math:: \log|\det dF/dz_0| = \sum_k \log|\det A_k| .

It is exact, its memory does not grow with K, and no K-step graph is built. Three entropies come from it:

``"conditional"`` (the paper's, with the noise given):
    ``H(z_K | eps) = H(z_0) + E sum_k log|det A_k|``. Conditioning never adds entropy, so this is a lower
    bound of the entropy of ``z_K`` and the free energy computed with it is an upper bound.
``"averaged"`` (the paper's Eq. 17 to the letter):
    ``-E_{z_0} log E_eps [p(z_0) / |det dF(z_0, eps)/dz_0|]``, several noises inside the logarithm for
    each ``z_0``. By Jensen's inequality it is at most the conditional entropy, which is the case of one
    noise.
``"marginal"`` (the default of this package):
    also counts what the injected noise adds, by following the covariance of the linearised dynamics,
    ``C_{k+1} = A_k C_k A_k^T + 2 s I``; ``H = d/2 log(2 pi e) + 1/2 E logdet C_K``. Exact for a
    linear-Gaussian model.

So ``averaged <= conditional <= true entropy``, and ``marginal`` is an approximation of the true one.

With one step size per layer, ``s`` is a vector, ``A_k = I + diag(s) H`` and ``2 s I`` is ``2 diag(s)``.
"""

from __future__ import annotations

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
# Krylov steps that find the top eigenvalue for the stability guard.
GUARD_DEPTH = 12


class ChainRun(NamedTuple):
    """The end of each chain, with what its way there did to volume. All but ``z`` have shape ``(n,)``."""

    z: Tensor
    """``z_K``, flat, shape ``(n, d)``."""
    log_joint: Tensor
    """``log p(x, z_K)``."""
    log_volume: Tensor
    """``sum_k log|det A_k|`` or ``1/2 (logdet C_K - logdet C_0)``: entropy gained since the start."""
    probe_variance: Tensor
    """Variance of ``log_volume`` that comes from the random probes; zero for the exact estimator."""
    stability: Tensor
    """Largest ``s * lambda_max`` along the chain, ``lambda_max`` the top eigenvalue of ``-H``."""
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
        probes, depth: random vectors and Krylov steps of the matrix-free estimators.
    """
    z = target.flatten(target.start)
    layer_sizes = torch.tensor(target.sizes, device=z.device)
    sizes = table.to(z).repeat_interleave(layer_sizes, dim=1)
    # The probes have a generator of their own: both estimators then see the same chains.
    probe_generator = _probe_generator(generator, z.device)
    with torch.no_grad():
        start_log_prior = target.model.log_prior(target.start)
        start_log_joint = target.flat_log_joint(z)
    target.check_start(start_log_joint)
    covariance = _start_covariance(target, z) if marginal else None

    def draw(like: Tensor) -> Tensor:
        return target.noise(like, generator) if noise else torch.zeros_like(like)

    chain: _Chain
    if estimator == "exact":
        chain = _run_exact(target, z, sizes, draw, noise, covariance, probe_generator)
    elif estimator == "endpoint":
        chain = _run_endpoint(target, z, sizes, draw, noise, covariance, probe_generator, probes, depth)
    else:
        chain = _run_lanczos(target, z, sizes, draw, noise, covariance, probe_generator, probes, depth)
    with torch.set_grad_enabled(sizes.requires_grad):
        log_joint = target.flat_log_joint(chain.z)
    finite = chain.z.isfinite().all(1) & chain.log_volume.isfinite()
    divergent = is_divergent(log_joint.detach(), start_log_joint, target.dimension) | ~finite
    return ChainRun(log_joint=log_joint, divergent=divergent, start_log_prior=start_log_prior, **chain._asdict())


class _Chain(NamedTuple):
    z: Tensor
    log_volume: Tensor
    probe_variance: Tensor
    stability: Tensor


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


def _differentiable_gradient(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """``z`` as a point that can be differentiated at, and the gradient there with its graph."""
    if not (torch.is_grad_enabled() and z.requires_grad):
        z = z.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    return z, gradient


def _products(gradient: Tensor, z: Tensor, vectors: Tensor, create_graph: bool = False) -> Tensor:
    """Hessian-vector products: ``vectors`` is ``(p, n, d)`` and so is the result."""
    if not gradient.requires_grad:  # the log joint is linear here
        return torch.zeros_like(vectors)
    return torch.autograd.grad(
        gradient, z, vectors, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )[0]


def gradient_and_hessian(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient ``(n, d)`` and Hessian ``(n, d, d)`` of ``function: (n, d) -> (n,)``, row by row its own.

    In a ``torch.enable_grad`` block, with ``z`` requiring a gradient, both can be differentiated further.
    """
    create_graph = torch.is_grad_enabled() and z.requires_grad
    n, d = z.shape
    z, gradient = _differentiable_gradient(function, z)
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
    noise: bool,
    covariance: _StartCovariance | None,
    probe_generator: torch.Generator,
) -> _Chain:
    n, d = z.shape
    eye = torch.eye(d, dtype=torch.float64, device=z.device)
    start = _rademacher((1, n, d), z, probe_generator)
    if covariance is None:
        state = torch.zeros(n, dtype=torch.float64, device=z.device)  # sum of log|det A_k|
    else:
        state = eye.expand(n, d, d) if covariance.matrix is None else covariance.matrix  # C_k

    def advance(z: Tensor, state: Tensor, s: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drift, hessian = gradient_and_hessian(target.flat_log_joint, z)
        a = eye + s.double()[:, None] * hessian.double()
        if covariance is None:
            state = state + torch.linalg.slogdet(a)[1]
        else:
            state = a @ state @ a.mT
            if noise:
                state = state + torch.diag(2 * s.double())
        stability = _largest_curvature(hessian.detach(), s.detach(), start)
        return _move(z, drift, s, eps), state, stability

    stability = torch.zeros(n, dtype=z.dtype, device=z.device)
    for s in sizes:
        arguments = (z, state, s, draw(z.detach()))
        if sizes.requires_grad:
            z, state, top = _Recompute.apply(advance, *arguments)
        else:
            z, state, top = advance(*arguments)
        stability = torch.maximum(stability, top.detach())
    if covariance is not None:
        state = 0.5 * (torch.linalg.slogdet(state)[1] - covariance.logdet)
    return _Chain(z, state.to(z), torch.zeros_like(stability), stability)


def _largest_curvature(hessian: Tensor, s: Tensor, start: Tensor) -> Tensor:
    """Top eigenvalue of ``-S^(1/2) H S^(1/2)``, ``S = diag(s)``, by a few Krylov steps; shape ``(n,)``."""
    root = s.sqrt()
    scaled = root[:, None] * hessian * root
    krylov = lanczos(lambda v: (scaled @ v[..., None])[..., 0], start, GUARD_DEPTH)
    return -krylov.nodes[..., 0].amin(0)


def top_curvature(target: Target, z: Tensor, probe: Tensor, depth: int = 6) -> Tensor:
    """Largest eigenvalue of minus the Hessian of the log joint at ``z``, shape ``(n,)``.

    By ``depth`` Krylov steps from ``probe``, which has the shape ``(n, d)`` of ``z``.
    """
    point, drift = _differentiable_gradient(target.flat_log_joint, z)
    return -lanczos(lambda v: _products(drift, point, v), probe[None], depth).nodes[0, :, 0]


# --- matrix-free: Lanczos quadrature with Hessian-vector products ----------------------------------


class Krylov(NamedTuple):
    """``basis^T M basis = T``, its eigenvalues and the first row of its eigenvectors."""

    basis: Tensor
    """Orthonormal, shape ``(m, p, n, d)``; the first one is the probe, normalised."""
    nodes: Tensor
    """Eigenvalues of T, ascending, shape ``(p, n, m)``."""
    vectors: Tensor
    """Eigenvectors of T in columns, shape ``(p, n, m, m)``."""
    scale: Tensor
    """Squared length of the probe, shape ``(p, n)``."""

    def trace(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``v^T f(M) v``, by Gauss quadrature; shape ``(p, n)``. Its mean over probes is ``tr f(M)``."""
        weights = self.vectors[..., 0, :].square()
        return self.scale * (weights * function(self.nodes)).sum(-1)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``f(M) v`` within the Krylov space, shape ``(p, n, d)``."""
        inner = self.vectors[..., 0, :] * function(self.nodes)
        coordinates = (self.vectors @ inner[..., None])[..., 0] * self.scale.sqrt()[..., None]
        return torch.einsum("pnm,mpnd->pnd", coordinates.to(self.basis), self.basis)


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, depth: int) -> Krylov:
    """``depth`` Krylov steps of a symmetric operator from ``start`` of shape ``(p, n, d)``."""
    depth = min(depth, start.shape[-1])
    scale = start.square().sum(-1)
    vector = start / scale.sqrt()[..., None]
    basis: list[Tensor] = []
    diagonal, off_diagonal = [], []
    for j in range(depth):
        basis.append(vector)
        product = matvec(vector)
        diagonal.append((product * vector).sum(-1))
        if j == depth - 1:
            break
        stacked = torch.stack(basis)
        for _ in range(2):  # twice is enough for orthogonality to rounding error
            overlap = (stacked * product).sum(-1, keepdim=True)
            product = product - (overlap * stacked).sum(0)
        length = product.norm(dim=-1)
        # An exhausted Krylov space leaves rounding noise: cut it off, its quadrature weight is zero.
        length = torch.where(length > 1e-6 * diagonal[0].abs().clamp_min(1e-20), length, 0.0)
        off_diagonal.append(length)
        vector = product / torch.where(length > 0, length, torch.inf)[..., None]
    tridiagonal = torch.diag_embed(torch.stack(diagonal, -1).double())
    if off_diagonal:
        side = torch.stack(off_diagonal, -1).double()
        tridiagonal = tridiagonal + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    broken = ~tridiagonal.isfinite().all(-1).all(-1)
    nodes, vectors = torch.linalg.eigh(torch.where(broken[..., None, None], 0.0, tridiagonal))
    nodes = torch.where(broken[..., None], torch.nan, nodes)
    return Krylov(torch.stack(basis), nodes, vectors, scale.double())


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
    noise: bool,
    covariance: _StartCovariance | None,
    probe_generator: torch.Generator,
    probes: int,
    depth: int,
) -> _Chain:
    """As :func:`_run_exact`, with products ``H v`` alone.

    Values are Gauss quadratures of ``v^T log|M| v``. Derivatives in the step sizes use
    ``d log|det M| = E[(M^-1 v)^T dM v]``, with ``M^-1 v`` from the same Krylov space: one more product
    that is differentiated, instead of the derivative of eigenvalues.
    """
    n, d = z.shape
    wants_gradient = sizes.requires_grad
    total = torch.zeros(n, dtype=torch.float64, device=z.device)
    variance = torch.zeros_like(total)
    stability = torch.zeros(n, dtype=z.dtype, device=z.device)
    path: list[Tensor] = []
    for s in sizes:
        eps = draw(z.detach())
        path.append(z)
        with torch.set_grad_enabled(wants_gradient):
            z, drift = _differentiable_gradient(target.flat_log_joint, z)
            path[-1] = z
            root = s.detach().sqrt()

            def scaled_product(v: Tensor, z: Tensor = z, drift: Tensor = drift, root: Tensor = root) -> Tensor:
                return root * _products(drift, z, root * v)

            count = probes if covariance is None else 1
            v = _rademacher((count, n, d), z, probe_generator)
            krylov = lanczos(scaled_product, v, depth if covariance is None else GUARD_DEPTH // 2)
            stability = torch.maximum(stability, -krylov.nodes[..., 0].amin(0).to(stability))
            if covariance is None:
                mean, spread = _probe_mean(krylov.trace(lambda t: _log_abs(1 + t)))
                if wants_gradient:
                    # log|det(I + S H)|: pair S^(1/2) (I + S^(1/2) H S^(1/2))^-1 v with H S^(1/2) v
                    left = krylov.apply(lambda t: _inverse(1 + t)) / root
                    right = s * _products(drift, z, root * v, create_graph=True)
                    mean = _with_gradient(mean, (left * right).sum(-1).mean(0))
                total, variance = total + mean, variance + spread
            z = _move(z, drift, s, eps)
            if not wants_gradient:
                z = z.detach()
    if covariance is not None:
        total, variance = _covariance_logdet(
            target, path, sizes, noise, covariance, _rademacher((probes, n, d), z, probe_generator), depth
        )
        total, variance = 0.5 * total, 0.25 * variance
    return _Chain(z, total.to(z), variance.to(z), stability)


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
            z, drift = _differentiable_gradient(target.flat_log_joint, z)
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
            z, drift = _differentiable_gradient(target.flat_log_joint, z)
            u = u + s * _products(drift, z, u)
            if noise:
                u = u + 2 * s * way
        return u

    with torch.no_grad():
        krylov = lanczos(matvec, probes, depth)
    mean, variance = _probe_mean(krylov.trace(_log_abs))
    if sizes.requires_grad:
        with torch.enable_grad():
            solved = krylov.apply(_inverse)
            both = downwards(torch.cat([probes, solved]), True)
            right, left = zip(*(way.chunk(2) for way in both), strict=True)
            form = (left[0] * start_product(right[0])).sum(-1)
            if noise:
                for s, a, b in zip(sizes, left[1:], right[1:], strict=True):
                    form = form + (2 * s * a * b).sum(-1)
            mean = _with_gradient(mean, form.mean(0))
    return mean - covariance.logdet, variance


def _run_endpoint(
    target: Target,
    z: Tensor,
    sizes: Tensor,
    draw: Callable[[Tensor], Tensor],
    noise: bool,
    covariance: _StartCovariance | None,
    probe_generator: torch.Generator,
    probes: int,
    depth: int,
) -> _Chain:
    """The cheapest estimate: the curvature met at ``z_K`` stands for that of the whole chain.

    With one Hessian all matrices commute and the recursion is one of eigenvalues,
    ``c' = (1 + s h)^2 c + 2 s``, so ``logdet C_K = tr log c_K(H)`` takes a single Lanczos quadrature instead of
    one per step. Exact for a linear-Gaussian model; a good guide else, because a chain forgets where it came
    from.
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
            z, drift = _differentiable_gradient(target.flat_log_joint, z)
            z = _move(z, drift if wants_gradient else drift.detach(), s, eps)
        point, drift = _differentiable_gradient(target.flat_log_joint, z)
    v = _rademacher((probes, n, d), z, probe_generator)
    krylov = lanczos(lambda v: _products(drift, point, v).detach(), v, depth)
    steps = sizes[:, 0].double()

    def log_factor(curvature: Tensor) -> Tensor:
        if covariance is None:
            return sum((_log_abs(1 + s * curvature) for s in steps), torch.zeros_like(curvature))
        spread = torch.ones_like(curvature)
        for s in steps:
            spread = (1 + s * curvature).square() * spread + (2 * s if noise else 0.0)
        return 0.5 * spread.log()

    def slope(curvature: Tensor) -> Tensor:
        with torch.enable_grad():
            curvature = curvature.detach().requires_grad_()
            return torch.autograd.grad(log_factor(curvature).sum(), curvature)[0]

    traces = krylov.trace(log_factor)  # depends on the steps by the recursion alone, as if H stayed
    if wants_gradient:
        with torch.enable_grad():  # d tr f(H) = E[(f'(H) v)^T dH v]: z_K moves with the steps, and H with it
            moved = (krylov.apply(slope) * _products(drift, point, v, create_graph=True)).sum(-1)
            traces = traces + moved - moved.detach()
    log_volume, variance = _probe_mean(traces)
    top = steps.detach().max() if len(steps) else 0.0
    stability = -top * krylov.nodes[..., 0].amin(0)
    return _Chain(z, log_volume.to(z), variance.detach().to(z), stability.to(z))
