"""The step size that minimises the free energy (paper, Sec. 4.3, Eq. 20), by grid search or by gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shortrun.core.free_energy import Estimation, FreeEnergy, MixtureEntropy, free_energy_details, mean_free_energy
from shortrun.core.langevin import Langevin
from shortrun.core.latents import LatentModel, Rng, flatten

Per = Literal["run", "step", "layer"]
Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor over all processes along its first dimension."""
# As shortrun.core.free_energy.TIGHT, for a whole curve, whose candidates must all be judged alike.
TIGHT_CURVE = 0.6


class StepSizeError(ValueError):
    """No step size that was tried is safe to use."""


@dataclass(frozen=True)
class Guard:
    """Rules out steps that are too long for the curvature they meet.

    A linear model is stable for ``s * lambda_max < 2``. On trained generators the best step exceeds that for
    a few chains, so a candidate is excluded if ``s * lambda_max`` (:func:`shortrun.core.entropy.stability`) at
    ``quantile`` of the chains is above ``limit``, or if more than the remaining share of the chains diverge.
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
    """The chosen candidate."""
    best: int
    """Its index."""
    candidates: tuple[Langevin, ...]
    """All that were tried."""
    free_energy: Tensor
    """Mean over examples, in nats."""
    standard_error: Tensor
    """Standard error of that mean over examples. Candidates share their random numbers, so differences
    between them are known more precisely than this."""
    stability: Tensor
    """``s * lambda_max`` at the guard's quantile, which its limit applies to."""
    largest_stability: Tensor
    """``s * lambda_max`` of the worst chain."""
    divergent: Tensor
    """Number of divergent chains."""
    ruled_out: Tensor
    """Candidates that the guard excluded."""

    @property
    def step_sizes(self) -> list[float]:
        """The longest step of each candidate."""
        return [candidate.step_size for candidate in self.candidates]

    def __str__(self) -> str:
        lines = [
            "   step s    delta     free energy        s*lambda  worst  divergent",
        ]
        for i, candidate in enumerate(self.candidates):
            note = "<- chosen" if i == self.best else "ruled out" if self.ruled_out[i] else ""
            lines.append(
                f"{candidate.step_size:9.5f} {candidate.delta:8.4f} {self.free_energy[i]:12.6g} "
                f"+- {self.standard_error[i]:<8.3g} {self.stability[i]:6.2f} "
                f"{self.largest_stability[i]:6.2f} {int(self.divergent[i]):6d}  {note}".rstrip()
            )
        return "\n".join(lines)


class _Row(NamedTuple):
    """One candidate of a curve; the fields are those of :class:`TuneResult`."""

    candidate: Langevin
    free_energy: float
    by_mixture: float
    """The free energy if its entropy is that of the mixture; NaN where that is not tight."""
    standard_error: float
    stability: float
    largest_stability: float
    divergent: int
    ruled_out: bool


class _Curve:
    """Collects candidates one by one; of the examples of all processes, if there are several."""

    def __init__(self, guard: Guard | None, gather: Gather | None = None) -> None:
        # Without a guard a candidate is excluded only if it cannot be judged: its free energy is not finite.
        self.guard = NO_GUARD if guard is None else guard
        self.gather = gather
        self.rows: list[_Row] = []

    def add(self, candidate: Langevin, details: FreeEnergy) -> bool:
        """Record a candidate; true if the guard lets it pass."""
        if self.gather is not None:
            details = _gathered(details, self.gather)
        value = details.value.detach()
        error = value.std() / math.sqrt(len(value)) if len(value) > 1 else details.standard_error[0]
        tight = bool(details.mixture.slack.mean() < TIGHT_CURVE)
        row = _Row(
            candidate,
            free_energy=mean_free_energy(details, 0.0).item(),
            by_mixture=mean_free_energy(details, TIGHT_CURVE).item() if tight else math.nan,
            standard_error=float(error),
            stability=self.guard.measure(details),
            largest_stability=float(details.stability.nan_to_num(nan=math.inf).max()),
            divergent=int(details.divergent.sum()),
            ruled_out=self.guard.excludes(details),
        )
        self.rows.append(row)
        return not row.ruled_out

    def all_excluded(self) -> bool:
        return all(row.ruled_out for row in self.rows)

    def _refuse(self) -> StepSizeError:
        smallest = min(self.rows, key=lambda row: row.candidate.step_size)
        size, measured = smallest.candidate.step_size, smallest.stability
        limit = min(self.guard.limit, Guard.limit)
        top = size * (limit / measured if math.isfinite(measured) else 0.01)
        top = min(top, size / 2)
        return StepSizeError(
            f"all {len(self.rows)} step sizes were ruled out: even {size:.3g} has s * lambda_max "
            f"= {measured:.3g} against a limit of {limit:g}, with "
            f"{smallest.divergent} divergent chains. Try step sizes from {top / 100:.2g} "
            f"to {top:.2g}."
        )

    def result(self, best: int | None = None) -> TuneResult:
        """The candidate ``best``, or the one with the lowest free energy that the guard lets pass."""
        if self.all_excluded():
            raise self._refuse()
        columns = _Row(*zip(*self.rows, strict=True))  # type: ignore[arg-type]
        ruled_out = torch.tensor(columns.ruled_out)
        energy, mixtures, error, stability, largest = (
            torch.tensor(column, dtype=torch.float64) for column in columns[1:6]
        )
        if not mixtures[~ruled_out].isnan().any():  # one estimate for the whole curve
            energy = torch.where(mixtures.isnan(), energy, mixtures)
        if best is None:
            best = int(torch.where(ruled_out, torch.inf, energy).argmin())
        candidates = tuple(row.candidate for row in self.rows)
        divergent = torch.tensor(columns.divergent)
        return TuneResult(candidates[best], best, candidates, energy, error, stability, largest, divergent, ruled_out)


def _gathered(details: FreeEnergy, gather: Gather) -> FreeEnergy:
    """The examples of all processes."""

    def whole(field: Tensor) -> Tensor:
        return gather(field.detach())

    fields: dict[str, Any] = {
        key: whole(field) for key, field in details._asdict().items() if isinstance(field, Tensor)
    }
    return details._replace(**fields, mixture=MixtureEntropy(*map(whole, details.mixture)))


def _replay(rng: Rng, x: Tensor) -> tuple[torch.Generator | Sequence[torch.Generator], Callable[[], None]]:
    """``rng`` and a function that takes it back to its present state: common random numbers."""
    if rng is None:
        seed = int(torch.randint(2**62, ()))
        rng = torch.Generator(device=x.device).manual_seed(seed)
    sources = list(rng) if isinstance(rng, Sequence) else [rng]
    states = [source.get_state() for source in sources]

    def rewind() -> None:
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)

    return rng, rewind


def default_grid(dynamics: Langevin) -> list[float]:
    """Thirteen step sizes, a factor of sqrt(2) apart, around that of ``dynamics``."""
    return [dynamics.step_size * 2 ** (j / 2) for j in range(-6, 7)]


def tune_by_grid(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    step_sizes: Iterable[float] | None = None,
    how: Estimation = Estimation(),
    *,
    guard: Guard | None = Guard(),
    mask: Tensor | None = None,
    rng: Rng = None,
    gather: Gather | None = None,
) -> TuneResult:
    """The step size with the lowest mean free energy over the batch (paper, Eq. 20), by grid search.

    Args:
        dynamics: number of steps, and the profile that all candidates share.
        step_sizes: the longest step of each candidate; by default thirteen around the step size of ``dynamics``.
        how: the estimate of the free energy.
        guard: which candidates are excluded whatever their free energy; None for the bare minimum of the curve.
        mask, rng: as in :func:`shortrun.infer`. All candidates see the same random numbers.
        gather: if several processes share the examples, equally many each: concatenates a tensor over all of them
            along its first dimension. All processes then come to the same choice.

    Raises:
        StepSizeError: every candidate was excluded; the message proposes a smaller range.
    """
    sizes = default_grid(dynamics) if step_sizes is None else list(step_sizes)
    if not sizes:
        raise ValueError("step_sizes is empty; give at least one candidate")
    candidates = [replace(dynamics, step_size=size) for size in sizes]  # checks them all first
    rng, rewind = _replay(rng, x)
    curve = _Curve(guard, gather)
    for candidate in candidates:
        rewind()
        curve.add(candidate, free_energy_details(model, x, candidate, how, mask=mask, rng=rng))
    return curve.result()


def tune_by_gradient(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    per: Per = "run",
    how: Estimation = Estimation(),
    *,
    iterations: int = 40,
    learning_rate: float = 0.1,
    guard: Guard | None = Guard(),
    mask: Tensor | None = None,
    rng: Rng = None,
    gather: Gather | None = None,
) -> TuneResult:
    """Minimise the mean free energy over the batch (paper, Eq. 20) by gradient descent on ``log s``.

    Args:
        per: ``"run"``, one factor for the step sizes of ``dynamics``, so that its profile stays; ``"step"``,
            a factor of its own per step (the ``s_k`` that the paper leaves to future work); ``"layer"``, per step
            and layer.
        iterations, learning_rate: of Adam, which starts from the step sizes of ``dynamics``.

    The other arguments are those of :func:`tune_by_grid`. Each iterate sees fresh noise, so that many step
    sizes do not adapt to the noise of a few chains; the result is the average of the second half of the
    iterates, or the starting point if that is better on the same random numbers. The curve holds all
    iterates, then these two. Where the guard objects, the step is shortened.
    """
    if per not in get_args(Per):
        raise ValueError(f"per is {per!r}; accepted: {', '.join(get_args(Per))}")
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; expected a whole number, one or more")
    if not dynamics.steps:
        raise ValueError("there is no step size to tune: dynamics has zero steps")
    rng, rewind = _replay(rng, x)
    # Of a list all generators advance alike, so that an example does not depend on its place among the processes.
    example, *_ = [model.sample_prior(1, each) for each in (rng if isinstance(rng, Sequence) else [rng])]
    layers = len(example)
    start = dynamics.table(layers).to(x.device)
    one_size = (per != "layer" or layers == 1) and bool((start == start[:, :1]).all())
    # Layers that have their step sizes in common at the start need not stay so: one estimator for all iterates.
    how = replace(how, estimator=how.estimator_for(model, flatten(example).shape[1], one_size))
    shape = {"run": (), "step": (dynamics.steps, 1), "layer": (dynamics.steps, layers)}[per]
    log_factor = torch.zeros(shape, dtype=start.dtype, device=start.device, requires_grad=True)
    unchanged = log_factor.detach().clone()
    optimiser = torch.optim.Adam([log_factor], lr=learning_rate, betas=(0.8, 0.95))
    curve, tail = _Curve(guard, gather), []

    def evaluate(log_factor: Tensor) -> tuple[Langevin, FreeEnergy]:
        with torch.inference_mode(False), torch.enable_grad():
            table = start * log_factor.exp()
            details = free_energy_details(model, x, dynamics, how, mask=mask, rng=rng, table=table)
        if per == "run":
            return dynamics.scaled(float(log_factor.detach().exp())), details
        schedule = table.detach()[:, 0] if per == "step" and one_size else table.detach()
        return replace(dynamics, step_size=schedule, profile=()), details  # type: ignore[arg-type]

    for iteration in range(iterations):
        candidate, details = evaluate(log_factor)
        if not curve.add(candidate, details):
            # Too long a step: go back under the limit, and forget the momentum that led here.
            excess = min(curve.rows[-1].stability / curve.guard.limit, 100.0)
            log_factor.data -= math.log(max(1.2, 1.1 * excess))
            optimiser.state.clear()
            continue
        (slope,) = torch.autograd.grad(mean_free_energy(details), log_factor)
        log_factor.grad = slope if gather is None else gather(slope[None]).mean(0)
        optimiser.step()
        if iteration >= iterations // 2:
            tail.append(log_factor.detach().clone())
    # Each iterate saw fresh noise; their average is compared with the start on one and the same noise.
    finalists = _Curve(guard, gather)
    for finalist in [unchanged, *([torch.stack(tail).mean(0)] if tail else [])]:
        rewind()
        finalists.add(*evaluate(finalist))
    if finalists.all_excluded():
        return curve.result()
    chosen = finalists.result().best
    curve.rows += finalists.rows
    return curve.result(len(curve.rows) - len(finalists.rows) + chosen)
