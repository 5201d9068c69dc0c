"""The command that opens the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from shortrun.loading import find_model, shipped_models


@dataclass
class Studio:
    """A page in the browser: inpaint, watch chains, move the step size, look into layers, compare methods, follow runs.

    With the shipped models: shortrun studio

    With runs of yours: shortrun studio runs/digits runs/vae
    """

    models: Positional[tuple[str, ...]] = ()
    """Run folders, saved models or names of shipped ones; by default all shipped ones."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine reaches the page."""
    port: int | None = None
    """Port to listen on; by default the first free one from 7860."""
    browser: bool = True
    """Open the page in a browser."""
    runs: Path = Path("runs")
    """Folder with runs, for the tab that follows them."""
    data_root: str | None = None
    """Folder with the data sets of held-out images; by default the environment variable SHORTRUN_DATA."""

    def __call__(self) -> None:
        from shortrun.studio.server import serve

        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"port is {self.port}; expected 1 to 65535")
        for name in self.models:
            find_model(name)  # before the slow start
        serve(self.models or shipped_models(), self.host, self.port, self.browser, self.runs, self.data_root)
