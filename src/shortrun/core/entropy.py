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
    ``C_{k+1} = A_k C_k A_k^T + 2 s I`` (without the last term at steps that take no noise);
    ``H = d/2 log(2 pi e) + 1/2 E logdet C_K``. Exact for a linear-Gaussian model.

So ``averaged <= conditional``, which is at most the true entropy where the map does not fold, and ``marginal`` is an
approximation of the true one; :mod:`shortrun.core.free_energy` compares it with two upper bounds.

With momentum beta a step is ``z_k + s R(z_k) + beta (z_k - z_{k-1}) + sqrt(2 (1 - beta) s) eps``. ``dF/dz_0`` is no
product of symmetric matrices then, but a recursion over two steps: see :mod:`shortrun.core.estimators`.

With one step size per layer, ``s`` is a vector, ``A_k = I + diag(s) H`` and ``2 s I`` is ``2 diag(s)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shortrun.core import estimators
from shortrun.core.derivatives import differentiable_gradient, products, value_gradient_hessian
from shortrun.core.estimators import Gain, StartCovariance, Walk, rademacher
from shortrun.core.krylov import lanczos
from shortrun.core.langevin import is_divergent
from shortrun.core.latents import Rng, has_normal_prior
from shortrun.core.target import Target

_ESTIMATORS: dict[str, Callable[[Walk], Gain]] = {
    "exact": estimators.exact,
    "lanczos": estimators.lanczos,
    "endpoint": estimators.endpoint,
}

# Krylov steps that find the top eigenvalue for the stability of the chains.
STABILITY_DEPTH = 8


class ChainRun(NamedTuple):
    """The end of each chain, with what its way there did to volume; of shape ``(n,)`` but for the first two."""

    z: Tensor
    """``z_K``, flat, shape ``(n, d)``."""
    centre: Tensor
    """``z_K`` without its last noise, shape ``(n, d)``: given the chain so far, ``z_K`` is N(centre, 2 (1 - beta) s I).
    After a step without noise it is ``z_K`` itself."""
    log_joint: Tensor
    """``log p(x, z_K)``."""
    log_volume: Tensor
    """``sum_k log|det A_k|`` or ``1/2 (logdet C_K - logdet C_0)``: entropy gained since the start."""
    probe_variance: Tensor
    """Squared error of ``log_volume`` due to the probes and their Krylov spaces; zero for the exact estimator."""
    stability: Tensor
    """``s * lambda_max / (1 + momentum)`` at ``z_K``: see :func:`stability`."""
    divergent: Tensor
    """Whether the chain diverged (see :func:`shortrun.core.langevin.is_divergent`)."""
    start_log_prior: Tensor
    """``log p(z_0)``."""


def run_chains(
    target: Target,
    table: Tensor,
    noisy: Sequence[bool],
    *,
    rng: Rng = None,
    marginal: bool = True,
    estimator: Literal["exact", "lanczos", "endpoint"] = "exact",
    probes: int = 4,
    depth: int = 12,
    momentum: float = 0.0,
) -> ChainRun:
    """Run the dynamics from ``target.start`` and account for volume.

    Args:
        target: the log joint of the chains.
        table: step sizes, shape ``(K, layers)``; if it requires a gradient, so do the results.
        noisy: which of the K steps take noise.
        rng: of the noise; also seeds the probes.
        marginal: follow the covariance instead of the determinant of the noise-given map.
        estimator: see :mod:`shortrun.core.estimators`.
        probes, depth: random vectors and the first number of Krylov steps of the matrix-free estimators.
        momentum: of the dynamics.
    """
    sizes = flat_sizes(target, table)
    wants_gradient = sizes.requires_grad
    z = target.flatten(target.start)
    probe_rng = _probe_rng(rng, z.device)
    with torch.no_grad():
        start_log_joint = target.flat_log_joint(z)
        start_log_prior = target.model.log_prior(target.start)
    target.check_start(start_log_joint)
    covariance = _start_covariance(target, z) if marginal else None
    walk = Walk(target, sizes, noisy, covariance, rng, probe_rng, probes, depth, momentum)
    with torch.set_grad_enabled(wants_gradient):
        gain = _ESTIMATORS[estimator](walk)
        z = gain.z if wants_gradient else gain.z.detach()
        log_joint = target.flat_log_joint(z)
        centre = z if walk.last_noise is None else z - walk.variance(-1).sqrt() * walk.last_noise
    walk.follow(start_log_joint)
    walk.follow(log_joint)
    finite = z.isfinite().all(1) & gain.log_volume.isfinite()
    divergent = is_divergent(log_joint.detach(), walk.best, target.dimension) | ~finite
    probe = rademacher(tuple(z.shape), z, probe_rng)
    return ChainRun(
        z, centre, log_joint, gain.log_volume, gain.probe_variance,
        stability(target, z.detach(), sizes.detach() / (1 + momentum), probe), divergent, start_log_prior,
    )  # fmt: skip


def flat_sizes(target: Target, table: Tensor) -> Tensor:
    """Step sizes ``(K, layers)`` as ``(K, d)``."""
    layer_sizes = torch.tensor(target.sizes, device=target.x.device)
    return table.to(target.start[0]).repeat_interleave(layer_sizes, dim=1)


def stability(target: Target, z: Tensor, sizes: Tensor, probe: Tensor) -> Tensor:
    """``s * lambda_max`` of each chain, shape ``(n,)``: how long the steps are for the curvature where the chain ends.

    The largest eigenvalue of ``-S^(1/2) H(z) S^(1/2)`` with ``S = diag(s)``, ``s`` the longest step of the schedule in
    each coordinate; ``z`` is ``z_K``, ``sizes`` has shape ``(K, d)``, ``probe`` is a random vector per chain, shape
    ``(n, d)``. A linear model is stable below 2. Tuners and training compare the same number with the same limit, that
    of :class:`shortrun.core.tune.Guard`.
    """
    if not len(sizes):
        return torch.zeros(len(z), dtype=z.dtype, device=z.device)
    root = sizes.amax(0).sqrt()
    point, _, drift = differentiable_gradient(target.flat_log_joint, z)
    krylov = lanczos(lambda v: root * products(drift, point, root * v).detach(), probe[None], STABILITY_DEPTH)
    return -krylov.nodes[0, :, 0].to(z)


def _start_covariance(target: Target, z: Tensor) -> StartCovariance:
    """The identity for a N(0, I) prior, else the inverse of minus the Hessian of its log density.

    Directions in which a non-Gaussian prior curves upwards count with the size of their curvature.
    """
    if has_normal_prior(target.model):
        return StartCovariance(None, 0.0)

    def log_prior(flat: Tensor) -> Tensor:
        return target.model.log_prior(target.unflatten(flat))

    hessian = value_gradient_hessian(log_prior, z)[2].double()
    values, vectors = torch.linalg.eigh(-0.5 * (hessian + hessian.mT))
    values = values.abs().clamp_min(1e-12)
    return StartCovariance((vectors / values[:, None, :]) @ vectors.mT, -values.log().sum(-1))


def _probe_rng(rng: Rng, device: torch.device) -> torch.Generator:
    """A generator seeded by ``rng``; of a list all members advance alike, and the first one seeds."""
    sources = rng if isinstance(rng, Sequence) else [rng]
    seeds = [
        torch.randint(2**62, (), generator=source, device=device if source is None else source.device)
        for source in sources
    ]
    return torch.Generator(device=device).manual_seed(int(seeds[0]))
