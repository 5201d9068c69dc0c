"""Is it the generator or the prior that samples lack? FID with the latents drawn from what inference finds.

    python benchmarks/fitted_prior.py runs/reproduce-cpu/svhn-short-run-L5-K25 --samples 2000 --json FILE

A sample decodes z ~ N(0, c_l^2 I). If training has not yet brought the latents of images to that law, samples are worse
than the generator could draw. Here latents of training images are inferred, a Gaussian with their mean and full
covariance is fitted, and samples from both laws are compared with the same training images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from shortrun import data, metrics, tasks
from shortrun.config import TrainConfig
from shortrun.runs import from_pretrained, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trained, config = from_pretrained(arguments.run), TrainConfig.load(arguments.run / "config.yaml")
    images = data.load(config.data, "train", root=config.data_root, size=config.size, crop=config.crop)
    reference = images.part(arguments.samples)
    generator = torch.Generator().manual_seed(0)
    shown = tasks.reconstruct(trained, reference.float() / 127.5 - 1, generator)
    z = torch.cat([layer.flatten(1) for layer in shown.z], 1)[~shown.divergent].double()
    law = torch.distributions.MultivariateNormal(z.mean(0), z.T.cov() + 1e-6 * torch.eye(z.shape[1]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = law.sample((arguments.samples,)).float()
    parts = drawn.split([layer[0].numel() for layer in shown.z], 1)
    fitted = tuple(part.view(-1, *layer.shape[1:]) for part, layer in zip(parts, shown.z, strict=True))
    sets = {
        "samples of the prior": tasks.sample(trained, arguments.samples, torch.Generator().manual_seed(config.seed)),
        "samples of the fitted Gaussian": tasks.decode(trained, fitted),
    }
    network, rows = metrics.inception(), dict[str, Any]()
    for name, pictures in sets.items():
        scores = metrics.compare_sets(reference, metrics.to_bytes(pictures), network, quiet=True)
        rows[name] = {key: scores[key] for key in ("fid", "kid", "samples")}
        print(f"{arguments.run.name}, {name}: {json.dumps(rows[name])}", flush=True)
        if arguments.json:
            write_json(arguments.json, {"run": arguments.run.name, "training": trained.info, "rows": rows})


if __name__ == "__main__":
    main()
