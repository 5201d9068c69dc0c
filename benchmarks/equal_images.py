"""Equal updates are not equal images: short run inference and Ladder-VAE with as many updates from each batch.

    OMP_NUM_THREADS=1 python benchmarks/equal_images.py --data svhn --layers 3 --seeds 0 1 2 --json FILE

The `cpu` size of `shortrun reproduce` compares the two at equal updates of the generator and equal batch. Short run
inference makes m = 18 updates along each chain, so it sees a new batch only every 18 updates. Here Ladder-VAE, with all
other settings as there, keeps each batch for as many updates: equal updates and equal images. MSE of the same held-out
images, from a draw from q(z | x) and from its centre. `--variants` also has the rows of the tables, for more seeds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shortrun.learners.base import Batch
from shortrun.published import SCALES, Training
from shortrun.reproduce import Place, machine, measure_error
from shortrun.runs import from_pretrained, write_json
from shortrun.train import Loop

VARIANTS: dict[str, dict[str, Any]] = {
    "short-run": {},
    "short-run-more-images": {"fresh": True},  # 18 updates along each chain in the warm-up, then 9
    "ladder-vae": {"method": "ladder-vae"},  # as many updates per batch as short-run
    "ladder-vae-new-batches": {"method": "ladder-vae"},  # a new batch for each update, as in the tables
}


def join(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


class RepeatingLoop(Loop):
    """A training loop that keeps each batch for several iterations."""

    repeat = 1

    def draw(self, count: int, generator: str) -> Batch:
        if generator != "order":
            return super().draw(count, generator)
        if self.iteration % self.repeat == 0 or not hasattr(self, "kept"):
            self.kept = super().draw(count, generator)
        return self.kept


def learn(training: Training, repeat: int) -> dict[str, Any]:
    """Train at equal updates with ``repeat`` iterations per batch, and measure."""
    scale = SCALES["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        loop = RepeatingLoop(training.config(scale, None), Path(folder), False, lambda text: None)
        loop.repeat = repeat
        loop.save()  # what a recovery goes back to
        while loop.share < 1:
            loop.advance()
        loop.save()
        place = Place(Path(folder), Path(folder), "cpu", scale)
        found = measure_error(place, training, from_pretrained(Path(folder)))
    return {"seed": training.seed, "updates": loop.updates, "batches": -(-loop.iteration // repeat), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="svhn")
    parser.add_argument("--layers", type=int, default=3, choices=(1, 3, 5))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["short-run", "ladder-vae"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ours = Training(arguments.data, layers=arguments.layers, equal="updates")
    along = ours.config(SCALES["cpu"], None).learn_last
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in arguments.variants}
    for seed, variant in itertools.product(arguments.seeds, arguments.variants):
        training = replace(ours, seed=seed, **VARIANTS[variant])
        rows[variant].append(learn(training, along if variant == "ladder-vae" else 1))
        print(f"{variant}: {rows[variant][-1]}", flush=True)
        if arguments.json:
            settings = f"--data {arguments.data} --layers {arguments.layers} --seeds {join(arguments.seeds)}"
            command = f"benchmarks/equal_images.py {settings} --variants {join(arguments.variants)}"
            write_json(arguments.json, {"command": command, "machine": machine(), "rows": rows})
    for measure, variant in itertools.product(("mse", "mse_centre"), rows):
        print(f"mean {measure} of {variant}: {statistics.mean(row[measure] for row in rows[variant]):.4f}")


if __name__ == "__main__":
    main()
