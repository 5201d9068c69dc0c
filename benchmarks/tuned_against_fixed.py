"""Time to quality: a self-tuned run against one with the authors' fixed step (delta = 0.05, s = 0.00125).

    python benchmarks/tuned_against_fixed.py --data mnist --minutes 2 --seeds 0 1 2 --json FILE

Both train the same `cpu` preset from the same seeds. The fixed run has the whole budget; the figure is the share of
it that the tuned run needs to reach the held-out MSE at which the fixed run ended. `--learn-last 1` for the fixed
run is the authors' recipe; the default gives it the same updates along the chain, so that only the step differs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from shortrun.config import preset
from shortrun.runs import read_lines
from shortrun.train import train


def curve(folder: Path) -> list[tuple[float, float]]:
    lines = read_lines(folder / "metrics.jsonl")
    return [(line["seconds"], line["mse"]) for line in lines if "mse" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learn-last", type=int, default=18, help="of the fixed run; 1 is the authors' recipe")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        base = replace(preset("cpu", arguments.data), minutes=arguments.minutes, seed=seed)
        fixed = replace(base, tune="off", step_size=0.05**2 / 2, learn_last=arguments.learn_last, evaluate_every=1e9)
        tuned = replace(base, evaluate_every=4.0)
        with tempfile.TemporaryDirectory() as folder:
            goal = train(fixed, Path(folder) / "fixed", quiet=True).mse
            train(replace(tuned, iterations=None), Path(folder) / "tuned", quiet=True)
            points = curve(Path(folder) / "tuned")
        reached = next((seconds for seconds, mse in points if mse <= goal), float("inf"))
        share = reached / (60 * arguments.minutes)
        rows.append({"seed": seed, "fixed_mse": goal, "seconds": reached, "share": share, "tuned_mse": points[-1][1]})
        print(
            f"seed {seed}: fixed step ends at MSE {goal:.4f} after {60 * arguments.minutes:.0f} s; the tuned run is "
            f"there after {reached:.0f} s ({100 * share:.0f} %) and ends at {points[-1][1]:.4f}",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"command": vars(arguments), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
