"""The step size that training chooses cheaply, against a reference, at five moments of one training run.

    OMP_NUM_THREADS=1 python benchmarks/tuning_choice.py --data embedded --minutes 3 --json FILE

While a small model trains, the free energy is taken on a grid from 0.5 to 2 times the step in use, twice: as training
does it (curvature at the end point, a few images and chains) and by the reference (a Hessian at every step, 64 chains
per image). The choice is the lowest free energy, without a guard. The figure is how many cells of the grid apart the
two choices are; the goal is at most one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shortrun.core.free_energy import Estimation, Estimator
from shortrun.core.tune import tune_by_grid
from shortrun.data import Images
from shortrun.fitting import fit
from shortrun.learners.short_run import TUNING
from shortrun.trained import Trained
from shortrun.training.presets import preset

MOMENTS = (0.1, 0.3, 0.5, 0.75, 0.95)
EVERY = 0.05  # share of the run between two evaluations; all moments are multiples of it
FACTORS = [2 ** (j / 2) for j in range(-2, 3)]


def choose(trained: Trained, seen: Images, images: int, chains: int, estimator: Estimator, seed: int) -> dict[str, Any]:
    """The curve and the choice for so many training images and chains."""
    grid = [factor * trained.dynamics.step_size for factor in FACTORS]
    x = seen.batch(seen.some(100)[seed * images : (seed + 1) * images])
    how = Estimation(estimator=estimator, chains=chains, **TUNING)
    rng = torch.Generator().manual_seed(seed)
    begun = time.perf_counter()
    result = tune_by_grid(trained.model, x, trained.dynamics, grid, how, guard=None, rng=rng)
    return {
        "best": result.best,
        "free_energy": [round(value, 2) for value in result.free_energy.tolist()],
        "stability": [round(value, 2) for value in result.stability.tolist()],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latents", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--reference-images", type=int, default=2)
    parser.add_argument("--reference-chains", type=int, default=64)
    parser.add_argument("--cheap", nargs="*", default=[], help="further settings to try, as IMAGESxCHAINS")
    parser.add_argument("--repeats", type=int, default=3, help="choices with other images and noise")
    parser.add_argument("--preset", choices=("smoke", "cpu"), default="cpu", help="smoke: to see that it runs")
    parser.add_argument("--json")
    arguments = parser.parse_args(argv)
    config = preset(arguments.preset, arguments.data).changed(
        network={"latent_sizes": tuple(arguments.latents), "channels": arguments.channels}, minutes=arguments.minutes,
        iterations=None, seed=arguments.seed, compile="off", evaluate_every=60 * arguments.minutes * EVERY,
    )  # fmt: skip
    settings: Any = config.settings
    used = f"{settings.tune_images}x{settings.tune_chains}"
    seen = config.data.load("train")
    rows: list[dict[str, Any]] = []

    def measure(trained: Trained) -> dict[str, Any]:
        reference = choose(trained, seen, arguments.reference_images, arguments.reference_chains, "exact", 0)
        cheap = {}
        for setting in dict.fromkeys([used, *arguments.cheap]):
            images, chains = map(int, setting.split("x"))
            cheap[setting] = [
                choose(trained, seen, images, chains, settings.estimator, seed)
                for seed in range(1, arguments.repeats + 1)
            ]
        return {
            "iteration": trained.info["iterations"], "mse": trained.info["mse"], "reference": reference,
            "step_size": trained.dynamics.step_size, "cheap": cheap,
        }  # fmt: skip

    def watch(trained: Trained) -> bool:
        """Measure at each moment; whether all are over."""
        while len(rows) < len(MOMENTS) and trained.info["share"] >= MOMENTS[len(rows)]:
            rows.append(row := measure(trained))
            choices = {name: [each["best"] for each in tries] for name, tries in row["cheap"].items()}
            text = f"iteration {row['iteration']}, MSE {row['mse']:.4f}"
            print(f"{text}: reference {row['reference']['best']}, {choices}", flush=True)
        return len(rows) == len(MOMENTS)

    fit(None, seen, validation=config.data.load("test"), config=config, quiet=True, callback=watch)
    apart = [abs(each["best"] - row["reference"]["best"]) for row in rows for each in row["cheap"][used]]
    print(f"cells apart, as training tunes ({used}): {apart}")
    if arguments.json:
        content = {"command": vars(arguments), "factors": FACTORS, "used": used, "cells_apart": apart, "rows": rows}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
