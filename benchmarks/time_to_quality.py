"""Time to quality: short run inference against a VAE and against the authors' recipe.

    OMP_NUM_THREADS=1 python benchmarks/time_to_quality.py --data mnist --seed 0 --json FILE

Short run inference (the `cpu` preset), a VAE (the `cpu` preset: 128 latents through the same blocks) and the published
recipe (fixed delta = 0.05, one update per chain, batch 100, learning rate 8e-5) train for `--minutes` each. What
`--methods` leaves out is taken over from the file, if it is there. Held-out MSE is taken in two ways:

* draw: from a draw of the method's q(z | x), which is what short run inference gives;
* centre: from the mean of the VAE's q; for short run inference, the last ten steps are taken without noise.

The figure is the time at which short run inference is where the other one ends. KID compares samples at the end with
training images. Evaluation time does not count. All settings were fixed on the embedded digits, not on these images.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun import data, metrics
from shortrun.config import TrainConfig, preset
from shortrun.langevin import infer
from shortrun.train import Loop

IMAGES, QUIET_STEPS, EVALUATIONS = 100, 10, 24


def evaluate(loop: Loop) -> dict[str, float]:
    """Held-out MSE from a draw and from the centre of q(z | x)."""
    model: Any = loop.model
    x = loop.test_images.batch(slice(0, IMAGES))
    generator = torch.Generator().manual_seed(0)
    if loop.config.method == "vae":
        with torch.no_grad():
            draw = model.encode(x, model.sample_prior(len(x), generator)).z
            centre = model.encode(x, tuple(torch.zeros_like(layer) for layer in draw)).z
    else:
        dynamics = loop.learner.dynamics
        noisy, steps = dynamics.steps - QUIET_STEPS, dynamics.steps
        half_way = infer(model, x, dynamics.part(0, noisy), generator=generator)
        draw = infer(model, x, dynamics.part(noisy, steps), start=half_way, generator=generator)
        centre = infer(model, x, dynamics.part(noisy, steps, noise=False), start=half_way)

    def error(z: tuple[Tensor, ...]) -> float:
        with torch.no_grad():
            return float((model.decoder(z) - x).square().mean())

    return {"draw": error(draw), "centre": error(centre)}


def run(config: TrainConfig, samples: int) -> tuple[list[dict[str, float]], Tensor, dict[str, Any]]:
    points = []
    every = 60 * (config.minutes or 1) / EVALUATIONS
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(config, Path(folder), False, lambda text: None)
        loop.save()
        following, mark = every, time.perf_counter()
        while loop.share < 1:
            update = loop.advance()
            now = time.perf_counter()
            loop.seconds, mark = loop.seconds + now - mark, now
            if loop.seconds >= following or loop.share >= 1:
                points.append({"seconds": round(loop.seconds, 1), **evaluate(loop)})
                following, mark = loop.seconds + every, time.perf_counter()
        source = torch.Generator().manual_seed(config.seed)
        drawn = loop.learner.sample(loop.model, samples, source, loop.learner.spread)
        return points, drawn, {"updates": loop.updates, "latent_std": update.latent_std}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=250, help="for KID; 0 leaves it out")
    methods = ("ours", "vae", "authors")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="what to run")
    parser.add_argument("--same-latents", action="store_true", help="a VAE over the noises of all three layers")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    ours = replace(preset("cpu", arguments.data), minutes=arguments.minutes, seed=arguments.seed)
    vae = replace(preset("cpu", arguments.data, "vae"), minutes=arguments.minutes, seed=arguments.seed)
    if arguments.same_latents:
        vae = replace(vae, model=ours.model)
    script = preset("authors-script", arguments.data)
    authors = replace(
        ours, tune="off", step_size=script.step_size, learn_last=1, cool_down=0, batch=script.batch, warm_up=0,
        learning_rates=script.learning_rates, betas=script.betas, decay=False,
    )  # fmt: skip
    rows: dict[str, Any] = {}
    if arguments.json and Path(arguments.json).is_file():
        rows = json.loads(Path(arguments.json).read_text())["rows"]
    if "ours" not in rows and "ours" not in arguments.methods:
        parser.error("--methods leaves out ours, and --json names no file that has it")
    if arguments.samples:
        network = metrics.inception()
        seen = metrics.to_bytes(data.load(arguments.data, "train").batch(slice(0, arguments.samples)))
    for name, config in {"ours": ours, "vae": vae, "authors": authors}.items():
        if name in arguments.methods:
            points, drawn, more = run(config, max(arguments.samples, 1))
            rows[name] = {**points[-1], "curve": points, **more}
            if arguments.samples:
                sets = (metrics.features(images, network, quiet=True) for images in (seen, metrics.to_bytes(drawn)))
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
