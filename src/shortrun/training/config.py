"""The settings of a run: data, loop, method and network, each with those who use them; a file is one flat list."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from shortrun.data import DataSettings
from shortrun.files import write_atomically
from shortrun.learners import Method, learner_class
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.glo import GLOSettings
from shortrun.learners.vae import VAESettings
from shortrun.priors import PriorKind
from shortrun.processes import MixedPrecision
from shortrun.settings import BelowOne, Count, CountOrZero, Positive, Range, Seed, Share, check

COMPILE_FROM_MINUTES, COMPILE_FROM_UPDATES = 10.0, 20_000
# What a network of version 0.1 was whose file does not say, because the setting did not exist.
BEFORE: dict[str, Any] = {"published_glow": False, "batch_norm": False, "gate": "affine"}
# Settings whose former values are taken for what came in their place.
FORMER: dict[str, dict[Any, str]] = {"step_control": {"follow": "bound", "gain": "bound"}, "tune": {"guard": "off"}}


@dataclass(frozen=True)
class RunSettings:
    """Of the loop, whatever the method."""

    order: Literal["random", "epochs"] = "random"
    """random: every batch is drawn from all images; epochs: each image once, in a new order each time."""
    seed: Seed = 0
    """Of weights, order of images, chains and masks."""
    iterations: Count | None = None
    """T, the number of batches that are learned from; with chains, each gives several updates."""
    minutes: Positive | None = 10.0
    """Stop after this much training time. With both limits, the first one counts."""
    clock: Literal["wall", "processor"] = "wall"
    """What measures training time: the clock on the wall, or the time that processors worked for this process, which
    other work on the machine hardly changes (with several threads it adds up over them)."""
    batch: Annotated[int, Range(1, 1_000_000)] = 64
    """Images per update, over all processes together."""
    learning_rates: tuple[Positive, ...] = (1e-3,)
    """Learning rates, each for an equal share of the run; the last share decays smoothly if decay is set."""
    rate_changes: tuple[CountOrZero, ...] = ()
    """Iterations at which the next learning rate starts, instead of equal shares."""
    decay: bool = True
    """Let the learning rate fall to a fiftieth along a cosine in the last 40 % of the run."""
    warm_up: CountOrZero = 40
    """Iterations over which the learning rate rises from zero."""
    start_at_mean: bool = True
    """Whether the generator starts at images of the mean colour of the training images."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """Of Adam."""
    sigma: tuple[Positive, Positive] = (0.3, 0.22)
    """Observation noise at the start and after annealing."""
    anneal: Share = 0.7
    """Share of the run at which sigma has its last value."""
    anneal_from: Share = 0.0
    """Share of the run at which annealing starts."""
    anneal_shape: Literal["geometric", "linear"] = "geometric"
    """How sigma falls in between."""
    mask: str | None = None
    """Hide part of every training image: a mask such as lower-half, random:0.3, blocks:6:3, box:8,8,12,12."""
    evaluate_every: Positive = 20.0
    """Seconds between evaluations on held-out images (or iterations, if there is no limit of minutes)."""
    evaluate_images: Count = 100
    """Number of held-out images for that."""
    checkpoint_every: Positive = 30.0
    """Seconds between checkpoints (or iterations, if there is no limit of minutes)."""
    mixed_precision: MixedPrecision = "no"
    """Of the network; latents and their update stay in float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether gradients are compiled: it takes up to half a minute once; auto does it for long runs."""
    prior: PriorKind = "mixture"
    """The law of the latents that samples are drawn from, fitted to those of training images once training is over:
    gaussian, mixture, flow or energy; normal leaves it at N(0, I), as in the paper. Chains start there anyway."""
    prior_images: Count = 10_000
    """Number of training images whose latents it is fitted to (at most all there are)."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""

    def __post_init__(self) -> None:
        check(self)
        problems = []
        if not self.learning_rates:
            problems.append("learning_rates is empty; expected one or more")
        if self.rate_changes and (
            len(self.rate_changes) != len(self.learning_rates) - 1
            or list(self.rate_changes) != sorted(self.rate_changes)
        ):
            problems.append(
                f"rate_changes is {self.rate_changes}; expected one iteration, in rising order, between two of the "
                f"{len(self.learning_rates)} learning_rates"
            )
        if self.anneal_from > self.anneal:
            problems.append(f"anneal_from is {self.anneal_from}; expected between 0 and anneal ({self.anneal})")
        if self.iterations is None and self.minutes is None:
            problems.append("neither iterations nor minutes is set: the run would never end")
        if problems:
            raise ValueError("; ".join(problems))


def _pick(kind: type[Any], values: dict[str, Any]) -> Any:
    """The dataclass ``kind`` with those of the values that it has."""
    names = {f.name for f in fields(kind)}
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in names})


def names_of(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    method: Method = "short-run"
    data: DataSettings = field(default_factory=DataSettings)
    run: RunSettings = field(default_factory=RunSettings)
    settings: Any = field(default_factory=ShortRunSettings)
    """Of the method: ``learner_class(method).Settings``."""
    network: Any = field(default_factory=lambda: learner_class("short-run").Network())
    """Of its network: ``learner_class(method).Network``."""

    def changed(self, **changes: Any) -> Config:
        """With single settings changed, each named as on the command line; ``network`` takes a dictionary of its own.

        >>> Config().changed(steps=40, minutes=2.0, network={"channels": 8}).settings.steps
        40
        """
        network = changes.pop("network", {})
        if not (isinstance(network, dict) or is_dataclass(network)):
            raise ValueError(f"network is {network!r}; expected a dictionary of settings of the network")
        network = network if isinstance(network, dict) else asdict(network)  # type: ignore[arg-type]
        parts = {"data": self.data, "run": self.run, "settings": self.settings}
        routed: dict[str, dict[str, Any]] = {name: {} for name in parts}
        for key, value in changes.items():
            home = next((name for name, part in parts.items() if key in names_of(part)), None)
            if home is None:
                raise ValueError(_unknown(key, self.method, [n for part in parts.values() for n in names_of(part)]))
            routed[home][key] = tuple(value) if isinstance(value, list) else value
        for key in network:
            if key not in names_of(self.network):
                raise ValueError(_unknown(f"network {key}", self.method, list(names_of(self.network))))
        changed = {name: replace(part, **routed[name]) for name, part in parts.items()}
        return replace(self, **changed, network=replace(self.network, **network))

    def flat(self) -> dict[str, Any]:
        """All settings as one dictionary of plain values; those of the network under ``model``."""
        values = {**asdict(self.data), "method": self.method, "model": asdict(self.network)}
        return _plain({**values, **asdict(self.run), **asdict(self.settings)})

    def save(self, path: Path) -> None:
        write_atomically(path, yaml.safe_dump(self.flat(), sort_keys=False).encode())

    @classmethod
    def load(cls, path: Path) -> Config:
        """From a file of :meth:`save`; files of version 0.1 hold the settings of all methods, which is fine."""
        try:
            values = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is {type(values).__name__}; expected a table of settings and values")
        try:
            return cls._of_file(values)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from None

    @classmethod
    def _of_file(cls, values: dict[str, Any]) -> Config:
        method = values.pop("method", "short-run")
        network = values.pop("model", {})
        if not values.pop("fit_spread", True):  # what version 0.1 called it
            values.setdefault("prior", "normal")
        values.setdefault("momentum", 0.0)  # which there was not at first
        for name, former in FORMER.items():
            if isinstance(value := values.get(name), str | bool):
                values[name] = former.get(value, value)
        learner = learner_class(method)
        kinds: list[Any] = [DataSettings, RunSettings, learner.Settings]
        known = set().union(*(names_of(kind) for kind in [*kinds, ShortRunSettings, VAESettings, GLOSettings]))
        if unknown := set(values) - known:
            raise ValueError(f"unknown settings: {', '.join(sorted(map(str, unknown)))}")
        data, run, settings = (_pick(kind, values) for kind in kinds)
        return cls(method, data, run, settings, network_of(method, network))

    # -- counting -------------------------------------------------------------------------------------

    def updates_along(self, iteration: int) -> int:
        """Updates of the generator in an iteration; the first one is 0."""
        if isinstance(self.settings, ShortRunSettings):
            return self.settings.updates_along(iteration, self.run.warm_up)
        return 1

    def updates_in(self, iterations: int) -> int:
        """Updates of the generator in the first ``iterations``."""
        early = min(iterations, self.run.warm_up)
        return early * self.updates_along(0) + (iterations - early) * self.updates_along(self.run.warm_up)

    def iterations_for(self, updates: int) -> int:
        """The fewest iterations with at least this many updates."""
        first = self.updates_along(0) if self.run.warm_up else self.updates_along(self.run.warm_up)
        early = min(math.ceil(updates / first), self.run.warm_up)
        left = max(updates - early * first, 0)
        return early + math.ceil(left / self.updates_along(self.run.warm_up))

    @property
    def compiles(self) -> bool:
        """Whether compiling is asked for, or the run is long enough to earn back the half minute that it may take."""
        run = self.run
        if run.compile != "auto":
            return run.compile == "on"
        updates = math.inf if run.iterations is None else self.updates_in(run.iterations)
        minutes = math.inf if run.minutes is None else run.minutes
        return minutes >= COMPILE_FROM_MINUTES and updates >= COMPILE_FROM_UPDATES


def network_of(method: str, values: dict[str, Any]) -> Any:
    """The network settings of a method from a file; files of version 0.1 hold those of all methods, or lack some."""
    return _pick(learner_class(method).Network, {**BEFORE, **values})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _unknown(name: str, method: str, accepted: list[str]) -> str:
    near = difflib.get_close_matches(name, accepted, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"accepted: {', '.join(sorted(accepted))}"
    return f"{method} has no setting {name!r}; {hint}"
