"""Learning from damaged images alone: the error on whole held-out images, beside learning from whole images.

    python benchmarks/measurements_only.py --json results/measurements_only.json

Generators of one size learn for as many iterations: from whole images; from images of which each shows one half of its
pixels, and never the other; from images with a sixteenth of the pixels, means of 4x4, either at the same places of all
images, so that no image ever shows what is finer, or each shifted by its own whole number of pixels; and, as if they
were images, from the same with holes filled by the mean image, or enlarged by bicubic interpolation. Then all infer the
same held-out images by the same dynamics: from whole images, from half of their pixels, from means of 4x4. Mean square
error per pixel, images in [-1, 1].
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shortrun as sr
from shortrun.core.model import gaussian_log_likelihood
from shortrun.data import DataSettings
from shortrun.inverse import Downsample, Function, Identity, Mask, Operator
from shortrun.learners import learner_class
from shortrun.metrics.errors import mse_per_image
from shortrun.nets.build import GeneratorNetwork
from shortrun.studies.sources import Cells

SIGMA = 0.22
FACTOR = 4


class InPart(Operator):
    """Of all that an operator would measure, each ``y`` holds a part of its own, and says itself which.

    ``y`` is what was measured, zero where it was not, and after it 1 where it was, else 0: twice as many channels.
    """

    def __init__(self, whole: Operator) -> None:
        self.whole = whole

    def measure(self, x: Tensor) -> Tensor:
        made = self.whole.measure(x)
        return torch.cat([made, torch.ones_like(made)], 1)

    def log_likelihood(self, y: Tensor, seen: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        values, shown = y.chunk(2, 1)
        return gaussian_log_likelihood(values, seen.chunk(2, 1)[0], sigma, shown > 0.5)


def in_part(made: Tensor, shown: Tensor) -> Tensor:
    """Measurements for :class:`InPart`."""
    shown = shown.expand_as(made)
    return torch.cat([torch.where(shown, made, 0.0), shown.to(made)], 1)


def shifted(x: Tensor) -> Tensor:
    """Means of 4x4 pixels after each shift by 0 to 3 pixels down and right, as 16 channels; the edge is background."""
    padded = F.pad(x, (FACTOR - 1, 0, FACTOR - 1, 0), value=-1.0)
    side = x.shape[-1]
    shifts = [(a, b) for a in range(FACTOR) for b in range(FACTOR)]
    return torch.cat([F.avg_pool2d(padded[..., a : a + side, b : b + side], FACTOR) for a, b in shifts], 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--train-images", type=int, help="by default all")
    parser.add_argument("--images", type=int, default=200, help="held-out ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="lessons whose names have this in them")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)
    command = (
        f"python benchmarks/measurements_only.py --data {words.data} --iterations {words.iterations} --channels "
        f"{words.channels} --images {words.images} --seed {words.seed}"
    )
    cells = Cells(words.json, f"{words.data}, seed {words.seed}", command)
    if words.train_images:
        command += f" --train-images {words.train_images}"
    settings = DataSettings(words.data, train_images=words.train_images)
    train, test = settings.load("train"), settings.load("test").batch(slice(0, words.images))
    x = train.batch(slice(0, len(train)))
    for name, (data, operator) in lessons(x, train.mean, torch.Generator().manual_seed(words.seed)).items():
        if words.only not in name:
            continue
        found = cells.measure(name, lambda data=data, operator=operator: learned(data, operator, test, words))
        print(f"{name:34} " + "  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    guess = mse_per_image(train.mean.expand_as(test), test).mean()
    print(f"the mean image: {float(guess):.4f}")


def lessons(x: Tensor, mean: Tensor, rng: torch.Generator) -> dict[str, tuple[Tensor, Operator | None]]:
    """What each generator learns from."""
    shown = sr.make_mask("random:0.5", x, rng)
    small, all_shifts = Downsample(FACTOR)(x), shifted(x)
    own_shift = F.one_hot(torch.randint(0, FACTOR**2, (len(x),), generator=rng), FACTOR**2).bool()[:, :, None, None]
    enlarged = F.interpolate(small, scale_factor=FACTOR, mode="bicubic", align_corners=False).clamp(-1, 1)
    return {
        "whole images": (x, None),
        "half of the pixels": (in_part(x, shown), InPart(Identity())),
        "half of the pixels, filled": (torch.where(shown, x, mean), None),
        "downsampled, each shifted": (in_part(all_shifts, own_shift), InPart(Function(shifted))),
        "downsampled, all alike": (small, Downsample(FACTOR)),
        "downsampled, enlarged": (enlarged, None),
    }


def learned(data: Tensor, operator: Operator | None, test: Tensor, words: argparse.Namespace) -> dict[str, Any]:
    fewer = operator is not None and operator(test[:1]).shape[-1] < test.shape[-1]
    sigma = SIGMA / 2 if fewer else SIGMA  # means of 4x4 let a quarter of it pass; with so little chains diverge
    network = GeneratorNetwork(latent_sizes=(10, 16, 30), channels=words.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(words.seed)
        model = learner_class("short-run").build(network, tuple(test.shape[1:]), sigma)
    trained = sr.fit(model, data, operator=operator, iterations=words.iterations, seed=words.seed, quiet=True)
    holes = Mask(sr.make_mask("random:0.5", test, torch.Generator().manual_seed(words.seed)))
    small = Downsample(FACTOR)
    return {
        "whole": error(trained.restore(test, sigma=SIGMA), test),
        "from_half": error(trained.restore(test, holes, SIGMA), test),
        "from_downsampled": error(trained.restore(small(test), small, SIGMA / FACTOR), test),
        "seconds": float(trained.info["seconds"]), "divergent": int(trained.info["divergent"]),
    }  # fmt: skip


def error(images: Tensor, x: Tensor) -> float:
    return float(mse_per_image(images, x).mean())


if __name__ == "__main__":
    main()
