"""A model with another prior than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shortrun.core.latents import Latents, Rng, flatten, shapes_of, unflatten
from shortrun.priors.base import Prior


class WithPrior(nn.Module):
    """``p(x, z) = p(z) p(x | z)`` with a learned ``p(z)`` and the likelihood of a model.

    It is a model like any other: chains start from the learned prior and drift with it, importance sampling anneals
    from it, and the entropies start from its covariance.
    """

    standard_normal_prior = False

    def __init__(self, model: Any, prior: Prior) -> None:
        super().__init__()
        self.model, self.prior = model, prior
        self.latent_shapes = shapes_of(model)
        # In the mode of the model: whoever puts this one into another mode and back leaves the model as it was.
        self.training = getattr(model, "training", False)

    @property
    def sigma(self) -> Tensor:
        """That of the model, if it has one."""
        return self.model.sigma

    @property
    def prepare(self) -> Callable[[Tensor], Tensor]:
        """That of the model, if it has one."""
        return self.model.prepare

    @property
    def lowest_log_likelihood(self) -> Callable[..., Tensor]:
        """That of the model, if it has one."""
        return self.model.lowest_log_likelihood

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        with torch.no_grad():
            return unflatten(self.prior.sample(n, rng), self.latent_shapes)

    def log_prior(self, z: Latents) -> Tensor:
        return self.prior.log_density(flatten(z))

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        return self.model.log_likelihood(x, z, mask)

    def decode(self, z: Latents) -> Tensor:
        return self.model.decode(z)

    def frozen(self) -> WithPrior | None:
        """The same model for as long as its parameters stay as they are, if the one inside offers that."""
        frozen = self.model.frozen() if hasattr(self.model, "frozen") else None
        return None if frozen is None else WithPrior(frozen, self.prior)

    def arrange(self, x: Tensor) -> Tensor:
        """Pixels in the order of the frozen model."""
        return self.model.arrange(x)

    def refresh(self) -> None:
        """Of a frozen model: take over the parameters as they are now."""
        self.model.refresh()
