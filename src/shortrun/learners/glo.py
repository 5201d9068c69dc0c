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
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shortrun.core.langevin import Langevin
from shortrun.learners.base import Batch, Info, Learner, Moment, State
from shortrun.learners.gradients import gradients_of
from shortrun.nets.build import ModelError, Shape, decoder_of
from shortrun.nets.codes import CodeModel, to_ball, visible_residual
from shortrun.settings import Positive, check

PCA_IMAGES = 64 * 64 * 3 * 2  # n_pca of the paper's appendix
CHUNK = 4096


@dataclass(frozen=True)
class GLOSettings:
    """Of generative latent optimisation."""

    code_rate: Positive = 1.0
    """Learning rate of the codes; it follows the schedule of the generator's."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """What updates the generator."""

    def __post_init__(self) -> None:
        check(self)


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


def principal_codes(images: Any, size: int, rng: torch.Generator) -> Tensor:
    """Principal components of every image, scaled to the unit sphere."""
    mean, directions = principal_directions(images, torch.randperm(len(images), generator=rng)[:PCA_IMAGES])
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
    Settings = GLOSettings
    settings: GLOSettings

    @classmethod
    def adopt(cls, model: Any, network: Any, shape: Shape) -> CodeModel:
        decoder = decoder_of(model, "glo", layers=1)
        if len(model.latent_shapes[0]) != 1:
            raise ModelError(f"the codes of glo are vectors; latents of shape {model.latent_shapes[0]} were given")
        return CodeModel(decoder, model.latent_shapes, float(model.sigma)).to(model.reference)

    def default_dynamics(self) -> Langevin:
        """None is used: codes of new images are optimised."""
        return Langevin()

    def make_optimiser(self) -> torch.optim.Optimizer:
        if self.settings.optimiser == "sgd":
            return torch.optim.SGD(self.parameters, lr=self.learning_rate)
        return super().make_optimiser()

    def init(self, seed: int = 0, examples: Any = None) -> State:
        if examples is None:
            raise ValueError("glo learns a code for each training example: init(seed, examples) needs them")
        rng = torch.Generator().manual_seed(seed)
        codes = principal_codes(examples, math.prod(self.model.latent_shapes[0]), rng)
        return replace(super().init(seed, examples), memory={"codes": codes})

    def update(self, state: State, batch: Batch | Tensor, moment: Moment = Moment()) -> tuple[State, Info]:
        """One step for the generator by its optimiser, one for the codes of the batch by projected gradient descent."""
        batch, codes = self.as_batch(batch), state.memory["codes"]
        x, mask = self.own_batch(batch)
        indices = self.indices_of(batch)
        z = codes[self.processes.own(indices)].to(x).requires_grad_()
        with self.processes.autocast():
            residual = visible_residual(self.model, x, z, mask)
        loss = residual.float().square().flatten(1).mean(1).sum()
        gradient, *gradients = gradients_of(loss, [z, *self.parameters])
        rate = self.set_rate(state, moment)
        value, finite = self.descend(state.optimiser, loss, torch.tensor(len(x), device=x.device), gradients, 1.0)
        moved = to_ball(z.detach() - self.settings.code_rate * rate / self.learning_rate * gradient)
        if finite:
            self.processes.remember(codes, indices, moved)
        state = self.counted(state, finite)
        spread = float(moved.std()) * math.sqrt(moved.shape[1])
        return state, Info(value, 0, finite, (spread,), state.dynamics.step_size, math.nan)

    def ready(self, state: State, batch: Batch, rng: torch.Generator) -> State:
        self.model.fit(state.memory["codes"])
        return state
