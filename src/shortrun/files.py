"""Files that are never half written, and the folder for what can be computed again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where things are kept that can be computed again: SHORTRUN_CACHE, by default ~/.cache/shortrun."""
    return Path(os.environ.get("SHORTRUN_CACHE", Path.home() / ".cache" / "shortrun"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file, flush it to disk, rename: readers see the old file or the whole of this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, values: Any) -> None:
    write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object per line; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
