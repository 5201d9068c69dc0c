"""Settings of a run, and presets: the same code at three sizes.

``smoke`` takes seconds, ``cpu`` minutes on two cores, ``paper`` is as published.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from shortrun.data import Crop
from shortrun.entropy import Entropy, Estimator

Preset = Literal["smoke", "cpu", "paper", "authors-script"]
Method = Literal["short-run", "abp", "glo", "vae", "vae-iaf", "ladder-vae", "glow"]
# What `shortrun reproduce` can reproduce, and how large.
Target = Literal[
    "all", "table-1", "table-2", "table-L", "table-K", "figure-samples", "figure-reconstruction", "figure-inpainting",
    "figure-hierarchy", "figure-step-size",
]  # fmt: skip
ScaleName = Literal["smoke", "cpu", "paper"]
ONE_LAYER = ("abp", "glo", "vae", "vae-iaf")
HeadChannels = int | Literal["latent"] | None
StepControl = Literal["follow", "tuned"]


DECAY_FROM = 0.6  # share of a run after which the learning rate decays
SCRIPT_EPOCH = 400  # updates in an epoch of the authors' script: 40,000 images in batches of 100
GLOW_WARM_UP = math.ceil(10 * 50_000 / 64)  # ten epochs of 50,000 images (n_train of the official code), 64 at a time


@dataclass(frozen=True)
class ModelConfig:
    """The generator."""

    kind: str = "top-down"
    """top-down (the paper's), hierarchical (independent latents at different depths), or the import path of
    your own nn.Module, such as mypackage.models:Decoder; it is built without arguments and has the
    attribute latent_shapes."""
    latent_sizes: tuple[int, ...] = (32, 64, 128)
    """Sizes of the latents, top layer first."""
    channels: int = 16
    """n_f, the number of maps inside."""
    base: int | None = None
    """Height of the maps inside; by default half of that of the image."""
    head_channels: HeadChannels = None
    """Width of the heads for mean and variance: a number, latent for the size of the latent that the head is for, or by
    default that of the maps."""
    coordinates: Literal["noise", "latent"] = "noise"
    """Whether the dynamics runs on the noises (the authors' script) or on the latents themselves."""
    last_block: bool = True
    """One more block before the output, as in the authors' script; the paper's table has none."""
    activated: bool = False
    """GELU inside projections and heads, as in the authors' script; the paper's text names none there."""
    encoder_channels: int = 16
    """vae, vae-iaf, ladder-vae: maps of the encoder before its first halving; they double with each."""
    batch_norm: bool = True
    """ladder-vae: batch normalisation in the upward pass; models saved before have none."""
    flows: int = 2
    """vae-iaf: autoregressive transformations."""
    flow_width: int = 128
    """vae-iaf: size of the context, half of that of the hidden layers."""
    gate: Literal["sigmoid", "affine"] = "sigmoid"
    """vae-iaf: sigmoid(s) z + (1 - sigmoid(s)) m, which its paper recommends; or exp(a) z + b, as in models saved
    before."""
    levels: int = 3
    """glow: how often the image is squeezed."""
    depth: int = 16
    """glow: steps per level."""
    width: int = 512
    """glow: maps inside a coupling."""
    additive: bool = True
    """glow: additive instead of affine coupling."""
    published_glow: bool = True
    """glow: conditional priors at the splits, a standard normal top and actnorm inside couplings, as in the official
    code; models saved before have none of them."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a run."""

    data: str = "embedded"
    """embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""
    size: int | None = None
    """Side of the images, for celeba, folder, zip and hf."""
    crop: Crop = None
    """Side of the centre square that is cut out before resizing; whole resizes the shorter side and then cuts out the
    centre, as the paper does. By default folders and zips are cut to their largest square, and celeba to the face."""
    train_images: int | None = None
    """Learn from the first so many training images only."""
    order: Literal["random", "epochs"] = "random"
    """random: every batch is drawn from all images; epochs: each image once, in a new order each time."""
    method: Method = "short-run"
    """How the generator is learned."""
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    iterations: int | None = None
    """T, the number of chains per place in the batch; each chain gives learn_last updates."""
    minutes: float | None = 10.0
    """Stop after this much training time. With both limits, the first one counts."""
    batch: int = 32
    """Images per update, over all processes together."""
    steps: int = 25
    """K, the number of Langevin steps."""
    step_size: float = 0.007
    """s at the start (drift s * gradient, noise sqrt(2 s))."""
    cool_down: int = 6
    """The last so many steps become shorter, evenly towards zero: less noise is left in the latents."""
    tune: Literal["grid", "gradient", "guard", "off"] = "grid"
    """How the step size follows the model; guard heeds its steepness alone, off keeps the step fixed."""
    tune_every: int = 100
    """T_s: tune the step size every so many iterations."""
    tune_images: int = 3
    """Images that the step size is tuned on."""
    tune_chains: int = 4
    """Chains of each of these images; the bounds of the entropy need several."""
    tune_deltas: tuple[float, ...] = ()
    """tune=grid: the candidates as delta = sqrt(2 s); by default three around the present step."""
    entropy: Entropy = "marginal"
    """Entropy of the short run distribution: conditional is the paper's, marginal also counts the injected noise."""
    estimator: Estimator = "endpoint"
    """How its log-determinants are estimated: exact (a Hessian at each step), lanczos (products with it) or endpoint
    (the curvature at the end of the chain stands for all of it)."""
    step_control: StepControl = "follow"
    """follow: between tunings the step follows the curvature, and iterations that drive chains away are undone. tuned,
    the paper's Algorithm 1: the step is what was tuned, nothing else changes it, and divergence ends the run."""
    tune_per: Literal["run", "step", "layer"] = "run"
    """For tune=gradient: one step size, one per step, or one per step and layer."""
    fit_spread: bool = True
    """short-run, abp: samples are drawn as wide as the latents were in training, instead of from the prior itself."""
    learn_last: int = 18
    """m: update the generator at each of the last m points of the chain; 1 is the paper's algorithm."""
    learn_last_later: int | None = None
    """m after the warm-up, if it is to be another one: fewer updates per chain see more images in as many updates."""
    learning_rates: tuple[float, ...] = (2e-3,)
    """Learning rates, each for an equal share of the run; the last share decays smoothly if decay is set."""
    rate_changes: tuple[int, ...] = ()
    """Iterations at which the next learning rate begins, instead of equal shares."""
    loss: Literal["per-pixel", "log-joint", "sum-of-squares"] = "per-pixel"
    """Unit of what the generator of short-run and abp descends: minus the mean log joint times sigma^2 / pixels, minus
    the mean log joint (the paper's), or the sum of squares over the batch (the authors' script). Adam minds it only
    through its epsilon."""
    decay: bool = True
    """Let the learning rate fall to a fiftieth along a cosine in the last 40 % of the run."""
    warm_up: int = 40
    """Iterations over which the learning rate rises from zero."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Of Adam."""
    sigma: tuple[float, float] = (0.3, 0.22)
    """Observation noise at the start and after annealing."""
    anneal: float = 0.7
    """Share of the run at which sigma has its last value."""
    anneal_from: float = 0.0
    """Share of the run at which annealing begins."""
    anneal_shape: Literal["geometric", "linear"] = "geometric"
    """How sigma falls in between."""
    kl_warm_up: float = 0.0
    """vae, vae-iaf, ladder-vae: share of the run over which the weight of the KL term rises from 0 to 1."""
    code_rate: float = 1.0
    """glo: learning rate of the codes; it follows the schedule of the generator's."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """glo: what updates the generator."""
    mask: str | None = None
    """Hide part of every training image: a mask such as lower-half, random:0.3, blocks:6:3, box:8,8,12,12."""
    evaluate_every: float = 20.0
    """Seconds between evaluations on held-out images (or iterations, if there is no limit of minutes)."""
    evaluate_images: int = 100
    """How many held-out images are used for that."""
    checkpoint_every: float = 30.0
    """Seconds between checkpoints (or iterations, if there is no limit of minutes)."""
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Of the network; latents and their update stay in float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether gradients are compiled: it takes up to half a minute once; auto does it for long runs."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("batch", "learn_last", "learn_last_later", "tune_every", "tune_images", "tune_chains",
                     "train_images", "evaluate_images"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}; expected one or more")
        if not 0 <= self.cool_down < max(self.steps, 1):
            problems.append(f"cool_down is {self.cool_down}; expected less than the {self.steps} steps")
        if self.steps < 1:
            problems.append(f"steps is {self.steps}; expected one or more")
        for name in ("learn_last", "learn_last_later"):
            value = getattr(self, name)
            if value is not None and value > self.steps + 1:
                problems.append(f"{name} is {value}, more than the {self.steps + 1} points of a chain")
        if self.rate_changes and (
            len(self.rate_changes) != len(self.learning_rates) - 1
            or list(self.rate_changes) != sorted(self.rate_changes)
        ):
            problems.append(
                f"rate_changes is {self.rate_changes}; expected one iteration, in rising order, between two of the "
                f"{len(self.learning_rates)} learning_rates"
            )
        if not all(0 < delta < math.inf for delta in self.tune_deltas):
            problems.append(f"tune_deltas is {self.tune_deltas}; expected positive numbers")
        if not 0 <= self.anneal_from <= self.anneal:
            problems.append(f"anneal_from is {self.anneal_from}; expected between 0 and anneal ({self.anneal})")
        if self.entropy == "averaged" and self.estimator != "exact":
            problems.append(f"entropy averaged needs the estimator exact, not {self.estimator}")
        if self.iterations is None and self.minutes is None:
            problems.append("neither iterations nor minutes is set: the run would never end")
        for name in ("iterations", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                problems.append(f"{name} is {value}; expected more than zero")
        if not 0 <= self.kl_warm_up <= 1 or not self.code_rate > 0:
            problems.append("kl_warm_up must lie between 0 and 1, and code_rate must be positive")
        if min(self.sigma) <= 0 or self.step_size <= 0 or min(self.learning_rates) <= 0:
            problems.append("sigma, step_size and learning_rates must be positive")
        if problems:
            raise ValueError("; ".join(problems))

    def updates_along(self, iteration: int) -> int:
        """Updates of the generator along the chains of an iteration; the first one is 0."""
        return self.learn_last if self.learn_last_later is None or iteration < self.warm_up else self.learn_last_later

    def updates_in(self, iterations: int) -> int:
        """Updates of the generator in the first so many iterations."""
        early = min(iterations, self.warm_up)
        return early * self.learn_last + (iterations - early) * self.updates_along(self.warm_up)

    def iterations_for(self, updates: int) -> int:
        """The fewest iterations with at least so many updates."""
        early = min(math.ceil(updates / self.learn_last), self.warm_up)
        left = max(updates - early * self.learn_last, 0)
        return early + math.ceil(left / self.updates_along(self.warm_up))

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(to_plain(self), sort_keys=False))

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        values = yaml.safe_load(path.read_text())
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{path} has unknown settings: {', '.join(sorted(unknown))}")
        values["model"] = model_from_plain(values["model"])
        for name in ("learning_rates", "rate_changes", "tune_deltas", "betas", "sigma"):
            if name in values:  # older runs lack some
                values[name] = tuple(values[name])
        return cls(**values)


def to_plain(config: Any) -> dict[str, Any]:
    """Nested dataclasses as dictionaries and lists, for YAML and JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value

    return plain(asdict(config))


# What a model was whose file does not say: files written before a setting existed.
BEFORE: dict[str, Any] = {"published_glow": False, "batch_norm": False, "gate": "affine"}


def model_from_plain(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**{**BEFORE, **values, "latent_sizes": tuple(values["latent_sizes"])})


def preset(name: Preset, data: str, method: Method = "short-run") -> TrainConfig:
    """The settings of a preset for a data set and a method.

    >>> preset("paper", "svhn").model.latent_sizes
    (64, 64, 64, 96, 128)
    >>> preset("paper", "svhn", "glo").model.latent_sizes
    (128,)
    """
    if name not in ("smoke", "cpu", "paper", "authors-script"):
        raise ValueError(f"preset is {name!r}; accepted: smoke, cpu, paper, authors-script")
    kind = data.partition(":")[0]
    grey = kind in ("embedded", "mnist")
    if name == "smoke":
        model = ModelConfig(
            latent_sizes=(4, 8), channels=8, base=7 if grey else 8, encoder_channels=4, flow_width=8, levels=2, depth=2,
            width=8,
        )  # fmt: skip
        config = TrainConfig(
            data=data, model=model, iterations=6, minutes=None, batch=8, steps=5, cool_down=1, learn_last=3, warm_up=2,
            tune_every=3, evaluate_every=3, evaluate_images=8, checkpoint_every=3,
        )  # fmt: skip
    elif name == "cpu":
        model = ModelConfig(
            latent_sizes=(32, 64, 128), channels=16 if grey else 24, base=7 if grey else 8, depth=4, width=48
        )
        config = TrainConfig(data=data, model=model, minutes=10.0)
    else:
        # docs/networks.md says where each number comes from, and what was chosen where the text is silent.
        model = ModelConfig(
            latent_sizes=(64, 64, 64, 96, 128), channels=64, head_channels="latent", last_block=False,
            encoder_channels=64,
        )  # fmt: skip
        config = TrainConfig(
            data=data, crop="whole" if kind in ("celeba", "folder", "zip", "hf") else None, model=model,
            iterations=300_000, minutes=None, batch=100, steps=25, step_size=0.05**2 / 2, cool_down=0,
            tune_every=3000, tune_images=4, tune_chains=1, tune_deltas=tuple(i / 100 for i in range(1, 16)),
            entropy="conditional", estimator="exact", step_control="tuned", fit_spread=False, learn_last=1,
            learning_rates=(1e-4, 5e-5, 1e-5), loss="log-joint", decay=False, warm_up=0, betas=(0.9, 0.999),
            sigma=(0.25, 0.15), anneal_from=5 * SCRIPT_EPOCH / 300_000, anneal=1.0, anneal_shape="linear",
            evaluate_every=1000, evaluate_images=1000, checkpoint_every=1000,
        )  # fmt: skip
        if name == "authors-script":
            config = replace(
                config, model=replace(model, last_block=True, activated=True), seed=2, train_images=40_000,
                order="epochs", iterations=601 * SCRIPT_EPOCH, tune="off", loss="sum-of-squares",
                learning_rates=(8e-5, 4e-5, 2e-5, 1e-5), betas=(0.5, 0.999), sigma=(0.15, 0.15), anneal_from=0.0,
                rate_changes=(50 * SCRIPT_EPOCH, 100 * SCRIPT_EPOCH, 300 * SCRIPT_EPOCH),
            )  # fmt: skip
    return config if method == "short-run" else _baseline(config, name, method)


def _baseline(config: TrainConfig, name: Preset, method: Method) -> TrainConfig:
    """What the methods of comparison change: data, generator, budget and observation noise stay."""
    if name == "authors-script":
        raise ValueError(f"the authors' script has no {method}; use the preset paper")
    config = replace(config, method=method, cool_down=0, learn_last=1, tune="off")
    if method in ONE_LAYER:
        size = 8 if name == "smoke" else 128
        config = replace(config, model=replace(config.model, latent_sizes=(size,)))
    if method == "abp":  # 40 steps of delta = 0.3, sigma = 0.3 in the paper's appendix
        if name == "paper":
            return replace(config, steps=40, step_size=0.045, sigma=(0.3, 0.3))
        return replace(config, steps=5 if name == "smoke" else 20, step_size=0.045, tune="guard")
    if name == "cpu":
        rates = {"glo": 2e-3, "glow": 2e-3}
        config = replace(config, batch=64, learning_rates=(rates.get(method, 1e-3),), step_size=0.01)
    if method == "glo" and name == "paper":  # Bojanowski et al. 2018; see learners/glo.py for the rate of the codes
        return replace(config, optimiser="sgd", batch=128, learning_rates=(1.0,), code_rate=10 / 128)
    if method == "ladder-vae":
        return replace(config, kl_warm_up=0.1)
    if method == "glow":
        config = replace(config, betas=(0.9, 0.999))
        if name == "paper":
            config = replace(config, batch=64, learning_rates=(1e-3,), warm_up=GLOW_WARM_UP)
    return config


@dataclass(frozen=True)
class Terms:
    """What is equal for all methods of a comparison."""

    data: str = "embedded"
    data_root: str | None = None
    preset: Preset = "cpu"
    minutes: float | None = None
    """Training time of each."""
    updates: int | None = None
    """Or: updates of the generator of each."""
    images: int = 500
    """Held-out images for the MSE."""
    mask: str = "lower-half"
    """What is hidden for inpainting."""
    samples: int = 500
    """Samples for FID and KID against equally many training images; 0 leaves these out."""
    likelihood_images: int = 16
    """Held-out images for bounds, importance weights and annealed importance sampling; 0 leaves these out."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.images < 1 or self.likelihood_images < 0 or self.samples < 0 or self.samples == 1:
            raise ValueError(
                f"images is {self.images}, likelihood_images {self.likelihood_images}, samples {self.samples}; "
                "expected one or more images, zero or more likelihood_images, and samples either zero or at least two"
            )
        for name in ("minutes", "updates"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected more than zero")

    def config(self, method: Method) -> TrainConfig:
        config = replace(preset(self.preset, self.data, method), data_root=self.data_root, seed=self.seed)
        if self.updates is not None:
            iterations = config.iterations_for(self.updates)
            config = replace(
                config, iterations=iterations, minutes=None, evaluate_every=max(iterations // 5, 1),
                checkpoint_every=max(iterations // 5, 1),
            )  # fmt: skip
        elif self.minutes is not None:
            config = replace(config, minutes=self.minutes, iterations=None, evaluate_every=30.0, checkpoint_every=30.0)
        return config
