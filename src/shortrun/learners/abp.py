r"""Alternating back-propagation (Han et al., "Alternating Back-Propagation for Generator Network", 2017).

Inferential back-propagation: ``steps`` Langevin steps that continue the chain of each training image from where the
last visit left it (persistent chains). Learning back-propagation: one step up the log joint at the point reached.

Step size: Han et al. write ``z + s eps + s^2/2 gradient``, so their 0.3 (and that of the paper's appendix) is the
standard deviation of the noise, ``delta`` of the authors' script; here it is ``0.3^2 / 2 = 0.045``.

New images have no chain yet: theirs starts at the prior and runs ``TEST_VISITS`` times as long as one visit in
training.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from shortrun.config import TrainConfig
from shortrun.langevin import Langevin
from shortrun.learners.base import Batch
from shortrun.learners.short_run import ShortRun
from shortrun.model import Latents

TEST_VISITS = 5


class ABP(ShortRun):
    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator, images: Any = None) -> None:
        super().__init__(model, config, accelerator, images)
        start = model.sample_prior(len(images), torch.Generator().manual_seed(config.seed))
        self.chains: Latents = tuple(layer.cpu() for layer in start)
        """The latents of every training image, in main memory; checkpoints hold them too."""

    def start(self, batch: Batch, generator: torch.Generator) -> Latents:
        rows = self.own(batch.indices)
        return tuple(layer[rows].to(self.accelerator.device) for layer in self.chains)

    def keep(self, batch: Batch, z: Latents) -> None:
        for chains, layer in zip(self.chains, z, strict=True):
            self.remember(chains, batch, layer)

    @classmethod
    def dynamics_for_new_images(cls, dynamics: Langevin) -> Langevin:
        """A chain of several visits, whether it ends in a draw or near the centre."""
        return Langevin(TEST_VISITS * dynamics.steps, dynamics.longest, dynamics.noise)

    def tensors(self) -> dict[str, Tensor]:
        return {f"chains.{i}": layer for i, layer in enumerate(self.chains)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.chains = tuple(tensors[f"chains.{i}"] for i in range(len(self.chains)))
