"""A progress bar with messages: in a terminal, in a notebook, or quiet."""

from __future__ import annotations

import importlib.util
import time
from typing import Any


class Progress:
    """Shows how much of the work is done, with one line about its state; messages appear above it.

    In a notebook without ipywidgets it is a line of text that is replaced.
    """

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, quiet=quiet)
        self._bar: Any = None
        self._task: Any = None
        self._cell: Any = None
        self._shown = 0.0
        self._plain = self.console.is_jupyter and importlib.util.find_spec("ipywidgets") is None

    def log(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Progress:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        if self._plain and not self.console.quiet:
            from IPython.display import display

            self._cell = display({"text/plain": "training"}, raw=True, display_id=True)
            return self
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._bar = Bar(*columns, console=self.console, transient=False, disable=self.console.quiet)
        self._bar.__enter__()
        self._task = self._bar.add_task("training", total=1.0, status="")
        return self

    def show(self, share: float, status: str) -> None:
        if self._cell is not None:
            if time.monotonic() - self._shown > 0.5 or share >= 1:
                self._shown = time.monotonic()
                self._cell.update({"text/plain": f"training {100 * min(share, 1):.0f} %: {status}"}, raw=True)
        elif self._bar is not None:
            self._bar.update(self._task, completed=share, status=status)

    def __exit__(self, *details: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*details)
