"""Settings of learning with chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shortrun.core.free_energy import Entropy, Estimator
from shortrun.core.langevin import Langevin, cool_down
from shortrun.settings import BelowOne, Count, CountOrZero, Positive, check


@dataclass(frozen=True)
class ShortRunSettings:
    """Of short run inference and learning."""

    steps: Count = 25
    """K, the number of Langevin steps."""
    step_size: Positive = 0.02
    """s at the start (drift s * gradient, noise sqrt(2 s))."""
    cool_down: CountOrZero | None = None
    """Number of final steps that become shorter, evenly towards zero: less noise is left in the latents. By default a
    quarter of the steps, at most six."""
    speed_up: CountOrZero | None = None
    """Number of first steps that become longer, evenly from zero: from the prior, far away, a full step overshoots by
    as much as it has to go, into regions that nothing was learned about. By default an eighth of the steps, rounded
    down: 3 of 25."""
    momentum: BelowOne = 0.4
    """Share of the last step that the next one goes on with, so that short chains arrive; 0 is the paper's dynamics."""
    tune: Literal["grid", "gradient", "off"] = "grid"
    """How the free energy is minimised over the step size; off keeps the step fixed."""
    tune_every: Count = 100
    """T_s: iterations between two tunings of the step size."""
    tune_images: Count = 3
    """Images that the step size is tuned on."""
    tune_chains: Count = 4
    """Chains of each of these images; the bounds of the entropy need several."""
    tune_deltas: tuple[Positive, ...] = ()
    """tune=grid: the candidates as delta = sqrt(2 s); by default three around the present step."""
    entropy: Entropy = "marginal"
    """Entropy of the short run distribution: conditional is the paper's, marginal also counts the injected noise."""
    estimator: Estimator = "endpoint"
    """How its log-determinants are estimated: exact (a Hessian at each step), lanczos (products with it), endpoint
    (the curvature at the end of the chain stands for all of it) or auto (exact for few latents)."""
    step_control: Literal["bound", "tuned"] = "bound"
    """bound: tuning leads the step slowly, a price on steepness keeps the generator within its reach, and iterations
    that drive most chains away are undone. tuned, the paper's Algorithm 1: the step is what was tuned, nothing else is
    done, and divergence ends the run."""
    tune_per: Literal["run", "step", "layer"] = "run"
    """For tune=gradient: one step size, one per step, or one per step and layer."""
    learn_last: Count | None = None
    """m: update the generator at each of the last m points of the chain; 1 is the paper's algorithm. By default 0.72
    of the steps: 18 of 25."""
    learn_last_later: Count | None = None
    """m after the warm-up, if it is to be another one: fewer updates per chain see more images in as many updates."""
    loss: Literal["per-pixel", "log-joint", "sum-of-squares"] = "per-pixel"
    """Unit of what the generator descends: minus the mean log joint times sigma^2 / pixels, minus the mean log joint
    (the paper's), or the sum of squares over the batch (the authors' script). Adam heeds it only by its epsilon."""

    def __post_init__(self) -> None:
        check(self)
        problems = []
        for name in ("cool_down", "speed_up"):
            value = getattr(self, name)
            if value is not None and value >= self.steps:
                problems.append(f"{name} is {value}; expected less than the {self.steps} steps")
        for name in ("learn_last", "learn_last_later"):
            value = getattr(self, name)
            if value is not None and value > self.steps + 1:
                problems.append(f"{name} is {value}, more than the {self.steps + 1} points of a chain")
        if self.entropy == "averaged" and self.estimator not in ("exact", "auto"):
            problems.append(f"entropy averaged needs the estimator exact, not {self.estimator}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def shorter_steps(self) -> int:
        """Number of final steps that become shorter."""
        return min(6, self.steps // 4) if self.cool_down is None else self.cool_down

    def dynamics(self) -> Langevin:
        """The dynamics at the start."""
        first = self.steps // 8 if self.speed_up is None else self.speed_up
        profile = cool_down(self.steps, self.shorter_steps, first)
        return Langevin(self.steps, self.step_size, profile, momentum=self.momentum)

    def updates_along(self, iteration: int, warm_up: int) -> int:
        """Updates of the generator along the chains of an iteration; the first one is 0."""
        first = max(1, round(0.72 * self.steps)) if self.learn_last is None else self.learn_last
        return first if self.learn_last_later is None or iteration < warm_up else self.learn_last_later
