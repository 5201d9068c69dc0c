r"""Variational autoencoder (Kingma & Welling, "Auto-Encoding Variational Bayes", 2014).

.. math:: \log p(x) \ge E_{q(z|x)}[\log p(x \mid z)] - KL(q(z \mid x) \,\|\, p(z)),
          \qquad q(z \mid x) = N(\mu(x), \mathrm{diag}\, \sigma^2(x)) .

The decoder is the generator that short run inference learns; the encoder is what it does without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from shortrun.config import ModelConfig, TrainConfig
from shortrun.generators import ModelError, build_model
from shortrun.gradients import checked
from shortrun.langevin import Langevin
from shortrun.learners.base import COMPILED_TOLERANCE, Batch, Inferred, Learner, Update, evaluating
from shortrun.learners.batch_norm import BatchNorm
from shortrun.model import GaussianModel, Latents, RandomSource
from shortrun.tune import StepSizeError, tune_by_grid

FILLING_ROUNDS = 25
TUNING_CHAINS = 4  # of each image; the bounds of the entropy need several
BOUND_DRAWS = 16


class Encoded(NamedTuple):
    """A draw from the approximate posterior; fields but the first have shape ``(n,)``."""

    z: Latents
    log_q: Tensor
    """``log q(z | x)``."""
    kl: Tensor
    """``KL(q || p(z))``: in closed form where there is one, else its estimate ``log q(z | x) - log p(z)``."""


class Trunk(nn.Module):
    """Convolutions with stride two from the image down to maps of at most 8x8 (``GELU`` in between).

    With ``batch_norm`` each is normalised before its ``GELU``; it then needs no bias.
    """

    def __init__(self, image: tuple[int, int, int], channels: int, batch_norm: bool = False) -> None:
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


class GaussianAutoencoder(Autoencoder):
    """Diagonal Gaussian posterior over the latents; of a generator with several layers, over all its noises."""

    def __init__(self, decoder: Any, image: tuple[int, int, int], channels: int, sigma: float) -> None:
        super().__init__(decoder, decoder.latent_shapes, sigma)
        self.trunk = Trunk(image, channels)
        self.sizes = [math.prod(shape) for shape in self.latent_shapes]
        self.head = nn.Linear(math.prod(self.trunk.shape), 2 * sum(self.sizes))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation."""
        mean, log_sd = self.head(self.trunk(x).flatten(1)).chunk(2, 1)
        return mean, log_sd.clamp(-8, 4)

    def encode(self, x: Tensor, eps: Latents) -> Encoded:
        mean, log_sd = self.posterior(x)
        flat = mean + torch.exp(log_sd) * torch.cat([layer.flatten(1) for layer in eps], 1)
        z = tuple(part.view_as(layer) for part, layer in zip(flat.split(self.sizes, 1), eps, strict=True))
        return Encoded(z, gaussian_log_density(flat, mean, log_sd), gaussian_kl(mean, log_sd))


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
    """Learning with an encoder; :class:`Autoencoder` says what a method has to provide."""

    @classmethod
    def build(cls, config: ModelConfig, image: tuple[int, int, int], sigma: float) -> nn.Module:
        model: Any = build_model(config, image, sigma)
        if config.coordinates != "noise":
            raise ModelError("the encoder of a vae works in noise coordinates; latent coordinates were asked for")
        return GaussianAutoencoder(model.decoder, image, config.encoder_channels, sigma)

    @classmethod
    def infer(
        cls, model: Any, x: Tensor, dynamics: Langevin, mask: Tensor | None = None, generator: RandomSource = None
    ) -> Inferred:
        """The centre of q(z | x); for hidden pixels see :meth:`draw`."""
        eps = tuple(x.new_zeros(len(x), *shape) for shape in model.latent_shapes)
        return cls._encode(model, x, eps, mask, generator)

    @classmethod
    def draw(
        cls, model: Any, x: Tensor, dynamics: Langevin, mask: Tensor | None = None, generator: RandomSource = None
    ) -> Inferred:
        """A draw from q(z | x).

        Hidden pixels are filled by the model itself: encode, decode, fill, and again (Rezende et al. 2014,
        appendix F), because the encoder has seen only whole images.
        """
        eps = tuple(layer.to(x.device) for layer in model.sample_prior(len(x), generator))
        return cls._encode(model, x, eps, mask, generator)

    @classmethod
    def _encode(cls, model: Any, x: Tensor, eps: Latents, mask: Tensor | None, generator: RandomSource) -> Inferred:
        with torch.no_grad(), evaluating(model):
            if mask is not None:
                seen = mask.expand_as(x)
                x = torch.where(seen, x, torch.zeros((), dtype=x.dtype, device=x.device))
                for _ in range(FILLING_ROUNDS):
                    z = model.encode(x, model.sample_prior(len(x), generator)).z
                    x = torch.where(seen, x, model.decoder(z))
            z = model.encode(x, eps).z
        return Inferred(z, torch.zeros(len(x), dtype=torch.bool, device=x.device))

    @classmethod
    def lower_bound(cls, model: Any, x: Tensor, dynamics: Langevin, generator: torch.Generator) -> Tensor:
        """The ELBO, averaged over a few draws."""
        draws = []
        with torch.no_grad(), evaluating(model):
            for _ in range(BOUND_DRAWS):
                encoded = model.encode(x, model.sample_prior(len(x), generator))
                draws.append(model.log_likelihood(x, encoded.z) - encoded.kl)
        return torch.stack(draws).mean(0)

    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator, images: Any = None) -> None:
        super().__init__(model, config, accelerator, images)
        self.differentiate = partial(self._differentiate, self._loss)
        if self.compiled:
            fast = first_without_traces(
                partial(self._differentiate, torch.compile(self._loss, dynamic=False)), list(model.buffers())
            )
            tolerance = COMPILED_TOLERANCE[config.mixed_precision]
            self.differentiate = checked("learning step", fast, self.differentiate, tolerance, self.tell)  # type: ignore[assignment]

    def _loss(self, x: Tensor, mask: Tensor | None, eps: Latents, weight: Tensor) -> tuple[Tensor, Latents]:
        """Minus the ELBO of the batch, its KL term weighted, and the latents."""
        visible = x if mask is None else torch.where(mask.expand_as(x), x, 0.0)
        with self.accelerator.autocast():
            encoded = self.model.encode(visible, eps)
            loss = weight * encoded.kl - self.model.log_likelihood(x, encoded.z, mask)
        return loss.float().sum(), encoded.z

    def _differentiate(
        self, function: Callable[..., tuple[Tensor, Latents]], *arguments: Any
    ) -> tuple[Tensor, Latents, tuple[Tensor, ...]]:
        loss, z = function(*arguments)
        return loss.detach(), tuple(layer.detach() for layer in z), torch.autograd.grad(loss, self.parameters)

    def update(self, batch: Batch, share: float, generator: torch.Generator) -> Update:
        """One step up the ELBO, with the weight of the KL term rising from 0 to 1 during the warm-up."""
        x, mask = self.own_batch(batch)
        eps = tuple(self.own(layer) for layer in self.model.sample_prior(len(batch.x), generator))
        weight = min(1.0, share / self.config.kl_warm_up) if self.config.kl_warm_up else 1.0
        loss, z, gradients = self.differentiate(x, mask, eps, torch.tensor(weight, device=x.device))
        unit = float(self.model.sigma) ** 2 / x[0].numel()
        value, finite = self.descend(loss, torch.tensor(len(x), device=x.device), gradients, unit)
        return Update(value, 0, finite, tuple(float(layer.std()) for layer in z))

    def prepare(self, batch: Batch, generator: torch.Generator) -> None:
        """Tune the step size of short run dynamics on the decoder, for tasks that use it instead of the encoder."""
        x = batch.x[: len(batch.x) // TUNING_CHAINS].to(self.accelerator.device)
        grid = [self.config.step_size * 2.0**j for j in range(-4, 4)]
        try:
            result = tune_by_grid(
                self.model, x, self.dynamics, grid, estimator="endpoint", samples=TUNING_CHAINS, probes=1, depth=8,
                generator=generator,
            )  # fmt: skip
            self.dynamics = result.dynamics
        except StepSizeError:
            self.dynamics = Langevin(self.config.steps, min(grid))


def one_layer_decoder(config: ModelConfig, image: tuple[int, int, int], sigma: float, method: str) -> Any:
    model: Any = build_model(config, image, sigma)
    if len(model.latent_shapes) != 1 or config.coordinates != "noise":
        raise ModelError(
            f"{method} has one layer of latents, but the sizes {config.latent_sizes} were given; "
            "choose one size, or the method ladder-vae"
        )
    return model.decoder
