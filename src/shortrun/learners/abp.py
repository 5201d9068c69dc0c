r"""Alternating back-propagation (Han et al., "Alternating Back-Propagation for Generator Network", 2017).

Inferential back-propagation: ``steps`` Langevin steps that continue the chain of each training image from where the
last visit ended (persistent chains). Learning back-propagation: one step up the log joint at the point reached.

Step size: Han et al. write ``z + s eps + s^2/2 gradient``, so their 0.3 (and that of the paper's appendix) is the
standard deviation of the noise, ``delta`` of the authors' script; here it is ``0.3^2 / 2 = 0.045``.

New images have no chain yet: theirs starts at the prior and runs ``TEST_VISITS`` times as long as one visit in
training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents
from shortrun.learners.base import Batch, State
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.short_run import ShortRun
from shortrun.settings import BelowOne, Count, CountOrZero, Positive

TEST_VISITS = 5


@dataclass(frozen=True)
class ABPSettings(ShortRunSettings):
    """Of persistent chains."""

    steps: Count = 20
    step_size: Positive = 0.045
    cool_down: CountOrZero | None = 0
    speed_up: CountOrZero | None = 0
    momentum: BelowOne = 0.0
    tune: Literal["grid", "gradient", "off"] = "off"
    learn_last: Count | None = 1


class ABP(ShortRun):
    Settings = ABPSettings

    def init(self, seed: int = 0, examples: Any = None) -> State:
        if examples is None:
            raise ValueError("abp keeps a chain for each training example: init(seed, examples) needs them")
        start = self.model.sample_prior(len(examples), torch.Generator().manual_seed(seed))
        memory = {f"chains.{i}": layer.cpu() for i, layer in enumerate(start)}  # in main memory
        return replace(super().init(seed, examples), memory=memory)

    def start(self, state: State, batch: Batch) -> Latents:
        rows = self.processes.own(self.indices_of(batch))
        return tuple(table[rows].to(self.processes.device) for table in state.memory.values())

    def keep(self, state: State, batch: Batch, z: Latents) -> None:
        for table, layer in zip(state.memory.values(), z, strict=True):
            self.processes.remember(table, self.indices_of(batch), layer)

    def dynamics_of_use(self, state: State) -> Langevin:
        """A chain of several visits."""
        return visits(state.dynamics)


def visits(dynamics: Langevin) -> Langevin:
    """The dynamics of one visit, for new images: ``TEST_VISITS`` times as long."""
    longer = TEST_VISITS * dynamics.steps
    return Langevin(longer, dynamics.step_size, noise=dynamics.noise, momentum=dynamics.momentum)
