r"""Generative latent optimisation (Bojanowski et al., "Optimizing the Latent Space of Generative Networks", 2018).

.. math:: \min_\theta \frac1n \sum_i \min_{\|z_i\| \le 1} \| x_i - g_\theta(z_i) \|^2 .

Every training image has a learnable code on the unit ball, which starts at its principal components. Codes of new
images are found by the same optimisation with the generator held fixed; samples come from a Gaussian fitted to them,
which is also the prior p(z) of the model: draws and density are those of the Gaussian itself, off the ball too.

Bojanowski et al. learn both by plain SGD, rate 1 for the generator and 10 for the codes; so does the re-implementation
that the paper's appendix names (tneumann/minimal_glo). The codes' rate there multiplies the gradient of the mean over a
batch of 128 images; here it multiplies that of each image's own error, so it is ``10 / 128``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shortrun.config import ModelConfig, TrainConfig
from shortrun.langevin import Langevin
from shortrun.learners.base import Batch, Inferred, Learner, NotPossibleError, Update
from shortrun.learners.vae import one_layer_decoder
from shortrun.model import GaussianModel, Latents, RandomSource, fit_gaussian, standard_normal

PCA_IMAGES = 64 * 64 * 3 * 2  # n_pca of the paper's appendix
CHUNK = 4096
TEST_STEPS, TEST_RATE = 150, 0.05


def to_ball(z: Tensor) -> Tensor:
    """The nearest point of the unit ball."""
    return z / z.norm(dim=1, keepdim=True).clamp_min(1)


def visible_residual(model: Any, x: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
    """``x - g(z)``, zero where a pixel is hidden."""
    residual = x - model.decoder((z,))
    return residual if mask is None else torch.where(mask.expand_as(x), residual, 0.0)


class CodeModel(GaussianModel):
    """Codes with a Gaussian fitted to them as their prior."""

    standard_normal_prior = False
    mean: Tensor
    factor: Tensor

    def __init__(self, decoder: Any, sigma: float) -> None:
        super().__init__(decoder, decoder.latent_shapes, sigma)
        size = math.prod(self.latent_shapes[0])
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("factor", torch.eye(size) / math.sqrt(size))

    def fit(self, codes: Tensor) -> None:
        """``p(z) = N(mean, covariance)`` of the codes."""
        mean, factor = fit_gaussian(codes)
        self.mean.copy_(mean)
        self.factor.copy_(factor)

    def sample_prior(self, n: int, generator: RandomSource = None) -> Latents:
        noise = standard_normal((n, len(self.mean)), self.mean, generator)
        return (self.mean + noise @ self.factor.T,)

    def log_prior(self, z: Latents) -> Tensor:
        centred = (z[0] - self.mean).T
        standard = torch.linalg.solve_triangular(self.factor, centred, upper=False).T
        log_volume = self.factor.diagonal().log().sum()
        return -0.5 * (standard.square().sum(1) + len(self.mean) * math.log(2 * math.pi)) - log_volume


def principal_directions(images: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the images in these rows and their principal directions, of shape ``(directions, pixels)``.

    With more images than pixels, as the eigenvectors of their covariance, which is summed up part by part: the images
    need not all be in memory as floating point numbers.
    """
    pixels = math.prod(images.shape)
    parts = rows.split(CHUNK)
    mean = sum(images.batch(part).flatten(1).sum(0, dtype=torch.float64) for part in parts).float() / len(rows)
    if len(rows) <= pixels:
        return mean, torch.linalg.svd(images.batch(rows).flatten(1) - mean, full_matrices=False)[2]
    covariance = torch.zeros(pixels, pixels)
    for part in parts:
        centred = images.batch(part).flatten(1) - mean
        covariance.addmm_(centred.T, centred, alpha=1 / len(rows))
    return mean, torch.linalg.eigh(covariance)[1].T.flip(0)


def principal_codes(images: Any, size: int, generator: torch.Generator) -> Tensor:
    """Principal components of every image, scaled to the unit sphere."""
    mean, directions = principal_directions(images, torch.randperm(len(images), generator=generator)[:PCA_IMAGES])
    if len(directions) < size:
        raise ValueError(
            f"codes of size {size} need at least as many training images and pixels; there are {len(images)} images of "
            f"{math.prod(images.shape)} pixels"
        )
    parts = []
    for rows in torch.arange(len(images)).split(CHUNK):
        codes = (images.batch(rows).flatten(1) - mean) @ directions[:size].T
        parts.append(codes / codes.norm(dim=1, keepdim=True).clamp_min(1e-12))
    return torch.cat(parts)


class GLO(Learner):
    no_dynamics = "short run dynamics needs latents with a normal prior, which glo has not"

    @classmethod
    def build(cls, config: ModelConfig, image: tuple[int, int, int], sigma: float) -> nn.Module:
        return CodeModel(one_layer_decoder(config, image, sigma, "glo"), sigma)

    def __init__(self, model: Any, config: TrainConfig, accelerator: Accelerator, images: Any = None) -> None:
        super().__init__(model, config, accelerator, images)
        if config.optimiser == "sgd":
            self.optimiser = torch.optim.SGD(self.parameters, lr=config.learning_rates[0])
        generator = torch.Generator().manual_seed(config.seed)
        self.codes = principal_codes(images, math.prod(model.latent_shapes[0]), generator)

    def update(self, batch: Batch, share: float, generator: torch.Generator) -> Update:
        """One step for the generator by its optimiser, one for the codes of the batch by projected gradient descent."""
        x, mask = self.own_batch(batch)
        z = self.codes[self.own(batch.indices)].to(x.device).requires_grad_()
        with self.accelerator.autocast():
            residual = visible_residual(self.model, x, z, mask)
        loss = residual.float().square().flatten(1).mean(1).sum()
        gradient, *gradients = torch.autograd.grad(loss, [z, *self.parameters])
        value, finite = self.descend(loss, torch.tensor(len(x), device=x.device), tuple(gradients), 1.0)
        rate = self.config.code_rate * self.optimiser.param_groups[0]["lr"] / self.config.learning_rates[0]
        moved = to_ball(z.detach() - rate * gradient)
        if finite:
            self.remember(self.codes, batch, moved)
        return Update(value, 0, finite, (float(moved.std()) * math.sqrt(moved.shape[1]),))

    def prepare(self, batch: Batch, generator: torch.Generator) -> None:
        self.model.fit(self.codes)

    @classmethod
    def infer(
        cls, model: Any, x: Tensor, dynamics: Langevin, mask: Tensor | None = None, generator: RandomSource = None
    ) -> Inferred:
        """Codes of new images: the best of the unit ball by Adam, from the mean of the training codes."""
        z = to_ball(model.mean.expand(len(x), -1)).clone().requires_grad_()
        optimiser = torch.optim.Adam([z], lr=TEST_RATE)
        for step in range(TEST_STEPS):
            optimiser.param_groups[0]["lr"] = TEST_RATE * (1 - step / TEST_STEPS)
            with torch.enable_grad():
                error = visible_residual(model, x, z, mask).square().sum()
                (z.grad,) = torch.autograd.grad(error, z)
            optimiser.step()
            z.data = to_ball(z.data)
        return Inferred((z.detach(),), torch.zeros(len(x), dtype=torch.bool, device=x.device))

    @classmethod
    def lower_bound(cls, model: Any, x: Tensor, dynamics: Langevin, generator: torch.Generator) -> Tensor:
        raise NotPossibleError("glo finds one code per image and no distribution over codes, so it has no lower bound")

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.codes = tensors["codes"]
