r"""Estimates of ``log p(x)`` for models with latents: lower bounds, importance weights, annealed importance sampling.

All are in nats per image for the density of images in [-1, 1]; :func:`bits_per_dimension` converts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shortrun.core.latents import Latents, standard_normal
from shortrun.core.model import NotPossibleError
from shortrun.core.target import Target

WEIGHTS = 64  # samples of the importance-weighted estimate
LEAPFROG = 8
ACCEPTANCE = 0.7


def bits_per_dimension(log_p: Tensor, dimensions: int) -> Tensor:
    """From nats per image in [-1, 1] to bits per 8-bit grey level, which is 2/255 wide."""
    return (-log_p / dimensions - math.log(2 / 255)) / math.log(2)


def importance_weighted(
    model: Any, x: Tensor, encode: Callable[[Tensor, Latents], Any], rng: torch.Generator, samples: int = 64
) -> Tensor:
    r"""``log 1/S sum_s p(x, z_s) / q(z_s | x)``, a lower bound of ``log p(x)`` in expectation (Burda et al. 2016).

    ``encode(x, eps)`` returns a draw and its ``log_q`` from standard normal noise; with ``samples=1`` it is the ELBO.
    """
    weights = []
    with torch.no_grad():
        for _ in range(samples):
            encoded = encode(x, model.sample_prior(len(x), rng))
            joint = model.log_prior(encoded.z) + model.log_likelihood(x, encoded.z)
            weights.append(joint - encoded.log_q)
    return torch.logsumexp(torch.stack(weights), 0) - math.log(samples)


def annealed_importance(model: Any, x: Tensor, rng: torch.Generator, stages: int = 200, chains: int = 8) -> Tensor:
    r"""Annealed importance sampling (Neal 2001; Wu et al. 2017), shape ``(n,)``: a lower bound in expectation.

    From the prior to the posterior through ``p(z) p(x|z)^beta``, ``beta`` from 0 to 1; each stage is one transition of
    Hamiltonian Monte Carlo that keeps its distribution invariant. The weight of a chain is
    ``prod_t p(x | z_t)^(beta_{t+1} - beta_t)``. A first pass finds the step size of each stage; the second, with fresh
    random numbers and these steps fixed, gives the estimate.
    """
    target = Target(model, x, None, rng=rng, chains=chains)
    betas = (torch.linspace(0, 1, stages + 1, dtype=torch.float64) ** 3).tolist()  # slow where the data come in

    def parts(flat: Tensor) -> tuple[Tensor, Tensor]:
        z = target.unflatten(flat)
        return model.log_prior(z), model.log_likelihood(target.x, z)

    def slope(flat: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        """``log p(z) + beta log p(x|z)``, its gradient, and ``log p(x|z)``."""
        with torch.enable_grad():
            leaf = flat.detach().requires_grad_()
            prior, likelihood = parts(leaf)
            value = prior + beta * likelihood
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient, likelihood.detach()

    def run(flat: Tensor, steps: list[float], adapt: bool) -> Tensor:
        log_weight = torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
        with torch.no_grad():
            likelihood = parts(flat)[1]
        size = 0.1
        for t in range(1, len(betas)):
            log_weight += (betas[t] - betas[t - 1]) * likelihood.double()
            if not adapt:
                size = steps[t - 1]
            momentum = standard_normal(flat.shape, flat, rng)
            value, gradient, likelihood = slope(flat, betas[t])
            energy = value - 0.5 * momentum.square().sum(1)
            place, force = flat, gradient
            for _ in range(LEAPFROG):
                momentum = momentum + 0.5 * size * force
                place = place + size * momentum
                new_value, force, new_likelihood = slope(place, betas[t])
                momentum = momentum + 0.5 * size * force
            gain = (new_value - 0.5 * momentum.square().sum(1) - energy).nan_to_num(nan=-math.inf)
            uniform = torch.rand(len(flat), generator=rng).to(flat)
            accepted = uniform.log() < gain
            flat = torch.where(accepted[:, None], place, flat)
            likelihood = torch.where(accepted, new_likelihood, likelihood)
            if adapt:
                steps.append(size)
                size *= 1.1 if float(gain.exp().clamp(max=1).mean()) > ACCEPTANCE else 1 / 1.1
        return log_weight

    sizes: list[float] = []
    run(target.flatten(target.start), sizes, adapt=True)
    fresh = Target(model, x, None, rng=rng, chains=chains)
    log_weight = run(fresh.flatten(fresh.start), sizes, adapt=False)
    return torch.logsumexp(log_weight.view(len(x), chains), 1) - math.log(chains)


def known_likelihoods(model: Any, joint: Any, x: Tensor, stages: int, rng: torch.Generator) -> dict[str, Any]:
    """All that can be estimated of log p(x), as :meth:`shortrun.Trained.log_likelihood` says.

    Args:
        model: with the prior that it was trained with.
        joint: the same with a learned prior, or the model itself.
    """
    if stages < 0:
        raise ValueError(f"stages is {stages}; expected zero or more")
    found: dict[str, Any] = {"likelihood_images": len(x)}

    def note(name: str, values: Tensor) -> None:
        values, count = values.double(), x[0].numel()
        density = hasattr(model, "sigma")  # else a probability, of what is discrete itself
        bits = bits_per_dimension(values, count) if density else -values / count / math.log(2)
        for key, each in ((name, values), (f"{name}_bits", bits)):
            found[key] = float(each.mean())
            if len(x) > 1:
                found[f"{key}_error"] = float(each.std() / math.sqrt(len(x)))

    with contextlib.suppress(NotPossibleError):
        if hasattr(model, "lower_bound"):
            note("lower_bound", model.lower_bound(x, rng))
    if hasattr(model, "encode"):
        note("importance_weighted", importance_weighted(model, x, model.encode, rng, WEIGHTS))
        found["importance_weights"] = WEIGHTS
    if stages and hasattr(model, "log_prior"):
        own = annealed_importance(model, x, rng, stages)
        if joint is model:
            note("annealed", own)
        else:
            learned = annealed_importance(joint, x, rng, stages)
            note("annealed", learned)
            note("annealed_normal", own)
            gain = learned.double() - own.double()  # paired, so that its error is that of the difference
            found["annealed_gain"] = float(gain.mean())
            if len(x) > 1:
                found["annealed_gain_error"] = float(gain.std() / math.sqrt(len(x)))
    return found
