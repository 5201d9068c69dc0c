"""Every table and figure of the paper, each from one command, with the paper's numbers beside the measured ones.

A table is made of cells; a cell shows what was measured of one trained model, and cells that show the same model share
it. What is finished (its JSON file is there) is not done again, so everything can be stopped and continued.
"""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from torch import Tensor

from shortrun import data, hierarchy, metrics, tasks
from shortrun.config import Method, Preset, ScaleName, Target, TrainConfig, preset, to_plain
from shortrun.langevin import Langevin
from shortrun.learners.base import NotPossibleError
from shortrun.masks import make_mask
from shortrun.parallel import processes
from shortrun.pictures import Line, save_grid, save_lines, save_panels
from shortrun.report import markdown_table, page, paragraph, picture, section, table
from shortrun.runs import Pretrained, from_pretrained, read_lines, write_atomically, write_json
from shortrun.train import Loop, train
from shortrun.tune import Guard, StepSizeError, tune_by_grid

COLOUR_SETS = ("svhn", "celeba")
ENCODERS, CHAINS = ("vae", "vae-iaf", "ladder-vae"), ("short-run", "abp")
QUIET_STEPS = 10
"""Steps without noise that lead from a draw to the centre of q(z | x)."""
PAPER_LINE = ("0.6", ":")
MASKS = ("lower-half", "random:0.3", "blocks:8:3")


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


# --- sizes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    preset: Preset
    layers: dict[int, tuple[int, ...]]
    """Sizes of the latents by number of layers, top layer first."""
    minutes: float | None
    """Training time of a model of 32x32 images, larger ones in proportion to their pixels; None leaves the preset's
    number of iterations."""
    updates: int
    """Of the generator, where methods are compared at equal updates."""
    images: int
    """Held-out images for the MSE."""
    samples: int
    """For FID and KID, against as many training images; 0 leaves these out."""
    reader: int = 1500
    """Updates of the network that reads the factors of scenes."""
    pairs: int = 1000
    """Of images that differ in one layer, for the share of that layer."""
    most_steps: int = 400
    tune_every: int = 1000
    """T_s of the runs that show how the step size is tuned."""
    tune: Literal["grid", "guard"] = "grid"
    """How the step size follows the model, except where tuning is what is shown."""
    stand_in: dict[str, str] = field(default_factory=dict)
    """Data sets that take the place of the real ones."""


PUBLISHED_LAYERS = {1: (128,), 3: (32, 64, 128), 5: (64, 64, 64, 96, 128)}
# A short training fills few latents well: the published ones by four, about as the feature maps of the cpu preset.
SMALL_LAYERS = {layers: tuple(size // 4 for size in sizes) for layers, sizes in PUBLISHED_LAYERS.items()}
SCALES: dict[ScaleName, Scale] = {
    "smoke": Scale(
        "smoke", {1: (8,), 3: (4, 6, 8), 5: (4, 4, 4, 6, 8)}, None, 6, 6, 0, reader=2, pairs=20, most_steps=3,
        tune="guard", stand_in={"mnist": "embedded", "svhn": "scenes:60", "celeba": "scenes:60", "scenes": "scenes:60"},
    ),
    "cpu": Scale("cpu", SMALL_LAYERS, 1.5, 2_000, 1_000, 2_000, tune_every=15),
    "paper": Scale("paper", PUBLISHED_LAYERS, None, 300_000, 10_000, 40_000),
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
    equal: Literal["minutes", "updates"] = "minutes"
    fresh: bool = False
    """short-run: half as many updates along each chain, so that as many updates see twice as many images."""
    tune: Literal["grid", "gradient"] | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [f"{self.data}{self.size or ''}", self.method, f"L{self.layers}", f"K{self.steps}"]
        parts += [self.kind] if self.kind != "top-down" else []
        parts += ["updates"] if self.equal == "updates" else []
        parts += ["fresh"] if self.fresh else []
        parts += [self.tune] if self.tune else []
        parts += [f"seed{self.seed}"] if self.seed else []
        return "-".join(parts)

    def config(self, scale: Scale, data_root: str | None) -> TrainConfig:
        name = scale.stand_in.get(self.data, self.data)
        ours = preset(scale.preset, name)
        config = preset(scale.preset, name, self.method)
        model = replace(config.model, kind=self.kind)
        if self.method != "glow":
            model = replace(model, latent_sizes=scale.layers[self.layers])
        size = None if name.startswith(("embedded", "scenes", "mnist", "svhn")) else self.size
        config = replace(config, data=name, data_root=data_root, size=size, model=model, seed=self.seed)
        config = replace(config, steps=min(config.steps, scale.most_steps))
        if self.method == "short-run":
            config = replace(config, tune=self.tune or scale.tune)
            if self.tune is not None:  # tuning is what is shown: have it often enough
                config = replace(config, tune_every=min(config.tune_every, scale.tune_every))
            steps, most = min(self.steps, scale.most_steps), config.learn_last // 2 if self.fresh else config.learn_last
            along = max(1, min(most, round(0.72 * steps)))
            config = replace(
                config, steps=steps, learn_last=along, cool_down=min(config.cool_down, steps // 4),
                warm_up=round(config.warm_up * config.learn_last / along),  # as many updates, however many chains
            )  # fmt: skip
        iterations, minutes = config.iterations, config.minutes
        if self.equal == "updates":
            iterations, minutes = math.ceil(scale.updates / config.learn_last), None
            config = replace(config, batch=ours.batch)
        elif scale.minutes is not None:
            iterations, minutes = None, scale.minutes * ((self.size or 32) / 32) ** 2
        moments = iterations if minutes is None else 60 * minutes
        assert moments is not None
        every = max(moments / 10, 6) if minutes is None else moments / 10
        return replace(
            config, iterations=iterations, minutes=minutes, evaluate_every=every,
            checkpoint_every=max(every / 2, 1), evaluate_images=min(config.evaluate_images, scale.images),
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


def in_table_1(name: str, method: Method, layers: int, equal: Literal["minutes", "updates"] = "minutes") -> Training:
    """The model of a cell of table 1. At equal updates, short run inference would see 18 times fewer images."""
    return Training(name, method, layers, equal=equal, fresh=equal == "updates" and method == "short-run")


def table_cells() -> list[Cell]:
    cells = []
    for (method, layers), row in TABLE_1.items():
        for name, (mse, fid) in row.items():
            if mse is None and fid is None:
                continue
            paper = {"mse": mse, "fid": fid}
            training = in_table_1(name, method, layers)
            cells.append(Cell("table-1", f"{method} L={layers}", name, training, paper, name != "mnist"))
            if method != "glow":
                fair = in_table_1(name, method, layers, "updates")
                cells.append(
                    Cell("table-1", f"{method} L={layers}, equal updates", name, fair, {"mse": mse, "fid": None}, False)
                )
    for method, values in TABLE_2.items():
        for name, fid in values.items():
            # with one layer a Ladder-VAE is a VAE, and the paper gives both the same numbers
            training = Training(name, "ladder-vae" if method == "vae" else method, 1)
            cells.append(Cell("table-2", method, name, training, {"mse": None, "fid": fid}))
    for layers, (mse, fid) in TABLE_L.items():
        training = Training("celeba", layers=layers, size=64)
        cells.append(Cell("table-L", f"L={layers}", "celeba64", training, {"mse": mse, "fid": fid}))
    for steps, (mse, fid) in TABLE_K.items():
        training = Training("celeba", layers=5, steps=steps, equal="updates")
        cells.append(Cell("table-K", f"K={steps}", "celeba", training, {"mse": mse, "fid": fid}))
    return cells


FACES = {
    "ladder-vae": Training("celeba", "ladder-vae", 5, size=64),
    "short-run": Training("celeba", "short-run", 5, size=64),
}
STEP_SIZE_RUNS = [Training("mnist", layers=3, tune="grid", seed=seed) for seed in (0, 1, 2)]
STEP_SIZE_RUNS += [Training("mnist", layers=3, tune="gradient", seed=seed) for seed in (0, 1, 2)]
HIERARCHIES = [
    Training("svhn", layers=3, kind="hierarchical"),
    Training("scenes", layers=3, kind="hierarchical"),
    Training("scenes", layers=3),
]
FIGURES: dict[str, list[Training]] = {
    "figure-samples": [*FACES.values(), *(Training(name, layers=5) for name in ("mnist", *COLOUR_SETS))],
    "figure-reconstruction": list(FACES.values()),
    "figure-inpainting": [FACES["short-run"]],
    "figure-hierarchy": HIERARCHIES,
    "figure-step-size": STEP_SIZE_RUNS,
}


# --- doing it -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where results and runs go, and how large they are."""

    out: Path
    runs: Path
    scale_name: ScaleName
    scale: Scale
    data_root: str | None = None
    quiet: bool = False
    fid: bool = True
    """Whether FID and KID are taken."""
    jobs: int = 1
    """How many models are worked on at a time, each with its share of the threads."""

    @property
    def threads(self) -> int:
        return max(1, torch.get_num_threads() // self.jobs)

    @property
    def budget(self) -> dict[str, Any]:
        """What all numbers of a report must have in common."""
        names = ("minutes", "updates", "images", "samples")
        return {name: getattr(self.scale, name) for name in names} | {"threads": self.threads}

    def run(self, training: Training) -> Path:
        return self.runs / training.name

    def result(self, training: Training) -> Path:
        """What was measured of a model, with all that is needed to repeat it."""
        return self.out / "models" / f"{training.name}.json"

    def wants_fid(self, training: Training) -> bool:
        shown = any(cell.with_fid for cell in table_cells() if cell.training == training)
        return shown and self.fid and self.scale.samples > 0

    def is_measured(self, training: Training) -> bool:
        path = self.result(training)
        return path.is_file() and (not self.wants_fid(training) or "fid" in json.loads(path.read_text())["measured"])

    def drawn(self, figure: str) -> Path:
        return self.out / f"{figure}.json"

    def is_drawn(self, figure: str) -> bool:
        """Whether it shows the models that are measured."""
        path = self.drawn(figure)
        shown = json.loads(path.read_text())["models"] if path.is_file() else {}
        return bool(shown) and all(
            self.result(training).is_file()
            and json.loads(self.result(training).read_text())["training"] == shown[training.name]
            for training in FIGURES[figure]
        )

    def trained(self, training: Training) -> Pretrained:
        return from_pretrained(self.run(training))

    def load(self, training: Training, split: data.Split) -> data.Images:
        config = training.config(self.scale, self.data_root)
        return data.load(config.data, split, root=config.data_root, size=config.size, crop=config.crop)

    def held_out(self, training: Training, count: int) -> Tensor:
        images = self.load(training, "test")
        return images.batch(slice(0, min(count, len(images))))

    def command(self, target: str, only: str = "") -> str:
        words = ["shortrun reproduce", target, f"--preset {self.scale_name}"]
        if only:
            words.append(f"--only '{only}'")
        if self.scale.minutes is not None and self.scale.minutes != SCALES[self.scale_name].minutes:
            words.append(f"--minutes-per-cell {self.scale.minutes:g}")
        if self.jobs > 1:
            words.append(f"--jobs {self.jobs}")
        return " ".join(words)


def do_model(place: Place, training: Training) -> str:
    """Train what is not trained, measure what is not measured, and say what came out."""
    do_training(place, training)
    trained, path = place.trained(training).to(processes().device), place.result(training)
    result = json.loads(path.read_text()) if path.is_file() else {}
    if result.get("training") != trained.info:  # nothing was measured yet, or of another training
        result = describe(place, training, trained) | {"measured": measure_error(place, training, trained)}
        write_json(path, result)
    if place.wants_fid(training) and "fid" not in result["measured"]:
        result["measured"] |= measure_samples(place, training, trained)
        write_json(path, result)
    found = result["measured"]
    return ", ".join(f"{name.upper()} {show(found[name], name)}" for name in ("mse", "fid") if name in found)


def do_training(place: Place, training: Training) -> None:
    """Train, or continue, or leave alone what is finished."""
    folder = place.run(training)
    config = training.config(place.scale, place.data_root)
    started = (folder / "config.yaml").is_file()
    if started:
        before, now = yaml.safe_load((folder / "config.yaml").read_text()), to_plain(config)
        changed = sorted(key for key in now if key != "data_root" and before.get(key) != now[key])
        if changed:
            raise ValueError(f"{folder} holds a run with other settings ({', '.join(changed)}); name another --runs")
    if (folder / "finished.json").is_file():
        return
    watch = _Objective(folder / "objective.jsonl") if training in STEP_SIZE_RUNS and training.tune == "grid" else None
    outcome = train(config, folder, resume=started, quiet=place.quiet, watch=watch)
    if outcome.stopped:
        raise KeyboardInterrupt
    write_json(folder / "finished.json", {"seconds": outcome.seconds, "mse": outcome.mse})


class _Objective:
    """Free energy for a fixed grid of step sizes as the generator learns (paper, step size figure, right)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, loop: Loop) -> None:
        deltas = [0.01 * 1.5**j for j in range(9)]
        x = loop.test_images.batch(slice(0, 8)).to(loop.accelerator.device)
        try:
            result = tune_by_grid(
                loop.model, x, Langevin(loop.config.steps), [d**2 / 2 for d in deltas], estimator="endpoint",
                samples=2, guard=Guard(limit=math.inf), generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
        except StepSizeError:
            return
        values = [value if math.isfinite(value) else None for value in result.free_energy.tolist()]
        line = {"iteration": loop.iteration, "delta": deltas, "free_energy": values}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def machine() -> str:
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def describe(place: Place, training: Training, trained: Pretrained) -> dict[str, Any]:
    """What is needed to repeat the numbers of a model."""
    command = place.command("all", training.name)
    if not any(cell.training == training for cell in table_cells()):
        command = place.command(next(name for name, models in FIGURES.items() if training in models))
    return {
        "command": command, "machine": machine(), "budget": place.budget, "parameters": trained.parameters,
        "training": trained.info,
    }  # fmt: skip


def measure_error(place: Place, training: Training, trained: Pretrained) -> dict[str, Any]:
    """MSE of held-out images, from a draw from q(z | x) and from its centre, where the method has both.

    Draws are compared with draws and centres with centres: the end of a chain is a draw, and with d latents that the
    posterior leaves free its noise alone adds up to ``d sigma^2 / pixels`` to the MSE.
    """
    x = place.held_out(training, place.scale.images)

    def mse(**options: Any) -> tuple[float, int]:
        generator = torch.Generator().manual_seed(training.seed)  # the same chains each time
        shown = tasks.reconstruct(trained, x, generator, **options)
        return float(tasks.mse_per_image(shown.images, x)[~shown.divergent].mean()), int(shown.divergent.sum())

    try:
        error, divergent = mse(by="draw")
    except NotPossibleError as reason:
        return {"no_mse": str(reason)}
    found: dict[str, Any] = {"mse": error, "images": len(x), "divergent": divergent}
    if training.method in ENCODERS:
        found["mse_centre"] = mse(by="method")[0]
    elif training.method in CHAINS:
        found["mse_centre"] = mse(quiet_steps=min(QUIET_STEPS, trained.dynamics.steps))[0]
    return found


def measure_samples(place: Place, training: Training, trained: Pretrained) -> dict[str, Any]:
    """FID and KID of samples."""
    generator = torch.Generator().manual_seed(training.seed)
    reference = place.load(training, "train").part(place.scale.samples)
    network = metrics.inception(device=trained.device)
    scores = tasks.score(trained, reference, place.scale.samples, generator, network, place.quiet)
    return {key: scores[key] for key in ("fid", "kid", "kid_deviation", "samples", "reference_images", "resize")}


# --- figures ------------------------------------------------------------------------------------------


def draw_samples(place: Place) -> dict[str, Any]:
    for training in FIGURES["figure-samples"]:
        images = tasks.sample(place.trained(training), 60, torch.Generator().manual_seed(0))
        title = f"{training.method}, L = {training.layers}, {training.data} {images.shape[2]}x{images.shape[3]}"
        save_grid(place.out / f"samples-{training.name}.png", [("", row) for row in images.split(10)], title)
    return {}


def draw_reconstructions(place: Place) -> dict[str, Any]:
    x = place.held_out(FACES["short-run"], 10)
    rows = [("held out", x)]
    for method, training in FACES.items():
        shown = tasks.reconstruct(place.trained(training), x, torch.Generator().manual_seed(0)).images
        rows.append((method, shown))
    save_grid(place.out / "reconstruction.png", rows)
    return {}


def draw_inpainting(place: Place) -> dict[str, Any]:
    trained = place.trained(FACES["short-run"])
    x = place.held_out(FACES["short-run"], 8)
    height, width = x.shape[2:]
    box = f"box:{height // 4},{width // 4},{height // 2},{width // 2}"
    rows = []
    for name in (box, *MASKS):
        mask = make_mask(name, len(x), height, width, torch.Generator().manual_seed(0))
        fills = tasks.inpaint(trained, x, mask, torch.Generator().manual_seed(0), fills=1).fills
        rows += [(name, torch.where(mask.expand_as(x), x, 0.0)), ("filled", fills[0])]
    save_grid(place.out / "inpainting.png", [*rows, ("original", x)])
    return {}


def draw_hierarchy(place: Place) -> dict[str, Any]:
    """One layer at a time; and, on scenes, the share of each layer in each factor."""
    for training in HIERARCHIES:
        trained = place.trained(training)
        generator = torch.Generator().manual_seed(0)
        z = trained.sample_latents(4, generator)
        with torch.no_grad():
            originals = trained.model.decoder(z)
        rows = []
        for layer in range(len(z)):
            changed = tasks.traverse(trained, z, layer, 9, generator)
            label = f"only z_{len(z) - layer}"
            rows += [
                (label if i == 0 else "", torch.cat([originals[i : i + 1], changed[:, i]])) for i in range(len(z[0]))
            ]
        save_grid(place.out / f"hierarchy-{training.name}.png", rows)
    reader, quality = hierarchy.train_reader(place.scale.reader)
    shares = {}
    for training in HIERARCHIES:
        if training.data == "scenes":
            trained = place.trained(training)
            prior = functools.partial(trained.sample_latents, generator=torch.Generator().manual_seed(0))
            decode = functools.partial(tasks.decode, trained)
            shares[training.name] = hierarchy.layer_shares(decode, prior, reader, place.scale.pairs)
    return {"reader": quality, "shares": shares}


def draw_step_size(place: Place) -> dict[str, Any]:
    """The tuned step over learning, by grid and by gradient; and the objective for single step sizes."""
    for tune in ("grid", "gradient"):
        series = []
        for training in STEP_SIZE_RUNS:
            if training.tune != tune:
                continue
            lines = read_lines(place.run(training) / "metrics.jsonl")
            points = [
                (line["iteration"], math.sqrt(2 * float(torch.tensor(line["chosen"]).max())))
                for line in lines
                if line.get("event") == "tuned" and "chosen" in line
            ]
            series.append((f"seed {training.seed}", [p[0] for p in points], [p[1] for p in points]))
        save_lines(place.out / f"step-size-{tune}.png", series, ("iteration", "delta"), f"tuned by {tune}", log_y=True)
    lines = read_lines(place.run(STEP_SIZE_RUNS[0]) / "objective.jsonl")
    series = []
    for i, delta in enumerate(lines[0]["delta"] if lines else []):
        points = [(line["iteration"], line["free_energy"][i]) for line in lines if line["free_energy"][i] is not None]
        series.append((f"delta = {delta:.3g}", [p[0] for p in points], [p[1] for p in points]))
    labels = ("iteration", "free energy, nats per image")
    save_lines(place.out / "step-size-objective.png", series, labels, "objective for single step sizes")
    return {}


DRAWN: dict[str, Callable[[Place], dict[str, Any]]] = {
    "figure-samples": draw_samples,
    "figure-reconstruction": draw_reconstructions,
    "figure-inpainting": draw_inpainting,
    "figure-hierarchy": draw_hierarchy,
    "figure-step-size": draw_step_size,
}


def do_figure(place: Place, name: str) -> str:
    """Draw a figure, and note what it was drawn from."""
    numbers = DRAWN[name](place)
    models = {training.name: place.trained(training).info for training in FIGURES[name]}
    note = {**numbers, "models": models, "command": place.command(name), "machine": machine()}
    write_json(place.drawn(name), note)
    return "drawn"


PICTURES = {
    "figure-samples": "samples-*.png",
    "figure-reconstruction": "reconstruction.png",
    "figure-inpainting": "inpainting.png",
    "figure-hierarchy": "hierarchy-*.png",
    "figure-step-size": "step-size-*.png",
}


# --- all of it ----------------------------------------------------------------------------------------


def reproduce(
    target: Target,
    place: Place,
    only: str = "*",
    say: Callable[[str], None] = print,
) -> list[str]:
    """Train, measure and draw what is missing, then write the report. Returns what failed."""
    cells = [c for c in table_cells() if target in ("all", c.target) and c.matches(only)]
    figures = [
        name
        for name, models in FIGURES.items()
        if target in ("all", name) and any(fnmatch.fnmatch(n, only) for n in (name, *(t.name for t in models)))
    ]
    if not cells and not figures:
        names = [c.name for c in table_cells() if target in ("all", c.target)][:3]
        names += [t.name for t in FIGURES.get(target, [])][:3]
        raise ValueError(f"--only {only!r} matches nothing in {target}; names look like {', '.join(names)}")
    if place.jobs < 1:
        raise ValueError(f"jobs is {place.jobs}; expected one or more")
    for path in sorted((place.out / "models").glob("*.json")):
        try:
            budget = json.loads(path.read_text())["budget"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no result of `shortrun reproduce`; remove it, or name another --out") from None
        if budget != place.budget:
            raise ValueError(
                f"{path} was measured with {budget}, now it is {place.budget}; name another --out, and other --runs"
            )
    undrawn = [f for f in figures if not place.is_drawn(f)]
    wanted = {c.training for c in cells} | {t for f in figures for t in FIGURES[f]}
    needed = [c.training for c in cells if not place.is_measured(c.training)]
    models = list(dict.fromkeys(needed + [t for f in undrawn for t in FIGURES[f]]))
    models.sort(key=lambda t: -t.steps * (t.size or 32) ** 2)  # the longest first: no job is left alone with it
    if len(models) < len(wanted):
        say(f"{len(wanted) - len(models)} of {len(wanted)} models are measured in {place.out}; these stay as they are")
    for training in {(t.data, t.size): t for t in models}.values():
        for split in get_args(data.Split):
            place.load(training, split)  # files that are missing are noticed now
    if any(place.wants_fid(training) for training in models):
        metrics.inception()
    place.out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with contextlib.closing(_each(place, models)) as done:
        for i, (training, said, error) in enumerate(done, 1):
            say(f"model {i} of {len(models)}, {training.name}: {error or said}")
            if error:
                failed[training.name] = error
            write_report(place, failed)
    for name in undrawn:
        missing = [t.name for t in FIGURES[name] if t.name in failed]
        said, error = ("", f"needs {', '.join(missing)}") if missing else _attempt(do_figure, place, name)
        say(f"{name}: {error or said}")
        if error:
            failed[name] = error
    write_report(place, failed)
    return [f"{name}: {error}" for name, error in failed.items()]


def _attempt(work: Callable[[Place, Any], str], place: Place, item: Any) -> tuple[str, str]:
    """What the work says, and what went wrong."""
    try:
        return work(place, item), ""
    except Exception as error:  # whatever it is, the others can go on
        return "", str(error) if str(error) else type(error).__name__


def _each(place: Place, models: Sequence[Training]) -> Generator[tuple[Training, str, str], None, None]:
    """Each model with what came out and what went wrong; several at a time in processes of their own."""
    if place.jobs == 1:
        for training in models:
            yield training, *_attempt(do_model, place, training)
        return
    waiting, quiet = iter(models), replace(place, quiet=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(place.jobs, context, torch.set_num_threads, (place.threads,)) as pool:
        # No more than can run are submitted: when stopped, those that have begun save, and the others do not begin.
        running = {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, place.jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                training = running.pop(future)
                running |= {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, 1)}
                yield training, *future.result()


# --- the report ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A finished cell."""

    cell: Cell
    result: dict[str, Any]

    def measured(self, measure: str) -> float | None:
        """None where the cell does not show it, or it was not taken."""
        return self.result["measured"].get(measure) if self.cell.with_fid or measure.startswith("mse") else None


def finished(place: Place) -> list[Row]:
    rows = []
    for cell in table_cells():
        path = place.result(cell.training)
        if path.is_file():
            rows.append(Row(cell, json.loads(path.read_text())))
    return rows


def show(value: float | None, measure: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if measure == "fid" else f"{value:.4f}"


def agreement(rows: Sequence[Row], measure: str) -> tuple[int, int, list[str]]:
    """Pairs of rows that the paper orders, how many of them are in the same order here, and those that are not."""
    known = [
        (row.cell.row, paper, found)
        for row in rows
        if (paper := row.cell.paper.get(measure)) is not None and (found := row.measured(measure)) is not None
    ]
    total = agreeing = 0
    against = []
    for a, b in itertools.combinations(known, 2):
        theirs, ours = a[1] - b[1], a[2] - b[2]
        if theirs == 0:
            continue
        total += 1
        if theirs * ours > 0:
            agreeing += 1
        else:
            better, worse = (a, b) if theirs < 0 else (b, a)
            against.append(f"{better[0]} before {worse[0]}")
    return total, agreeing, against


def claims(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """What the paper concludes from its tables, the numbers measured here, and whether they bear it out."""
    known = {row.cell.training: row.result["measured"] for row in rows}
    published: dict[Training, dict[str, float]] = {}
    for cell in table_cells():
        values = {measure: value for measure, value in cell.paper.items() if value is not None}
        published.setdefault(cell.training, {}).update(values)
    found = []

    def compare(claim: str, measure: str, higher: Training, lower: Training) -> None:
        pair = (higher, lower)
        theirs: list[Any] = [published.get(training, {}).get(measure) for training in pair]
        ours: list[Any] = [known.get(training, {}).get(measure) for training in pair]
        if None in theirs or None in ours or theirs[0] <= theirs[1]:
            return
        holds = ours[0] > ours[1]
        numbers = (" > " if holds else ", ").join(show(value, measure) for value in ours)
        found.append((claim, numbers, "yes" if holds else "no"))

    fair: Literal["minutes", "updates"]
    for name in ("mnist", *COLOUR_SETS):
        for fair in ("minutes", "updates"):
            ours = [in_table_1(name, "short-run", layers, fair) for layers in (1, 3, 5)]
            compare(f"{name}, equal {fair}: MSE falls from L = 1 to 5", "mse", ours[0], ours[2])
    for name in COLOUR_SETS:
        ours = [Training(name, "short-run", layers) for layers in (1, 3, 5)]
        compare(f"{name}: FID falls from L = 1 to 5", "fid", ours[0], ours[2])
        for own in ours:
            compare(f"{name}, L = {own.layers}: FID below Ladder-VAE", "fid", replace(own, method="ladder-vae"), own)
        compare(f"{name}, L = 5: FID below Glow", "fid", Training(name, "glow", 3), ours[2])
        for method in TABLE_2:
            if method != "short-run":
                compare(f"{name}, one layer: FID below {method}", "fid", Training(name, method, 1), ours[0])
    for measure in ("mse", "fid"):
        large = [Training("celeba", layers=layers, size=64) for layers in (1, 5)]
        compare(f"celeba 64x64: {measure.upper()} falls from L = 1 to 5", measure, large[0], large[1])
        for few, more in itertools.pairwise(TABLE_K):
            steps = [Training("celeba", layers=5, steps=k, equal="updates") for k in (few, more)]
            compare(f"celeba: {measure.upper()} falls from K = {few} to {more}", measure, steps[0], steps[1])
    return found


def against_ladder(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], str]:
    """MSE of Ladder-VAE and short run inference, draws and centres apart: the heads and lines of a table, a summary."""
    known = {row.cell.training: row.result["measured"] for row in rows}
    heads = ["data", "L", "equal", "Ladder-VAE, draw", "short run, draw", "lower",
             "Ladder-VAE, centre", "short run, quiet end", "lower"]  # fmt: skip
    lines = []
    won: dict[tuple[str, str], list[bool]] = {}
    equal: Literal["minutes", "updates"]
    for equal in ("updates", "minutes"):
        for name, layers in itertools.product(("mnist", *COLOUR_SETS), (1, 3, 5)):
            ours, theirs = (in_table_1(name, method, layers, equal) for method in ("short-run", "ladder-vae"))
            if ours not in known or theirs not in known:
                continue
            line = [name, str(layers), equal]
            for measure in ("mse", "mse_centre"):
                pair = known[theirs][measure], known[ours][measure]
                lower = "short run" if pair[1] < pair[0] else "Ladder-VAE"
                line += [*(show(value, "mse") for value in pair), lower]
                won.setdefault((equal, measure), []).append(lower == "short run")
            lines.append(line)
    words = {"mse": "draws", "mse_centre": "centres"}
    parts = [f"{sum(v)} of {len(v)} at equal {equal} ({words[measure]})" for (equal, measure), v in won.items()]
    return heads, lines, f"Short run inference has the lower MSE in {', '.join(parts)}."


class _Document:
    """The same headings, paragraphs, tables and pictures as HTML and as Markdown."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self.text: list[str] = []

    def add(self, title: str, content: Sequence[str | Path | tuple[Sequence[str], Sequence[Sequence[Any]]]]) -> None:
        """Paragraphs, paths of pictures, and tables as (heads, rows)."""
        parts, self.text = [], [*self.text, f"## {title}"]
        for item in content:
            if isinstance(item, str):
                parts.append(paragraph(item))
                self.text.append(item)
            elif isinstance(item, Path):
                parts.append(picture(item, item.stem))
                self.text.append(f"![{item.stem}]({item.name})")
            else:
                parts.append(table(item[1], item[0]))
                self.text.append(markdown_table(item[1], item[0]))
        self.html.append(section(title, "".join(parts)))


def draw_tables(place: Place, rows: Sequence[Row]) -> dict[str, Path]:
    """Tables as pictures, where all of what they show is finished."""
    known: dict[Training, Any] = {row.cell.training: row.result["measured"].get("mse") for row in rows}
    colours: dict[Method, str] = {"short-run": "tab:blue", "ladder-vae": "tab:orange"}
    dashes: dict[Literal["minutes", "updates"], str] = {"updates": "-", "minutes": "--"}
    layers, steps = (1, 3, 5), list(TABLE_K)
    by_layers: dict[str, list[Line]] = {}
    for name in ("mnist", *COLOUR_SETS):
        by_layers[name] = [
            (f"{method}, equal {equal}", (colours[method], dashes[equal]), layers,
             [known.get(in_table_1(name, method, count, equal)) for count in layers])
            for method, equal in itertools.product(colours, dashes)
        ]  # fmt: skip
        paper = [TABLE_1["short-run", count][name][0] for count in layers]
        by_layers[name].append(("short-run, paper", PAPER_LINE, layers, paper))
    measured = [known.get(Training("celeba", layers=5, steps=k, equal="updates")) for k in steps]
    by_steps: list[Line] = [
        ("measured", (colours["short-run"], "-"), steps, measured),
        ("paper", PAPER_LINE, steps, [mse for mse, _ in TABLE_K.values()]),
    ]
    drawn = {}
    for target, panels, label in (
        ("table-1", by_layers, "latent layers L"),
        ("table-K", {"celeba, L = 5": by_steps}, "Langevin steps K"),
    ):
        if all(None not in values for lines in panels.values() for *_, values in lines):
            drawn[target] = place.out / f"{target}.png"
            save_panels(drawn[target], panels, (label, "held-out MSE"), log_x=target == "table-K")
    return drawn


def write_report(place: Place, failed: dict[str, str]) -> None:
    """``report.html``, ``report.md``, and ``<table>.csv`` for what is finished.

    What people have to say about the results, in paragraphs of ``notes.md`` beside them, comes first.
    """
    rows = finished(place)
    document = _Document()
    notes = place.out / "notes.md"
    if notes.is_file():
        document.add("Reading the results", [" ".join(part.split()) for part in notes.read_text().split("\n\n")])
    curves = draw_tables(place, rows)
    held = claims(rows)
    if held:
        borne_out = sum(verdict == "yes" for _, _, verdict in held)
        document.add(
            "What the paper concludes, and what was measured here",
            [f"{borne_out} of {len(held)} hold at this size.", (["claim", "measured", "holds"], held)],
        )
    heads, lines, summary = against_ladder(rows)
    if lines:
        note = (
            "Each number is an error per pixel. A draw from q(z | x) carries its noise into the image, the centre does "
            f"not; for chains, the centre is where the last {QUIET_STEPS} steps lead without noise. The paper does not "
            "say which of the two it measures of an encoder."
        )
        document.add("Short run inference against Ladder-VAE", [summary, note, (heads, lines)])
    for target in dict.fromkeys(cell.target for cell in table_cells()):
        part = [row for row in rows if row.cell.target == target]
        if not part:
            continue
        heads = ["row", "data", "MSE", "MSE, paper", "MSE, centre", "FID", "FID, paper", "KID",
                 "updates", "batches", "seconds"]  # fmt: skip
        lines = [
            [row.cell.row, row.cell.column, show(row.measured("mse"), "mse"), show(row.cell.paper["mse"], "mse"),
             show(row.measured("mse_centre"), "mse"), show(row.measured("fid"), "fid"),
             show(row.cell.paper["fid"], "fid"), show(row.measured("kid"), "kid"),
             f"{row.result['training'].get('updates', 0):,}", f"{row.result['training'].get('iterations', 0):,}",
             f"{row.result['training'].get('seconds', 0):.0f}"]
            for row in part
        ]  # fmt: skip
        with (place.out / f"{target}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([heads, *lines])
        remarks = []
        for column in dict.fromkeys(row.cell.column for row in part):
            for measure, equal in itertools.product(("mse", "fid"), ("minutes", "updates")):
                same = [row for row in part if row.cell.column == column and row.cell.training.equal == equal]
                total, agreeing, against = agreement(same, measure)
                if total:
                    note = f"{column}{', equal updates' if equal == 'updates' else ''}: order by {measure.upper()} "
                    note += f"agrees with the paper in {agreeing} of {total} pairs"
                    remarks.append(note + (f"; the paper has {'; '.join(against)}" if against else ""))
        curve = [curves[target]] if target in curves else []
        document.add(f"{target}: {place.command(target)}", [*curve, (heads, lines), *remarks])
    for target, pattern in PICTURES.items():
        if place.drawn(target).is_file():
            pictures = sorted(place.out.glob(pattern))
            content = [item for path in pictures for item in (path.stem, path)]
            document.add(f"{target}: {place.command(target)}", content)
    if place.drawn("figure-hierarchy").is_file():
        numbers = json.loads(place.drawn("figure-hierarchy").read_text())
        shares = [
            [name, f"z_{len(layers) - i}", *(f"{share[factor]:.2f}" for factor in hierarchy.FACTORS)]
            for name, layers in numbers["shares"].items()
            for i, share in enumerate(layers)
        ]
        quality = ", ".join(f"{name} {value:.3f}" for name, value in numbers["reader"].items())
        note = (
            "Share of each factor's variation when one layer alone is drawn anew, on scenes. The network that reads "
            f"the factors is right in this share (digit, style) or off by so much (position, background): {quality}."
        )
        document.add("Which layer controls what", [note, (["model", "layer", *hierarchy.FACTORS], shares)])
    sources = [
        [path.stem, result["command"], result["training"].get("train_checksum", "")[:16],
         result["training"].get("seed", ""), f"{result['training'].get('seconds', 0):.0f}", result["machine"],
         result["measured"].get("images", "-"), result["measured"].get("samples", "-")]
        for path in sorted((place.out / "models").glob("*.json"))
        for result in [json.loads(path.read_text())]
    ]  # fmt: skip
    heads = ["model", "command", "sha256 of data", "seed", "seconds", "machine", "held-out images", "samples"]
    document.add("Where each number comes from", [(heads, sources)])
    if failed:
        document.add("What failed", [(["what", "why"], list(failed.items()))])
    scale = place.scale
    budget = "as published" if scale.minutes is None else f"{scale.minutes:g} minutes of training per model"
    large = "" if scale.minutes is None else f" ({4 * scale.minutes:g} for 64x64)"
    layers = "; ".join(f"L = {count}: {', '.join(map(str, sizes))}" for count, sizes in scale.layers.items())
    introduction = (
        f"Preset {place.scale_name}: {budget}{large}, or {scale.updates:,} updates where updates are equal; MSE per "
        f"pixel in [-1, 1] on {scale.images:,} held-out images, of a draw from q(z | x) unless it says 'centre'; FID "
        f"and KID of {scale.samples:,} samples against as many training images ({metrics.RESIZE}). Latents: {layers}. "
        "The paper trains 300,000 updates and takes FID of 40,000 samples, so compare orders rather than values."
    )
    title = "The paper's tables and figures, measured"
    text = "\n\n".join([f"# {title}", introduction, *document.text]) + "\n"
    write_atomically(place.out / "report.html", page(title, paragraph(introduction), document.html).encode())
    write_atomically(place.out / "report.md", text.encode())
