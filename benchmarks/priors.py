"""How good samples are under each law of the latents, beside reconstructions, which no law can beat.

    python benchmarks/priors.py mnist-small --data mnist --kinds gaussian mixture flow energy --json FILE

KID and FID against 1,000 training images: of reconstructions of other training images, of samples from N(0, I) (for
GLO: from the Gaussian of its codes), and of samples from each kind of learned prior, all fitted to the same latents.
Latents are draws from q(z | x) of --images training images, the reference among them, as `shortrun prior` takes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shortrun as sr
from shortrun import metrics
from shortrun.core.latents import flatten
from shortrun.data import DataSettings
from shortrun.priors import fit_prior
from shortrun.studies.sources import machine

REFERENCE = 1000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--kinds", nargs="+", default=["mixture"])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", choices=("inception", "pixels"), default="inception", help="pixels: for tests")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)

    trained = sr.load(words.model)
    seen = DataSettings(words.data).load("train")
    network = metrics.inception() if words.features == "inception" else pixels()
    reference = seen.part(REFERENCE)
    scores: dict[str, dict[str, Any]] = {}

    def note(name: str, images: torch.Tensor, **facts: Any) -> None:
        found = metrics.compare_sets(reference, metrics.to_bytes(images), network)
        kept = {key: round(found[key], 5) for key in ("kid", "kid_deviation", "fid")}
        scores[name] = {**kept, "images": len(images), **facts}
        print(f"{name:16} KID {kept['kid']:.4f}  FID {kept['fid']:.1f}  {facts}", flush=True)

    begun = time.perf_counter()
    indices = seen.some(words.images)
    inferred = trained.reconstruction(seen.batch(indices), by="draw", decode=False, seed=words.seed)
    seconds = time.perf_counter() - begun
    others = slice(min(REFERENCE, len(indices) // 2), min(REFERENCE, len(indices) // 2) + words.samples)
    note("reconstructions", trained.decode(tuple(layer[others] for layer in inferred.z)))
    note("normal", trained.sample(words.samples, prior="normal", seed=words.seed))
    z = flatten(inferred.z)[~inferred.divergent]
    for kind in words.kinds:
        trained.prior = fit_prior(z, kind, seed=words.seed)
        note(kind, trained.sample(words.samples, seed=words.seed), **trained.prior.info)
    values = {
        "command": f"python benchmarks/priors.py {words.model} --data {words.data} --kinds {' '.join(words.kinds)} "
        f"--images {words.images} --samples {words.samples} --seed {words.seed}",
        "machine": machine(),
        "model": {"method": trained.method, **trained.info},
        "latents": z.shape[1],
        "inference_seconds": round(seconds, 1),
        "scores": scores,
    }
    if words.json is not None:
        words.json.parent.mkdir(parents=True, exist_ok=True)
        words.json.write_text(json.dumps(values, indent=1) + "\n")


def pixels() -> metrics.FeatureNetwork:
    """Features that need no network."""
    return metrics.FeatureNetwork(lambda images: images.float().flatten(1)[:, :64], "pixels", 64)


if __name__ == "__main__":
    main()
