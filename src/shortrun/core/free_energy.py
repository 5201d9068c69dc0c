"""The free energy of the short run distribution (paper, Sec. 4.3, Eq. 19), with upper bounds of its entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shortrun.core.entropy import flat_sizes, run_chains
from shortrun.core.langevin import Langevin
from shortrun.core.latents import LatentModel, Rng, has_normal_prior
from shortrun.core.target import Target

Entropy = Literal["conditional", "averaged", "marginal"]
Estimator = Literal["auto", "exact", "lanczos", "endpoint"]

# Up to so many latents "auto" builds Hessians: with a few dozen columns they cost little more than the chain.
MOST_LATENTS_FOR_EXACT = 64
# A mixture whose entropy changes by less nats with half of the chains (MixtureEntropy.slack) is the entropy itself.
TIGHT = 0.1


@dataclass(frozen=True)
class Estimation:
    """How a free energy is estimated.

    Args:
        entropy: ``"marginal"``, ``"conditional"`` or ``"averaged"``; :mod:`shortrun.core.entropy` says how the
            three relate.
        estimator: ``"exact"`` builds the Hessian at each step; ``"lanczos"`` needs only its products with
            ``probes`` random vectors, ``depth`` times each, and is for models with hundreds of latents;
            ``"endpoint"`` looks at the curvature at the end of each chain only, and costs little more than
            the chain itself. ``"auto"``: exact for up to 64 latents and for ``entropy="averaged"``; else endpoint where
            it applies, with a standard normal prior and one step size for all layers; else lanczos.
        chains: per example, each from its own ``z_0``.
        noises: noise sequences for each ``z_0``, used by ``entropy="averaged"`` alone.
    """

    entropy: Entropy = "marginal"
    estimator: Estimator = "auto"
    chains: int = 8
    noises: int = 4
    probes: int = 4
    depth: int = 12

    def __post_init__(self) -> None:
        for name, accepted in (("entropy", get_args(Entropy)), ("estimator", get_args(Estimator))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        for name in ("chains", "noises", "probes", "depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number, one or more")
        if self.entropy == "averaged" and self.estimator not in ("auto", "exact"):
            raise ValueError(
                'entropy="averaged" needs estimator="exact": the noise of the probes inside its logarithm would bias it'
            )

    def estimator_for(self, model: Any, dimension: int, one_size: bool) -> Literal["exact", "lanczos", "endpoint"]:
        """The estimator for ``dimension`` latents, whose layers have step sizes in common or not."""
        if self.estimator != "auto":
            return self.estimator
        if dimension <= MOST_LATENTS_FOR_EXACT or self.entropy == "averaged":
            return "exact"
        return "endpoint" if one_size and has_normal_prior(model) else "lanczos"


class MixtureEntropy(NamedTuple):
    """What the last step of several chains says about their entropy: ``(batch,)`` each, infinite if nothing."""

    bound: Tensor
    """An upper bound, in expectation."""
    estimate: Tensor
    """The bound less what is left of its gap; good where the slack is small."""
    slack: Tensor
    """How much half of the chains change the bound, with the standard error of that."""


class FreeEnergy(NamedTuple):
    """Free energy per example with what is needed to trust it; fields have shape ``(batch,)``."""

    value: Tensor
    """``E_q[log q(z) - log p(x, z)]``; infinite where a chain is not finite."""
    standard_error: Tensor
    """Monte Carlo error of ``value`` over the chains of the example (NaN for a single one)."""
    energy: Tensor
    """``E_q[-log p(x, z)]``."""
    entropy: Tensor
    """The entropy as estimated; ``value`` is ``energy`` minus this, within the bounds below."""
    cap: Tensor
    """An upper bound of the entropy, see :func:`gaussian_cap`; infinite where it does not apply."""
    cap_error: float
    """Standard error of ``cap``."""
    mixture: MixtureEntropy
    """Another upper bound of the entropy, in few dimensions the entropy itself: see :func:`mixture_entropy`."""
    probe_error: Tensor
    """Standard error of ``entropy`` due to the probes of the matrix-free estimator; else zero."""
    stability: Tensor
    """``s * lambda_max`` where each chain ends (:func:`shortrun.core.entropy.stability`), shape ``(batch, chains)``."""
    divergent: Tensor
    """Which chains diverged, shape ``(batch, chains)``."""


def free_energy(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    how: Estimation = Estimation(),
    *,
    mask: Tensor | None = None,
    rng: Rng = None,
) -> Tensor:
    """``F(x) = E_q[log q(z) - log p(x, z)]``, shape ``(batch,)``, constants included (paper, Eq. 19).

    ``F(x) + log p(x) = KL(short run || posterior)``. So ``-F`` is a lower bound of ``log p(x)`` whenever
    the entropy is not overestimated; ``entropy="conditional"`` guarantees that where the map from ``z_0`` to ``z_K`` is
    one-to-one for given noise, and can overestimate it where steps are so long that the map folds.

    :func:`free_energy_details` also returns errors, the stability of the chains and the number of divergent ones.
    """
    return free_energy_details(model, x, dynamics, how, mask=mask, rng=rng).value


def free_energy_details(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    how: Estimation = Estimation(),
    *,
    mask: Tensor | None = None,
    rng: Rng = None,
    table: Tensor | None = None,
) -> FreeEnergy:
    """As :func:`free_energy`, with errors and diagnostics.

    ``table``, step sizes of shape ``(K, layers)``, takes the place of those of ``dynamics``; if it requires
    a gradient, ``value`` can be differentiated with respect to it.
    """
    wants_gradient = table is not None and table.requires_grad
    with torch.inference_mode(False), torch.set_grad_enabled(wants_gradient):
        target = Target(model, x, mask, rng=rng, chains=how.chains, evaluations=dynamics.steps)
        if how.entropy == "averaged":
            start = tuple(layer.repeat_interleave(how.noises, 0) for layer in target.start)
            target = Target(model, x, mask, start=start, chains=how.chains * how.noises)
        sizes = dynamics.table(len(target.sizes)) if table is None else table
        noisy = [dynamics.is_noisy(k) for k in range(dynamics.steps)]
        run = run_chains(
            target,
            sizes,
            noisy,
            rng=rng,
            # Without noise the map is deterministic: the change of variables is the whole entropy.
            marginal=how.entropy == "marginal" and any(noisy),
            estimator=how.estimator_for(model, target.dimension, bool((sizes == sizes[:, :1]).all())),
            probes=how.probes,
            depth=how.depth,
            momentum=dynamics.momentum,
        )
        shape = (len(x), target.chains)
        if has_normal_prior(model):
            constant = 0.5 * target.dimension * math.log(2 * math.pi * math.e)
            start_entropy = torch.full_like(run.start_log_prior, constant).view(shape)
        else:
            start_entropy = -run.start_log_prior.view(shape)
        energy = -run.log_joint.view(shape)
        gain = run.log_volume.view(shape)
        if how.entropy == "averaged":
            groups = (len(x), how.chains, how.noises)
            gain = math.log(how.noises) - torch.logsumexp(-gain.view(groups), -1)
            start_entropy = start_entropy.view(groups)[..., 0]
            energy = energy.view(groups).mean(-1)
        per_chain = start_entropy + gain
        estimate = per_chain.mean(1)
        cap, cap_error = torch.full_like(estimate, torch.inf), 0.0
        mixture = MixtureEntropy(*[torch.full_like(estimate, torch.inf)] * 3)
        if how.entropy == "marginal":
            cap, cap_error = gaussian_cap(run.z.view(*shape, -1))
            if noisy and noisy[-1]:
                variances = 2 * (1 - dynamics.momentum) * flat_sizes(target, sizes)[-1]
                mixture = mixture_entropy(run.z.view(*shape, -1), run.centre.view(*shape, -1), variances)
        # Three standard errors on top, so that the cap does not bite where the estimate is right.
        value = energy.mean(1) - _bounded(estimate, cap + 3 * cap_error, mixture)
        value = torch.where(run.z.isfinite().all(1).view(shape).all(1), value, torch.inf)
        value = torch.where(value.isnan(), torch.inf, value)
        spread = (energy - per_chain).detach()
        count = spread.shape[1]
        standard_error = spread.std(1) / math.sqrt(count) if count > 1 else spread[:, 0] * torch.nan
        probe_error = (run.probe_variance.view(shape).sum(1)).sqrt() / shape[1]
    return FreeEnergy(
        value,
        standard_error,
        energy.mean(1),
        estimate,
        cap,
        cap_error,
        mixture,
        probe_error,
        run.stability.view(shape),
        run.divergent.view(shape),
    )


def gaussian_cap(z: Tensor) -> tuple[Tensor, float]:
    """An upper bound of the entropy of ``z_K``, shape ``(batch,)``, and its standard error.

    ``z`` has shape ``(batch, chains, d)``.

    No density has more entropy than the Gaussian with its covariance, ``H <= 1/2 logdet(2 pi e Cov z)``; with
    fewer than ``2 d`` chains the covariance is replaced by its diagonal, a looser bound. The logarithm of a
    sampled determinant is biased; the digamma terms remove that for Gaussian ``z``.
    """
    count, dimension = z.shape[1:]
    if count < 3:
        return torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device), 0.0
    whole = count > 2 * dimension
    freedom = count - 1 - (torch.arange(dimension) if whole else torch.zeros(dimension))
    half = freedom.double() / 2
    bias = (torch.digamma(half) - math.log((count - 1) / 2)).sum().item()
    error = 0.5 * torch.polygamma(1, half).sum().sqrt().item()
    if whole:
        centred = z - z.mean(1, keepdim=True)
        covariance = centred.mT.double() @ centred.double() / (count - 1)
        logdet = torch.linalg.slogdet(covariance)[1].to(z)
    else:
        logdet = z.var(1).clamp_min(1e-30).log().sum(1)
    return 0.5 * (dimension * math.log(2 * math.pi * math.e) + logdet - bias), error


def mixture_entropy(z: Tensor, centres: Tensor, variances: Tensor) -> MixtureEntropy:
    r"""The entropy of ``z_K`` from its last step alone.

    Given the chain so far the law of ``z_K`` is exactly ``N(centre, 2 s I)`` (``2 (1 - beta) s I`` with momentum), so q
    is the mean of these Gaussians over all chains, and their mean over the *other* chains ``c'`` of the same example is
    a density of its own:

    .. math:: H(q) \le E\Bigl[-\log \frac1{n-1} \sum_{c' \ne c} N(z_c; \mathrm{centre}_{c'}, 2 s I)\Bigr] ,

    because a cross entropy is no less than the entropy (Gibbs). It sees all modes, which a linearisation cannot. The
    gap falls like 1/n once the Gaussians overlap, as they do in few dimensions: then half of the chains give nearly
    the same value, and what they add is what there is to subtract. In many dimensions the bound is far off, and half of
    the chains say so.

    Args:
        z, centres: shape ``(batch, chains, d)``.
        variances: of the noise of the last step, shape ``(d,)``.
    """
    count, dimension = z.shape[1:]
    if count < 4:
        nothing = torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device)
        return MixtureEntropy(nothing, nothing, nothing)
    scale = variances.sqrt()
    squares = torch.cdist(z / scale, centres / scale).square()  # (batch, chain, other chain)
    log_kernel = -0.5 * (squares + dimension * math.log(2 * math.pi)) - scale.log().sum()
    itself = torch.eye(count, dtype=torch.bool, device=z.device)
    log_kernel = log_kernel.masked_fill(itself, -torch.inf)
    whole = math.log(count - 1) - torch.logsumexp(log_kernel, 2)
    halves = []
    for side in (0, 1):
        used = torch.arange(count, device=z.device) % 2 == side
        others = (used.sum() - used.long()).log()  # of each chain
        halves.append(others - torch.logsumexp(log_kernel[:, :, used], 2))
    change = torch.stack(halves).mean(0) - whole
    slack = (change.mean(1).abs() + change.std(1) / math.sqrt(count)).detach()
    return MixtureEntropy(whole.mean(1), whole.mean(1) - change.mean(1), slack)


def _bounded(estimate: Tensor, cap: Tensor, mixture: MixtureEntropy, tight: float = TIGHT) -> Tensor:
    """The entropy: that of the mixture if it is tight enough, else the estimate or the lower of its upper bounds."""
    lowest = torch.minimum(torch.minimum(estimate, cap), mixture.bound)
    return torch.where(mixture.slack < tight, mixture.estimate, lowest)


def mean_free_energy(details: FreeEnergy, tight: float = TIGHT) -> Tensor:
    """The tuner's objective (paper, Eq. 20): the mean over examples, a scalar.

    Here the bounds are compared with the mean of the estimates, where their errors are smaller by the square root of
    the number of examples, so they bite sooner than for one example alone. ``tight`` as in :data:`TIGHT`.
    """
    if not details.value.isfinite().all():
        return details.value.mean()
    margin = details.cap_error / math.sqrt(len(details.cap))
    mixture = MixtureEntropy(*(part.mean() for part in details.mixture))
    return details.energy.mean() - _bounded(details.entropy.mean(), details.cap.mean() + margin, mixture, tight)
