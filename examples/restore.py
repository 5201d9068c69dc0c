"""Undo known damage with a trained generator: one picture per task.

    python examples/restore.py [--model mnist-small] [--images 8] [--draws 8] [--out demo]

Each task shows the truth, the measurement, the best answer, three draws from the posterior, their mean, and the spread
of each pixel. Images are embedded digits for the digits model, and samples of the model itself for the others, so that
the truth is known without any data set.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import shortrun as sr
from shortrun.cli.restore import shown
from shortrun.inverse import parse_operator
from shortrun.metrics.errors import psnr
from shortrun.pictures import save_grid

TASKS = {  # an operator and the noise that is added to its measurements
    "holes": ("mask:random:0.3", 0.0), "resolution": ("downsample:4", 0.0), "blur": ("blur:1.5", 0.05),
    "motion": ("motion:7:30", 0.05), "noise": ("denoise", 0.5), "one-bit": ("quantise:1", 0.0),
    "projections": ("project:100", 0.0), "colours": ("grey", 0.0),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="mnist-small")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    words = parser.parse_args(argv)
    trained = sr.load(words.model)
    x = images(trained, words.images)
    for task in words.tasks:
        name, noise = TASKS[task]
        if name == "grey" and trained.shape[0] == 1:
            continue
        operator = parse_operator(name, x)
        clean = operator(x)
        y = clean + noise * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
        sigma = (trained.noise_of(operator) ** 2 + noise**2) ** 0.5
        best = trained.restore(y, operator, sigma, steps=words.steps)
        posterior = trained.posterior(y, operator, sigma, draws=words.draws, steps=words.steps)
        spread = posterior.std
        rows = [("truth", x), ("measured", shown(y, operator, x)), ("best", best)]
        rows += [(f"draw {i + 1}", draw) for i, draw in enumerate(posterior.images[:3])]
        rows += [("mean", posterior.mean), ("spread", 2 * spread / spread.max().clamp_min(1e-6) - 1)]
        quality = [float(psnr(each, x).mean()) for each in (best, posterior.mean)]
        title = f"{name}, noise {noise}: PSNR {quality[0]:.1f} dB (best), {quality[1]:.1f} (mean of {words.draws})"
        save_grid(words.out / f"restore-{task}.png", rows, title)
        print(title, flush=True)


def images(trained: sr.Trained, count: int) -> Tensor:
    if trained.shape == (1, 28, 28):
        return sr.data.load("embedded", "test").batch(slice(0, count))
    return trained.sample(count, seed=5)


if __name__ == "__main__":
    main()
