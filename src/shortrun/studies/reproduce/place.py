"""Where the results and runs of a reproduction go, how large they are, and which models its cells share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun import data, metrics
from shortrun.studies.reproduce.published import (
    FIGURES,
    SCALES,
    Cell,
    Scale,
    ScaleName,
    Training,
    planned,
    table_cells,
)
from shortrun.trained import Trained, load
from shortrun.training.config import Config

WITH_ORIGINALS = ("figure-reconstruction", "figure-inpainting")


@dataclass(frozen=True)
class Place:
    """Where results and runs go, and how large they are."""

    out: Path
    runs: Path
    scale_name: ScaleName
    scale: Scale
    data_root: str | None = None
    quiet: bool = False
    fid: bool = True
    """Whether FID and KID are taken."""
    jobs: int = 1
    """How many models are worked on at a time, each with its share of the threads."""
    originals: bool = True
    """Whether figures show images of the data sets; those of CelebA may not be passed on."""
    open_model: Callable[[Path], Trained] = load
    """What reads the model of a run folder."""
    network: Callable[..., metrics.FeatureNetwork] = metrics.inception
    """The network of FID and KID, as a function of ``device``."""

    @property
    def threads(self) -> int:
        """Of each model: its share of all; one where the time of processors is what is measured."""
        return 1 if self.scale.clock == "processor" else max(1, torch.get_num_threads() // self.jobs)

    @property
    def budget(self) -> dict[str, Any]:
        """What all numbers of a report must have in common."""
        names = ("minutes", "updates", "images", "samples")
        budget = {name: getattr(self.scale, name) for name in names} | {"threads": self.threads}
        return budget | ({"clock": self.scale.clock} if self.scale.clock != "wall" else {})

    # -- models ---------------------------------------------------------------------------------------

    @property
    def cells(self) -> list[Cell]:
        """Without the rows "more images" where fewer updates per chain are not possible: there is one already."""
        cells = [c for c in table_cells() if not c.training.fresh or self.model(c.training) == c.training]
        return [c for c in cells if not any(c.matches(pattern) for pattern in self.scale.left_out)]

    @functools.cached_property
    def _configs(self) -> dict[Training, Config]:
        """Those that were asked for already: a report asks for each many times."""
        return {}

    def config(self, training: Training) -> Config:
        if training not in self._configs:
            self._configs[training] = training.config(self.scale, self.data_root)
        return self._configs[training]

    @functools.cached_property
    def _models(self) -> dict[Config, Training]:
        """The first planned model with each configuration."""
        return {self.config(training): training for training in reversed(planned())}

    def model(self, training: Training) -> Training:
        """The model that is trained: one for all planned ones that have the same configuration at this size.

        For example, without a limit of minutes, methods have equal updates anyway.
        """
        return self._models.get(self.config(training), training)

    @property
    def planned(self) -> list[Training]:
        """All models of the tables and figures at this size, each once."""
        figures = [name for name in FIGURES if name not in self.scale.left_out]
        models = [self.model(cell.training) for cell in self.cells]
        return list(dict.fromkeys(models + [model for name in figures for model in self.models(name)]))

    def models(self, figure: str) -> list[Training]:
        """The models that a figure shows, each once."""
        return list(dict.fromkeys(self.model(training) for training in FIGURES[figure]))

    def run(self, training: Training) -> Path:
        return self.runs / self.model(training).name

    def trained(self, training: Training) -> Trained:
        return self.open_model(self.run(training))

    # -- images ---------------------------------------------------------------------------------------

    def load(self, training: Training, split: data.Split) -> data.Images:
        return self.config(training).data.load(split)

    def held_out(self, training: Training, count: int) -> Tensor:
        images = self.load(training, "test")
        return images.batch(slice(0, min(count, len(images))))

    def shows(self, training: Training) -> bool:
        """Whether figures may show the images that a model was trained for; scenes are the project's own."""
        return self.originals or training.data == "scenes"

    # -- results --------------------------------------------------------------------------------------

    def result(self, training: Training) -> Path:
        """What was measured of a model, with all that is needed to repeat it."""
        return self.out / "models" / f"{self.model(training).name}.json"

    def wants_fid(self, training: Training) -> bool:
        model = self.model(training)
        shown = any(self.model(cell.training) == model for cell in table_cells() if cell.with_fid)
        return shown and self.fid and self.scale.samples > 0

    def is_measured(self, training: Training) -> bool:
        path = self.result(training)
        return path.is_file() and (not self.wants_fid(training) or "fid" in json.loads(path.read_text())["measured"])

    def drawn(self, figure: str) -> Path:
        return self.out / f"{figure}.json"

    def is_drawn(self, figure: str) -> bool:
        """Whether it shows the models that are measured."""
        path = self.drawn(figure)
        note = json.loads(path.read_text()) if path.is_file() else {"models": {}}
        shown = note["models"]
        if not self.originals and figure in WITH_ORIGINALS and shown and "--no-originals" not in note["command"]:
            return False  # it shows images that must not be shown
        return bool(shown) and all(
            self.result(training).is_file()
            and json.loads(self.result(training).read_text())["training"] == shown.get(training.name)
            for training in self.models(figure)
        )

    def command(self, target: str, only: str = "") -> str:
        words = ["shortrun reproduce", target, f"--preset {self.scale_name}"]
        if only:
            words.append(f"--only '{only}'")
        if self.scale.minutes is not None and self.scale.minutes != SCALES[self.scale_name].minutes:
            words.append(f"--minutes-per-cell {self.scale.minutes:g}")
        if self.jobs > 1:
            words.append(f"--jobs {self.jobs}")
        if not self.originals:
            words.append("--no-originals")
        return " ".join(words)
