"""Files that are never half written, and the folder for what can be computed again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where things are kept that can be computed again: SHORTRUN_CACHE, by default ~/.cache/shortrun."""
    return Path(os.environ.get("SHORTRUN_CACHE", Path.home() / ".cache" / "shortrun"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file, flush it to disk, rename: readers see the old file or the whole of this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk, say: the space of what could be written is given back
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def to_json(values: Any, indent: int | None = None) -> str:
    """As JSON, which has no NaN and no infinity: they become null.

    >>> to_json({"mse": float("nan"), "steps": (25, 0.5)})
    '{"mse": null, "steps": [25, 0.5]}'
    """
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def check_writable(folder: Path) -> None:
    """Raise an ``OSError`` that names the folder if nothing can be written there; an existing one stays as it is."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(f"{folder} cannot be written to: {error.strerror or error}") from None


def write_json(path: Path, values: Any) -> None:
    write_atomically(path, (to_json(values, indent=1) + "\n").encode())


def append_line(path: Path, values: Any) -> None:
    """One more JSON object at the end of a file."""
    with path.open("a") as file:
        file.write(to_json(values) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object per line; none if there is no file. A half line at its end is left out.

    A process that is killed while it writes, or a full disk, leaves such a line.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from None
    return found


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """A file of one JSON object per line; nothing is written where there are none and no file."""
    if values or path.is_file():
        write_atomically(path, "".join(to_json(line) + "\n" for line in values).encode())


def remove_temporary(folder: Path) -> None:
    """Remove what :func:`write_atomically` could not finish, in processes that were killed."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that this file stands for; raises ``BlockingIOError`` if another process does.

    The system gives it back when the process ends, however it ends. Where there are no such locks, nothing is done.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
