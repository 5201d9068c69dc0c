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
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shortrun.config import preset
from shortrun.learners.short_run import DEPTH, PROBES
from shortrun.train import Loop
from shortrun.tune import tune_by_grid

MOMENTS = (0.1, 0.3, 0.5, 0.75, 0.95)
FACTORS = [2 ** (j / 2) for j in range(-2, 3)]


def choose(loop: Loop, images: int, chains: int, estimator: str, seed: int) -> dict[str, Any]:
    """The curve and the choice for so many training images and chains."""
    dynamics = loop.learner.dynamics
    grid = [dynamics.scaled(factor).step_size for factor in FACTORS]
    x = loop.train_images.batch(loop.train_images.some(100)[seed * images : (seed + 1) * images])
    begun = time.perf_counter()
    result = tune_by_grid(
        loop.model, x, dynamics, grid, estimator=estimator, samples=chains, probes=PROBES, depth=DEPTH, guard=None,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return {
        "best": result.best,
        "free_energy": [round(value, 2) for value in result.free_energy.tolist()],
        "stability": [round(value, 2) for value in result.stability.tolist()],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
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
    parser.add_argument("--json")
    arguments = parser.parse_args()
    config = preset("cpu", arguments.data)
    model = replace(config.model, latent_sizes=tuple(arguments.latents), channels=arguments.channels)
    config = replace(config, model=model, minutes=arguments.minutes, seed=arguments.seed, compile="off")
    used = f"{config.tune_images}x{config.tune_chains}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(config, Path(folder), False, lambda text: None)
        loop.save()
        for moment in MOMENTS:
            while loop.share < moment:
                begun = time.perf_counter()
                loop.advance()
                loop.seconds += time.perf_counter() - begun
            mse = loop.evaluate(pictures=False)
            reference = choose(loop, arguments.reference_images, arguments.reference_chains, "exact", 0)
            row: dict[str, Any] = {
                "iteration": loop.iteration, "mse": mse, "reference": reference,
                "step_size": loop.learner.dynamics.longest, "cheap": {},
            }  # fmt: skip
            for setting in dict.fromkeys([used, *arguments.cheap]):
                images, chains = map(int, setting.split("x"))
                row["cheap"][setting] = [
                    choose(loop, images, chains, config.estimator, seed) for seed in range(1, arguments.repeats + 1)
                ]
            rows.append(row)
            choices = {name: [each["best"] for each in tries] for name, tries in row["cheap"].items()}
            print(f"iteration {loop.iteration}, MSE {mse:.4f}: reference {reference['best']}, {choices}", flush=True)
    apart = [abs(each["best"] - row["reference"]["best"]) for row in rows for each in row["cheap"][used]]
    print(f"cells apart, as training tunes ({used}): {apart}")
    if arguments.json:
        content = {"command": vars(arguments), "factors": FACTORS, "used": used, "cells_apart": apart, "rows": rows}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
