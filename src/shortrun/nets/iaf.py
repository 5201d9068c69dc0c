r"""The encoder with inverse autoregressive flow (Kingma et al., "Improved Variational Inference with IAF", 2016).

.. math:: z_0 = \mu(x) + \sigma(x) \epsilon, \qquad z_t = \sigma_t z_{t-1} + (1 - \sigma_t) m_t, \qquad
          \sigma_t = \mathrm{sigmoid}(s_t), \quad (m_t, s_t) = \mathrm{MADE}_t(z_{t-1}, h(x)),

where ``m`` and ``s`` of each coordinate depend on the coordinates before it, so that
``log q(z_T | x) = log q(z_0 | x) - sum_t sum_i log sigma_{t,i}``. This is the LSTM-type gate that the paper
recommends as the stable one (its Algorithm 1); ``s`` starts two above what the network says, so the flow begins near
the identity. Models saved before have zuko's affine transformation ``exp(a) z + b`` instead, ``a`` softly clipped at
``log 1000``. Masked networks and autoregressive inverse are zuko's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from shortrun.core.latents import Latents
from shortrun.nets.build import EncoderNetwork, Shape, needs_extra
from shortrun.nets.encoders import Autoencoder, Encoded, build_trunk, gaussian_log_density
from shortrun.settings import Count

with needs_extra("vae-iaf", "flows"):
    from zuko.flows.autoregressive import MaskedAutoregressiveTransform
    from zuko.transforms import MonotonicAffineTransform

FORGET_BIAS = 2.0  # Kingma et al., Sec. 4, start with s near one or two


@dataclass(frozen=True)
class FlowNetwork(EncoderNetwork):
    flows: Count = 2
    """Autoregressive transformations."""
    flow_width: Count = 128
    """Size of the context, half of that of the hidden layers."""
    gate: Literal["sigmoid", "affine"] = "sigmoid"
    """sigmoid(s) z + (1 - sigmoid(s)) m, which its paper recommends; or exp(a) z + b, as in some models of version
    0.1."""


class GatedTransform(Transform):
    """``f(z) = sigma z + (1 - sigma) m`` with ``sigma = sigmoid(s + 2)``, coordinate by coordinate."""

    domain = constraints.real
    codomain = constraints.real
    bijective = True
    sign = +1

    def __init__(self, m: Tensor, s: Tensor) -> None:
        super().__init__()
        self.s = s + FORGET_BIAS
        self.keep = torch.sigmoid(self.s)
        self.shift = torch.sigmoid(-self.s) * m

    def _call(self, x: Tensor) -> Tensor:
        return self.keep * x + self.shift

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.shift) / self.keep

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return F.logsigmoid(self.s).expand(x.shape)


GATES = {"sigmoid": GatedTransform, "affine": MonotonicAffineTransform}


class FlowAutoencoder(Autoencoder):
    """One layer of latents; the posterior is a Gaussian that autoregressive transformations have reshaped."""

    def __init__(
        self,
        decoder: Any,
        latent_shapes: Any,
        shape: Shape,
        channels: int,
        flows: int,
        width: int,
        sigma: float,
        gate: str = "sigmoid",
    ) -> None:
        super().__init__(decoder, latent_shapes, sigma)
        size = math.prod(self.latent_shapes[0])
        self.size, self.width = size, width
        self.trunk = build_trunk(shape, channels)
        self.head = nn.Linear(math.prod(self.trunk.shape), 2 * size + width)
        orders = [torch.arange(size) if t % 2 == 0 else torch.arange(size - 1, -1, -1) for t in range(flows)]
        self.flows = nn.ModuleList(
            MaskedAutoregressiveTransform(
                size, context=width, order=order, univariate=GATES[gate], hidden_features=(2 * width, 2 * width)
            )
            for order in orders
        )

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and log standard deviation of ``z_0``, and the context ``h`` of the flow."""
        mean, log_sd, context = self.head(self.trunk(x).flatten(1)).split([self.size, self.size, self.width], 1)
        return mean, log_sd.clamp(-8, 4), context

    def encode(self, x: Tensor, eps: Latents) -> Encoded:
        mean, log_sd, context = self.posterior(x)
        z = mean + torch.exp(log_sd) * eps[0].flatten(1)
        log_q = gaussian_log_density(z, mean, log_sd)
        for flow in self.flows:
            z, log_det = flow(context).call_and_ladj(z)
            log_q = log_q - log_det
        latents = (z.view_as(eps[0]),)
        return Encoded(latents, log_q, log_q - self.log_prior(latents))

    def log_density(self, z: Tensor, x: Tensor) -> Tensor:
        """``log q(z | x)`` of any ``z`` of shape ``(n, size)``: the flow is inverted, coordinate by coordinate."""
        mean, log_sd, context = self.posterior(x)
        total = torch.zeros(len(z), dtype=z.dtype, device=z.device)
        for flow in reversed(self.flows):
            transform = flow(context)
            before = transform.inv(z)
            total = total - transform.log_abs_det_jacobian(before, z)
            z = before
        return total + gaussian_log_density(z, mean, log_sd)
