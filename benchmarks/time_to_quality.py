"""Time to quality: short run inference against a VAE and against the authors' recipe.

    OMP_NUM_THREADS=1 python benchmarks/time_to_quality.py --data mnist --seed 0 --json FILE

Short run inference (the `cpu` preset), a VAE (the `cpu` preset: 128 latents through the same blocks) and the published
recipe (fixed delta = 0.05, one update per chain, batch 100, learning rate 8e-5) train for `--minutes` each. What
`--methods` does not name is taken over from the file, if it is there. Held-out MSE is taken in two ways:

* draw: from a draw of the method's q(z | x), which is what short run inference gives;
* centre: from the mean of the VAE's q; for short run inference, the last ten steps are taken without noise.

The figure is the time at which short run inference is where the other one ends. KID compares samples at the end with
training images. Evaluation time does not count. All settings were fixed on the embedded digits, not on these images.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun import metrics
from shortrun.fitting import fit
from shortrun.metrics.errors import mse_per_image
from shortrun.trained import Trained
from shortrun.training.config import Config
from shortrun.training.presets import preset

IMAGES, QUIET_STEPS = 100, 10
METHODS = ("ours", "vae", "authors")


def evaluate(trained: Trained, x: Tensor) -> dict[str, float]:
    """Held-out MSE from a draw and from the centre of q(z | x)."""
    quiet = 0 if trained.method == "vae" else min(QUIET_STEPS, trained.dynamics.steps)
    images = {"draw": trained.reconstruct(x, by="draw"), "centre": trained.reconstruct(x, quiet_steps=quiet)}
    return {name: float(mse_per_image(shown, x).mean()) for name, shown in images.items()}


def run(config: Config, samples: int, evaluations: int) -> tuple[list[dict[str, float]], Tensor, dict[str, Any]]:
    """Train; the errors over time, samples at the end, and what else is worth knowing."""
    points: list[dict[str, float]] = []
    config = config.changed(evaluate_every=60 * config.run.minutes / evaluations, evaluate_images=1)
    held_out = config.data.load("test")
    x = held_out.batch(slice(0, IMAGES))

    def note(trained: Trained) -> None:
        points.append({"seconds": round(trained.info["seconds"], 1), **evaluate(trained, x)})

    seen = config.data.load("train")
    trained = fit(None, seen, validation=held_out, config=config, quiet=True, callback=note)
    drawn = trained.sample(samples, seed=config.run.seed)
    latent_std = trained.history.evaluations[-1]["latent_std"]
    return points, drawn, {"updates": trained.info["updates"], "latent_std": latent_std}


def configs(arguments: argparse.Namespace) -> dict[str, Config]:
    budget = {"minutes": arguments.minutes, "iterations": None, "seed": arguments.seed}
    ours = preset(arguments.preset, arguments.data).changed(**budget)
    vae = preset(arguments.preset, arguments.data, "vae").changed(**budget)
    if arguments.same_latents:
        vae = vae.changed(network={each.name: getattr(ours.network, each.name) for each in fields(ours.network)})
    script = preset("authors-script", arguments.data)
    authors = ours.changed(
        tune="off", step_size=script.settings.step_size, learn_last=1, cool_down=0, batch=script.run.batch, warm_up=0,
        learning_rates=script.run.learning_rates, betas=script.run.betas, decay=False,
    )  # fmt: skip
    return dict(zip(METHODS, (ours, vae, authors), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=250, help="for KID; 0 for none")
    parser.add_argument("--evaluations", type=int, default=24, help="of each method, evenly over time")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="what to run")
    parser.add_argument("--same-latents", action="store_true", help="a VAE over the noises of all three layers")
    parser.add_argument("--preset", choices=("smoke", "cpu"), default="cpu", help="smoke: to see that it runs")
    parser.add_argument("--json")
    arguments = parser.parse_args(argv)
    rows: dict[str, Any] = {}
    if arguments.json and Path(arguments.json).is_file():
        rows = json.loads(Path(arguments.json).read_text())["rows"]
    if "ours" not in rows and "ours" not in arguments.methods:
        parser.error("--methods does not name ours, and --json names no file that has it")
    network = metrics.inception() if arguments.samples else None
    for name, config in configs(arguments).items():
        if name in arguments.methods:
            points, drawn, more = run(config, max(arguments.samples, 1), arguments.evaluations)
            rows[name] = {**points[-1], "curve": points, **more}
            if network is not None:
                seen = config.data.load("train").batch(slice(0, arguments.samples))
                sets = (metrics.features(metrics.to_bytes(part), network, quiet=True) for part in (seen, drawn))
                rows[name]["kid"] = metrics.kid(*sets)[0]
        elif name not in rows:
            continue
        row = rows[name]
        text = f"MSE of a draw {row['draw']:.4f}, of the centre {row['centre']:.4f}, KID {row.get('kid', math.nan):.3f}"
        if name != "ours":
            curve = rows["ours"]["curve"]
            for kind in ("draw", "centre"):
                there = next((p["seconds"] for p in curve if p[kind] <= row[kind]), math.inf)
                row[f"ours_is_there_after_{kind}"] = there / row["seconds"] if math.isfinite(there) else None
                text += f"; ours is there ({kind}) after {there / row['seconds']:.2f} of the time"
        print(f"{arguments.data} seed {arguments.seed} {name}: {text}", flush=True)
        if arguments.json:
            settings = {k: v for k, v in vars(arguments).items() if k != "json"} | {"threads": torch.get_num_threads()}
            Path(arguments.json).write_text(json.dumps({"command": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
