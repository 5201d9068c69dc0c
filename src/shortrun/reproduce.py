"""Every table and figure of the paper, each from one command, with the paper's numbers beside the measured ones.

A table is made of cells; a cell is one trained model and what is measured of it. Cells that need the same model share
its training. What is finished is not done again, so everything can be stopped and continued.
"""

from __future__ import annotations

import csv
import fnmatch
import json
import math
import multiprocessing
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from shortrun import data, hierarchy, metrics, tasks
from shortrun.config import Method, Preset, ScaleName, Target, TrainConfig, preset, to_plain
from shortrun.langevin import Langevin
from shortrun.learners.base import NotPossibleError
from shortrun.masks import make_mask
from shortrun.pictures import save_grid, save_lines
from shortrun.report import markdown_table, page, paragraph, picture, section, table
from shortrun.runs import Pretrained, from_pretrained, write_atomically, write_json
from shortrun.train import Loop, train
from shortrun.tune import Guard, StepSizeError, tune_by_grid

COLOUR_SETS = ("svhn", "celeba")
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
    """Training time of a cell; None leaves the preset's number of iterations."""
    updates: int
    """Of the generator, where methods are compared at equal updates."""
    images: int
    """Held-out images for the MSE."""
    samples: int
    """For FID and KID, against as many training images; 0 leaves these out."""
    reader: int = 1500
    """Updates of the network that reads the factors of scenes."""
    most_steps: int = 400
    tune: Literal["grid", "guard"] = "grid"
    """How the step size follows the model, except where tuning is what is shown."""
    stand_in: dict[str, str] = field(default_factory=dict)
    """Data sets that take the place of the real ones."""


PUBLISHED_LAYERS = {1: (128,), 3: (32, 64, 128), 5: (64, 64, 64, 96, 128)}
SCALES: dict[ScaleName, Scale] = {
    "smoke": Scale(
        "smoke", {1: (8,), 3: (4, 6, 8), 5: (4, 4, 4, 6, 8)}, None, 6, 6, 0, reader=2, most_steps=3, tune="guard",
        stand_in={"mnist": "embedded", "svhn": "scenes:60", "celeba": "scenes:60", "scenes": "scenes:60"},
    ),
    "cpu": Scale("cpu", PUBLISHED_LAYERS, 5.0, 6_000, 1_000, 2_000),
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
    tune: Literal["grid", "gradient"] | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [f"{self.data}{self.size or ''}", self.method, f"L{self.layers}", f"K{self.steps}"]
        parts += [self.kind] if self.kind != "top-down" else []
        parts += ["updates"] if self.equal == "updates" else []
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
            steps = min(self.steps, scale.most_steps)
            along = config.learn_last > 1  # the paper's preset updates once per chain
            config = replace(
                config, steps=steps, learn_last=max(1, min(config.learn_last, round(0.72 * steps))) if along else 1,
                cool_down=min(config.cool_down, steps // 4),
            )  # fmt: skip
        iterations, minutes = config.iterations, config.minutes
        if self.equal == "updates":
            iterations, minutes = math.ceil(scale.updates / config.learn_last), None
            config = replace(config, batch=ours.batch)
        elif scale.minutes is not None:
            iterations, minutes = None, scale.minutes
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


def table_cells() -> list[Cell]:
    cells = []
    for (method, layers), row in TABLE_1.items():
        for name, (mse, fid) in row.items():
            paper = {"mse": mse, "fid": fid}
            training = Training(name, method, layers)
            cells.append(Cell("table-1", f"{method} L={layers}", name, training, paper, name != "mnist"))
            if method != "glow":
                fair = replace(training, equal="updates")
                cells.append(
                    Cell("table-1", f"{method} L={layers}, equal updates", name, fair, {"mse": mse, "fid": None}, False)
                )
    for method, values in TABLE_2.items():
        for name, fid in values.items():
            cells.append(Cell("table-2", method, name, Training(name, method, 1), {"mse": None, "fid": fid}))
    for layers, (mse, fid) in TABLE_L.items():
        training = Training("celeba", layers=layers, size=64)
        cells.append(Cell("table-L", f"L={layers}", "celeba64", training, {"mse": mse, "fid": fid}))
    for steps, (mse, fid) in TABLE_K.items():
        training = Training("celeba", layers=5, steps=steps)
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

    def run(self, training: Training) -> Path:
        return self.runs / training.name

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
        return " ".join(words)


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


def do_cell(place: Place, cell: Cell) -> None:
    """Measure what the table shows, and save it with all that is needed to repeat it."""
    path = place.out / "cells" / f"{cell.name}.json"
    if path.is_file():
        return
    trained = place.trained(cell.training)
    generator = torch.Generator().manual_seed(cell.training.seed)
    found: dict[str, Any] = {}
    x = place.held_out(cell.training, place.scale.images)
    try:
        shown = tasks.reconstruct(trained, x, generator)
        found["mse"] = float(tasks.mse_per_image(shown.images, x)[~shown.divergent].mean())
        found |= {"images": len(x), "divergent": int(shown.divergent.sum())}
    except NotPossibleError as error:
        found["no_mse"] = str(error)
    if cell.with_fid and place.scale.samples:
        reference = place.load(cell.training, "train").part(place.scale.samples)
        scores = tasks.score(trained, reference, place.scale.samples, generator, metrics.inception(), place.quiet)
        found |= {key: scores[key] for key in ("fid", "kid", "kid_deviation", "samples", "reference_images", "resize")}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    write_json(
        path,
        {
            "target": cell.target, "row": cell.row, "column": cell.column, "run": cell.training.name,
            "measured": found, "paper": cell.paper, "training": trained.info, "parameters": trained.parameters,
            "command": place.command(cell.target, cell.name), "machine": machine, "torch": torch.__version__,
        },
    )  # fmt: skip


# --- figures ------------------------------------------------------------------------------------------


def draw_samples(place: Place) -> None:
    for training in FIGURES["figure-samples"]:
        images = tasks.sample(place.trained(training), 60, torch.Generator().manual_seed(0))
        title = f"{training.method}, L = {training.layers}, {training.data} {images.shape[2]}x{images.shape[3]}"
        save_grid(place.out / f"samples-{training.name}.png", [("", row) for row in images.split(10)], title)


def draw_reconstructions(place: Place) -> None:
    x = place.held_out(FACES["short-run"], 10)
    rows = [("held out", x)]
    for method, training in FACES.items():
        shown = tasks.reconstruct(place.trained(training), x, torch.Generator().manual_seed(0)).images
        rows.append((method, shown))
    save_grid(place.out / "reconstruction.png", rows)


def draw_inpainting(place: Place) -> None:
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


def draw_hierarchy(place: Place) -> None:
    """One layer at a time; and, on scenes, the share of each layer in each factor."""
    for training in HIERARCHIES:
        trained = place.trained(training)
        generator = torch.Generator().manual_seed(0)
        z = trained.model.sample_prior(4, generator)
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
    numbers: dict[str, Any] = {"reader": quality, "shares": {}, "command": place.command("figure-hierarchy")}
    for training in HIERARCHIES:
        if training.data == "scenes":
            trained = place.trained(training)
            generator = torch.Generator().manual_seed(0)

            def decode(z: Any, trained: Pretrained = trained) -> Tensor:
                return tasks.decode(trained, z)

            def sample(count: int, trained: Pretrained = trained, generator: torch.Generator = generator) -> Any:
                return trained.model.sample_prior(count, generator)

            pairs = 1000 if place.scale_name != "smoke" else 20
            numbers["shares"][training.name] = hierarchy.layer_shares(decode, sample, reader, pairs)
    write_json(place.out / "hierarchy.json", numbers)


def draw_step_size(place: Place) -> None:
    """The tuned step over learning, by grid and by gradient; and the objective for single step sizes."""
    for tune in ("grid", "gradient"):
        series = []
        for training in STEP_SIZE_RUNS:
            if training.tune != tune:
                continue
            lines = _lines(place.run(training) / "metrics.jsonl")
            points = [
                (line["iteration"], math.sqrt(2 * float(torch.tensor(line["step_size"]).max())))
                for line in lines
                if line.get("event") == "tuned"
            ]
            series.append((f"seed {training.seed}", [p[0] for p in points], [p[1] for p in points]))
        save_lines(place.out / f"step-size-{tune}.png", series, ("iteration", "delta"), f"tuned by {tune}", log_y=True)
    lines = _lines(place.run(STEP_SIZE_RUNS[0]) / "objective.jsonl")
    series = []
    for i, delta in enumerate(lines[0]["delta"] if lines else []):
        points = [(line["iteration"], line["free_energy"][i]) for line in lines if line["free_energy"][i] is not None]
        series.append((f"delta = {delta:.3g}", [p[0] for p in points], [p[1] for p in points]))
    labels = ("iteration", "free energy, nats per image")
    save_lines(place.out / "step-size-objective.png", series, labels, "objective for single step sizes")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


DRAWN: dict[str, Callable[[Place], None]] = {
    "figure-samples": draw_samples,
    "figure-reconstruction": draw_reconstructions,
    "figure-inpainting": draw_inpainting,
    "figure-hierarchy": draw_hierarchy,
    "figure-step-size": draw_step_size,
}


def do_figure(place: Place, name: str) -> None:
    DRAWN[name](place)


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
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Train, measure and draw what is missing, then write the report. Returns what failed."""
    cells = [c for c in table_cells() if target in ("all", c.target) and fnmatch.fnmatch(c.name, only)]
    figures = [f for f in FIGURES if target in ("all", f) and fnmatch.fnmatch(f, only)]
    if not cells and not figures:
        names = ", ".join([c.name for c in table_cells() if target in ("all", c.target)][:3])
        raise ValueError(f"--only {only!r} matches nothing in {target}; names look like {names}")
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected one or more")
    needed = [c.training for c in cells] + [t for f in figures for t in FIGURES[f]]
    trainings = list(dict.fromkeys(needed))
    for training in {t.data: t for t in trainings}.values():
        place.load(training, "test")  # files that are missing are noticed now
    if any(c.with_fid for c in cells) and place.scale.samples:
        metrics.inception()
    failed: dict[str, str] = {}

    def run(work: Callable[[Place, Any], None], items: Sequence[Any]) -> None:
        waiting = [item for item in items if not (isinstance(item, Cell) and item.training.name in failed)]
        for i, (item, error) in enumerate(_each(work, place, waiting, jobs), 1):
            say(
                f"{work.__name__.removeprefix('do_')} {i} of {len(waiting)}: {item.name}{': ' + error if error else ''}"
            )
            if error:
                failed[item.name] = error

    run(do_training, trainings)
    run(do_cell, cells)
    for name in figures:
        missing = [t.name for t in FIGURES[name] if t.name in failed]
        if missing:
            failed[name] = f"needs {', '.join(missing)}"
            continue
        error = _attempt(do_figure, place, name)
        say(f"figure {name}{': ' + error if error else ''}")
        if error:
            failed[name] = error
    write_report(place, failed)
    return [f"{name}: {error}" for name, error in failed.items()]


def _attempt(work: Callable[[Place, Any], None], place: Place, item: Any) -> str:
    try:
        work(place, item)
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _each(work: Callable[[Place, Any], None], place: Place, items: Sequence[Any], jobs: int) -> Any:
    """Each item with what went wrong, in order; several at a time in processes of their own."""
    if jobs == 1 or len(items) < 2:
        for item in items:
            yield item, _attempt(work, place, item)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        futures = [pool.submit(_attempt, work, replace(place, quiet=True), item) for item in items]
        for item, future in zip(items, futures, strict=True):
            yield item, future.result()


# --- the report ---------------------------------------------------------------------------------------


def finished_cells(place: Place) -> dict[str, dict[str, Any]]:
    found = {}
    for cell in table_cells():
        path = place.out / "cells" / f"{cell.name}.json"
        if path.is_file():
            found[cell.name] = json.loads(path.read_text())
    return found


def _show(value: float | None, measure: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if measure == "fid" else f"{value:.4f}"


def agreement(rows: Sequence[dict[str, Any]], measure: str) -> tuple[int, int, list[str]]:
    """Pairs of rows that the paper orders, how many of them are in the same order here, and those that are not."""
    known = [r for r in rows if r["paper"].get(measure) is not None and r["measured"].get(measure) is not None]
    total = agreeing = 0
    against = []
    for i, a in enumerate(known):
        for b in known[i + 1 :]:
            theirs = a["paper"][measure] - b["paper"][measure]
            ours = a["measured"][measure] - b["measured"][measure]
            if theirs == 0:
                continue
            total += 1
            if theirs * ours > 0:
                agreeing += 1
            else:
                better, worse = (a, b) if theirs < 0 else (b, a)
                against.append(f"{better['row']} before {worse['row']}")
    return total, agreeing, against


def write_report(place: Place, failed: dict[str, str]) -> None:
    """``report.html``, ``report.md``, and ``<table>.csv`` for what is finished."""
    cells = finished_cells(place)
    sections, text = [], []
    for target in dict.fromkeys(c.target for c in table_cells()):
        rows = [row for row in cells.values() if row["target"] == target]
        if not rows:
            continue
        heads = ["row", "data", "MSE", "MSE, paper", "FID", "FID, paper", "KID", "updates", "seconds"]
        lines = []
        for row in rows:
            found, paper = row["measured"], row["paper"]
            lines.append(
                [row["row"], row["column"], _show(found.get("mse"), "mse"), _show(paper["mse"], "mse"),
                 _show(found.get("fid"), "fid"), _show(paper["fid"], "fid"), _show(found.get("kid"), "kid"),
                 f"{row['training'].get('updates', 0):,}", f"{row['training'].get('seconds', 0):.0f}"]
            )  # fmt: skip
        with (place.out / f"{target}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([heads, *lines])
        notes = []
        for column in dict.fromkeys(row["column"] for row in rows):
            for measure in ("mse", "fid"):
                for fair in (False, True):
                    part = [r for r in rows if r["column"] == column and ("equal updates" in r["row"]) == fair]
                    total, agreeing, against = agreement(part, measure)
                    if total:
                        note = f"{column}{', equal updates' if fair else ''}: order by {measure.upper()} agrees with "
                        note += f"the paper in {agreeing} of {total} pairs"
                        notes.append(note + (f"; the paper has {'; '.join(against)}" if against else ""))
        title = f"{target}: {place.command(target)}"
        sections.append(section(title, table(lines, heads) + "".join(paragraph(note) for note in notes)))
        text += [f"## {title}", markdown_table(lines, heads), *(f"- {note}" for note in notes)]
    for target, pattern in PICTURES.items():
        paths = sorted(place.out.glob(pattern))
        if paths:
            title = f"{target}: {place.command(target)}"
            sections.append(section(title, "".join(paragraph(p.stem) + picture(p, p.stem) for p in paths)))
            text += [f"## {title}", *(f"![{p.stem}]({p.name})" for p in paths)]
    if (place.out / "hierarchy.json").is_file():
        numbers = json.loads((place.out / "hierarchy.json").read_text())
        heads = ["model", "layer", *hierarchy.FACTORS]
        lines = [
            [name, f"z_{len(shares) - i}", *(f"{share[factor]:.2f}" for factor in hierarchy.FACTORS)]
            for name, shares in numbers["shares"].items()
            for i, share in enumerate(shares)
        ]
        note = f"Share of each factor's variation when one layer alone is drawn anew. Reader: {numbers['reader']}"
        sections.append(section("Which layer controls what", paragraph(note) + table(lines, heads)))
        text += ["## Which layer controls what", note, markdown_table(lines, heads)]
    heads = ["number", "command", "data checksum", "seed", "machine", "torch", "held-out images", "samples"]
    lines = [
        [name, row["command"], row["training"].get("train_checksum", ""), row["training"].get("seed", ""),
         row["machine"], row["torch"], row["measured"].get("images", "-"), row["measured"].get("samples", "-")]
        for name, row in cells.items()
    ]  # fmt: skip
    sections.append(section("Where each number comes from", table(lines, heads)))
    text += ["## Where each number comes from", markdown_table(lines, heads)]
    if failed:
        sections.append(section("What failed", table(failed.items(), ["what", "why"])))
        text += ["## What failed", markdown_table(failed.items(), ["what", "why"])]
    scale = place.scale
    budget = "as published" if scale.minutes is None else f"{scale.minutes:g} minutes of training per model"
    introduction = (
        f"Preset {place.scale_name}: {budget}, or {scale.updates:,} updates where updates are equal; MSE per pixel in "
        f"[-1, 1] on {scale.images:,} held-out images; FID and KID of {scale.samples:,} samples against as many "
        f"training images ({metrics.RESIZE}). The paper trains 300,000 updates and takes FID of 40,000 samples, so "
        "compare orders rather than values."
    )
    title = "The paper's tables and figures, measured"
    write_atomically(place.out / "report.html", page(title, paragraph(introduction), sections).encode())
    write_atomically(place.out / "report.md", ("\n\n".join([f"# {title}", introduction, *text]) + "\n").encode())
