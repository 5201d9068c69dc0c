"""Short runs that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shortrun as sr
from shortrun.learners import learner_class
from shortrun.processes import processes
from shortrun.training.config import Config
from shortrun.training.loop import Loop
from shortrun.training.presets import preset

SMOKE = preset("smoke", "embedded")


def train(config: Config, folder: Path | None = None, **options: Any) -> sr.Trained:
    """The run of a configuration, on the data that it names, as the command line does it."""
    train, test = config.data.load("train"), config.data.load("test")
    return sr.fit(None, train, validation=test, config=config, folder=folder, quiet=True, **options)


def open_loop(config: Config, folder: Path | None = None, resume: bool = False, log: Any = lambda text: None) -> Loop:
    """The loop of a configuration, to be driven by hand."""
    examples, held_out = config.data.load("train"), config.data.load("test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        model = learner_class(config.method).build(config.network, examples.shape, config.run.sigma[0])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    shared = processes(config.run.mixed_precision)
    return Loop(config, model, examples, held_out, folder=folder, resume=resume, processes=shared, log=log)
