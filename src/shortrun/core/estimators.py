r"""Three ways to the entropy that a chain gains: a Hessian per step, its products alone, or the curvature at the end.

Each runs the same chain over flat latents, ``z_{k+1} = z_k + s R(z_k) + sqrt(2 s) eps`` with Jacobian
``A_k = I + s H(z_k)``, and estimates either ``sum_k log|det A_k|`` or ``1/2 (logdet C_K - logdet C_0)`` with
``C_{k+1} = A_k C_k A_k^T + 2 s I``, where the last term is for steps with noise alone. :mod:`shortrun.core.entropy`
says what the two mean, and calls them with gradients enabled if the step sizes require one.

With momentum beta, ``z_{k+1}`` depends on two points. With ``B_k = A_k + beta I``, ``J_k = dz_k/dz_0``, ``P_k`` the
covariance of ``z_k``, and ``R_k`` that of ``z_k`` with ``z_{k-1}``, and the point before the start alike to it,

    J_{k+1} = B_k J_k - beta J_{k-1}
    P_{k+1} = B_k P_k B_k^T - beta (B_k R_k + R_k^T B_k^T) + beta^2 P_{k-1} + 2 (1 - beta) s I
    R_{k+1} = B_k P_k - beta R_k^T .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shortrun.core.chain import Point, chain
from shortrun.core.derivatives import Recompute, differentiable_gradient, products, value_gradient_hessian
from shortrun.core.krylov import log_trace
from shortrun.core.latents import Latents, Rng
from shortrun.core.target import Target

# Matrix-free estimators: eigenvalues of -s H above DEFLATE_CURVATURE, and those of C_K above DEFLATE_COVARIANCE, are
# found one by one. Beyond them log|1 + t| has its singularity at t = -1, or C_K has the many orders of magnitude of
# unstable directions, which no quadrature with a few nodes can follow; below them a few nodes are plenty.
DEFLATE_CURVATURE, DEFLATE_COVARIANCE = 0.8, 2.0
# The covariance of one direction as a function of its curvature is smooth up to where it becomes unstable.
DEFLATE_UNSTABLE = 1.5


class StartCovariance(NamedTuple):
    """``C_0`` as a matrix ``(n, d, d)``, or None for the identity, and its log-determinant."""

    matrix: Tensor | None
    logdet: Tensor | float


class Gain(NamedTuple):
    """The end of each chain and what its way there did to volume."""

    z: Tensor
    """``z_K``, shape ``(n, d)``."""
    log_volume: Tensor
    """Shape ``(n,)``."""
    probe_variance: Tensor
    """Squared error of ``log_volume``, shape ``(n,)``."""


class Walk:
    """Chains over flat latents, which remember their best log joint and their last noise.

    Args:
        target: the log joint of the chains.
        sizes: step sizes, shape ``(K, d)``; if they require a gradient, results can be differentiated.
        noisy: which of the K steps take noise.
        momentum: of the dynamics.
        covariance: where the covariance of the dynamics starts; None to follow the determinant of the noise-given map.
        rng: of the noise.
        probe_rng: of the probes, a generator of their own: all estimators then see the same chains.
        probes, depth: random vectors and the first number of Krylov steps of the matrix-free estimators.
    """

    def __init__(
        self,
        target: Target,
        sizes: Tensor,
        noisy: Sequence[bool],
        covariance: StartCovariance | None,
        rng: Rng,
        probe_rng: torch.Generator,
        probes: int,
        depth: int,
        momentum: float = 0.0,
    ) -> None:
        self.target, self.sizes, self.noisy, self.covariance = target, sizes, noisy, covariance
        self.momentum = momentum
        self.rng, self.probe_rng, self.probes, self.depth = rng, probe_rng, probes, depth
        self.start = target.flatten(target.start)
        self.wants_gradient = sizes.requires_grad
        self.best = torch.full_like(self.start[:, 0], -torch.inf)
        self.last_noise: Tensor | None = None

    def follow(self, log_joint: Tensor) -> None:
        """Compare the best log joint of each chain with another one; NaN is never the best."""
        self.best = torch.fmax(self.best, log_joint.detach())

    def run(
        self, visit: Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor]], evaluate_end: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``z_K`` and the last drift; ``visit(k, z_k)`` gives ``z_k``, its log joint and its drift."""

        def visit_flat(k: int, z: Latents) -> tuple[Latents, Point]:
            flat, log_joint, drift = visit(k, z[0])
            self.follow(log_joint)
            return (flat,), Point(log_joint.detach(), (drift,))

        def noise(k: int, layer: Tensor) -> Tensor | None:
            self.last_noise = self.target.noise(layer.detach(), self.rng) if self.noisy[k] else None
            return self.last_noise

        z, drift, rows = self.start, torch.zeros_like(self.start), [(s,) for s in self.sizes]
        for _, (z,), point in chain(  # noqa: B007
            (self.start,), rows, visit_flat, noise, evaluate_end, self.momentum
        ):
            drift = drift if point is None else point.drift[0]
        return z, drift

    def variance(self, k: int) -> Tensor:
        """Of the noise of step k, in each coordinate."""
        return 2 * (1 - self.momentum) * self.sizes[k]

    def random_signs(self, count: int) -> Tensor:
        """Rademacher vectors, shape ``(count, n, d)``."""
        return rademacher((count, *self.start.shape), self.start, self.probe_rng)


def rademacher(shape: tuple[int, ...], like: Tensor, rng: torch.Generator) -> Tensor:
    """Random signs, +1 or -1, in the dtype of ``like``."""
    bits = torch.randint(2, shape, generator=rng, device=like.device)
    return (2 * bits - 1).to(like.dtype)


# --- exact: one Hessian per step ----------------------------------------------------------------------


def exact(walk: Walk) -> Gain:
    """Builds ``A_k`` at each step. To differentiate it, each Hessian is built again in the backward pass."""
    target, covariance, sizes = walk.target, walk.covariance, walk.sizes
    n, d = walk.start.shape
    eye, beta = torch.eye(d, dtype=torch.float64, device=walk.start.device), walk.momentum
    if covariance is None:
        state = torch.zeros(n, dtype=torch.float64, device=walk.start.device)  # sum of log|det A_k|
        if beta:
            state = eye.expand(2, n, d, d)  # J_k, J_{k-1}
    else:
        state = eye.expand(n, d, d) if covariance.matrix is None else covariance.matrix  # C_k
        if beta:
            state = state.expand(3, n, d, d)  # P_k, R_k, P_{k-1}

    def look(z: Tensor, state: Tensor, s: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log joint and drift at ``z_k``, and the state after the step from there."""
        log_joint, drift, hessian = value_gradient_hessian(target.flat_log_joint, z)
        a = eye + s.double()[:, None] * hessian.double()
        added = torch.diag(2 * (1 - beta) * s.double()) if walk.noisy[k] else torch.zeros_like(eye)
        if covariance is None and not beta:
            state = state + torch.linalg.slogdet(a)[1]
        elif covariance is None:
            state = torch.stack([(a + beta * eye) @ state[0] - beta * state[1], state[0]])
        elif not beta:
            state = a @ state @ a.mT + added
        else:
            (p, r, before), b = state, a + beta * eye
            mixed = b @ r
            state = torch.stack([b @ p @ b.mT - beta * (mixed + mixed.mT) + beta**2 * before + added,
                                 b @ p - beta * r.mT, p])  # fmt: skip
        return log_joint, drift, state

    def visit(k: int, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal state

        def step(z: Tensor, state: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return look(z, state, s, k)

        arguments = (z, state, sizes[k])
        log_joint, drift, state = Recompute.apply(step, *arguments) if walk.wants_gradient else step(*arguments)
        return z, log_joint, drift

    z, _ = walk.run(visit)
    if beta:
        state = state[0]
    if covariance is not None:
        state = 0.5 * (torch.linalg.slogdet(state)[1] - covariance.logdet)
    elif beta:
        state = torch.linalg.slogdet(state)[1]
    return Gain(z, state.to(z), torch.zeros_like(z[:, 0]).detach())


# --- matrix-free: Lanczos quadrature with Hessian-vector products -------------------------------------


def _log_abs(values: Tensor) -> Tensor:
    return values.abs().clamp_min(1e-12).log()


def _inverse(values: Tensor) -> Tensor:
    return values / values.square().clamp_min(1e-12)


def _with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """``value`` with the derivative of ``surrogate``."""
    return value.detach() + surrogate - surrogate.detach()


def lanczos(walk: Walk) -> Gain:
    """As :func:`exact`, with products ``H v`` alone: :func:`shortrun.core.krylov.log_trace` says how.

    Derivatives in the step sizes use ``d log|det M| = tr(M^-1 dM)``, with ``M^-1`` from the same Krylov spaces: one
    more product that is differentiated, instead of the derivative of eigenvalues.
    """
    target, sizes = walk.target, walk.sizes
    total = torch.zeros(len(walk.start), dtype=torch.float64, device=walk.start.device)
    variance, bias = torch.zeros_like(total), torch.zeros_like(total)
    path: list[Tensor] = []

    def visit(k: int, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal total, variance, bias
        z, log_joint, drift = differentiable_gradient(target.flat_log_joint, z)
        path.append(z)
        if walk.covariance is None and not walk.momentum:
            step, step_variance, step_bias = _step_log_volume(walk, z, drift, sizes[k])
            total, variance, bias = total + step, variance + step_variance, bias + step_bias
        return z, log_joint, drift

    z, _ = walk.run(visit)
    if walk.covariance is not None or walk.momentum:
        total, variance = _covariance_logdet(walk, path)
        total, variance = 0.5 * total, 0.25 * variance
    return Gain(z, total.to(z), (variance + bias.square()).to(z))


def _step_log_volume(walk: Walk, z: Tensor, drift: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``log|det(I + S H(z))|``, its variance over probes and its bias."""
    root = s.detach().sqrt()

    def steepness(v: Tensor) -> Tensor:
        return -root * products(drift, z, root * v)

    v = walk.random_signs(walk.probes + 1)
    found = log_trace(steepness, lambda t: _log_abs(1 - t), v[1:], v[0], DEFLATE_CURVATURE, walk.depth)
    value = found.value
    if walk.wants_gradient:
        # log|det(I + S H)|: pair S^(-1/2) (I + S^(1/2) H S^(1/2))^-1 w with S H S^(1/2) w
        left = found.left(lambda t: _inverse(1 - t)) / root
        right = s * products(drift, z, root * found.right, create_graph=True)
        value = _with_gradient(value, (left * right).sum((0, 2)))
    return value, found.variance, found.bias


def _covariance_logdet(walk: Walk, path: list[Tensor]) -> tuple[Tensor, Tensor]:
    """``logdet C_K - logdet C_0`` and the variance of its estimate.

    ``C_K v`` takes a pass down the chain, ``w_k = A_k^T w_{k+1}``, and one up,
    ``u_{k+1} = A_k u_k + 2 s w_{k+1}``: 2 K products, no matrix. With momentum both passes carry a second vector, for
    the point before, which starts where the first one does. Without the noise it is the determinant of the noise-given
    map: ``C_K = J_K J_K^T``.
    """
    covariance = StartCovariance(None, 0.0) if walk.covariance is None else walk.covariance
    counted = [walk.covariance is not None and noisy for noisy in walk.noisy]
    sizes, log_joint, beta = walk.sizes, walk.target.flat_log_joint, walk.momentum
    probes = walk.random_signs(walk.probes + 1)

    def downwards(v: Tensor, create_graph: bool) -> list[Tensor]:
        ways, before = [v], torch.zeros_like(v)
        for z, s in zip(reversed(path), reversed(sizes), strict=True):
            z, _, drift = differentiable_gradient(log_joint, z)
            turned = v + products(drift, z, s * v, create_graph)
            if beta:
                turned, before = turned + beta * v + before, -beta * v
            v = turned
            ways.append(v)
        ways[-1] = v + before  # z_{-1} is z_0
        return ways[::-1]

    def start_product(v: Tensor) -> Tensor:
        if covariance.matrix is None:
            return v
        return (covariance.matrix.to(v) @ v[..., None])[..., 0]

    def matvec(v: Tensor) -> Tensor:
        ways = downwards(v, False)
        u = before = start_product(ways[0])
        for k, (z, s, way) in enumerate(zip(path, sizes, ways[1:], strict=True)):
            z, _, drift = differentiable_gradient(log_joint, z)
            turned = u + s * products(drift, z, u)
            if beta:
                turned, before = turned + beta * (u - before), u
            u = turned
            if counted[k]:
                u = u + walk.variance(k) * way
        return u

    with torch.no_grad():
        found = log_trace(matvec, _log_abs, probes[1:], probes[0], DEFLATE_COVARIANCE, walk.depth)
    value = found.value
    if walk.wants_gradient:
        both = downwards(torch.cat([found.right, found.left(_inverse)]), True)
        right, left = zip(*(way.chunk(2) for way in both), strict=True)
        form = (left[0] * start_product(right[0])).sum((0, 2))
        for k, (a, b) in enumerate(zip(left[1:], right[1:], strict=True)):
            if counted[k]:
                form = form + (walk.variance(k) * a * b).sum((0, 2))
        value = _with_gradient(value, form)
    return value - covariance.logdet, found.variance + found.bias.square()


# --- endpoint: one curvature for the whole chain ------------------------------------------------------


def endpoint(walk: Walk) -> Gain:
    """The cheapest estimate: the curvature met at ``z_K`` stands for that of the whole chain.

    With one Hessian all matrices commute and the recursion is one of eigenvalues,
    ``c' = (1 + s h)^2 c + 2 s`` (with momentum, one of three numbers), so ``logdet C_K = tr log c_K(H)`` takes a single
    trace instead of one per step. Exact for a linear-Gaussian model; a good guide else, because a chain forgets where
    it came from.
    """
    target, sizes, covariance = walk.target, walk.sizes, walk.covariance
    if (sizes != sizes[:, :1]).any():
        raise ValueError('estimator="endpoint" needs one step size for all layers')
    if covariance is not None and covariance.matrix is not None:
        raise ValueError('estimator="endpoint" needs a standard normal prior')

    def visit(k: int, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return differentiable_gradient(target.flat_log_joint, z)

    z, drift = walk.run(visit, evaluate_end=True)
    v = walk.random_signs(walk.probes + 1)
    steps, beta = sizes[:, 0].double(), walk.momentum
    longest = steps.detach().max() if len(steps) else torch.ones((), dtype=torch.float64, device=z.device)

    def steepness(v: Tensor) -> Tensor:
        return -longest.to(v) * products(drift, z, v).detach()

    def log_factor(t: Tensor) -> Tensor:
        """Log of the factor by which a direction of steepness ``t = -longest * h`` has become wider."""
        curvature = -t / longest
        if covariance is None and not beta:
            return sum((_log_abs(1 + s * curvature) for s in steps), torch.zeros_like(curvature))
        if covariance is None:
            slope = slope_before = torch.ones_like(curvature)
            for s in steps:
                slope, slope_before = (1 + beta + s * curvature) * slope - beta * slope_before, slope
            return _log_abs(slope)
        width = mixed = before = torch.ones_like(curvature)
        for s, noisy in zip(steps, walk.noisy, strict=True):
            b = 1 + beta + s * curvature
            wider = b.square() * width - 2 * beta * b * mixed + beta**2 * before
            mixed, before = b * width - beta * mixed, width
            width = wider + (2 * (1 - beta) * s if noisy else 0.0)
        return 0.5 * width.log()

    def slope(t: Tensor) -> Tensor:
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            return torch.autograd.grad(log_factor(t).sum(), t)[0].detach()

    # its value depends on the steps by the recursion alone, as if H stayed
    beyond = DEFLATE_CURVATURE if covariance is None else DEFLATE_UNSTABLE
    found = log_trace(steepness, log_factor, v[1:], v[0], beyond, walk.depth)
    log_volume = found.value
    if walk.wants_gradient:  # d tr f(H) = tr f'(H) dH: z_K moves with the steps, and H with it
        turned = -longest.to(z) * products(drift, z, found.right, create_graph=True)
        moved = (found.left(slope) * turned).sum((0, 2))
        log_volume = log_volume + moved - moved.detach()
    return Gain(z, log_volume.to(z), (found.variance + found.bias.square()).to(z))
