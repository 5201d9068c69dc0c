"""What is needed to repeat a number: the machine it was measured on, and the training of its model."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

TRAINING = (
    "data", "crop", "train_images", "train_checksum", "iterations", "updates", "seconds", "seed", "processes",
)  # fmt: skip


def machine() -> str:
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def training_of(info: dict[str, Any]) -> dict[str, Any]:
    """What ``Trained.info`` knows of the training, without what was measured on the way."""
    return {key: info[key] for key in TRAINING if key in info}
