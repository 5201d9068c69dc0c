"""Learning Glow (Kingma & Dhariwal 2018) by maximum likelihood; the flow is :mod:`shortrun.nets.glow`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.core.model import NotPossibleError
from shortrun.learners.base import Batch, Info, Learner, Moment, State
from shortrun.nets.build import ModelError, Shape
from shortrun.nets.glow import GlowFlow, GlowNetwork, dequantised

INITIAL_IMAGES = 256


@dataclass(frozen=True)
class GlowSettings:
    """Glow has none."""


class Glow(Learner):
    Settings = GlowSettings
    Network = GlowNetwork

    @classmethod
    def build(cls, network: GlowNetwork, shape: Shape, sigma: float) -> GlowFlow:
        if len(shape) != 3:
            raise ModelError(f"glow is a flow of images (colours, height, width); the data have shape {shape}")
        return GlowFlow(shape, network.levels, network.depth, network.width, network.additive, network.published_glow)

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> GlowFlow:
        raise ModelError("glow is a network of its own and takes no decoder: pass None as the model")

    def default_dynamics(self) -> Langevin:
        """None is used: there is nothing to infer."""
        return Langevin()

    def make_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.Adamax(self.parameters, lr=self.learning_rate, betas=self.betas)

    def init(self, seed: int = 0, examples: Any = None) -> State:
        """The first images set the scales of activation normalisation."""
        if examples is None:
            raise ValueError("glow sets its scales with training images: init(seed, examples) needs them")
        rng = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(examples), generator=rng)[:INITIAL_IMAGES]
        self.model.set_initialised(False)
        with torch.no_grad():
            self.model.log_density(dequantised(examples.batch(chosen), rng).to(self.processes.device))
        return super().init(seed, examples)

    def update(self, state: State, batch: Batch | Tensor, moment: Moment = Moment()) -> tuple[State, Info]:
        """One step up the exact log-likelihood."""
        batch = self.as_batch(batch)
        if batch.mask is not None:
            raise NotPossibleError("glow learns from whole images only; leave out the mask")
        x = self.processes.own(dequantised(batch.x, state.rng)).to(self.processes.device)
        with self.processes.autocast():
            loss = -self.model.log_density(x)
        loss = loss.float().sum()
        gradients = torch.autograd.grad(loss, self.parameters)
        self.set_rate(state, moment)
        count = torch.tensor(len(x), device=x.device)
        value, finite = self.descend(state.optimiser, loss, count, gradients, 1 / x[0].numel())
        state = self.counted(state, finite)
        return state, Info(value, 0, finite, (), state.dynamics.step_size, math.nan)
