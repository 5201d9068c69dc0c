"""Time to quality: a self-tuned run against one with the authors' fixed step (delta = 0.05, s = 0.00125).

    python benchmarks/tuned_against_fixed.py --data mnist --minutes 2 --seeds 0 1 2 --json FILE

Both train the same `cpu` preset from the same seeds. The fixed run has the whole budget; the figure is the share of
it that the tuned run needs to reach the held-out MSE at which the fixed run ended. `--learn-last 1` for the fixed
run is the authors' recipe; the default gives it the same updates along the chain, so that only the step differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from shortrun.fitting import fit
from shortrun.training.config import Config
from shortrun.training.presets import preset


def curve(config: Config) -> list[tuple[float, float]]:
    """Train; held-out MSE over seconds of training."""
    trained = fit(None, config.data.load("train"), validation=config.data.load("test"), config=config, quiet=True)
    return [(line["seconds"], line["mse"]) for line in trained.history.evaluations]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learn-last", type=int, default=18, help="of the fixed run; 1 is the authors' recipe")
    parser.add_argument("--preset", choices=("smoke", "cpu"), default="cpu", help="smoke: to see that it runs")
    parser.add_argument("--json")
    arguments = parser.parse_args(argv)
    rows = []
    for seed in arguments.seeds:
        base = preset(arguments.preset, arguments.data).changed(minutes=arguments.minutes, iterations=None, seed=seed)
        fixed = {"tune": "off", "step_size": 0.05**2 / 2, "learn_last": arguments.learn_last, "evaluate_every": 1e9}
        goal = curve(base.changed(**fixed))[-1][1]
        points = curve(base.changed(evaluate_every=4.0))
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
