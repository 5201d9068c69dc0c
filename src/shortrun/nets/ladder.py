r"""The encoder of a ladder variational autoencoder (Sønderby et al., 2016), on the paper's multi-layer generator.

A deterministic pass upwards gives each layer a Gaussian estimate :math:`(\hat\mu_l, \hat\sigma_l^2)`. On the way down
it is combined with the generator's own conditional prior, weighted by precision:

.. math:: \sigma_{q,l}^2 = \frac1{\hat\sigma_l^{-2} + \sigma_{p,l}^{-2}}, \qquad
          \mu_{q,l} = \sigma_{q,l}^2 (\hat\mu_l \hat\sigma_l^{-2} + \mu_{p,l} \sigma_{p,l}^{-2}) .

The top layer has the upward estimate alone, so with one layer it is a VAE. The weight of the KL term rises from 0 to 1
during ``kl_warm_up`` (deterministic warm-up).

The paper's third ingredient is batch normalisation, in all layers but the output ones. Here the whole upward pass has
it, before each nonlinearity, and its heads for mean and deviation have none. The generator has none either: it must be
the same one for every method, and chains on it need a log joint of each image that does not depend on the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.latents import Latents
from shortrun.nets.build import EncoderNetwork, Shape
from shortrun.nets.encoders import Autoencoder, Encoded, Trunk, gaussian_kl, gaussian_log_density, normalisation
from shortrun.nets.generators import TopDownGenerator


@dataclass(frozen=True)
class LadderNetwork(EncoderNetwork):
    batch_norm: bool = True
    """Batch normalisation in the upward pass; models of version 0.1 may have none."""


class LadderAutoencoder(Autoencoder):
    decoder: TopDownGenerator

    def __init__(
        self,
        decoder: TopDownGenerator,
        image: Shape,
        channels: int,
        sigma: float,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(decoder, decoder.latent_shapes, sigma)
        sizes = [math.prod(shape) for shape in self.latent_shapes]
        self.trunk = Trunk(image, channels, batch_norm)
        maps, features = self.trunk.shape[0], math.prod(self.trunk.shape)
        self.ups = nn.ModuleList(nn.Conv2d(maps, maps, 3, padding=1, bias=not batch_norm) for _ in sizes[1:])
        self.norms = nn.ModuleList(normalisation(maps, batch_norm) for _ in sizes[1:])
        self.heads = nn.ModuleList(nn.Linear(features, 2 * size) for size in sizes)

    def estimates(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Upward pass: mean and log standard deviation of each layer, top layer first."""
        hidden = self.trunk(x)
        found = []
        for i in range(len(self.heads) - 1, -1, -1):
            mean, log_sd = self.heads[i](hidden.flatten(1)).chunk(2, 1)
            found.append((mean, log_sd.clamp(-8, 4)))
            if i > 0:
                hidden = hidden + F.gelu(self.norms[i - 1](self.ups[i - 1](hidden)))
        return found[::-1]

    def encode(self, x: Tensor, eps: Latents) -> Encoded:
        """The draw is returned in noise coordinates, ``(z_l - mu_p) / sigma_p``, where every prior is N(0, I).

        KL divergences do not depend on the coordinates; in these, each is that of a Gaussian to N(0, I).
        """
        estimates = self.estimates(x)
        mean, log_sd = estimates[0]
        noises = [mean + torch.exp(log_sd) * eps[0]]
        log_q, kl = gaussian_log_density(noises[0], mean, log_sd), gaussian_kl(mean, log_sd)

        def choose(i: int, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
            nonlocal log_q, kl
            mean_up, log_sd_up = estimates[i]
            precision_up, precision_down = torch.exp(-2 * log_sd_up), torch.exp(-prior_log_variance)
            variance = 1 / (precision_up + precision_down)
            combined = variance * (mean_up * precision_up + prior_mean * precision_down)
            prior_sd = torch.exp(0.5 * prior_log_variance)
            mean, log_sd = (combined - prior_mean) / prior_sd, 0.5 * (variance.log() - prior_log_variance)
            noises.append(mean + torch.exp(log_sd) * eps[i])
            log_q = log_q + gaussian_log_density(noises[-1], mean, log_sd)
            kl = kl + gaussian_kl(mean, log_sd)
            return prior_mean + prior_sd * noises[-1]

        self.decoder.descend(noises[0], choose)
        return Encoded(tuple(noises), log_q, kl)
