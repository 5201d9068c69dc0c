"""The demonstration: train on embedded digits for three minutes, then show everything in one report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shortrun import data, tasks
from shortrun.config import TrainConfig, preset, to_plain
from shortrun.masks import make_mask
from shortrun.pictures import save_curve, save_grid, save_lines
from shortrun.report import page, paragraph, picture, section, table
from shortrun.runs import from_pretrained, read_lines
from shortrun.train import train

MASKS = ("lower-half", "random:0.2", "blocks:8:3", "box:8,8,12,12")


def demo_config(minutes: float, seed: int, smoke: bool) -> TrainConfig:
    if smoke:
        return replace(preset("smoke", "embedded"), seed=seed)
    config = preset("cpu", "embedded")
    # Few latents: reconstructions lose a little, samples and inpaintings gain more.
    model = replace(config.model, latent_sizes=(6, 12, 20))
    return replace(config, model=model, minutes=minutes, seed=seed, evaluate_every=15.0)


def demo(folder: Path, minutes: float = 3.0, seed: int = 0, smoke: bool = False) -> dict[str, Any]:
    """Train, draw, report. Returns the numbers of the report."""
    begun = time.perf_counter()
    run = folder / "run"
    if run.exists():
        shutil.rmtree(run)  # the folder of an earlier demo, which this command made itself
    # The limit holds for the whole command: a fifth is left for evaluation and pictures.
    config = demo_config(0.8 * minutes, seed, smoke)
    outcome = train(config, run)
    trained = from_pretrained(run)
    generator = torch.Generator().manual_seed(seed)
    held_out = data.load("embedded", "test").batch(slice(None))
    count = 20 if smoke else len(held_out)
    inferred = tasks.reconstruct(trained, held_out[:count], generator)
    mse = float(tasks.mse_per_image(inferred.images, held_out[:count]).mean())

    pictures: list[tuple[str, str, str]] = []

    def add(name: str, title: str, text: str) -> Path:
        pictures.append((name, title, text))
        return folder / name

    x = held_out[:10]
    rows = []
    for part in (slice(0, 10), slice(10, 20)):
        rows += [("held out", held_out[part]), ("reconstruction", inferred.images[part])]
    save_grid(
        add("reconstructions.png", "Reconstructions", "Held-out digits, and what the generator makes of the "
            f"latents that K = {config.steps} Langevin steps infer. There is no encoder."), rows,
    )  # fmt: skip
    images = tasks.sample(trained, 60, generator)
    save_grid(
        add("samples.png", "Samples", samples_text(trained.spread)),
        [("", row) for row in images.split(10)],
    )
    for i, name in enumerate(MASKS):
        mask = make_mask(name, len(x), *x.shape[2:], generator)  # type: ignore[call-arg]
        filled = tasks.inpaint(trained, x, mask, generator, fills=2)
        visible = torch.where(mask.expand_as(x), x, torch.zeros(()))
        save_grid(
            add(f"inpainting_{i + 1}.png", f"Inpainting: {name}", "Only the visible pixels enter the "
                "dynamics; the hidden ones (grey) are painted by the generator, twice."),
            [("original", x), ("visible", visible), ("fill 1", filled.fills[0]), ("fill 2", filled.fills[1])],
        )  # fmt: skip
    z = tuple(layer[:4] for layer in inferred.z)
    for layer in range(len(z)):
        level = len(z) - layer
        changed = tasks.traverse(trained, z, layer, 9, generator)
        save_grid(
            add(f"traverse_layer_{level}.png", f"Only layer z_{level} changes",
                "The inferred digit on the left; then this layer is freshly drawn nine times, the others stay."),
            [("", torch.cat([inferred.images[i : i + 1], changed[:, i]])) for i in range(4)],
        )  # fmt: skip

    lines = read_lines(run / "metrics.jsonl")
    evaluations = [line for line in lines if "mse" in line]
    seconds = [line["seconds"] for line in evaluations]
    save_lines(
        add("mse.png", "Held-out MSE over training", f"Per pixel in [-1, 1], {config.evaluate_images} held-out."),
        [("MSE", seconds, [line["mse"] for line in evaluations])],
        ("seconds of training", "held-out MSE"), log_y=True,
    )  # fmt: skip
    steps = [line for line in lines if "step_size" in line]
    save_lines(
        add("step_size_training.png", "Step size over training",
            "The tuner and its guard lower the step as the generator becomes steeper, and raise it again."),
        [("s", [line["seconds"] for line in steps], [torch.tensor(line["step_size"]).max().item() for line in steps])],
        ("seconds of training", "step size s"), log_y=True,
    )  # fmt: skip
    curve = tasks.tune(trained, held_out[: 4 if smoke else 8], generator)
    save_curve(
        add("free_energy.png", "Free energy over step sizes", "E_q[log q - log p(x, z)] of the trained model, "
            "marginal entropy, curvature at the end point; the star is the choice."), curve,
    )  # fmt: skip
    last = evaluations[-1]
    numbers = {
        "mse": mse,
        "images": count,
        "seconds_training": round(outcome.seconds, 1),
        "seconds_total": round(time.perf_counter() - begun, 1),
        "iterations": outcome.iteration,
        "updates": config.updates_in(outcome.iteration),
        "parameters": trained.parameters,
        "step_size": trained.dynamics.step_size,
        "divergent_chains": last["divergent"],
        "latent_std": [round(value, 3) for value in last["latent_std"]],
        "tuning_share": round(last["tuning_share"], 4),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    write_report(folder / "report.html", pictures, numbers, config)
    print(json.dumps(numbers, indent=1))
    print(f"wrote {folder / 'report.html'}")
    return numbers


def samples_text(spread: Sequence[float]) -> str:
    """Which latents the samples are made of; ``spread`` is the width of each layer, if it is not that of the prior."""
    if not spread:
        return "Latents drawn from the prior, decoded."
    widths = ", ".join(f"{width:.2f}" for width in spread)
    return (
        f"Latents drawn from the prior, each layer times the width that its latents had in training ({widths}; top "
        "layer first), decoded."
    )


def write_report(
    path: Path, pictures: list[tuple[str, str, str]], numbers: dict[str, Any], config: TrainConfig
) -> None:
    """One HTML file with everything inside it."""
    settings = to_plain(config)
    settings |= {f"model.{key}": value for key, value in settings.pop("model").items()}
    introduction = (
        f"<p>A three-layer model learned from 4,500 digits in {numbers['seconds_training']:.0f} s; "
        f"held-out MSE <b>{numbers['mse']:.4f}</b> per pixel in [-1, 1] on {numbers['images']} digits. "
        "Command: <code>shortrun demo</code></p>"
    )
    sections = [section(title, paragraph(text) + picture(path.parent / name, title)) for name, title, text in pictures]
    sections += [section("Numbers", table(numbers.items())), section("Settings", table(settings.items()))]
    path.write_text(page("A generator without an encoder", introduction, sections))
