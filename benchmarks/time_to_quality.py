"""Time to quality: short run inference against a VAE and against the authors' recipe.

    OMP_NUM_THREADS=1 python benchmarks/time_to_quality.py --data mnist --seed 0 --json FILE

The VAE (the `cpu` preset: 128 latents through the same blocks) trains for `--minutes`; the goal is the held-out MSE at
which it ends. Short run inference (the `cpu` preset as it is, with the same budget) and, with `--authors N`, the
published script's recipe (fixed delta = 0.05, one update per chain, batch 100, learning rate 8e-5) then train until
they are there. The recipe is given up after N times the time that short run inference took. `--same-latents` gives the
VAE the three-layer generator with an encoder over all its noises, which is a weaker baseline. KID compares samples at
these moments with training images. Evaluation time does not count. The budget and all settings were fixed on the
embedded digits, not on these test images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from shortrun import data, metrics
from shortrun.config import TrainConfig, preset
from shortrun.train import Loop


def run(
    config: TrainConfig, goal: float | None, every: float, samples: int
) -> tuple[list[tuple[float, float]], torch.Tensor, dict]:
    """Train to the end of the budget, or until the held-out MSE is at most ``goal``."""
    points: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(config, Path(folder), False, lambda text: None)
        loop.save()
        following, mark = every, time.perf_counter()
        while loop.share < 1:
            update = loop.advance()
            now = time.perf_counter()
            loop.seconds, mark = loop.seconds + now - mark, now
            if loop.seconds >= following or loop.share >= 1:
                points.append((round(loop.seconds, 1), loop.evaluate(pictures=False)))
                following, mark = loop.seconds + every, time.perf_counter()
                if goal is not None and points[-1][1] <= goal:
                    break
        drawn = loop.learner.sample(loop.model, samples, torch.Generator().manual_seed(config.seed))
        return points, drawn, {"updates": loop.updates, "latent_std": update.latent_std}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=250, help="for KID; 0 leaves it out")
    parser.add_argument("--authors", type=float, help="also run the authors' recipe, up to so many times as long")
    parser.add_argument("--same-latents", action="store_true", help="a VAE over the noises of all layers")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    ours = replace(preset("cpu", arguments.data), minutes=arguments.minutes, seed=arguments.seed, evaluate_images=200)
    vae = replace(
        preset("cpu", arguments.data, "vae"), minutes=arguments.minutes, seed=arguments.seed, evaluate_images=200
    )  # fmt: skip
    if arguments.same_latents:
        vae = replace(vae, model=ours.model)
    script = preset("authors-script", arguments.data)
    authors = replace(
        ours, tune="off", step_size=script.step_size, learn_last=1, cool_down=0, batch=script.batch, warm_up=0,
        learning_rates=script.learning_rates, betas=script.betas, decay=False,
    )  # fmt: skip
    every = 60 * arguments.minutes / 40
    count = max(arguments.samples, 2)
    rows = {}
    images = data.load(arguments.data, "train").batch(slice(0, count))
    network = metrics.inception()

    def report(name: str, config: TrainConfig, goal: float | None) -> None:
        points, drawn, more = run(config, goal, every, count)
        row = {"seconds": points[-1][0], "mse": points[-1][1], "curve": points, **more}
        if arguments.samples:
            known, found = (metrics.features(metrics.to_bytes(x), network, quiet=True) for x in (images, drawn))
            row["kid"] = metrics.kid(known, found)[0]
        rows[name] = row
        print(
            f"{arguments.data} seed {arguments.seed} {name}: MSE {row['mse']:.4f} after {row['seconds']:.0f} s, "
            f"KID {row.get('kid', float('nan')):.3f}",
            flush=True,
        )

    report("vae", vae, None)
    report("ours", ours, rows["vae"]["mse"])
    if arguments.authors:
        limit = arguments.authors * rows["ours"]["seconds"] / 60
        report("authors", replace(authors, minutes=limit), rows["vae"]["mse"])
    if arguments.json:
        settings = {**vars(arguments), "threads": torch.get_num_threads()}
        Path(arguments.json).write_text(json.dumps({"command": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
