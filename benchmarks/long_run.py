"""Whether a long run stays as it is: memory, open files and the size of its folder, from its first tenth to its end.

OMP_NUM_THREADS=1 python benchmarks/long_run.py --minutes 60 --json results/long_run.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shortrun as sr
from shortrun.data import load
from shortrun.studies.sources import machine
from shortrun.training.presets import preset


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--evaluate-every", type=float, default=10, help="seconds; each writes a picture and a line")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)
    config = preset("smoke").changed(
        iterations=None, minutes=words.minutes, evaluate_every=words.evaluate_every,
        checkpoint_every=words.evaluate_every, tune_every=100,
    )  # fmt: skip
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"

        def look(trained: sr.Trained) -> None:
            seen.append({
                "seconds": round(trained.info["seconds"]), "iterations": trained.info["iterations"],
                "memory_mb": round(_resident() / 1e6, 1), "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
                "pictures": len(list((run / "pictures").glob("*"))),
                "folder_mb": round(sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6, 2),
            })  # fmt: skip

        sr.fit(None, load("embedded"), validation=load("embedded", "test"), config=config, folder=run, callback=look)
    shown = [seen[len(seen) // 10], seen[len(seen) // 2], seen[-1]]
    for row in shown:
        print(row)
    result = {"minutes": words.minutes, "rows": seen[:: max(1, len(seen) // 30)] + seen[-1:], "machine": machine()}
    if words.json:
        words.json.write_text(json.dumps(result, indent=1) + "\n")


def _resident() -> int:
    """Bytes of memory that this process holds (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
