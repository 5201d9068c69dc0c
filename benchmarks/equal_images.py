"""Equal updates are not equal images: what Ladder-VAE loses when it, too, updates 18 times per batch.

    OMP_NUM_THREADS=1 python benchmarks/equal_images.py --data svhn --layers 3 --json FILE

The `cpu` size of `shortrun reproduce` compares short run inference and Ladder-VAE at equal updates of the generator and
equal batch. Short run inference makes m = 18 updates along each chain, so it sees a new batch only every 18 updates.
Here Ladder-VAE, with all other settings as there, keeps each batch for `--repeat` updates. Same held-out images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from shortrun.learners.base import Batch
from shortrun.published import SCALES, Training
from shortrun.tasks import mse_per_image
from shortrun.train import Loop


class RepeatingLoop(Loop):
    """A training loop that keeps each batch for several updates."""

    repeat = 1

    def draw(self, count: int, generator: str) -> Batch:
        if generator != "order":
            return super().draw(count, generator)
        if self.iteration % self.repeat == 0 or not hasattr(self, "kept"):
            self.kept = super().draw(count, generator)
        return self.kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="svhn")
    parser.add_argument("--layers", type=int, default=3, choices=(1, 3, 5))
    parser.add_argument("--repeat", type=int, nargs="+", default=[1, 18], help="updates per batch")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    scale = SCALES["cpu"]
    config = Training(arguments.data, "ladder-vae", arguments.layers, equal="updates").config(scale, None)
    rows: dict[str, Any] = {}
    for repeat in arguments.repeat:
        with tempfile.TemporaryDirectory() as folder:
            loop = RepeatingLoop(config, Path(folder), False, lambda text: None)
            loop.repeat = repeat
            loop.save()  # what a recovery goes back to
            while loop.share < 1:
                loop.advance()
        x = loop.test_images.batch(slice(0, scale.images))
        errors = {}
        for name, inference in {"draw": loop.learner.draw, "centre": loop.learner.infer}.items():
            z = inference(loop.model, x, loop.learner.dynamics, generator=torch.Generator().manual_seed(0)).z
            with torch.no_grad():
                errors[name] = float(mse_per_image(loop.model.decoder(z), x).mean())
        rows[str(repeat)] = {**errors, "updates": loop.updates, "batches": -(-loop.updates // repeat)}
        print(f"{arguments.data} L={arguments.layers}, {repeat} updates per batch: {rows[str(repeat)]}", flush=True)
        if arguments.json:
            settings = {key: value for key, value in vars(arguments).items() if key != "json"}
            Path(arguments.json).write_text(json.dumps({"command": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
