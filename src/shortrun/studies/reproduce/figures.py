"""The figures of a reproduction, drawn from its trained models."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shortrun.files import write_json
from shortrun.masks import make_mask
from shortrun.metrics.errors import mse_per_image
from shortrun.pictures import sample_rows, save_grid, save_lines, save_objectives
from shortrun.studies import hierarchy
from shortrun.studies.reproduce.models import OBJECTIVES
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import (
    FACES,
    FIGURES,
    HIERARCHIES,
    PAPER_DELTA,
    SCENES,
    STEP_SIZE_RUNS,
    Training,
)
from shortrun.studies.sources import machine
from shortrun.trained import Trained

MASKS = ("lower-half", "random:0.3", "blocks:8:3")
Rows = list[tuple[str, Tensor]]
"""Labels and images, as :func:`shortrun.pictures.save_grid` takes them."""


def draw_samples(place: Place) -> dict[str, Any]:
    """Samples of each model, from N(0, I) as in the paper and from its learned prior."""
    for training in FIGURES["figure-samples"]:
        trained = place.trained(training)
        title = f"{training.method}, L = {training.layers}, {training.data} {trained.shape[1]}x{trained.shape[2]}"
        save_grid(place.out / f"samples-{training.name}.png", sample_rows(trained, 60), title)
    return {}


def reconstruction_rows(place: Place, models: Mapping[str, Training]) -> Rows:
    """Held-out images, where they may be shown, and what each model makes of them."""
    x = place.held_out(models["short-run"], 10)
    rows = [("held out", x)] if place.shows(models["short-run"]) else []
    for method, training in models.items():
        images = place.trained(training).reconstruct(x)
        rows.append((f"{method}\nMSE {float(mse_per_image(images, x).mean()):.3f}", images))
    return rows


def draw_reconstructions(place: Place) -> dict[str, Any]:
    for name, models in {"celeba64": FACES, "scenes": {"short-run": SCENES}}.items():
        save_grid(place.out / f"reconstruction-{name}.png", reconstruction_rows(place, models))
    return {}


def inpainting_rows(place: Place, training: Training) -> Rows:
    """Each mask with its fills; where originals are not shown, the mask alone, and pixels that are all the model's."""
    trained, x, shown = place.trained(training), place.held_out(training, 8), place.shows(training)
    height, width = x.shape[2:]
    rows = []
    for kind in (f"box:{height // 4},{width // 4},{height // 2},{width // 2}", *MASKS):
        mask = make_mask(kind, x)
        visible = mask.expand_as(x)
        fills = trained.inpaint(x, mask, 1, keep_known=shown)
        rows += [(kind, torch.where(visible, x if shown else 1.0, 0.0)), ("filled", fills[0])]
    rows.append(("original", x) if shown else ("nothing hidden", trained.reconstruct(x)))
    return rows


def draw_inpainting(place: Place) -> dict[str, Any]:
    for name, training in {"celeba64": FACES["short-run"], "scenes": SCENES}.items():
        save_grid(place.out / f"inpainting-{name}.png", inpainting_rows(place, training))
    return {}


def _one_layer_at_a_time(trained: Trained) -> Rows:
    rng = torch.Generator().manual_seed(0)
    z = trained.sample_latents(4, rng)
    originals = trained.decode(z)
    rows: Rows = []
    for layer in range(len(z)):
        changed = trained.traverse(z, layer, 9, rng=rng)
        label = f"only z_{len(z) - layer}"
        rows += [(label if i == 0 else "", torch.cat([originals[i : i + 1], changed[:, i]])) for i in range(len(z[0]))]
    return rows


def draw_hierarchy(place: Place) -> dict[str, Any]:
    """One layer at a time; and, on scenes, the share of each layer in each factor."""
    for training in HIERARCHIES:
        save_grid(place.out / f"hierarchy-{training.name}.png", _one_layer_at_a_time(place.trained(training)))
    reader, quality = hierarchy.train_reader(place.scale.reader)
    shares = {}
    for training in HIERARCHIES:
        if training.data == "scenes":
            trained = place.trained(training)
            prior = functools.partial(trained.sample_latents, rng=torch.Generator().manual_seed(0))
            shares[training.name] = hierarchy.layer_shares(trained.decode, prior, reader, place.scale.pairs)
    return {"reader": quality, "shares": shares}


def objective_panels(moments: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, Any, Any]]]:
    """One panel per objective: a curve (name, delta, free energy) for each moment of learning."""
    return {
        title: [(f"iteration {line['iteration']}", line["delta"], line[entropy]) for line in moments]
        for entropy, title in OBJECTIVES.items()
    }


def draw_step_size(place: Place) -> dict[str, Any]:
    """The tuned step over learning, by grid and by gradient; and the two objectives for single step sizes."""
    results = {t: json.loads(place.result(t).read_text()) for t in STEP_SIZE_RUNS}
    tuned = [
        {
            "tune": training.tune,
            "seed": training.seed,
            "iterations": result["training"]["iterations"],
            "iteration": [iteration for iteration, _ in result["tuned"]],
            "delta": [delta for _, delta in result["tuned"]],
        }
        for training, result in results.items()
    ]
    for tune in ("grid", "gradient"):
        series = [(f"seed {run['seed']}", run["iteration"], run["delta"]) for run in tuned if run["tune"] == tune]
        labels = ("iteration", "chosen delta (s = delta^2 / 2)")
        level = (PAPER_DELTA, f"the paper: {PAPER_DELTA}")
        save_lines(place.out / f"step-size-{tune}.png", series, labels, f"tuned by {tune}", log_y=True, level=level)
    moments = results[STEP_SIZE_RUNS[0]]["objective"]
    if not moments:
        path = place.run(STEP_SIZE_RUNS[0])
        raise ValueError(f"{path} was trained without the objective; remove it and its result to train again")
    mark = (PAPER_DELTA, f"the paper's {PAPER_DELTA}")
    save_objectives(place.out / "step-size-objective.png", objective_panels(moments), mark)
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
    models = {t.name: json.loads(place.result(t).read_text())["training"] for t in place.models(name)}
    note = {**numbers, "models": models, "command": place.command(name), "machine": machine()}
    write_json(place.drawn(name), note)
    return "drawn"
