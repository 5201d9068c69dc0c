"""Learning a VAE with inverse autoregressive flow (Kingma et al. 2016); the model is :mod:`shortrun.nets.iaf`."""

from __future__ import annotations

from typing import Any

from shortrun.learners.vae import VAE
from shortrun.nets.build import Shape, decoder_of
from shortrun.nets.iaf import FlowAutoencoder, FlowNetwork


class VAEWithIAF(VAE):
    Network = FlowNetwork

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> FlowAutoencoder:
        decoder = decoder_of(model, "vae-iaf", layers=1)
        return FlowAutoencoder(
            decoder, model.latent_shapes, shape, network.encoder_channels, network.flows, network.flow_width,
            float(model.sigma), network.gate,
        ).to(model.reference)  # fmt: skip
