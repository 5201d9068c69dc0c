"""What is needed to repeat a number: the machine it was measured on, the training of its model, the command."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shortrun.files import write_json

TRAINING = (
    "data", "crop", "train_images", "train_checksum", "iterations", "updates", "seconds", "seed", "processes",
)  # fmt: skip


def machine() -> str:
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def training_of(info: dict[str, Any]) -> dict[str, Any]:
    """What ``Trained.info`` knows of the training, without what was measured on the way."""
    return {key: info[key] for key in TRAINING if key in info}


class Cells:
    """Numbers of a long measurement, written to a file after each cell, so that it can go on where it was stopped.

    The file has a part for each model, with the command that made it. A cell that is there already, made by the same
    command, is not measured again; a part that another command made is measured anew.

    Args:
        path: of the file; None keeps nothing.
        part: for example the name of a model.
        command: what makes this part, with all that its numbers depend on.
    """

    def __init__(self, path: Path | None, part: str, command: str) -> None:
        self.path, self.part = path, part
        known = self._parts().get(part, {})
        if known.get("command") != command:
            known = {"command": command, "machine": machine(), "cells": {}}
        self.known: dict[str, Any] = known

    def _parts(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path is not None and self.path.exists() else {}

    @property
    def values(self) -> dict[str, Any]:
        """What is known of each cell."""
        return self.known["cells"]

    def measure(self, name: str, how: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is known of a cell, or else what ``how()`` finds, with four digits, which is written at once."""
        if name not in self.values:
            self.values[name] = {key: _short(value) for key, value in how().items()}
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, self._parts() | {self.part: self.known})  # others may have written theirs
        return self.values[name]


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
