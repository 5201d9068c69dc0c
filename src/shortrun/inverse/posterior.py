"""What is known of images after a measurement: draws, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shortrun.core.latents import Latents


@dataclass(frozen=True)
class Posterior:
    """Draws from the posterior of each measurement, with diagnostics of the chains that they are the ends of."""

    images: Tensor
    """Shape ``(draws, n, ...)``."""
    z: Latents
    """Their latents, shape ``(draws, n, ...)`` each, top layer first."""
    step_size: float
    """s of the chains."""
    steps: int
    """K of the chains."""
    divergent: Tensor
    """Share of the chains of each measurement that diverged, shape ``(n,)``."""
    mended: Tensor
    """Share that had got lost and end where a later try did, shape ``(n,)``."""
    sigma: float = math.nan
    """Observation noise of the model, which :meth:`with_noise` adds."""
    r_hat: Tensor | None = None
    """Largest R-hat of the log joint and of several projections of the latents, over the last half of the chains, shape
    ``(n,)``; None where chains are not longer than in training: they are not meant to mix."""
    effective_draws: Tensor | None = None
    """Smallest effective sample size of the same, shape ``(n,)``."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def mean(self) -> Tensor:
        """The mean image of each measurement: what has the lowest expected square error."""
        return self.images.mean(0)

    @property
    def std(self) -> Tensor:
        """The spread of each pixel."""
        return self.images.std(0)

    def quantile(self, share: float) -> Tensor:
        """Of each pixel."""
        if not 0 <= share <= 1:
            raise ValueError(f"the share of a quantile is {share!r}; expected 0 to 1")
        return self.images.quantile(share, 0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends of the central interval of each pixel that holds it with probability ``level``.

        The truth is one more draw, so it lies between the k-th of n draws from below and the k-th from above with
        probability ``1 - 2 k / (n + 1)``. Between neighbours the ends are interpolated; the widest interval, from the
        lowest draw to the highest, holds it with probability ``(n - 1) / (n + 1)``.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level!r}; expected a probability between 0 and 1")
        count = len(self)
        share = max((1 - level) / 2 * (count + 1) - 1, 0.0) / max(count - 1, 1)
        return self.quantile(share), self.quantile(1 - share)

    def probability(self, statement: Callable[[Tensor], Tensor]) -> Tensor:
        """How likely a statement about an image is, shape ``(n,)``: ``statement`` maps images ``(draws, ..)`` to
        booleans ``(draws,)``; for example ``lambda x: x.mean((1, 2, 3)) > 0`` for a bright image.
        """
        count = self.images.shape[1]
        found = [torch.as_tensor(statement(self.images[:, i])) for i in range(count)]
        for each in found:
            if each.shape != (len(self),):
                raise ValueError(
                    f"the statement gives shape {tuple(each.shape)} for {len(self)} images; expected one true or false "
                    "for each"
                )
        return torch.stack([each.double().mean() for each in found]).to(self.images)

    def with_noise(self, seed: int = 0) -> Posterior:
        """The same with the observation noise of the model: intervals then are for pixels of real images, which the
        generator explains up to that noise, instead of for those of the generator.
        """
        if not math.isfinite(self.sigma):
            raise ValueError("the model has no observation noise of its own")
        rng = torch.Generator().manual_seed(seed)
        return replace(self, images=self.images + self.sigma * torch.randn(self.images.shape, generator=rng))
