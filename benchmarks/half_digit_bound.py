"""How well can the lower half of a digit be guessed from the upper one? A yardstick for inpainting.

    python benchmarks/half_digit_bound.py --epochs 12

A network of two hidden layers is trained for nothing but this guess, by its squared error, on the 60,000 training
digits of MNIST. Its error on the test digits is near that of the conditional mean, the best guess there is; a fair draw
from the conditional distribution has twice that error. Filling with the mean image is printed beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import nn

from shortrun import data


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--images", type=int, help="only the first so many of each split")
    parser.add_argument("--width", type=int, default=1024)
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    train, test = (
        data.load(arguments.data, split, limit=arguments.images).batch(slice(None)).flatten(1).chunk(2, 1)
        for split in ("train", "test")
    )
    half, width = train[0].shape[1], arguments.width
    network = nn.Sequential(
        nn.Linear(half, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(width, half), nn.Tanh(),
    )  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters())
    for epoch in range(arguments.epochs):
        network.train()
        rate = 1e-3 * 0.5 * (1 + math.cos(math.pi * epoch / arguments.epochs)) + 1e-5
        optimiser.param_groups[0]["lr"] = rate
        for rows in torch.randperm(len(train[0])).split(256):
            loss = (network(train[0][rows]) - train[1][rows]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        network.eval()
        with torch.no_grad():
            error = (network(test[0]) - test[1]).square().mean()
        print(f"epoch {epoch + 1}: error on the hidden half {error:.4f}", flush=True)
    print(f"mean image: {(train[1].mean(0) - test[1]).square().mean():.4f}")


if __name__ == "__main__":
    main()
