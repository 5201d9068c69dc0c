"""Small generators that several tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shortrun as sr


class TwoLayerConv(nn.Module):
    """Two latents: the top one is projected to 3x3 maps, the lower one enters after a convolution."""

    def __init__(self, top: int = 3, lower: int = 4, channels: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(top, channels * 9)
        self.inject = nn.Linear(lower, channels * 9)
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.out = nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        top, lower = z
        hidden = nn.functional.gelu(self.project(top)).view(len(top), -1, 3, 3)
        hidden = hidden + nn.functional.gelu(self.mix(hidden) + self.inject(lower).view_as(hidden))
        return torch.tanh(self.out(hidden))


def conv_model(seed: int = 0, sigma: float = 0.4, gain: float = 2.0) -> sr.GaussianModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = TwoLayerConv().double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(gain)
    return sr.GaussianModel(decoder, [(3,), (4,)], sigma)


def conv_data(model: sr.GaussianModel, count: int, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return model.decoder(model.sample_prior(count, rng))


def linear_problem(noise: float = 0.4, dimension: int = 8) -> tuple[sr.LinearGaussian, Tensor]:
    """A linear-Gaussian model in two layers with curvatures from 1 to about 130, and data from it."""
    rng = torch.Generator().manual_seed(3)
    scales = torch.linspace(0.1, 1.2, dimension, dtype=torch.float64)
    weight = torch.randn(dimension + 4, dimension, generator=rng, dtype=torch.float64) * scales
    bias = torch.randn(dimension + 4, generator=rng, dtype=torch.float64)
    split = [(dimension // 2,), (dimension - dimension // 2,)]
    exact = sr.LinearGaussian(weight, noise, bias, split)
    z = torch.randn(5, dimension, generator=rng, dtype=torch.float64)
    x = z @ weight.T + bias
    return exact, x + noise * torch.randn(x.shape, generator=rng, dtype=torch.float64)
