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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from shortrun.files import write_json
from shortrun.fitting import fit
from shortrun.studies.reproduce.models import measure_error
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import SCALES, Scale, ScaleName, Training
from shortrun.studies.sources import machine

VARIANTS: dict[str, dict[str, Any]] = {
    "short-run": {},
    "short-run-more-images": {"fresh": True},  # 18 updates along each chain in the warm-up, then 9
    "ladder-vae": {"method": "ladder-vae"},  # as many updates per batch as short-run
    "ladder-vae-new-batches": {"method": "ladder-vae"},  # a new batch for each update, as in the tables
}


def join(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


class RepeatedBatches:
    """Random indices without end, each batch several times in a row; the batches are those that `fit` would draw."""

    def __init__(self, total: int, batch: int, repeat: int, seed: int) -> None:
        self.total, self.batch, self.repeat = total, batch, repeat
        self.rng = torch.Generator().manual_seed(1000 * seed)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            indices = torch.randint(self.total, (self.batch,), generator=self.rng).tolist()
            yield from itertools.repeat(indices, self.repeat)


def learn(training: Training, repeat: int, name: ScaleName, scale: Scale) -> dict[str, Any]:
    """Train at equal updates with ``repeat`` iterations per batch, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), Path(folder), name, scale)
        images = place.load(training, "train")
        config = place.config(training).changed(evaluate_every=1e9)  # an evaluation would take a batch for itself
        data: Any = images
        if repeat > 1:
            batches: Any = RepeatedBatches(len(images), config.run.batch, repeat, training.seed)
            data = DataLoader(TensorDataset(images.array), batch_sampler=batches)
        trained = fit(None, data, validation=place.load(training, "test"), config=config, quiet=True)
        found = measure_error(place, training, trained)
    updates, iterations = trained.info["updates"], trained.info["iterations"]
    return {"seed": training.seed, "updates": updates, "batches": -(-iterations // repeat), **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="svhn")
    parser.add_argument("--layers", type=int, default=3, choices=(1, 3, 5))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["short-run", "ladder-vae"])
    parser.add_argument("--preset", choices=SCALES, default="cpu", help="smoke: to see that it runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    name: ScaleName = arguments.preset
    scale = SCALES[name]
    ours = Training(arguments.data, layers=arguments.layers, equal="updates")
    along = ours.config(scale, None).updates_along(0)
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in arguments.variants}
    for seed, variant in itertools.product(arguments.seeds, arguments.variants):
        training = replace(ours, seed=seed, **VARIANTS[variant])
        rows[variant].append(learn(training, along if variant == "ladder-vae" else 1, name, scale))
        print(f"{variant}: {rows[variant][-1]}", flush=True)
        if arguments.json:
            settings = f"--data {arguments.data} --layers {arguments.layers} --seeds {join(arguments.seeds)}"
            command = f"benchmarks/equal_images.py {settings} --variants {join(arguments.variants)}"
            write_json(arguments.json, {"command": command, "machine": machine(), "rows": rows})
    for measure, variant in itertools.product(("mse", "mse_centre"), rows):
        print(f"mean {measure} of {variant}: {statistics.mean(row[measure] for row in rows[variant]):.4f}")


if __name__ == "__main__":
    main()
