"""What all users of the page share: the models, and what is computed once for everybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun.masks import make_mask
from shortrun.studio import pieces, work
from shortrun.studio.sources import Source

MOST_SEED = 2**31 - 1


class StepCurve:
    """The curve of one model, computed once, for all who look at it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[work.Step | None] = [None] * len(work.STEP_GRID)
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        with self.changed:
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True)
                self.thread.start()

    def _run(self) -> None:
        for step in work.step_sizes(self.source, threading.Event()):
            with self.changed:
                self.found[step.place] = step
                self.changed.notify_all()

    def looks(self) -> Iterator[list[work.Step | None]]:
        """The curve as it grows."""
        self.begin()
        while True:
            known = list(self.found)
            yield known
            assert self.thread is not None
            if not self.thread.is_alive():
                return
            with self.changed:
                self.changed.wait_for(lambda: self.found != known, timeout=2.0)  # noqa: B023


class Studio:
    """The models on show, and what is computed once for all users.

    Args:
        sources: the models.
        runs: where run folders are looked for.
        any_folder: whether users may name other run folders; only on their own machine.
    """

    def __init__(self, sources: Sequence[Source], runs: Path = Path("runs"), any_folder: bool = True) -> None:
        self.sources = {source.label: source for source in sources}
        self.curves = {source.label: StepCurve(source) for source in sources}
        self.runs, self.any_folder = runs, any_folder
        self.stops: dict[str, threading.Event] = {}

    def warm_up(self) -> None:
        """What is slow for the first time, before anybody asks."""
        for label, source in self.sources.items():
            x = source.images[:1]
            for _ in work.inpaint(source, x, make_mask("lower-half", x), 0, threading.Event()):
                pass
            for _ in self.curves[label].looks():
                pass

    def source(self, label: Any) -> Source:
        if label not in self.sources:
            raise ValueError(f"There is no model {label!r} here; there are {', '.join(self.sources)}.")
        return self.sources[label]

    def image(self, source: Source, chosen: Any, uploaded: Tensor | None) -> tuple[Tensor, int | None]:
        """The chosen image with its number; None for one that was uploaded."""
        number = chosen.get("chosen", 0) if isinstance(chosen, dict) else 0
        if number == len(source.images) and uploaded is not None:
            return uploaded, None
        if not isinstance(number, int) or not 0 <= number < len(source.images):
            raise ValueError(f"There is no image {number!r}; there are {len(source.images)}.")
        return source.images[number : number + 1], number

    def folders(self) -> list[str]:
        return work.run_folders(self.runs)

    # -- values of pieces -----------------------------------------------------------------------------

    def picker(self, source: Source, uploaded: Tensor | None = None) -> dict[str, Any]:
        names = [f"Image {i}" for i in range(len(source.images))] + ["Your image"] * (uploaded is not None)
        images = source.images if uploaded is None else torch.cat([source.images, uploaded])
        return {"images": pieces.uris(images), "names": names, "chosen": len(names) - 1 if uploaded is not None else 0}

    def painter(self, source: Source, x: Tensor, kind: str, painted: Any = None) -> dict[str, Any]:
        """The mask of a kind over an image; where it was painted by hand it stays."""
        height, width = source.trained.shape[-2:]
        hidden = painted.get("hidden") if isinstance(painted, dict) else None
        if kind == "painted" and (not isinstance(hidden, str) or len(hidden) != height * width):
            hidden = "0" * (height * width)
        if kind != "painted":
            hidden = "".join("0" if seen else "1" for seen in make_mask(kind, x).flatten().tolist())
        return {"image": pieces.uri(x[0]), "height": height, "width": width, "hidden": hidden, "kind": kind}


def whole_number(seed: Any) -> int:
    if not isinstance(seed, int | float) or seed != seed or not 0 <= seed <= MOST_SEED or seed != int(seed):
        raise ValueError(f"The seed is {seed!r}; expected a whole number from 0 to {MOST_SEED}.")
    return int(seed)
