"""Equal updates are not equal images: short run inference and Ladder-VAE with as many updates from each batch.

    OMP_NUM_THREADS=1 python benchmarks/equal_images.py --data svhn --layers 3 --seeds 0 1 2 --json FILE

The `cpu` size of `shortrun reproduce` compares the two at equal updates of the generator and equal batch. Short run
inference makes m = 18 updates along each chain, so it sees a new batch only every 18 updates. Here Ladder-VAE, with all
other settings as there, keeps each batch for as many updates: equal updates and equal images. MSE of the same held-out
images, from a draw from q(z | x) and from its centre.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from shortrun.config import Method
from shortrun.learners.base import Batch
from shortrun.published import SCALES, Training
from shortrun.reproduce import Place, machine, measure_error
from shortrun.runs import from_pretrained, write_json
from shortrun.train import Loop


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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ours = Training(arguments.data, layers=arguments.layers, equal="updates")
    along = ours.config(SCALES["cpu"], None).learn_last
    repeats: dict[Method, int] = {"short-run": 1, "ladder-vae": along}
    rows: dict[str, list[dict[str, Any]]] = {method: [] for method in repeats}
    for seed in arguments.seeds:
        for method, repeat in repeats.items():
            training = Training(arguments.data, method, arguments.layers, equal="updates", seed=seed)
            rows[method].append(learn(training, repeat))
            print(f"{training.name}: {rows[method][-1]}", flush=True)
            if arguments.json:
                settings = f"--data {arguments.data} --layers {arguments.layers} --seeds"
                command = f"benchmarks/equal_images.py {settings} {' '.join(map(str, arguments.seeds))}"
                write_json(arguments.json, {"command": command, "machine": machine(), "rows": rows})
    for measure in ("mse", "mse_centre"):
        means = {method: statistics.mean(row[measure] for row in found) for method, found in rows.items()}
        print(f"mean {measure}: {', '.join(f'{method} {mean:.4f}' for method, mean in means.items())}")


if __name__ == "__main__":
    main()
