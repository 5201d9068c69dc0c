r"""The latent energy-based prior (Pang et al. 2020), learned by short run chains of its own."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from shortrun.core.chain import Point, chain, gradient
from shortrun.core.latents import Latents, Rng, standard_normal
from shortrun.metrics.likelihood import annealed_importance
from shortrun.priors.base import Prior, Report, standard_log_density

STEPS, STEP_SIZE = 60, 0.02
"""Of the chains. Pang et al. take as many steps of s = 0.08; clusters of latents make that unstable in these
coordinates."""
RATE, BETAS, BATCH = 5e-4, (0.5, 0.999), 256
ITERATIONS, CHECK_EVERY, PATIENCE = 1500, 50, 4
STAGES, CHAINS = 100, 256  # of the annealing that finds the normalising constant


class EnergyPrior(Prior):
    r"""``p(y) = exp(f(y)) N(y; 0, I) / Z`` with a network f.

    The gradient of the log-likelihood is ``E_data[grad f] - E_p[grad f]``; draws from p are the ends of short run
    chains from N(0, I). ``log Z = log E_{N(0, I)} exp(f)`` is estimated by annealed importance sampling, whose steps
    leave their law invariant, so that densities are those of p and not of its chains.

    Args:
        width: of the two hidden layers of f.
    """

    kind = "energy"
    log_normaliser: Tensor

    def __init__(self, size: int, width: int = 200) -> None:
        super().__init__(size)
        self.width = width
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)  # f = 0: it begins as the Gaussian
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), last)
        self.register_buffer("log_normaliser", torch.zeros(()))

    def options(self) -> dict[str, Any]:
        return {"width": self.width}

    def energy(self, y: Tensor) -> Tensor:
        """``f(y)``, shape ``(n,)``."""
        return self.network(y)[:, 0]

    def white_log_density(self, y: Tensor) -> Tensor:
        return self.energy(y) + standard_log_density(y) - self.log_normaliser

    def white_sample(self, count: int, rng: Rng = None) -> Tensor:
        """The ends of chains ``y' = y + s grad log p(y) + sqrt(2 s) eps``."""

        def visit(k: int, z: Latents) -> tuple[Latents, Point]:
            return z, gradient(lambda leaves: self.energy(leaves[0]) + standard_log_density(leaves[0]), z)

        def noise(k: int, layer: Tensor) -> Tensor:
            return standard_normal(layer.shape, layer, rng)

        start = (standard_normal((count, self.size), self.mean, rng),)
        for _, (y,), _ in chain(start, [(STEP_SIZE,)] * STEPS, visit, noise, evaluate_end=False):  # noqa: B007
            pass
        return y.detach()

    def learn(self, y: Tensor, held_out: Tensor, rng: torch.Generator, report: Report) -> None:
        optimiser = torch.optim.Adam(self.network.parameters(), lr=RATE, betas=BETAS)
        best, kept, waited = -math.inf, copy.deepcopy(self.state_dict()), 0
        for iteration in range(1, ITERATIONS + 1):
            self.descend(optimiser, y[torch.randint(len(y), (BATCH,), generator=rng).to(y.device)], rng)
            if iteration % CHECK_EVERY:
                continue
            self.normalise(rng)
            density = float(self.white_log_density(held_out).mean())
            report(iteration / ITERATIONS, f"iteration {iteration}: {density:.2f} nats on held-out latents")
            if density > best:
                best, kept, waited = density, copy.deepcopy(self.state_dict()), 0
            else:
                waited += 1
            if waited >= PATIENCE or not math.isfinite(density):
                break
        self.load_state_dict(kept)

    def descend(self, optimiser: torch.optim.Optimizer, y: Tensor, rng: torch.Generator) -> None:
        """One step up the log-likelihood of ``y``: they become more likely, the ends of as many chains less."""
        drawn = self.white_sample(len(y), rng)
        with torch.enable_grad():
            loss = self.energy(drawn).mean() - self.energy(y).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def normalise(self, rng: torch.Generator) -> None:
        """Find ``log Z``."""
        nothing = torch.zeros(1, 1).to(self.mean)
        found = annealed_importance(_Tilted(self), nothing, rng, STAGES, CHAINS)
        self.log_normaliser.copy_(found[0])


class _Tilted:
    """N(0, I) with the "likelihood" ``exp(f)``, whose evidence is Z."""

    def __init__(self, prior: EnergyPrior) -> None:
        self.prior = prior

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        return (standard_normal((n, self.prior.size), self.prior.mean, rng),)

    def log_prior(self, z: Latents) -> Tensor:
        return standard_log_density(z[0])

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        return self.prior.energy(z[0])
