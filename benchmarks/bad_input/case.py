"""One bad input, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANARY = "canary"
"""A file that code in malicious input tries to write."""
MODEL = "mnist-small"


@dataclass
class Case:
    group: str
    name: str
    run: list[str] | Callable[[], Any]
    """Words of the command line, or a function of the Python interface; the folder of the case is the current one."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Makes the files of the case in its folder."""
    names: tuple[str, ...] = ()
    """One of these must be in the message."""
    works: Callable[[Path], str | None] | None = None
    """For valid input: what is wrong with what came of it, or None."""
    seconds: float = 30.0
    """It has hung after this time."""
    new: tuple[str, ...] = ("out",)
    """Must not exist after a refusal."""
