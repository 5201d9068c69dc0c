"""How long `import shortrun` takes beyond `import torch`: the best of several fresh processes.

python benchmarks/import_time.py [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CODE = (
    "import time; start = time.perf_counter(); import torch; middle = time.perf_counter(); import shortrun; "
    "print(middle - start, time.perf_counter() - middle)"
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args(words)
    runs = [
        subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(arguments.repeats)
    ]
    torch_seconds, own_seconds = (min(map(float, column)) for column in zip(*runs, strict=True))
    print(f"torch {torch_seconds:.3f} s, shortrun {own_seconds:.3f} s more")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch_seconds, "shortrun": own_seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
