"""Laws of the latents that are learned: a Gaussian, a mixture, a flow, an energy-based prior.

The prior is part of the model: the likelihood of the data grows with that of their latents. Training by chains moves
the scale of a latent by about ``sigma^2 / w^2`` per update, so latents never come to follow N(0, I) by themselves;
a law that is fitted to them says how to sample.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from shortrun.core.inference import Inferred
from shortrun.core.latents import flatten
from shortrun.priors.base import GaussianPrior, Prior, PriorKind, Report, are_typical, standard_log_density
from shortrun.priors.model import WithPrior

__all__ = ["GaussianPrior", "Prior", "PriorKind", "Report", "WithPrior", "fit_prior", "infer_and_fit", "prior_class"]

_HOMES = {"gaussian": "base:GaussianPrior", "mixture": "mixture:MixturePrior", "flow": "flow:FlowPrior",
          "energy": "energy:EnergyPrior"}  # fmt: skip
PART = 1000  # examples that are inferred between two reports
INFERENCE_SHARE = 0.7  # of the time that a prior takes, about
HELD_OUT = 0.1  # of the latents, to choose by
FEWEST = 20


def _silent(share: float, text: str) -> None:
    pass


def prior_class(kind: str) -> type[Prior]:
    """The class of a kind of learned prior.

    >>> prior_class("mixture").__name__
    'MixturePrior'
    """
    if kind not in _HOMES:
        raise ValueError(f"prior is {kind!r}; accepted: {', '.join(get_args(PriorKind))}")
    module, _, name = _HOMES[kind].partition(":")
    return getattr(importlib.import_module(f"shortrun.priors.{module}"), name)


def fit_prior(z: Tensor, kind: PriorKind = "mixture", *, seed: int = 0, report: Report = _silent) -> Prior:
    """The prior of a kind that is fitted to latents.

    Args:
        z: shape ``(n, d)``, all layers side by side (:func:`shortrun.core.latents.flatten`); what is far from all
            others (:func:`shortrun.priors.base.are_typical`) does not count.
        kind: gaussian, mixture (the number of components is chosen), flow or energy (both stop early). All choices are
            made by the density of a tenth of the latents, which is held out.

    >>> z = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 5.0])
    >>> prior = fit_prior(z, "gaussian")
    >>> prior.sample(1000, torch.Generator().manual_seed(1)).std(0).round()
    tensor([1., 2., 5.])
    """
    build = prior_class(kind)
    if z.ndim != 2 or len(z) < FEWEST:
        raise ValueError(f"latents have shape {tuple(z.shape)}; expected (n, d) with n at least {FEWEST}")
    if not bool(z.isfinite().all()):
        raise ValueError("latents have values that are NaN or infinite")
    given, rng = len(z), torch.Generator().manual_seed(seed)
    z = z[are_typical(z)]
    order = torch.randperm(len(z), generator=rng)
    held_out, rest = z[order[: round(HELD_OUT * len(z))]], z[order[round(HELD_OUT * len(z)) :]]
    begun = time.perf_counter()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)  # of the weights of networks
        prior = build(z.shape[1]).to(z)
        prior.fit(rest.clone(), held_out.clone(), rng, report)
        with torch.no_grad():
            density = float(prior.log_density(held_out.to(prior.mean)).mean())
    prior.info = {
        "latents": len(z),
        "outliers": given - len(z),
        "log_density": density,
        "log_density_normal": float(standard_log_density(held_out.float()).mean()),
        "largest_variance_normal": largest_variance(z),
        "largest_variance": largest_variance(prior.whiten(z.to(prior.mean))),
        "seconds": round(time.perf_counter() - begun, 1),
        **prior.options(),
    }
    return prior.eval().requires_grad_(False)


def infer_and_fit(
    latents: Callable[[slice], Inferred], count: int, kind: PriorKind, seed: int = 0, report: Report = _silent
) -> Prior:
    """:func:`fit_prior` to the latents of ``count`` examples, of which ``latents(rows)`` infers some at a time.

    Those of chains that diverged do not count.
    """
    prior_class(kind)  # an unknown kind is noticed before the long work
    begun, parts = time.perf_counter(), []
    for first in range(0, count, PART):
        rows = slice(first, min(first + PART, count))
        found = latents(rows)
        parts.append(flatten(found.z)[~found.divergent])
        report(INFERENCE_SHARE * rows.stop / count, f"latents of {rows.stop:,} of {count:,} examples")

    def pass_on(share: float, text: str) -> None:
        report(INFERENCE_SHARE + (1 - INFERENCE_SHARE) * share, text)

    prior = fit_prior(torch.cat(parts), kind, seed=seed, report=pass_on)
    prior.info |= {"examples": count, "seconds_in_all": round(time.perf_counter() - begun, 1)}
    return prior


def largest_variance(z: Tensor) -> float:
    """Of any direction."""
    return float(torch.linalg.eigvalsh(torch.cov(z.double().T).reshape(z.shape[1], -1))[-1])
