"""The folder of a run: who may write into it, and when a run may begin there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from shortrun.files import locked, read_lines, remove_temporary
from shortrun.training.checkpoints import list_checkpoints
from shortrun.training.model_folder import RunError

MOST_PICTURES = 200
CONFIG, METRICS, LOCK = "config.yaml", "metrics.jsonl", ".lock"


def prepare_folder(folder: Path, resume: bool) -> None:
    """Refuse to start into a folder that holds a run or anything else, or to resume where there is no run."""
    if resume:
        if not (folder / CONFIG).is_file():
            raise RunError(f"{folder} is not a run folder: it has no config.yaml")
    elif folder.exists() and (not folder.is_dir() or not (_is_empty(folder) or has_not_begun(folder))):
        raise RunError(f"{folder} is not empty. Continue it with `shortrun resume {folder}`, or name another folder")


def has_not_begun(folder: Path) -> bool:
    """Whether a run was started in this folder that ended before its first checkpoint."""
    ours = (folder / LOCK).is_file() and (folder / CONFIG).is_file()
    return ours and not list_checkpoints(folder / "checkpoints") and not read_lines(folder / METRICS)


def _is_empty(folder: Path) -> bool:
    return all(path.name == LOCK for path in folder.iterdir())


@contextlib.contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """The folder of a run, for this process alone; if nothing is written to it, it is removed again."""
    prepare_folder(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK))
        except BlockingIOError:
            raise RunError(f"another process is training in {folder}; wait for it, or stop it") from None
        prepare_folder(folder, resume)  # the other process may have begun in the meantime
        remove_temporary(folder)
        try:
            yield
        finally:
            if _is_empty(folder):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


def thin(pictures: Path) -> None:
    """Remove every second picture where there are too many: what is left still shows the whole run."""
    found = sorted(pictures.glob("*.png"))
    for path in found[1::2] if len(found) >= MOST_PICTURES else []:
        path.unlink()
