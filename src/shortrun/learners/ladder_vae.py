"""Learning a ladder variational autoencoder (Sønderby et al., 2016); the model is :mod:`shortrun.nets.ladder`.

The weight of the KL term rises from 0 to 1 during ``kl_warm_up`` (deterministic warm-up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shortrun.learners.vae import VAE, VAESettings
from shortrun.nets.build import ModelError, Shape, decoder_of
from shortrun.nets.generators import TopDownGenerator
from shortrun.nets.ladder import LadderAutoencoder, LadderNetwork
from shortrun.settings import Share


@dataclass(frozen=True)
class LadderSettings(VAESettings):
    kl_warm_up: Share = 0.1


class LadderVAE(VAE):
    Settings = LadderSettings
    Network = LadderNetwork

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> LadderAutoencoder:
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, TopDownGenerator):
            raise ModelError(
                "ladder-vae combines its estimates with the conditional priors of the top-down generator in noise "
                f"coordinates; {type(decoder).__name__} was given"
            )
        decoder_of(model, "ladder-vae")
        built = LadderAutoencoder(decoder, shape, network.encoder_channels, float(model.sigma), network.batch_norm)
        return built.to(model.reference)
