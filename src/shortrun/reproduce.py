"""Every table and figure of the paper, each from one command, with the paper's numbers beside the measured ones.

What is finished (its JSON file is there) is not done again, so everything can be stopped and continued. The cells of
the tables are in :mod:`shortrun.published`, the report is in :mod:`shortrun.reproduction_report`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from torch import Tensor

from shortrun import data, hierarchy, metrics, tasks
from shortrun.config import ScaleName, Target, TrainConfig, to_plain
from shortrun.entropy import Entropy, Estimator
from shortrun.langevin import Langevin
from shortrun.learners.base import NotPossibleError
from shortrun.masks import make_mask
from shortrun.parallel import processes
from shortrun.pictures import save_grid, save_lines, save_objectives
from shortrun.published import (
    FACES,
    FIGURES,
    HIERARCHIES,
    PAPER_DELTA,
    QUIET_STEPS,
    SCALES,
    SCENES,
    STEP_SIZE_RUNS,
    Cell,
    Scale,
    Training,
    planned,
    table_cells,
)
from shortrun.reproduction_report import show, write_report
from shortrun.runs import Pretrained, from_pretrained, read_lines, write_json
from shortrun.train import Loop, load_images, train
from shortrun.tune import Estimation, free_energy_details, mean_free_energy

ENCODERS, CHAINS = ("vae", "vae-iaf", "ladder-vae"), ("short-run", "abp")
WITH_ORIGINALS = ("figure-reconstruction", "figure-inpainting")
FITTED_IMAGES = 1000
"""Training images whose inferred latents the law of samples is fitted to, where it is."""
MASKS = ("lower-half", "random:0.3", "blocks:8:3")
OBJECTIVES: dict[Entropy, str] = {
    "conditional": "the paper's objective (conditional entropy)",
    "marginal": "ours (marginal entropy)",
}


# --- models -------------------------------------------------------------------------------------------


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
    originals: bool = True
    """Whether figures show images of the data sets; those of CelebA may not be passed on."""

    @property
    def threads(self) -> int:
        return max(1, torch.get_num_threads() // self.jobs)

    @property
    def budget(self) -> dict[str, Any]:
        """What all numbers of a report must have in common."""
        names = ("minutes", "updates", "images", "samples")
        return {name: getattr(self.scale, name) for name in names} | {"threads": self.threads}

    @property
    def cells(self) -> list[Cell]:
        """Without the rows "more images" where fewer updates per chain are not possible: there is one already."""
        return [c for c in table_cells() if not c.training.fresh or self.model(c.training) == c.training]

    @functools.cached_property
    def _models(self) -> dict[TrainConfig, Training]:
        """The first planned model with each configuration."""
        return {t.config(self.scale, self.data_root): t for t in reversed(planned())}

    def model(self, training: Training) -> Training:
        """The model that is trained: one for all planned ones that have the same configuration at this size.

        For example, without a limit of minutes, methods have equal updates anyway.
        """
        return self._models.get(training.config(self.scale, self.data_root), training)

    def models(self, figure: str) -> list[Training]:
        """The models that a figure shows, each once."""
        return list(dict.fromkeys(self.model(training) for training in FIGURES[figure]))

    def run(self, training: Training) -> Path:
        return self.runs / self.model(training).name

    def result(self, training: Training) -> Path:
        """What was measured of a model, with all that is needed to repeat it."""
        return self.out / "models" / f"{self.model(training).name}.json"

    def wants_fid(self, training: Training) -> bool:
        model = self.model(training)
        shown = any(self.model(cell.training) == model for cell in table_cells() if cell.with_fid)
        return shown and self.fid and self.scale.samples > 0

    def is_measured(self, training: Training) -> bool:
        path = self.result(training)
        return path.is_file() and (not self.wants_fid(training) or "fid" in json.loads(path.read_text())["measured"])

    def drawn(self, figure: str) -> Path:
        return self.out / f"{figure}.json"

    def is_drawn(self, figure: str) -> bool:
        """Whether it shows the models that are measured."""
        path = self.drawn(figure)
        note = json.loads(path.read_text()) if path.is_file() else {"models": {}}
        shown = note["models"]
        if not self.originals and figure in WITH_ORIGINALS and shown and "--no-originals" not in note["command"]:
            return False  # it shows images that are to be left out
        return bool(shown) and all(
            self.result(training).is_file()
            and json.loads(self.result(training).read_text())["training"] == shown.get(training.name)
            for training in self.models(figure)
        )

    def shows(self, training: Training) -> bool:
        """Whether figures may show the images that a model was trained for; scenes are the project's own."""
        return self.originals or training.data == "scenes"

    def trained(self, training: Training) -> Pretrained:
        return from_pretrained(self.run(training))

    def load(self, training: Training, split: data.Split) -> data.Images:
        return load_images(training.config(self.scale, self.data_root), split)

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
        if not self.originals:
            words.append("--no-originals")
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
    watch = _Objective(folder / "objective.jsonl") if place.model(training) == place.model(STEP_SIZE_RUNS[0]) else None
    outcome = train(config, folder, resume=started, quiet=place.quiet, watch=watch)
    if outcome.stopped:
        raise KeyboardInterrupt
    write_json(folder / "finished.json", {"seconds": outcome.seconds, "mse": outcome.mse})


class _Objective:
    """Free energy for a fixed grid of step sizes as the generator learns (paper, step size figure, right).

    With the paper's entropy and with ours, of the same chains.
    """

    DELTAS = tuple(0.01 * 1.5**j for j in range(9))
    IMAGES, MOMENTS, MOST_EXACT = 8, 5, 64

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, loop: Loop) -> None:
        if loop.share < (len(read_lines(self.path)) + 1) / self.MOMENTS:
            return  # not yet: each moment takes as long as many iterations
        x = loop.test_images.batch(slice(0, self.IMAGES)).to(loop.accelerator.device)
        latents = sum(math.prod(shape) for shape in loop.model.latent_shapes)
        estimator: Estimator = "exact" if latents <= self.MOST_EXACT else "endpoint"
        line: dict[str, Any] = {"iteration": loop.iteration, "estimator": estimator, "images": len(x)}
        line["delta"] = self.DELTAS
        for entropy in OBJECTIVES:
            how = Estimation(entropy, estimator, samples=1)
            line[entropy] = []
            for delta in self.DELTAS:
                generator = torch.Generator().manual_seed(0)  # the same chains each time
                dynamics = Langevin(loop.config.steps, delta**2 / 2)
                value = float(mean_free_energy(free_energy_details(loop.model, x, dynamics, how, generator=generator)))
                line[entropy].append(value if math.isfinite(value) else None)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def machine() -> str:
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def describe(place: Place, training: Training, trained: Pretrained) -> dict[str, Any]:
    """What is needed to repeat the numbers of a model."""
    command = place.command("all", training.name)
    if not any(cell.training == training for cell in table_cells()):
        command = place.command(next(name for name in FIGURES if training in place.models(name)))
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
    """Samples of each model; of ours, also with latents from a Gaussian fitted to those of training images."""
    for training in FIGURES["figure-samples"]:
        trained = place.trained(training)
        laws: dict[str, torch.Tensor | None] = {"": None}
        if training.method == "short-run":
            seen = place.load(training, "train")
            laws["-fitted"] = seen.batch(seen.some(FITTED_IMAGES))
        for suffix, fitted_to in laws.items():
            images = tasks.sample(trained, 60, torch.Generator().manual_seed(0), fitted_to)
            title = f"{training.method}, L = {training.layers}, {training.data} {images.shape[2]}x{images.shape[3]}"
            title += ", latents from a fitted Gaussian" if suffix else ""
            rows = [("", row) for row in images.split(10)]
            save_grid(place.out / f"samples-{training.name}{suffix}.png", rows, title)
    return {"fitted_images": FITTED_IMAGES}


def draw_reconstructions(place: Place) -> dict[str, Any]:
    for name, models in {"celeba64": FACES, "scenes": {"short-run": SCENES}}.items():
        x = place.held_out(models["short-run"], 10)
        rows = [("held out", x)] if place.shows(models["short-run"]) else []
        for method, training in models.items():
            images = tasks.reconstruct(place.trained(training), x, torch.Generator().manual_seed(0)).images
            rows.append((f"{method}\nMSE {float(tasks.mse_per_image(images, x).mean()):.3f}", images))
        save_grid(place.out / f"reconstruction-{name}.png", rows)
    return {}


def draw_inpainting(place: Place) -> dict[str, Any]:
    """Each mask with its fills; where originals are not shown, the mask alone, and pixels that are all the model's."""
    for name, training in {"celeba64": FACES["short-run"], "scenes": SCENES}.items():
        trained, x, shown = place.trained(training), place.held_out(training, 8), place.shows(training)
        height, width = x.shape[2:]
        rows = []
        for kind in (f"box:{height // 4},{width // 4},{height // 2},{width // 2}", *MASKS):
            mask = make_mask(kind, len(x), height, width, torch.Generator().manual_seed(0))
            visible = mask.expand_as(x)
            fills = tasks.inpaint(trained, x, mask, torch.Generator().manual_seed(0), 1, keep_known=shown).fills
            rows += [(kind, torch.where(visible, x if shown else 1.0, 0.0)), ("filled", fills[0])]
        if shown:
            rows.append(("original", x))
        else:
            rows.append(("nothing hidden", tasks.reconstruct(trained, x, torch.Generator().manual_seed(0)).images))
        save_grid(place.out / f"inpainting-{name}.png", rows)
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
    """The tuned step over learning, by grid and by gradient; and the two objectives for single step sizes."""
    tuned = []
    for training in STEP_SIZE_RUNS:
        points = [
            (line["iteration"], math.sqrt(2 * float(torch.tensor(line["chosen"]).max())))
            for line in read_lines(place.run(training) / "metrics.jsonl")
            if line.get("event") == "tuned" and "chosen" in line
        ]
        tuned.append(
            {
                "tune": training.tune,
                "seed": training.seed,
                "iterations": place.trained(training).info["iterations"],
                "iteration": [iteration for iteration, _ in points],
                "delta": [delta for _, delta in points],
            }
        )
    for tune in ("grid", "gradient"):
        series = [(f"seed {run['seed']}", run["iteration"], run["delta"]) for run in tuned if run["tune"] == tune]
        labels = ("iteration", "chosen delta (s = delta^2 / 2)")
        level = (PAPER_DELTA, f"the paper: {PAPER_DELTA}")
        save_lines(place.out / f"step-size-{tune}.png", series, labels, f"tuned by {tune}", log_y=True, level=level)
    moments = read_lines(place.run(STEP_SIZE_RUNS[0]) / "objective.jsonl")
    if not moments:
        raise ValueError(f"{place.run(STEP_SIZE_RUNS[0])} was trained without the objective; remove it to train again")
    panels = {
        title: [(f"iteration {line['iteration']}", line["delta"], line[entropy]) for line in moments]
        for entropy, title in OBJECTIVES.items()
    }
    save_objectives(place.out / "step-size-objective.png", panels, (PAPER_DELTA, f"the paper's {PAPER_DELTA}"))
    return {"tuned": tuned, "objective": moments}


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
    models = {training.name: place.trained(training).info for training in place.models(name)}
    note = {**numbers, "models": models, "command": place.command(name), "machine": machine()}
    write_json(place.drawn(name), note)
    return "drawn"


# --- all of it ----------------------------------------------------------------------------------------


def reproduce(
    target: Target,
    place: Place,
    only: str = "*",
    say: Callable[[str], None] = print,
) -> list[str]:
    """Train, measure and draw what is missing, then write the report. Returns what failed."""
    cells = [c for c in place.cells if target in ("all", c.target) and c.matches(only)]
    figures = [
        name
        for name, models in FIGURES.items()
        if target in ("all", name) and any(fnmatch.fnmatch(n, only) for n in (name, *(t.name for t in models)))
    ]
    if not cells and not figures:
        names = [c.name for c in place.cells if target in ("all", c.target)][:3]
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
    wanted = {place.model(c.training) for c in cells} | {t for f in figures for t in place.models(f)}
    needed = [place.model(c.training) for c in cells if not place.is_measured(c.training)]
    models = list(dict.fromkeys(needed + [t for f in undrawn for t in place.models(f)]))
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
        missing = [t.name for t in place.models(name) if t.name in failed]
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


def _begin_worker(threads: int) -> None:
    """Settings of a process that works on models; it stops when the one that started it is gone, and saves before."""
    torch.set_num_threads(threads)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _each(place: Place, models: Sequence[Training]) -> Generator[tuple[Training, str, str], None, None]:
    """Each model with what came out and what went wrong; several at a time in processes of their own."""
    if place.jobs == 1:
        for training in models:
            yield training, *_attempt(do_model, place, training)
        return
    waiting, quiet = iter(models), replace(place, quiet=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(place.jobs, context, _begin_worker, (place.threads,)) as pool:
        # No more than can run are submitted: when stopped, those that have begun save, and the others do not begin.
        running = {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, place.jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                training = running.pop(future)
                running |= {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, 1)}
                yield training, *future.result()
