r"""Variational autoencoder (Kingma & Welling, "Auto-Encoding Variational Bayes", 2014).

.. math:: \log p(x) \ge E_{q(z|x)}[\log p(x \mid z)] - KL(q(z \mid x) \,\|\, p(z)),
          \qquad q(z \mid x) = N(\mu(x), \mathrm{diag}\, \sigma^2(x)) .

The decoder is the generator that short run inference learns; the encoder (:mod:`shortrun.nets.encoders`) is what it
does without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shortrun.core.free_energy import Estimation
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents
from shortrun.core.tune import StepSizeError, tune_by_grid
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Info, Learner, Moment, State
from shortrun.learners.gradients import checked, gradients_of
from shortrun.nets.build import EncoderNetwork, Shape, decoder_of
from shortrun.nets.encoders import Autoencoder, GaussianAutoencoder
from shortrun.settings import Count, Positive, Share, check

TUNING_CHAINS = 4  # of each image; the bounds of the entropy need several


@dataclass(frozen=True)
class VAESettings:
    """Of learning with an encoder."""

    kl_warm_up: Share = 0.0
    """Share of the run over which the weight of the KL term rises from 0 to 1."""
    steps: Count = 25
    """K, the number of Langevin steps, where the decoder is inferred by short run dynamics instead."""
    step_size: Positive = 0.01
    """Centre of the step sizes that are tried for that dynamics."""

    def __post_init__(self) -> None:
        check(self)


def first_without_traces(function: Callable[..., Any], buffers: Sequence[Tensor]) -> Callable[..., Any]:
    """``function`` whose first call leaves the buffers as they were.

    The first call of a compiled function is only compared with the plain one, which has seen the same batch: running
    statistics must not count it twice.
    """
    called = False

    def call(*arguments: Any) -> Any:
        nonlocal called
        if called:
            return function(*arguments)
        called = True
        before = [buffer.clone() for buffer in buffers]
        try:
            return function(*arguments)
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    return call


class VAE(Learner):
    """Learning with an encoder; :class:`shortrun.nets.encoders.Autoencoder` says what a model has to provide."""

    Settings = VAESettings
    Network = EncoderNetwork
    settings: VAESettings

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> Autoencoder:
        decoder, channels = decoder_of(model, "vae"), network.encoder_channels
        built = GaussianAutoencoder(decoder, model.latent_shapes, shape, channels, float(model.sigma))
        return built.to(model.reference)

    def __init__(self, model: Any, dynamics: Langevin | None = None, **options: Any) -> None:
        super().__init__(model, dynamics, **options)
        self.differentiate = partial(self._differentiate, self._loss)
        if self.compiled:
            fast = first_without_traces(
                partial(self._differentiate, torch.compile(self._loss, dynamic=False)), list(model.buffers())
            )
            tolerance = COMPILED_TOLERANCE[self.processes.mixed_precision]
            self.differentiate = checked("learning step", fast, self.differentiate, tolerance, self.log)  # type: ignore[assignment]

    def _loss(self, x: Tensor, mask: Tensor | None, eps: Latents, weight: Tensor) -> tuple[Tensor, Latents]:
        """Minus the ELBO of the batch, its KL term weighted, and the latents."""
        visible = x if mask is None else torch.where(mask.expand_as(x), x, 0.0)
        with self.processes.autocast():
            encoded = self.model.encode(visible, eps)
            loss = weight * encoded.kl - self.model.log_likelihood(x, encoded.z, mask)
        return loss.float().sum(), encoded.z

    def _differentiate(
        self, function: Callable[..., tuple[Tensor, Latents]], *arguments: Any
    ) -> tuple[Tensor, Latents, tuple[Tensor, ...]]:
        loss, z = function(*arguments)
        return loss.detach(), tuple(layer.detach() for layer in z), gradients_of(loss, self.parameters)

    def update(self, state: State, batch: Batch | Tensor, moment: Moment = Moment()) -> tuple[State, Info]:
        """One step up the ELBO, with the weight of the KL term rising from 0 to 1 during the warm-up."""
        batch = self.as_batch(batch)
        x, mask = self.own_batch(batch)
        eps = tuple(self.processes.own(layer) for layer in self.model.sample_prior(len(batch.x), state.rng))
        weight = min(1.0, moment.share / self.settings.kl_warm_up) if self.settings.kl_warm_up else 1.0
        loss, z, gradients = self.differentiate(x, mask, eps, torch.tensor(weight, device=x.device))
        self.set_rate(state, moment)
        count = torch.tensor(len(x), device=x.device)
        value, finite = self.descend(state.optimiser, loss, count, gradients, self.pixel_unit(x))
        state = self.counted(state, finite)
        latent_std = tuple(float(layer.std()) for layer in z)
        return state, Info(value, 0, finite, latent_std, state.dynamics.step_size, math.nan)

    def ready(self, state: State, batch: Batch, rng: torch.Generator) -> State:
        """Tune the step size of short run dynamics on the decoder, for tasks that use it instead of the encoder."""
        x = batch.x[: max(len(batch.x) // TUNING_CHAINS, 1)].to(self.processes.device)
        grid = [self.settings.step_size * 2.0**j for j in range(-4, 4)]
        how = Estimation(estimator="endpoint", chains=TUNING_CHAINS, probes=1, depth=8)
        try:
            dynamics = tune_by_grid(self.model, x, state.dynamics, grid, how, rng=rng).dynamics
        except StepSizeError:
            dynamics = replace(state.dynamics, step_size=min(grid))
        return replace(state, dynamics=dynamics)
