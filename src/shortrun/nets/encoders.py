r"""Encoders: what short run inference does without.

A diagonal Gaussian posterior (Kingma & Welling 2014) over the latents, and the parts that other encoders share.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.inference import Inferred, none_lost
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, Rng, flatten, unflatten
from shortrun.core.model import GaussianModel, evaluating
from shortrun.nets.build import Shape

FILLING_ROUNDS = 25
BOUND_DRAWS = 16


class Encoded(NamedTuple):
    """A draw from the approximate posterior; fields but the first have shape ``(n,)``."""

    z: Latents
    log_q: Tensor
    """``log q(z | x)``."""
    kl: Tensor
    """``KL(q || p(z))``: in closed form where there is one, else its estimate ``log q(z | x) - log p(z)``."""


class BatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` whose batch is that of all processes, so that learning does not depend on their number.

    ``nn.SyncBatchNorm`` does the same on GPUs alone. Evaluation uses the running statistics, which are equal in all
    processes; there they need not keep step.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if alone or not self.training:
            return super().forward(x)
        # Gradients flow back through these sums: each process gets the part that the losses of the others have in it.
        wide = x.float()
        count = across.all_reduce(wide.new_tensor(float(x.numel() // self.num_features)))
        mean = across.all_reduce(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = across.all_reduce(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class Trunk(nn.Module):
    """Convolutions with stride two from the image down to maps of at most 8x8 (``GELU`` in between).

    With ``batch_norm`` each is normalised before its ``GELU``; it then needs no bias.
    """

    def __init__(self, image: Shape, channels: int, batch_norm: bool = False) -> None:
        super().__init__()
        colours, height, width = image
        bias = not batch_norm
        self.layers = nn.ModuleList([nn.Conv2d(colours, channels, 5, padding=2, bias=bias)])
        while min(height, width) > 8:
            self.layers.append(nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1, bias=bias))
            height, width, channels = height // 2, width // 2, 2 * channels
        self.norms = nn.ModuleList(normalisation(layer.out_channels, batch_norm) for layer in self.layers)
        self.shape = (channels, height, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.gelu(norm(layer(x)))
        return x


class DenseTrunk(nn.Module):
    """Two dense layers with GELU, for data that are not images."""

    def __init__(self, shape: Shape, channels: int) -> None:
        super().__init__()
        self.shape = (16 * channels,)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(shape), *self.shape), nn.GELU(), nn.Linear(*self.shape, *self.shape),
            nn.GELU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build_trunk(shape: Shape, channels: int) -> Any:
    """For images of shape (colours, height, width), or for anything else."""
    return Trunk(shape, channels) if len(shape) == 3 else DenseTrunk(shape, channels)


def normalisation(maps: Any, batch_norm: bool) -> nn.Module:
    return BatchNorm(maps) if batch_norm else nn.Identity()


def gaussian_log_density(z: Tensor, mean: Tensor, log_sd: Tensor) -> Tensor:
    """``log N(z; mean, exp(log_sd)^2)``, shape ``(n,)``."""
    standard = (z - mean) * torch.exp(-log_sd)
    return -(0.5 * standard.square() + log_sd + 0.5 * math.log(2 * math.pi)).sum(1)


def gaussian_kl(mean: Tensor, log_sd: Tensor) -> Tensor:
    """``KL(N(mean, exp(log_sd)^2) || N(0, I))``, shape ``(n,)``."""
    return 0.5 * (mean.square() + torch.exp(2 * log_sd) - 1 - 2 * log_sd).sum(1)


class Autoencoder(GaussianModel):
    """A latent-variable model with an encoder: still a model that short run dynamics can infer."""

    def encode(self, x: Tensor, eps: Latents) -> Encoded:
        """A posterior draw from standard normal noise ``eps``, shaped as the latents; zeros give its centre."""
        raise NotImplementedError

    def infer(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        """The centre of q(z | x); for hidden pixels see :meth:`draw`."""
        eps = tuple(x.new_zeros(len(x), *shape) for shape in self.latent_shapes)
        return self._encode(x, eps, mask, rng)

    def draw(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        """A draw from q(z | x).

        Hidden pixels are filled by the model itself: encode, decode, fill, and again (Rezende et al. 2014,
        appendix F), because the encoder has seen only whole images.
        """
        return self._encode(x, self.sample_prior(len(x), rng), mask, rng)

    def _encode(self, x: Tensor, eps: Latents, mask: Tensor | None, rng: Rng) -> Inferred:
        with torch.no_grad(), evaluating(self):
            if mask is not None:
                seen = mask.expand_as(x)
                x = torch.where(seen, x, torch.zeros((), dtype=x.dtype, device=x.device))
                for _ in range(FILLING_ROUNDS):
                    z = self.encode(x, self.sample_prior(len(x), rng)).z
                    x = torch.where(seen, x, self.decoder(z))
            z = self.encode(x, eps).z
        return Inferred(z, *none_lost(x))

    def lower_bound(self, x: Tensor, rng: Rng = None) -> Tensor:
        """The ELBO, averaged over a few draws."""
        draws = []
        with torch.no_grad(), evaluating(self):
            for _ in range(BOUND_DRAWS):
                encoded = self.encode(x, self.sample_prior(len(x), rng))
                draws.append(self.log_likelihood(x, encoded.z) - encoded.kl)
        return torch.stack(draws).mean(0)


class GaussianAutoencoder(Autoencoder):
    """Diagonal Gaussian posterior over the latents; of a generator with several layers, over all its noises."""

    def __init__(self, decoder: Any, latent_shapes: Any, shape: Shape, channels: int, sigma: float) -> None:
        super().__init__(decoder, latent_shapes, sigma)
        self.trunk = build_trunk(shape, channels)
        self.head = nn.Linear(math.prod(self.trunk.shape), 2 * sum(math.prod(s) for s in self.latent_shapes))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation."""
        mean, log_sd = self.head(self.trunk(x).flatten(1)).chunk(2, 1)
        return mean, log_sd.clamp(-8, 4)

    def encode(self, x: Tensor, eps: Latents) -> Encoded:
        mean, log_sd = self.posterior(x)
        flat = mean + torch.exp(log_sd) * flatten(eps)
        z = unflatten(flat, self.latent_shapes)
        return Encoded(z, gaussian_log_density(flat, mean, log_sd), gaussian_kl(mean, log_sd))
