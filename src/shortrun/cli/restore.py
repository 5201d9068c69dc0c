"""The command that undoes known damage."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shortrun.cli.use import Use
from shortrun.inverse import Operator, parse_operator
from shortrun.metrics.errors import mse_per_image, psnr


@dataclass
class Restore(Use):
    """Undo known damage: measure held-out images, infer them from the measurements, compare.

    Four times the resolution: shortrun restore svhn-small --operator downsample:4 --out pictures

    Colours for grey images, with intervals: shortrun restore faces-small --operator grey --draws 16 --out pictures

    Blurred, noisy and with holes: shortrun restore mnist-small --operator blur:1.5+mask:random:0.5 --noise 0.1 --out
    pictures
    """

    operator: str = "downsample:4"
    """denoise, mask:KIND (as for inpaint), downsample:FACTOR, blur:WIDTH, motion:LENGTH:DEGREES, grey, project:COUNT,
    clip:LOW:HIGH or quantise:BITS; several in a row are joined by +."""
    noise: float = 0.0
    """Standard deviation of the noise that is added to each measurement."""
    sigma: float | None = None
    """Standard deviation of measurements around A(g(z)) in the likelihood; by default noise and what the operator lets
    pass of the observation noise of the model."""
    draws: int = 8
    """Draws from the posterior of each image, for its mean and spread; 0 for the best single answer alone."""
    steps: int | None = None
    """Of the chains; by default four times those of training with the learned prior, else as many."""
    infer_with_prior: bool = True
    """Start from the modes of the learned prior that the measurement suggests, and drift with that prior; else from
    N(0, I), as in training."""

    def __call__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0) or self.draws < 0 or self.draws == 1:
            raise ValueError(f"noise is {self.noise} and draws {self.draws}; expected zero or more, but not one draw")
        trained, rng = self.open()
        x = self.held_out(trained)
        operator = parse_operator(self.operator, x, rng)
        clean = operator(x)
        y = clean + self.noise * torch.randn(clean.shape, generator=rng)
        sigma = self.sigma
        if sigma is None and self.noise:
            sigma = math.hypot(self.noise, trained.noise_of(operator))
        options: dict[str, Any] = {"steps": self.steps, "with_prior": self.infer_with_prior, "rng": rng}
        begun = time.perf_counter()
        best = trained.restore(y, operator, sigma, **options)
        seconds = time.perf_counter() - begun
        rows = [("original", x[:10]), ("measured", shown(y, operator, x)[:10])]
        rows.append(("best", best[:10]))
        values = {
            "operator": self.operator, "noise": self.noise, "sigma": sigma, "images": len(x),
            "mse": float(mse_per_image(best, x).mean()), "psnr": float(psnr(best, x).mean()),
            "seconds": round(seconds, 1),
        }  # fmt: skip
        if self.draws:
            posterior = trained.posterior(y, operator, sigma, draws=self.draws, **options)
            rows += [(f"draw {i + 1}", posterior.images[i, :10]) for i in range(min(3, self.draws))]
            rows.append(("mean", posterior.mean[:10]))
            spread = posterior.std
            rows.append(("spread", (2 * spread / spread.max().clamp_min(1e-6) - 1)[:10]))
            values |= {
                "draws": self.draws, "psnr_of_mean": float(psnr(posterior.mean, x).mean()),
                "psnr_of_draws": float(psnr(posterior.images[0], x).mean()), "step_size": posterior.step_size,
                "steps": posterior.steps, "divergent": float(posterior.divergent.mean()),
                "r_hat": None if posterior.r_hat is None else float(posterior.r_hat.median()),
            }  # fmt: skip
        self.draw("restored.png", rows, f"{self.operator}, PSNR {values['psnr']:.1f} dB")
        self.write("restore", values)


def shown(y: Tensor, operator: Operator, x: Tensor) -> Tensor:
    """A measurement as images of the size of ``x``, grey where nothing was measured, and all grey if it is no image."""
    if y.ndim != 4:
        return torch.zeros_like(x)
    if operator.visible is not None:
        y = torch.where(operator.visible, y, 0.0)
    y = F.interpolate(y, size=x.shape[2:], mode="nearest")
    return y.expand(len(y), x.shape[1], *y.shape[2:]) if y.shape[1] == 1 else y
