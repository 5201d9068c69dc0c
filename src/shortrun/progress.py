"""A progress bar with messages: in a terminal, in a notebook, or quiet."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any


class Progress:
    """Shows how much of the work is done, with one line about its state; messages appear above it.

    Args:
        quiet: show nothing.
        display: IPython's, for a line of text that is replaced; by default where a notebook has no ipywidgets, which
            the bar would need.
    """

    def __init__(self, quiet: bool = False, display: Callable[..., Any] | None = None, what: str = "training") -> None:
        from rich.console import Console

        self.console, self.what = Console(stderr=True, quiet=quiet), what
        if display is None and self.console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
            display = importlib.import_module("IPython.display").display
        self._display = None if quiet else display
        self._bar: Any = None
        self._task: Any = None
        self._line: Any = None
        self._shown = -1.0

    def log(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Progress:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        if self._display is not None:
            self._line = self._display({"text/plain": self.what}, raw=True, display_id=True)
            return self
        status = TextColumn("{task.fields[status]}")
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), status)
        self._bar = Bar(*columns, console=self.console, transient=False, disable=self.console.quiet)
        self._bar.__enter__()
        self._task = self._bar.add_task(self.what, total=1.0, status="")
        return self

    def show(self, share: float, status: str) -> None:
        """``share`` of the work is done."""
        if self._line is None:
            self._bar.update(self._task, completed=share, status=status)
        elif time.monotonic() - self._shown > 0.5 or share >= 1:
            self._shown = time.monotonic()
            self._line.update({"text/plain": f"{self.what} {100 * min(share, 1):.0f} %: {status}"}, raw=True)

    def __exit__(self, *details: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*details)
