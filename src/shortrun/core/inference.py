"""Inference for use: chains that got lost have a second and a third try."""

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
    Watch,
    infer_with_diagnostics,
    warn_if_not_finite,
)
from shortrun.core.latents import LatentModel, Latents, Rng

SHORTER_TRIES = (0.5, 0.25)
"""Share of the step in the second and, for what is still lost, the third try of a chain."""
FEW = 8
"""In a batch of as many or more of which most are unexplained it is not the chains that got lost."""


class Inferred(NamedTuple):
    z: Latents
    divergent: Tensor
    """Which chains diverged, shape ``(n,)``."""
    mended: Tensor
    """Which had got lost and end where a later try did, shape ``(n,)``."""


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
    watch: Watch | None = None,
) -> Inferred:
    """As :func:`shortrun.infer`, but a chain that got lost is run again with half the step, then with a quarter.

    Lost is a chain that diverged, or that leaves more of ``x`` unexplained than the observation noise of the model may
    (``lowest_log_likelihood``, for models that have it), unless that is so for most of a batch: then the model has yet
    to learn. Of its ends the one with the higher log joint is kept. The price is that of the chains that got lost:
    one in a hundred or less, if the model is trained and its step tuned. ``watch`` sees the first try.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        found = _infer_and_mend(model, x, dynamics, mask, start, rng, watch)
    warn_if_not_finite(found.z, dynamics)
    return found


def _infer_and_mend(
    model: LatentModel, x: Tensor, dynamics: Langevin, mask: Tensor | None, start: Latents | None, rng: Rng,
    watch: Watch | None,
) -> Inferred:  # fmt: skip
    def run(rows: Tensor, share: float, watch: Watch | None = None) -> tuple[Latents, Tensor, Tensor, Tensor]:
        """Ends of the chains of these rows, which diverged, which got lost, and their log joint."""
        seen = None if mask is None else mask.expand_as(x)[rows]
        begin = None if start is None else tuple(layer[rows] for layer in start)
        sources = [rng[i] for i in rows.tolist()] if isinstance(rng, Sequence) else rng
        z, log = infer_with_diagnostics(
            model, x[rows], dynamics.scaled(share), mask=seen, start=begin, rng=sources, watch=watch
        )
        lost = log.divergent[-1] | _unexplained(model, x[rows], z, seen, log)
        return z, log.divergent[-1], lost, log.log_joint[-1].nan_to_num(nan=-math.inf, posinf=-math.inf)

    z, divergent, lost, reached = run(torch.arange(len(x), device=x.device), 1.0, watch)
    mended = torch.zeros_like(lost)
    for share in SHORTER_TRIES:
        rows = lost.nonzero()[:, 0]
        if not (dynamics.steps and len(rows)):
            break
        again, astray, still_lost, height = run(rows, share)
        better = height > reached[rows]
        chosen = rows[better]
        z = tuple(old.index_put((chosen,), new[better]) for old, new in zip(z, again, strict=True))
        mended[chosen], divergent[chosen], reached[chosen] = True, astray[better], height[better]
        lost[rows] = still_lost | ~better
    return Inferred(z, divergent, mended)


def _unexplained(model: Any, x: Tensor, z: Latents, mask: Tensor | None, diagnostics: Diagnostics) -> Tensor:
    """Chains whose end is less likely than the noise of the model allows; none if the model explains few examples."""
    none = torch.zeros_like(diagnostics.divergent[-1])
    if not hasattr(model, "lowest_log_likelihood"):
        return none
    with torch.no_grad():
        found = ~(diagnostics.log_joint[-1] - model.log_prior(z) >= model.lowest_log_likelihood(x, mask))
    return none if len(x) >= FEW and found.double().mean() > 0.5 else found
