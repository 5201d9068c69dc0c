"""Whether learning lasts: the curve of a finished run, and the errors of held-out images at its end.

    python benchmarks/learning.py RUN [RUN ..] --json results/learning --plot docs/images/learning.png

Of each run: the held-out error over time, the largest ratio to the best so far after the first tenth, the last one to
the best; and on test images the errors of draws and of centres (chains without noise; what an encoder says, for methods
that have one), mean and median, and how many chains got lost. For pictures, files that it
wrote are accepted in the place of runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shortrun as sr
from shortrun.data import DataSettings
from shortrun.files import read_lines
from shortrun.metrics.errors import mse_per_image
from shortrun.studies.sources import machine
from shortrun.training.config import Config

WITH_CHAINS = ("short-run", "abp")  # the curves of these are errors of draws, those of encoders errors of centres
AFTER = 0.1  # of the run is over before errors are compared with the best so far


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="folder; the file of a run has its name")
    parser.add_argument("--plot", type=Path)
    words = parser.parse_args(argv)
    found = {}
    for run in words.runs:
        if run.suffix == ".json":
            found[run.stem] = json.loads(run.read_text())
            continue
        found[run.name] = result = measured(run, words.images)
        print(f"{run.name:20} " + "  ".join(f"{key} {result[key]:.4g}" for key in ("mse", "centres", "median", "mended",
              "largest_over_best", "last_over_best")), flush=True)  # fmt: skip
        if words.json:
            words.json.mkdir(parents=True, exist_ok=True)
            (words.json / f"{run.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if words.plot:
        plot(found, words.plot)


def measured(run: Path, images: int) -> dict[str, Any]:
    config, trained = Config.load(run / "config.yaml"), sr.load(run)
    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    total = lines[-1]["seconds"]
    best, largest = float("inf"), 0.0
    for line in lines:
        best = min(best, line["mse"])
        if line["seconds"] > AFTER * total:
            largest = max(largest, line["mse"] / best)
    test = DataSettings(config.data.data, size=config.data.size, crop=config.data.crop).load("test")
    x = test.batch(slice(0, images))
    draws = trained.reconstruction(x, by="draw")
    centres = trained.reconstruction(x, by="centre")
    errors, quiet_errors = mse_per_image(draws.images, x), mse_per_image(centres.images, x)
    return {
        "data": config.data.data, "method": config.method, "minutes": config.run.minutes, "seed": config.run.seed,
        "batch": config.run.batch, "learning_rates": list(config.run.learning_rates),
        "step_control": getattr(config.settings, "step_control", None),
        "steps": getattr(config.settings, "steps", None),
        "latent_sizes": list(getattr(config.network, "latent_sizes", ())), "iterations": lines[-1]["iteration"],
        "images": len(x), "mse": float(errors.mean()), "median": float(errors.median()),
        "centres": float(quiet_errors.mean()), "centres_median": float(quiet_errors.median()),
        "divergent": int(draws.divergent.sum()), "mended": int(draws.mended.sum()),
        "largest_over_best": largest, "last_over_best": lines[-1]["mse"] / best,
        "curve": [[round(line["seconds"]), line["iteration"], round(line["mse"], 5), round(line["step_size"], 5),
                   line["divergent"]] for line in lines],
        "columns": ["seconds", "iteration", "held-out mse", "step size", "divergent chains so far"],
        "machine": machine(),
    }  # fmt: skip


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(result["data"] for result in found.values()))
    figure, axes = plt.subplots(1, len(sets), figsize=(5 * len(sets), 3.6), squeeze=False)
    for name, result in found.items():
        axis = axes[0][sets.index(result["data"])]
        shares = [row[1] / result["iterations"] for row in result["curve"]]
        shown, other = ("draws", "centres") if result["method"] in WITH_CHAINS else ("centres", "draws")
        (line,) = axis.semilogy(shares, [row[2] for row in result["curve"]], label=f"{name}: {shown}")
        end = result["centres"] if other == "centres" else result["mse"]
        axis.semilogy([1.0], [end], "*", color=line.get_color(), markersize=11, label=f"{name}: {other} at the end")
    for axis, data in zip(axes[0], sets, strict=True):
        axis.set(title=data, xlabel="share of the run", ylabel="held-out MSE")
        axis.legend(fontsize=8, frameon=False)
        axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
