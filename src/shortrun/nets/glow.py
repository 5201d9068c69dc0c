r"""Glow (Kingma & Dhariwal, "Generative Flow with Invertible 1x1 Convolutions", 2018), on normflows.

An invertible map from images to noise: ``log p(x) = log N(f(x)) + log|det df/dx|`` is exact, with uniform noise added
to the 8-bit images (dequantisation). ``levels`` times: squeeze 2x2 into colours, ``depth`` steps of (actnorm,
invertible 1x1 convolution, coupling), and half of the maps leave as latents. There is nothing to infer.

As in the official code, the half :math:`z_2` that leaves at a split has a learned prior given the half :math:`z_1`
that stays, and the rest at the top is standard normal (``learntop=False``):

.. math:: p(z_2 \mid z_1) = N(\mu(z_1), \mathrm{diag}\, e^{2 \lambda(z_1)}), \qquad
          (\mu, \lambda) = \mathrm{conv}(z_1), \quad \text{zero at the start.}

Actnorm, 1x1 convolution, coupling, squeeze and the networks inside couplings are those of normflows; it has neither the
convolution that starts at zero with a learned scale nor a prior at a split that depends on the other half.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.inference import Inferred
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Rng, standard_normal
from shortrun.core.model import NotPossibleError, from_bytes
from shortrun.nets.build import ModelError, Shape, needs_extra
from shortrun.settings import Count, check

with needs_extra("glow", "flows"):
    import normflows as nf

LOG_SCALE_FACTOR = 3.0  # as in the official code: scales are learned this much faster
WEIGHT_DEVIATION = 0.05


@dataclass(frozen=True)
class GlowNetwork:
    """The flow."""

    levels: Count = 3
    """How often the image is squeezed."""
    depth: Count = 16
    """Steps per level."""
    width: Count = 512
    """Maps inside a coupling."""
    additive: bool = True
    """Additive instead of affine coupling."""
    published_glow: bool = True
    """Conditional priors at the splits, a standard normal top and actnorm inside couplings, as in the official
    code; some models of version 0.1 have none of them."""

    def __post_init__(self) -> None:
        check(self)


class ZeroConv(nn.Conv2d):
    """``exp(3 s) (W * x + b)`` with all of ``W, b, s`` zero at the start (Kingma & Dhariwal, Sec. 3.3)."""

    def __init__(self, maps: int, maps_out: int) -> None:
        super().__init__(maps, maps_out, 3, padding=1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.log_scale = nn.Parameter(torch.zeros(1, maps_out, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.exp(LOG_SCALE_FACTOR * self.log_scale)


class ConditionalMerge(nf.flows.Merge):
    """The conditional prior of a split as part of the flow: ``(z_1, e) -> (z_1, mu(z_1) + exp(lambda(z_1)) e)``.

    In these coordinates all that leaves the flow is N(0, I), so density and samples have one form at every level.
    """

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.prior = ZeroConv(maps, 2 * maps)

    def forward(self, z: list[Tensor]) -> tuple[Tensor, Tensor]:
        stays, noise = z
        mean, log_sd = self.prior(stays).chunk(2, 1)
        merged, _ = super().forward([stays, mean + torch.exp(log_sd) * noise])
        return merged, log_sd.sum((1, 2, 3))

    def inverse(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        (stays, leaves), _ = super().inverse(z)
        mean, log_sd = self.prior(stays).chunk(2, 1)
        return [stays, (leaves - mean) * torch.exp(-log_sd)], -log_sd.sum((1, 2, 3))


def glow_block(maps: int, width: int, additive: bool, published: bool) -> nn.Module:
    """One step of the flow; ``published``: the network of its coupling as in the official code.

    That is conv 3x3, actnorm, relu, conv 1x1, actnorm, relu, and :class:`ZeroConv`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # normflows calls torch.lu, which is being renamed
        block = nf.flows.GlowBlock(maps, width, scale=not additive, net_actnorm=published)
    if published:
        (network,) = (module.net for module in block.modules() if isinstance(module, nf.nets.ConvNet2d))
        network[-1] = ZeroConv(network[-1].in_channels, network[-1].out_channels)
        for layer in network[:-1]:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=WEIGHT_DEVIATION)
    return block


class GlowFlow(nn.Module):
    """The flow. Images whose sides do not divide by ``2^levels`` are framed in black, and samples cut to size.

    Not ``published`` is the flow of models that were saved before it had conditional priors: a learned Gaussian at each
    level, and no actnorm inside couplings.
    """

    sigma: Tensor

    def __init__(
        self,
        image: Shape,
        levels: int,
        depth: int,
        width: int,
        additive: bool,
        published: bool = True,
    ) -> None:
        super().__init__()
        self.image = image
        colours, height, width_of_image = image
        unit = 2**levels
        if unit > max(height, width_of_image):
            raise ModelError(
                f"levels is {levels}, and each halves the images, here {height}x{width_of_image}; expected at most "
                f"{int(math.log2(max(height, width_of_image)))}"
            )
        self.frame = (-height % unit, -width_of_image % unit)
        shape = (colours, height + self.frame[0], width_of_image + self.frame[1])
        bases, flows, merges = [], [], []
        for level in range(levels):  # the last one in this list sees the image first
            maps = colours * 2 ** (levels + 1 - level)
            flows.append([*(glow_block(maps, width, additive, published) for _ in range(depth)), nf.flows.Squeeze()])
            side = 2 ** (levels - level)
            if level > 0:
                maps //= 2
                merges.append(ConditionalMerge(maps) if published else nf.flows.Merge())
            size = (maps, shape[1] // side, shape[2] // side)
            bases.append(nf.distributions.DiagGaussian(size, trainable=not published))
        self.flow = nf.MultiscaleFlow(bases, flows, merges, class_cond=False)
        self.latent_shapes = tuple(tuple(base.shape) for base in bases)
        self.set_initialised(True)
        self.register_buffer("sigma", torch.ones(()))  # no observation noise; kept for a common interface

    def set_initialised(self, done: bool) -> None:
        """Whether activation normalisation has its scales; if not, the next batch of images sets them."""
        for module in self.flow.modules():
            if isinstance(module, nf.flows.ActNorm):
                module.data_dep_init_done = torch.tensor(float(done))

    def log_density(self, x: Tensor) -> Tensor:
        """``log p(x)`` in nats for images in [-1, 1], shape ``(n,)``."""
        return self.flow.log_prob(F.pad(x, (0, self.frame[1], 0, self.frame[0]), value=-1.0), None)

    def decode(self, noise: tuple[Tensor, ...]) -> Tensor:
        """Images of standard normal noise, one tensor per level."""
        z = [base.loc + torch.exp(base.log_scale) * n for base, n in zip(self.flow.q0, noise, strict=True)]
        images, _ = self.flow.forward_and_log_det(z)
        return images[:, :, : self.image[1], : self.image[2]]

    # -- use ------------------------------------------------------------------------------------------

    no_dynamics = (
        "glow maps images to noise and back without loss: its reconstructions are the images themselves and "
        "measure nothing, and it has no latents to infer from part of an image"
    )

    def prepare(self, x: Tensor) -> Tensor:
        """8-bit images become floats in [-1, 1]."""
        return from_bytes(x).to(self.sigma)

    def infer(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        raise NotPossibleError(self.no_dynamics)

    draw = infer_by_dynamics = infer

    def sample(self, count: int, rng: Rng = None) -> Tensor:
        noise = tuple(standard_normal((count, *shape), self.sigma, rng) for shape in self.latent_shapes)
        with torch.no_grad():
            return self.decode(noise).clamp(-1, 1)

    def lower_bound(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Not only a bound: the density itself, of images with uniform noise added."""
        with torch.no_grad():
            return self.log_density(dequantised(x, rng))


def dequantised(x: Tensor, rng: torch.Generator) -> Tensor:
    """The 8-bit grey levels are 2/255 apart; uniform noise fills the gap."""
    return x + (torch.rand(x.shape, generator=rng) - 0.5).to(x) * (2 / 255)
