"""Small images that are linear in their latents, so that ``log p(x)`` is known; and the ELBO of encoders of these."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import shortrun as sr
from shortrun.nets.build import GeneratorNetwork
from shortrun.training.model_folder import Description

IMAGE = (1, 8, 8)


class Linear(nn.Module):
    """``x = W z + b`` as an image."""

    def __init__(self, sizes: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.latent_shapes = tuple((size,) for size in sizes)
        self.linear = nn.Linear(sum(sizes), math.prod(IMAGE))

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        return self.linear(torch.cat(z, 1)).view(-1, *IMAGE)


def exact_log_density(decoder: Linear, sigma: float, x: Tensor) -> Tensor:
    """``log N(x; b, W W^T + sigma^2 I)`` by torch.distributions."""
    weight, bias = decoder.linear.weight.double(), decoder.linear.bias.double()
    covariance = weight @ weight.T + sigma**2 * torch.eye(len(bias), dtype=torch.float64)
    return torch.distributions.MultivariateNormal(bias, covariance).log_prob(x.flatten(1).double())


def linear_problem(sizes: tuple[int, ...] = (3,), n: int = 6) -> tuple[Linear, Tensor, torch.Generator]:
    torch.manual_seed(0)
    decoder = Linear(sizes).requires_grad_(False)
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    rng = torch.Generator().manual_seed(1)
    x = decoder(model.sample_prior(n, rng)) + 0.3 * torch.randn(n, *IMAGE, generator=rng)
    return decoder, x, rng


def linear_trained(steps: int = 200, step_size: float = 0.004) -> tuple[sr.Trained, sr.LinearGaussian, Tensor]:
    """The linear images as a trained model, with the closed forms of it, flat, and examples."""
    decoder, x, _ = linear_problem()
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    about = Description("short-run", GeneratorNetwork(), IMAGE, sr.Langevin(steps, step_size), own_decoder="Linear")
    exact = sr.LinearGaussian(decoder.linear.weight, 0.3, decoder.linear.bias, decoder.latent_shapes)
    return sr.Trained(model, about).eval(), exact, x


def fit_encoder(model: Any, x: Tensor, steps: int = 800, rate: float = 1e-2) -> None:
    """Maximise the ELBO over the encoder alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    rng = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
        eps = model.sample_prior(len(x), rng)
        encoded = model.encode(x, eps)
        loss = (encoded.kl - model.log_likelihood(x, encoded.z)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def bound(model: Any, x: Tensor, draws: int = 1500) -> Tensor:
    """The ELBO."""
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        values = []
        for _ in range(draws):
            encoded = model.encode(x, model.sample_prior(len(x), rng))
            values.append(model.log_likelihood(x, encoded.z) - encoded.kl)
    return torch.stack(values).double().mean(0)
