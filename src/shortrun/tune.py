"""The free energy of the short run distribution, and the step size that minimises it (paper, Sec. 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shortrun.entropy import Entropy, Estimator, flat_sizes, run_chains
from shortrun.langevin import Langevin, Target
from shortrun.model import LatentModel, RandomSource

Per = Literal["run", "step", "layer"]
# A mixture whose entropy changes by less nats with half of the chains (MixtureEntropy.slack) is the entropy itself: for
# one step size, and for a whole curve, whose candidates must all be judged alike.
TIGHT, TIGHT_CURVE = 0.1, 0.6


class StepSizeError(ValueError):
    """No step size that was tried is safe to use."""


@dataclass(frozen=True)
class Estimation:
    """How a free energy is estimated.

    Args:
        entropy: ``"marginal"``, ``"conditional"`` or ``"averaged"``; :mod:`shortrun.entropy` says how the
            three relate.
        estimator: ``"exact"`` builds the Hessian at each step; ``"lanczos"`` needs only its products with
            ``probes`` random vectors, ``depth`` times each, and is for models with hundreds of latents;
            ``"endpoint"`` looks at the curvature at the end of each chain only, and costs little more than
            the chain itself.
        samples: chains per example, each from its own ``z_0``.
        noises: noise sequences for each ``z_0``, used by ``entropy="averaged"`` alone.
    """

    entropy: Entropy = "marginal"
    estimator: Estimator = "exact"
    samples: int = 8
    noises: int = 4
    probes: int = 4
    depth: int = 12

    def __post_init__(self) -> None:
        for name, accepted in (("entropy", get_args(Entropy)), ("estimator", get_args(Estimator))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        for name in ("samples", "noises", "probes", "depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number, one or more")
        if self.entropy == "averaged" and self.estimator != "exact":
            raise ValueError(
                'entropy="averaged" needs estimator="exact": the noise of the probes inside its logarithm would bias it'
            )


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
    """``E_q[log q(z) - log p(x, z)]``; infinite where a chain left the floating point range."""
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
    """``s * lambda_max`` where each chain ends (:func:`shortrun.entropy.stability`), shape ``(batch, chains)``."""
    divergent: Tensor
    """Which chains diverged, shape ``(batch, chains)``."""


def free_energy(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    entropy: Entropy = "marginal",
    estimator: Estimator = "exact",
    samples: int = 8,
    noises: int = 4,
    probes: int = 4,
    depth: int = 12,
    mask: Tensor | None = None,
    generator: RandomSource = None,
) -> Tensor:
    """``F(x) = E_q[log q(z) - log p(x, z)]``, shape ``(batch,)``, constants included (paper, Eq. 19).

    ``F(x) + log p(x) = KL(short run || posterior)``. So ``-F`` is a lower bound of ``log p(x)`` whenever
    the entropy is not overestimated; ``entropy="conditional"`` guarantees that where the map from ``z_0`` to ``z_K`` is
    one-to-one for given noise, and can overestimate it where steps are so long that the map folds.

    The arguments are those of :class:`Estimation`; :func:`free_energy_details` also returns errors, the
    stability of the chains and the number of divergent ones.
    """
    how = Estimation(entropy, estimator, samples, noises, probes, depth)
    return free_energy_details(model, x, dynamics, how, mask=mask, generator=generator).value


def free_energy_details(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    how: Estimation = Estimation(),
    *,
    mask: Tensor | None = None,
    generator: RandomSource = None,
    table: Tensor | None = None,
) -> FreeEnergy:
    """As :func:`free_energy`, with errors and diagnostics.

    ``table``, step sizes of shape ``(K, layers)``, takes the place of those of ``dynamics``; if it requires
    a gradient, ``value`` can be differentiated with respect to it.
    """
    wants_gradient = table is not None and table.requires_grad
    with torch.inference_mode(False), torch.set_grad_enabled(wants_gradient):
        target = Target(model, x, mask, generator=generator, chains=how.samples, evaluations=dynamics.steps)
        if how.entropy == "averaged":
            start = tuple(layer.repeat_interleave(how.noises, 0) for layer in target.start)
            target = Target(model, x, mask, start=start, chains=how.samples * how.noises)
        tables = dynamics.table(len(target.sizes)) if table is None else table
        run = run_chains(
            target,
            tables,
            noise=dynamics.noise,
            generator=generator,
            # Without noise the map is deterministic: the change of variables is the whole entropy.
            marginal=how.entropy == "marginal" and dynamics.noise,
            estimator=how.estimator,
            probes=how.probes,
            depth=how.depth,
        )
        shape = (len(x), target.chains)
        if getattr(model, "standard_normal_prior", False):
            constant = 0.5 * target.dimension * math.log(2 * math.pi * math.e)
            start_entropy = torch.full_like(run.start_log_prior, constant).view(shape)
        else:
            start_entropy = -run.start_log_prior.view(shape)
        energy = -run.log_joint.view(shape)
        gain = run.log_volume.view(shape)
        if how.entropy == "averaged":
            groups = (len(x), how.samples, how.noises)
            gain = math.log(how.noises) - torch.logsumexp(-gain.view(groups), -1)
            start_entropy = start_entropy.view(groups)[..., 0]
            energy = energy.view(groups).mean(-1)
        per_chain = start_entropy + gain
        estimate = per_chain.mean(1)
        cap, cap_error = torch.full_like(estimate, torch.inf), 0.0
        mixture = MixtureEntropy(*[torch.full_like(estimate, torch.inf)] * 3)
        if how.entropy == "marginal":
            cap, cap_error = gaussian_cap(run.z.view(*shape, -1))
            if dynamics.noise and dynamics.steps:
                variances = 2 * flat_sizes(target, tables)[-1]
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

    Given ``z_{K-1}`` the law of ``z_K`` is exactly ``N(centre, 2 s I)``, so q is the mean of these Gaussians over all
    chains, and their mean over the *other* chains ``c'`` of the same example is a density of its own:

    .. math:: H(q) \le E\Bigl[-\log \frac1{n-1} \sum_{c' \ne c} N(z_c; \mathrm{centre}_{c'}, 2 s I)\Bigr] ,

    because a cross entropy is no less than the entropy (Gibbs). It sees all modes, which a linearisation cannot. The
    gap falls like 1/n once the Gaussians overlap, as they do in few dimensions: then half of the chains give nearly
    the same value, and what they add is what there is to subtract. In many dimensions the bound is far off, and half of
    the chains say so.

    Args:
        z, centres: shape ``(batch, chains, d)``.
        variances: ``2 s`` of the last step, shape ``(d,)``.
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

    Here the bounds are held against the mean of the estimates, where their errors are smaller by the square root of
    the number of examples, so they bite sooner than for one example alone. ``tight`` as in :data:`TIGHT`.
    """
    if not details.value.isfinite().all():
        return details.value.mean()
    margin = details.cap_error / math.sqrt(len(details.cap))
    mixture = MixtureEntropy(*(part.mean() for part in details.mixture))
    return details.energy.mean() - _bounded(details.entropy.mean(), details.cap.mean() + margin, mixture, tight)


@dataclass(frozen=True)
class Guard:
    """Rules out steps that are too long for the curvature they meet; training holds its steps at the same limit.

    A linear model is stable for ``s * lambda_max < 2``. On trained generators the best step exceeds that for
    a few chains, so a candidate is excluded if ``s * lambda_max`` (:func:`shortrun.entropy.stability`) at ``quantile``
    of the chains is above ``limit``, or if more than the remaining share of the chains diverge.
    """

    limit: float = 2.6
    quantile: float = 0.9

    def measure(self, details: FreeEnergy) -> float:
        """``s * lambda_max`` at the quantile, infinite if that chain is not finite."""
        values = details.stability.flatten().nan_to_num(nan=math.inf).sort().values
        return float(values[max(math.ceil(self.quantile * len(values)) - 1, 0)])

    def excludes(self, details: FreeEnergy) -> bool:
        diverged = details.divergent.double().mean() > 1 - self.quantile
        infinite = not details.value.isfinite().all()
        return bool(diverged) or infinite or self.measure(details) > self.limit


NO_GUARD = Guard(limit=math.inf, quantile=0.0)


class TuneResult(NamedTuple):
    """The chosen dynamics and the curve it was chosen from; tensors have one entry per candidate."""

    dynamics: Langevin
    """The settings given, with the tuned step size."""
    best: int
    """Index of the chosen candidate."""
    step_sizes: list[Any]
    """The candidates."""
    free_energy: Tensor
    """Mean over examples, in nats."""
    standard_error: Tensor
    """Standard error of that mean over examples. Candidates share their random numbers, so differences
    between them are known more precisely than this."""
    stability: Tensor
    """``s * lambda_max`` at the guard's quantile: what is held against its limit."""
    largest_stability: Tensor
    """``s * lambda_max`` of the worst chain."""
    divergent: Tensor
    """Number of divergent chains."""
    ruled_out: Tensor
    """Candidates that the guard excluded."""

    def __str__(self) -> str:
        lines = [
            "   step s    delta     free energy        s*lambda  worst  divergent",
        ]
        for i, size in enumerate(self.step_sizes):
            mean = _geometric_mean(size)
            note = "<- chosen" if i == self.best else "ruled out" if self.ruled_out[i] else ""
            lines.append(
                f"{mean:9.5f} {math.sqrt(2 * mean):8.4f} {self.free_energy[i]:12.6g} "
                f"+- {self.standard_error[i]:<8.3g} {self.stability[i]:6.2f} "
                f"{self.largest_stability[i]:6.2f} {int(self.divergent[i]):6d}  {note}".rstrip()
            )
        return "\n".join(lines)


def _geometric_mean(size: Any) -> float:
    return math.exp(torch.tensor(size, dtype=torch.float64).log().mean().item())


class _Curve:
    """Collects candidates one by one; of the examples of all processes, if there are several."""

    def __init__(self, guard: Guard | None, accelerator: Any = None) -> None:
        # Without a guard a candidate is excluded only if it cannot be judged: its free energy is not finite.
        self.guard = NO_GUARD if guard is None else guard
        self.accelerator = accelerator
        self.step_sizes: list[Any] = []
        self.rows: list[tuple[float, ...]] = []
        self.by_mixture: list[float] = []
        """The free energy of each candidate if its entropy is that of the mixture; NaN where that is not tight."""

    def add(self, step_size: Any, details: FreeEnergy) -> bool:
        """Record a candidate; true if the guard lets it pass."""
        if self.accelerator is not None and self.accelerator.num_processes > 1:
            gather: Any = lambda field: self.accelerator.gather(field.detach())  # noqa: E731
            gathered = {key: gather(field) for key, field in details._asdict().items() if isinstance(field, Tensor)}
            gathered["mixture"] = MixtureEntropy(*map(gather, details.mixture))
            details = details._replace(**gathered)
        value = details.value.detach()
        error = value.std() / math.sqrt(len(value)) if len(value) > 1 else details.standard_error[0]
        excluded = self.guard.excludes(details)
        self.step_sizes.append(step_size)
        tight = bool(details.mixture.slack.mean() < TIGHT_CURVE)
        self.by_mixture.append(mean_free_energy(details, TIGHT_CURVE).item() if tight else math.nan)
        self.rows.append(
            (
                mean_free_energy(details, 0.0).item(),
                float(error),
                self.guard.measure(details),
                float(details.stability.nan_to_num(nan=math.inf).max()),
                float(details.divergent.sum()),
                float(excluded),
            )
        )
        return not excluded

    def all_excluded(self) -> bool:
        return all(row[5] for row in self.rows)

    def result(self, dynamics: Langevin, best: int | None = None) -> TuneResult:
        """The candidate ``best``, or the one with the least free energy that the guard lets pass."""
        if self.all_excluded():
            smallest = min(range(len(self.rows)), key=lambda i: _geometric_mean(self.step_sizes[i]))
            size, measured = _geometric_mean(self.step_sizes[smallest]), self.rows[smallest][2]
            limit = min(self.guard.limit, Guard.limit)
            top = size * (limit / measured if math.isfinite(measured) else 0.01)
            top = min(top, size / 2)
            raise StepSizeError(
                f"all {len(self.rows)} step sizes were ruled out: even {size:.3g} has s * lambda_max "
                f"= {measured:.3g} against a limit of {limit:g}, with "
                f"{int(self.rows[smallest][4])} divergent chains. Try step sizes from {top / 100:.2g} "
                f"to {top:.2g}."
            )
        columns = torch.tensor(self.rows, dtype=torch.float64).unbind(1)
        ruled_out = columns[5].bool()
        mixtures = torch.tensor(self.by_mixture, dtype=torch.float64)
        if not mixtures[~ruled_out].isnan().any():  # one estimate for the whole curve
            columns = (torch.where(mixtures.isnan(), columns[0], mixtures), *columns[1:])
        if best is None:
            best = int(torch.where(ruled_out, torch.inf, columns[0]).argmin())
        energy, error, stability, largest, divergent, _ = columns
        return TuneResult(
            replace(dynamics, step_size=self.step_sizes[best]),
            best,
            self.step_sizes,
            energy,
            error,
            stability,
            largest,
            divergent.long(),
            ruled_out,
        )


def _replay(generator: RandomSource, x: Tensor) -> tuple[RandomSource, Callable[[], None]]:
    """A generator and a function that takes it back to its present state: common random numbers."""
    if generator is None:
        seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(device=x.device).manual_seed(seed)
    sources = list(generator) if isinstance(generator, Sequence) else [generator]
    states = [source.get_state() for source in sources]

    def rewind() -> None:
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)

    return generator, rewind


def default_grid(dynamics: Langevin) -> list[Any]:
    """Thirteen step sizes, a factor of sqrt(2) apart, around that of ``dynamics`` and of its form."""
    return [dynamics.scaled(2 ** (j / 2)).step_size for j in range(-6, 7)]


def candidates_of(dynamics: Langevin, deltas: Iterable[float]) -> list[Any]:
    """Step sizes of the form of ``dynamics`` whose longest step has each ``delta = sqrt(2 s)`` in turn."""
    return [dynamics.scaled(delta**2 / 2 / dynamics.longest).step_size for delta in deltas]


def tune_by_grid(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    step_sizes: Iterable[Any] | None = None,
    *,
    entropy: Entropy = "marginal",
    estimator: Estimator = "exact",
    samples: int = 8,
    noises: int = 4,
    probes: int = 4,
    depth: int = 12,
    guard: Guard | None = Guard(),
    mask: Tensor | None = None,
    generator: RandomSource = None,
    accelerator: Any = None,
) -> TuneResult:
    """The step size with the least mean free energy over the batch (paper, Eq. 20), by grid search.

    Args:
        step_sizes: candidates, each in any form that :class:`Langevin` takes; by default thirteen around
            the step size of ``dynamics``.
        guard: which candidates are excluded whatever their free energy; None for the bare minimum of the curve.
        accelerator: an ``accelerate.Accelerator`` if several processes share the examples, equally many each;
            all of them then come to the same choice.

    The other arguments are those of :func:`free_energy`. All candidates see the same random numbers.

    Raises:
        StepSizeError: every candidate was excluded; the message proposes a smaller range.
    """
    how = Estimation(entropy, estimator, samples, noises, probes, depth)
    candidates = default_grid(dynamics) if step_sizes is None else list(step_sizes)
    if not candidates:
        raise ValueError("step_sizes is empty; give at least one candidate")
    settings = [replace(dynamics, step_size=size) for size in candidates]  # checks them all first
    generator, rewind = _replay(generator, x)
    curve = _Curve(guard, accelerator)
    for candidate in settings:
        rewind()
        details = free_energy_details(model, x, candidate, how, mask=mask, generator=generator)
        curve.add(candidate.step_size, details)
    return curve.result(dynamics)


def tune_by_gradient(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    per: Per = "run",
    *,
    entropy: Entropy = "marginal",
    estimator: Estimator = "exact",
    samples: int = 8,
    noises: int = 4,
    probes: int = 4,
    depth: int = 12,
    iterations: int = 40,
    learning_rate: float = 0.1,
    guard: Guard | None = Guard(),
    mask: Tensor | None = None,
    generator: RandomSource = None,
    accelerator: Any = None,
) -> TuneResult:
    """Minimise the mean free energy over the batch (paper, Eq. 20) by gradient descent on ``log s``.

    Args:
        per: ``"run"``, one factor for the step sizes of ``dynamics``, so that a schedule keeps its form; ``"step"``,
            a step size of its own per step (the ``s_k`` that the paper leaves to future work); ``"layer"``, per step
            and layer.
        iterations, learning_rate: of Adam, which starts from the step sizes of ``dynamics``.

    The other arguments are those of :func:`tune_by_grid`. Each iterate sees fresh noise, so that many step
    sizes do not adapt to the noise of a few chains; the result is the average of the second half of the
    iterates, or the starting point if that is better on the same random numbers. The curve holds all
    iterates, then these two. Where the guard objects, the step is shortened.
    """
    how = Estimation(entropy, estimator, samples, noises, probes, depth)
    if per not in get_args(Per):
        raise ValueError(f"per is {per!r}; accepted: {', '.join(get_args(Per))}")
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; expected a whole number, one or more")
    if not dynamics.steps:
        raise ValueError("there is no step size to tune: dynamics has zero steps")
    generator, rewind = _replay(generator, x)
    layers = len(model.sample_prior(1, generator[0] if isinstance(generator, Sequence) else generator))
    start = dynamics.table(layers) if per == "layer" else torch.tensor(dynamics.step_size, dtype=torch.float64)
    if per == "step" and not start.ndim:
        start = start.expand(dynamics.steps)
    start = start.to(x.device)
    unchanged = torch.zeros_like(start[..., :1] if start.ndim == 2 and per == "step" else start)
    unchanged = unchanged.new_zeros(()) if per == "run" else unchanged
    log_factor = unchanged.clone().requires_grad_()
    optimiser = torch.optim.Adam([log_factor], lr=learning_rate, betas=(0.8, 0.95))
    curve, tail = _Curve(guard, accelerator), []

    def evaluate(log_factor: Tensor) -> tuple[Any, FreeEnergy]:
        """The step sizes, as in ``Langevin``, and their free energy."""
        with torch.inference_mode(False), torch.enable_grad():
            size = start * log_factor.exp()
            table = (size[:, None] if size.ndim == 1 else size).expand(dynamics.steps, layers)
            details = free_energy_details(model, x, dynamics, how, mask=mask, generator=generator, table=table)
        return size.tolist(), details

    for iteration in range(iterations):
        size, details = evaluate(log_factor)
        if not curve.add(size, details):
            # Too long a step: go back under the limit, and forget the momentum that led here.
            excess = min(curve.rows[-1][2] / curve.guard.limit, 100.0)
            log_factor.data -= math.log(max(1.2, 1.1 * excess))
            optimiser.state.clear()
            continue
        (slope,) = torch.autograd.grad(mean_free_energy(details), log_factor)
        log_factor.grad = slope if accelerator is None else accelerator.reduce(slope, "mean")
        optimiser.step()
        if iteration >= iterations // 2:
            tail.append(log_factor.detach().clone())
    # Each iterate saw fresh noise; their average is compared with the start on one and the same noise.
    finalists = _Curve(guard, accelerator)
    for finalist in [unchanged, *([torch.stack(tail).mean(0)] if tail else [])]:
        rewind()
        finalists.add(*evaluate(finalist))
    if finalists.all_excluded():
        return curve.result(dynamics)
    chosen = finalists.result(dynamics)
    curve.step_sizes += finalists.step_sizes
    curve.rows += finalists.rows
    curve.by_mixture += finalists.by_mixture
    return curve.result(dynamics, len(curve.rows) - len(finalists.rows) + chosen.best)
