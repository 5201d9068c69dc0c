"""The demonstration: train on embedded digits for three minutes, then show everything in one report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun.files import read_lines, to_json, write_json
from shortrun.fitting import fit
from shortrun.masks import make_mask
from shortrun.metrics.errors import mse_per_image
from shortrun.pictures import sample_rows, save_curve, save_grid, save_lines
from shortrun.studies.report import page, paragraph, picture, section, table
from shortrun.trained import Reconstruction, Trained, load
from shortrun.training.config import Config
from shortrun.training.presets import preset

MASKS = ("lower-half", "random:0.2", "blocks:8:3", "box:8,8,12,12")


def demo_config(minutes: float, seed: int, smoke: bool) -> Config:
    if smoke:
        return preset("smoke", "embedded").changed(seed=seed)
    # Few latents: reconstructions lose a little, samples and inpaintings gain more.
    return preset("cpu", "embedded").changed(
        network={"latent_sizes": (6, 12, 20)}, minutes=minutes, seed=seed, evaluate_every=15.0
    )


class Album:
    """The pictures of the report, each with its title and text, in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures: list[tuple[str, str, str]] = []

    def add(self, name: str, title: str, text: str) -> Path:
        """Where to write the picture."""
        self.pictures.append((name, title, text))
        return self.folder / name


def demo(folder: Path, minutes: float = 3.0, seed: int = 0, smoke: bool = False) -> dict[str, Any]:
    """Train, draw, report. Returns the numbers of the report."""
    begun = time.perf_counter()
    run = folder / "run"
    if run.exists():
        shutil.rmtree(run)  # the folder of an earlier demo, which this command made itself
    # The limit holds for the whole command: three tenths remain for the prior, evaluation and pictures.
    config = demo_config(0.7 * minutes, seed, smoke)
    test = config.data.load("test")
    info = fit(None, config.data.load("train"), validation=test, config=config, folder=run).info
    trained = load(run)
    rng = torch.Generator().manual_seed(seed)
    held_out = test.batch(slice(None))
    x = held_out[: 20 if smoke else len(held_out)]
    inferred = trained.reconstruction(x, rng=rng)
    album = Album(folder)
    draw_uses(album, trained, x, inferred, rng)
    lines = read_lines(run / "metrics.jsonl")
    draw_training(album, lines, config)
    save_curve(
        album.add("free_energy.png", "Free energy over step sizes", "E_q[log q - log p(x, z)] of the trained model, "
                  "marginal entropy, curvature at the end point; the star is the choice."),
        trained.tune(held_out[: 4 if smoke else 8], rng=rng),
    )  # fmt: skip
    last = [line for line in lines if "mse" in line][-1]
    numbers = {
        "mse": float(mse_per_image(inferred.images, x).mean()),
        "images": len(x),
        "seconds_training": round(info["seconds"], 1),
        "seconds_total": round(time.perf_counter() - begun, 1),
        "iterations": info["iterations"],
        "updates": info["updates"],
        "parameters": trained.parameter_count,
        "step_size": trained.dynamics.step_size,
        "divergent_chains": last["divergent"],
        "latent_std": [round(value, 3) for value in last["latent_std"]],
        "tuning_share": round(last["tuning_share"], 4),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    write_json(folder / "numbers.json", numbers)
    write_report(folder / "report.html", album.pictures, numbers, config)
    print(to_json(numbers, indent=1))
    print(f"wrote {folder / 'report.html'}")
    return numbers


def draw_uses(album: Album, trained: Trained, x: Tensor, inferred: Reconstruction, rng: torch.Generator) -> None:
    """What a trained model is for: reconstructions, samples, inpaintings, and what each layer changes."""
    rows = []
    for part in (slice(0, 10), slice(10, 20)):
        rows += [("held out", x[part]), ("reconstruction", inferred.images[part])]
    save_grid(
        album.add("reconstructions.png", "Reconstructions", "Held-out digits, and what the generator makes of the "
                  f"latents that K = {trained.dynamics.steps} Langevin steps infer. There is no encoder."), rows,
    )  # fmt: skip
    save_grid(
        album.add("samples.png", "Samples", "Latents drawn from N(0, I), decoded; and from the prior that was "
                  "learned from the latents of the training digits."), sample_rows(trained, 40),
    )  # fmt: skip
    shown = x[:10]
    for i, name in enumerate(MASKS):
        mask = make_mask(name, shown, rng)
        fills = trained.inpaint(shown, mask, 2, rng=rng)
        visible = torch.where(mask.expand_as(shown), shown, torch.zeros(()))
        save_grid(
            album.add(f"inpainting_{i + 1}.png", f"Inpainting: {name}", "Only the visible pixels enter the "
                      "dynamics; the hidden ones (grey) are painted by the generator, twice."),
            [("original", shown), ("visible", visible), ("fill 1", fills[0]), ("fill 2", fills[1])],
        )  # fmt: skip
    z = tuple(layer[:4] for layer in inferred.z)
    for layer in range(len(z)):
        level = len(z) - layer
        changed = trained.traverse(z, layer, 9, rng=rng)
        save_grid(
            album.add(f"traverse_layer_{level}.png", f"Only layer z_{level} changes",
                      "The inferred digit on the left; then this layer is freshly drawn nine times, the others stay."),
            [("", torch.cat([inferred.images[i : i + 1], changed[:, i]])) for i in range(4)],
        )  # fmt: skip


def draw_training(album: Album, lines: Sequence[dict[str, Any]], config: Config) -> None:
    """Error and step size over training, from the lines of ``metrics.jsonl``."""
    for key, name, axis, title, text in (
        ("mse", "MSE", "held-out MSE", "Held-out MSE over training",
         f"Per pixel in [-1, 1], {config.run.evaluate_images} held-out."),
        ("step_size", "s", "step size s", "Step size over training",
         "Tuning leads the step towards the minimum of the free energy, by 3 % at a time; a price on steepness keeps "
         "the generator within its reach."),
    ):  # fmt: skip
        known = [line for line in lines if key in line]
        save_lines(
            album.add("mse.png" if key == "mse" else "step_size_training.png", title, text),
            [(name, [line["seconds"] for line in known], [line[key] for line in known])],
            ("seconds of training", axis), log_y=True,
        )  # fmt: skip


def write_report(path: Path, pictures: list[tuple[str, str, str]], numbers: dict[str, Any], config: Config) -> None:
    """One HTML file with everything inside it."""
    introduction = (
        f"<p>A three-layer model learned from 4,500 digits in {numbers['seconds_training']:.0f} s; "
        f"held-out MSE <b>{numbers['mse']:.4f}</b> per pixel in [-1, 1] on {numbers['images']} digits. "
        "Command: <code>shortrun demo</code></p>"
    )
    sections = [section(title, paragraph(text) + picture(path.parent / name, title)) for name, title, text in pictures]
    sections += [section("Numbers", table(numbers.items())), section("Settings", table(config.flat().items()))]
    path.write_text(page("A generator without an encoder", introduction, sections))
