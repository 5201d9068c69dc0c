"""Errors of reconstructions and inpaintings, per pixel in [-1, 1]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shortrun.data import Examples


class HiddenErrors(NamedTuple):
    """Mean square errors on hidden pixels."""

    mean_fill: float
    """Of the mean over fills."""
    single_fill: float


def mse_per_image(images: Tensor, x: Tensor) -> Tensor:
    """Mean square error per pixel, images in [-1, 1]; shape ``(n,)``."""
    return (images - x).square().flatten(1).mean(1)


def psnr(images: Tensor, x: Tensor) -> Tensor:
    """``10 log10(4 / MSE)`` of each image, in decibels: the range of [-1, 1] is 2, its square 4."""
    return 10 * torch.log10(4 / mse_per_image(images, x).clamp_min(1e-12))


def mean_image_error(seen: Examples, x: Tensor, mask: Tensor) -> float:
    """Error on the hidden pixels if they are filled with the mean of the training images: what inpainting must beat."""
    return float((seen.mean - x).square()[~mask.expand_as(x)].mean())


def hidden_errors(fills: Tensor, x: Tensor, mask: Tensor) -> HiddenErrors:
    """Errors of ``fills``, shape ``(fills, n, ...)``, where ``mask`` hides ``x``."""
    hidden = ~mask.expand_as(x)
    squares = (fills - x).square()[:, hidden]
    mean_square = (fills.mean(0) - x).square()[hidden]
    return HiddenErrors(float(mean_square.mean()), float(squares.mean()))
