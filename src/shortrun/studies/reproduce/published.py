"""What the paper reports, and the models that its tables and figures are made of, at four sizes.

A table is made of cells; a cell shows what was measured of one trained model. Cells whose models have the same settings
at some size share one model there.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shortrun.learners import Method
from shortrun.training.config import Config
from shortrun.training.presets import Preset, preset

Target = Literal[
    "all", "table-1", "table-2", "table-L", "table-K", "figure-samples", "figure-reconstruction", "figure-inpainting",
    "figure-hierarchy", "figure-step-size", "steps", "additions",
]  # fmt: skip
"""What can be reproduced; the last two are questions of our own: K at equal minutes, and what each addition brings."""
ScaleName = Literal["smoke", "cpu", "night", "paper"]
COLOUR_SETS = ("svhn", "celeba")
DATA_SETS = ("mnist", *COLOUR_SETS)
Equal = Literal["minutes", "updates"]


# --- what the paper reports ---------------------------------------------------------------------------

# Table 1: (MSE, FID) by method, layers and data set; None where the paper has a dash.
TABLE_1: dict[tuple[Method, int], dict[str, tuple[float | None, float | None]]] = {
    ("glow", 3): {"mnist": (None, None), "svhn": (None, 65.27), "celeba": (None, 39.84)},
    ("ladder-vae", 1): {"mnist": (0.020, None), "svhn": (0.019, 46.78), "celeba": (0.031, 69.90)},
    ("ladder-vae", 3): {"mnist": (0.018, None), "svhn": (0.015, 41.72), "celeba": (0.029, 58.33)},
    ("ladder-vae", 5): {"mnist": (0.018, None), "svhn": (0.014, 39.26), "celeba": (0.028, 53.40)},
    ("short-run", 1): {"mnist": (0.019, None), "svhn": (0.018, 44.86), "celeba": (0.019, 45.74)},
    ("short-run", 3): {"mnist": (0.017, None), "svhn": (0.015, 39.02), "celeba": (0.018, 41.15)},
    ("short-run", 5): {"mnist": (0.015, None), "svhn": (0.011, 35.23), "celeba": (0.011, 36.84)},
}
# Table 2: FID by method, one layer.
TABLE_2: dict[Method, dict[str, float]] = {
    "abp": {"svhn": 49.71, "celeba": 51.50},
    "glo": {"svhn": 65.52, "celeba": 50.70},
    "vae": {"svhn": 46.78, "celeba": 69.90},
    "vae-iaf": {"svhn": 50.41, "celeba": 53.78},
    "short-run": {"svhn": 44.86, "celeba": 45.74},
}
# Table 3: (MSE, FID), by layers (CelebA 64x64) and by steps (CelebA 32x32, five layers).
TABLE_L = {1: (0.020, 61.03), 3: (0.018, 52.19), 5: (0.015, 47.95)}
TABLE_K = {5: (0.045, 82.79), 10: (0.037, 67.38), 25: (0.011, 36.84), 50: (0.010, 35.39), 400: (0.010, 35.16)}
PAPER_DELTA = 0.05
"""Where the step size settles, by grid and by gradient (text of Sec. 5.5)."""


# --- sizes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    preset: Preset
    layers: dict[int, tuple[int, ...]]
    """Sizes of the latents by number of layers, top layer first."""
    minutes: float | None
    """Training time of a model of 32x32 images, larger ones in proportion to their pixels; None keeps the preset's
    number of iterations."""
    updates: int
    """Of the generator, where methods are compared at equal updates."""
    images: int
    """Held-out images for the MSE."""
    samples: int
    """For FID and KID, against as many training images; 0 for neither."""
    reader: int = 1500
    """Updates of the network that reads the factors of scenes."""
    pairs: int = 1000
    """Of images that differ in one layer, for the share of that layer."""
    most_steps: int = 400
    tune_every: int = 1000
    """T_s of the runs that show how the step size is tuned."""
    tune: Literal["grid", "off"] = "grid"
    """How the step size follows the model, except where tuning is what is shown."""
    large: float = 4.0
    """Training time of a model of 64x64 images, in units of ``minutes``."""
    clock: Literal["wall", "processor"] = "wall"
    """What measures it."""
    evaluations: int = 10
    """Points of the curve of each training."""
    watched: int = 100
    """Held-out images that the curve is taken on."""
    prior_images: int = 2000
    """Training images whose latents a prior is learned from, of each model."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Cells, models and figures that do not earn their time at this size, as patterns, and why."""
    stand_in: dict[str, str] = field(default_factory=dict)
    """Data sets that take the place of the real ones."""


PUBLISHED_LAYERS = {1: (128,), 3: (32, 64, 128), 5: (64, 64, 64, 96, 128)}
# A short training fills few latents well: the published ones by four, about as the feature maps of the cpu preset.
SMALL_LAYERS = {layers: tuple(size // 4 for size in sizes) for layers, sizes in PUBLISHED_LAYERS.items()}
SCALES: dict[ScaleName, Scale] = {
    "smoke": Scale(
        "smoke", {1: (8,), 3: (4, 6, 8), 5: (4, 4, 4, 6, 8)}, None, 6, 6, 0, reader=2, pairs=20, most_steps=3,
        tune="off", left_out={"additions/*seed_[12]": "one seed is enough to see that it runs"},
        stand_in={"mnist": "embedded", "svhn": "scenes:60", "celeba": "scenes:70", "scenes": "scenes:60"},
    ),
    "cpu": Scale(
        "cpu", SMALL_LAYERS, 1.5, 2_000, 1_000, 2_000, tune_every=15, left_out={
            "steps/*": "90 seconds do not tell; the preset night asks this",
            "additions/*": "90 seconds do not tell; the preset night asks this",
        },
    ),
    "night": Scale(
        "cpu", PUBLISHED_LAYERS, 20.0, 2_000, 1_000, 2_000, large=2.0, clock="processor", evaluations=20, watched=300,
        prior_images=10_000, left_out={
            "*equal_updates*": "the curves compare the same runs at equal updates and at equal images",
            "table-1/glow*": "20 minutes on one core give it some 15,000 updates of the 300,000 that it would need",
            "table-2/abp/celeba": "two more colour sets would tell little that SVHN does not",
            "table-2/vae-iaf/celeba": "two more colour sets would tell little that SVHN does not",
            "table-K/*": "the target `steps` compares K at equal minutes instead",
        },
    ),
    "paper": Scale("paper", PUBLISHED_LAYERS, None, 300_000, 10_000, 40_000),
}  # fmt: skip


Without = Literal["along", "marginal", "momentum"]
# Settings that take one of our additions away.
WITHOUT: dict[Without, dict[str, Any]] = {
    "along": {"learn_last": 1}, "marginal": {"entropy": "conditional"}, "momentum": {"momentum": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """One model to train."""

    data: str
    method: Method = "short-run"
    layers: int = 3
    steps: int = 25
    size: int | None = None
    """Side of the images, where it is not that of the data set."""
    kind: str = "top-down"
    equal: Equal = "minutes"
    fresh: bool = False
    """short-run: half as many updates along each chain after the warm-up, so that as many updates see more images. No
    difference where each chain gives one update."""
    tune: Literal["grid", "gradient"] | None = None
    seed: int = 0
    without: Without | None = None
    """short-run: which of our additions to the paper's algorithm is left out."""
    half: bool = False
    """Half the training time."""

    @property
    def name(self) -> str:
        parts = [f"{self.data}{self.size or ''}", self.method, f"L{self.layers}", f"K{self.steps}"]
        parts += [self.kind] if self.kind != "top-down" else []
        parts += ["updates"] if self.equal == "updates" else []
        parts += ["fresh"] if self.fresh else []
        parts += [self.tune] if self.tune else []
        parts += [f"without-{self.without}"] if self.without else []
        parts += ["half"] if self.half else []
        parts += [f"seed{self.seed}"] if self.seed else []
        return "-".join(parts)

    def config(self, scale: Scale, data_root: str | None) -> Config:
        name = scale.stand_in.get(self.data, self.data)
        size = None if name.startswith(("embedded", "scenes", "mnist", "svhn")) else self.size
        config = preset(scale.preset, name, self.method).changed(data_root=data_root, size=size, seed=self.seed)
        config = config.changed(prior_images=min(scale.prior_images, config.run.prior_images), clock=scale.clock)
        if self.method != "glow":
            config = config.changed(network={"kind": self.kind, "latent_sizes": scale.layers[self.layers]})
        config = self._with_steps(config, scale)
        if self.without is not None:
            config = config.changed(**WITHOUT[self.without])
        iterations, minutes = config.run.iterations, config.run.minutes
        if self.equal == "updates":
            iterations, minutes = config.iterations_for(scale.updates), None
            config = config.changed(batch=preset(scale.preset, name).run.batch)
        elif scale.minutes is not None:
            iterations, minutes = None, scale.minutes * (scale.large if self.size == 64 else 1.0) * self._share
        moments = iterations if minutes is None else 60 * minutes
        assert moments is not None
        points = scale.evaluations
        every = max(moments / points, 6) if minutes is None else moments / points
        return config.changed(
            iterations=iterations, minutes=minutes, evaluate_every=every, checkpoint_every=max(every / 2, 1),
            evaluate_images=min(scale.watched, config.run.evaluate_images if scale.minutes is None else scale.images),
        )  # fmt: skip

    @property
    def _share(self) -> float:
        return 0.5 if self.half else 1.0

    def _with_steps(self, config: Config, scale: Scale) -> Config:
        """The length of the chains, and what depends on it; methods without chains stay as they are."""
        preset_steps = getattr(config.settings, "steps", None)
        if preset_steps is None:
            return config
        if self.method != "short-run":
            return config.changed(steps=min(preset_steps, scale.most_steps))
        settings: Any = config.settings
        tune_every = settings.tune_every
        if self.tune is not None:  # tuning is what is shown: have it often enough
            tune_every = min(tune_every, scale.tune_every)
        steps, most = min(self.steps, scale.most_steps), config.updates_along(0)
        along = max(1, min(most, round(0.72 * steps)))
        return config.changed(
            tune=self.tune or scale.tune, tune_every=tune_every, steps=steps, learn_last=along,
            cool_down=min(settings.shorter_steps, steps // 4),
            learn_last_later=along // 2 if self.fresh and along > 1 else None,
            warm_up=round(config.run.warm_up * most / along),  # as many updates, however many chains
        )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One model in one table."""

    target: str
    row: str
    column: str
    training: Training
    paper: dict[str, float | None] = field(hash=False)
    """What the paper has there: mse, fid."""
    with_fid: bool = True

    @property
    def name(self) -> str:
        return f"{self.target}/{self.row}/{self.column}".replace(" ", "_")

    def matches(self, pattern: str) -> bool:
        return fnmatch.fnmatch(self.name, pattern) or fnmatch.fnmatch(self.training.name, pattern)


def table_cells() -> list[Cell]:
    cells = []
    for (method, layers), values in TABLE_1.items():
        for name, (mse, fid) in values.items():
            if mse is None and fid is None:
                continue
            paper = {"mse": mse, "fid": fid}
            training = Training(name, method, layers)
            cells.append(Cell("table-1", f"{method} L={layers}", name, training, paper, name != "mnist"))
            if method == "glow":
                continue
            fair = replace(training, equal="updates")
            row, paper = f"{method} L={layers}, equal updates", {"mse": mse, "fid": None}
            cells.append(Cell("table-1", row, name, fair, paper, False))
            if method == "short-run":
                fresh = replace(fair, fresh=True)
                cells.append(Cell("table-1", f"{row}, more images", name, fresh, paper, False))
    for method, fids in TABLE_2.items():
        for name, fid in fids.items():
            # with one layer a Ladder-VAE is a VAE, and the paper gives both the same numbers
            training = Training(name, "ladder-vae" if method == "vae" else method, 1)
            cells.append(Cell("table-2", method, name, training, {"mse": None, "fid": fid}))
    for layers, (mse, fid) in TABLE_L.items():
        training = Training("celeba", layers=layers, size=64)
        cells.append(Cell("table-L", f"L={layers}", "celeba64", training, {"mse": mse, "fid": fid}))
    for steps, (mse, fid) in TABLE_K.items():
        training = Training("celeba", layers=5, steps=steps, equal="updates")
        cells.append(Cell("table-K", f"K={steps}", "celeba", training, {"mse": mse, "fid": fid}))
    return cells + own_cells()


def own_cells() -> list[Cell]:
    """What the paper does not ask: K at equal minutes, and our own additions, each left out in turn."""
    unknown: dict[str, float | None] = {"mse": None, "fid": None}
    cells = [
        Cell("steps", f"K={steps}, equal minutes", "celeba", Training("celeba", layers=5, steps=steps), unknown)
        for steps in (10, 25, 50)
    ]
    for without in (None, *WITHOUT):
        row = "all of ours" if without is None else f"without {without}"
        for seed in (0, 1, 2):
            training = Training("svhn", seed=seed, without=without, half=True)
            cells.append(Cell("additions", row, f"svhn seed {seed}", training, unknown, with_fid=False))
    return cells


FACES = {
    "ladder-vae": Training("celeba", "ladder-vae", 5, size=64),
    "short-run": Training("celeba", "short-run", 5, size=64),
}
STEP_SIZE_RUNS = [Training("mnist", layers=3, tune="grid", seed=seed) for seed in (0, 1, 2)]
STEP_SIZE_RUNS += [Training("mnist", layers=3, tune="gradient", seed=seed) for seed in (0, 1, 2)]
SCENES = Training("scenes", layers=3)
SCENES_HIERARCHY = Training("scenes", layers=3, kind="hierarchical")
HIERARCHIES = [Training("svhn", layers=3, kind="hierarchical"), SCENES_HIERARCHY, SCENES]
FIGURES: dict[str, list[Training]] = {
    "figure-samples": [*FACES.values(), *(Training(name, layers=5) for name in DATA_SETS)],
    "figure-reconstruction": [*FACES.values(), SCENES],
    "figure-inpainting": [FACES["short-run"], SCENES],
    "figure-hierarchy": HIERARCHIES,
    "figure-step-size": STEP_SIZE_RUNS,
}


def planned() -> list[Training]:
    """All models of the tables and figures, in their order."""
    tables = [cell.training for cell in table_cells()]
    return list(dict.fromkeys(tables + [training for models in FIGURES.values() for training in models]))


PICTURES = {
    "figure-samples": "samples-*.png",
    "figure-reconstruction": "reconstruction-*.png",
    "figure-inpainting": "inpainting-*.png",
    "figure-hierarchy": "hierarchy-*.png",
    "figure-step-size": "step-size-*.png",
}
