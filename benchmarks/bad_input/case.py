"""One bad input, and what must become of it."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
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


def speak_into(out: Path, errors: Path) -> None:
    """Let a forked process begin as a new one would: output into files, no input, warnings as they are by default."""
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # whoever runs this may have put something else in their place, and pytest does
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    warnings.resetwarnings()


def begin(work: Callable[[], int], said: Path) -> int:
    """Let a process of its own do some work, which returns its exit code; the number of that process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        speak_into(said, said)
        code = work()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(child: int) -> int:
    """Its exit code; minus the number of the signal that ended it."""
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
