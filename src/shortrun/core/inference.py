"""Inference for use: chains that got lost have a second try."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.langevin import (
    Diagnostics,
    DivergenceWarning,
    Langevin,
    infer_with_diagnostics,
    warn_if_not_finite,
)
from shortrun.core.latents import LatentModel, Latents, Rng

FEW = 8
"""In a batch of as many or more of which most are unexplained it is not the chains that got lost."""


class Inferred(NamedTuple):
    z: Latents
    divergent: Tensor
    """Which chains diverged, shape ``(n,)``."""
    mended: Tensor
    """Which had got lost and end where their second try did, shape ``(n,)``."""


def none_lost(x: Tensor) -> tuple[Tensor, Tensor]:
    """For inference without chains: none diverged, none was mended."""
    none = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return none, none


def infer_and_mend(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = None,
    start: Latents | None = None,
    rng: Rng = None,
) -> Inferred:
    """As :func:`shortrun.infer`, but a chain that got lost is run once more with half the step.

    Lost is a chain that diverged, or that leaves more of ``x`` unexplained than the observation noise of the model may
    (``lowest_log_likelihood``, for models that have it), unless that is so for most of a batch: then the model has yet
    to learn. Of its two ends the one with the higher log joint is kept. The price is that of the chains that got lost:
    one in a hundred or less, if the model is trained and its step tuned.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        found = _infer_and_mend(model, x, dynamics, mask, start, rng)
    warn_if_not_finite(found.z, dynamics)
    return found


def _infer_and_mend(
    model: LatentModel, x: Tensor, dynamics: Langevin, mask: Tensor | None, start: Latents | None, rng: Rng
) -> Inferred:
    z, first = infer_with_diagnostics(model, x, dynamics, mask=mask, start=start, rng=rng)
    divergent, mended = first.divergent[-1], torch.zeros_like(first.divergent[-1])
    lost = divergent | _unexplained(model, x, z, mask, first)
    if not (dynamics.steps and lost.any()):
        return Inferred(z, divergent, mended)
    rows = lost.nonzero()[:, 0]
    seen = None if mask is None else mask.expand_as(x)[rows]
    sources = [rng[i] for i in rows.tolist()] if isinstance(rng, Sequence) else rng
    begin = None if start is None else tuple(layer[rows] for layer in start)
    again, second = infer_with_diagnostics(model, x[rows], dynamics.scaled(0.5), mask=seen, start=begin, rng=sources)
    before, after = (log.log_joint[-1].nan_to_num(nan=-math.inf, posinf=-math.inf) for log in (first, second))
    better = after > before[rows]
    mended[rows] = better
    divergent = divergent.index_put((rows,), torch.where(better, second.divergent[-1], divergent[rows]))
    chosen = rows[better]
    z = tuple(old.index_put((chosen,), new[better]) for old, new in zip(z, again, strict=True))
    return Inferred(z, divergent, mended)


def _unexplained(model: Any, x: Tensor, z: Latents, mask: Tensor | None, diagnostics: Diagnostics) -> Tensor:
    """Chains whose end is less likely than the noise of the model allows; none if the model explains few examples."""
    none = torch.zeros_like(diagnostics.divergent[-1])
    if not hasattr(model, "lowest_log_likelihood"):
        return none
    with torch.no_grad():
        found = ~(diagnostics.log_joint[-1] - model.log_prior(z) >= model.lowest_log_likelihood(x, mask))
    return none if len(x) >= FEW and found.double().mean() > 0.5 else found
