"""Numbers of a trained model: its free energy over step sizes, its likelihood, the quality of its samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shortrun.core.free_energy import Estimation
from shortrun.core.langevin import Langevin
from shortrun.core.latents import has_normal_prior
from shortrun.core.model import NotPossibleError
from shortrun.core.tune import TuneResult, tune_by_grid
from shortrun.priors import Prior
from shortrun.processes import flushed_denormals

Law = Literal["learned", "normal"]
"""What the latents of samples are drawn from: the learned prior, or that of training, N(0, I) for most methods."""

By = Literal["method", "draw", "centre", "dynamics"]
"""The model's own inference (the end of a chain, or the centre of an encoder's q(z | x)); a draw from q(z | x), from an
encoder too; its centre, from chains too, whose steps then take no noise; or short run dynamics on the decoder, whatever
the method."""


def random_source(seed: int, rng: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(seed) if rng is None else rng


class Measured(nn.Module):
    """What :class:`shortrun.trained.Trained` can say about itself in numbers."""

    model: Any
    prior: Prior | None
    dynamics: Langevin

    @property
    def joint(self) -> Any:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def prepare(self, x: Any, what: str = "x") -> Tensor:
        raise NotImplementedError

    def sample(
        self, count: int, *, prior: Law = "learned", seed: int = 0, rng: torch.Generator | None = None
    ) -> Tensor:
        raise NotImplementedError

    def tune(
        self,
        x: Any,
        step_sizes: Iterable[float] | None = None,
        how: Estimation | None = None,
        *,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> TuneResult:
        """The free energy over step sizes: see :func:`shortrun.tune_by_grid`.

        By default with four chains per example and the curvature at their ends, where the prior allows it.
        """
        self._check_dynamics()
        x = self.prepare(x).to(self.device)
        if how is None:
            how = Estimation(estimator="endpoint" if has_normal_prior(self.model) else "auto", chains=4)
        with flushed_denormals():
            return tune_by_grid(self.model, x, self.dynamics, step_sizes, how, rng=random_source(seed, rng))

    def _runs_dynamics(self) -> bool:
        return getattr(self.model, "no_dynamics", None) is None

    def _check_dynamics(self) -> None:
        if not self._runs_dynamics():
            raise NotPossibleError(self.model.no_dynamics)

    def log_likelihood(
        self, x: Any, *, stages: int = 200, seed: int = 0, rng: torch.Generator | None = None
    ) -> dict[str, Any]:
        """What is known of log p(x): means over the examples, each with its standard error over them.

        * ``lower_bound``: the ELBO of an encoder, or the density itself for Glow. Methods by chains have none.
        * ``importance_weighted``: for methods with an encoder; it lies between the ELBO and log p(x).
        * ``annealed``: annealed importance sampling in so many stages, for all that have latents; for chains and codes
          it is the likelihood. It, too, is a lower bound in expectation, which more stages make tighter. Where a
          prior was learned it is that of the model with it, and ``annealed_normal`` that with the prior of training.

        Nats per example, for images the density in [-1, 1], and bits per dimension: of 8-bit images, or of what is
        discrete itself.
        """
        from shortrun.metrics.likelihood import known_likelihoods

        x = self.prepare(x).to(self.device)
        with flushed_denormals():
            return known_likelihoods(self.model, self.joint, x, stages, random_source(seed, rng))

    def score(
        self,
        reference: Tensor,
        samples: int,
        *,
        seed: int = 0,
        rng: torch.Generator | None = None,
        network: Any = None,
        quiet: bool = False,
    ) -> dict[str, Any]:
        """FID and KID of ``samples`` drawn from the model against 8-bit reference images.

        Where a prior was learned, ``fid`` and ``kid`` are of samples from it, ``fid_normal`` and ``kid_normal`` of
        samples from the prior of training.
        """
        from shortrun import metrics

        network, rng = network or metrics.inception(device=self.device), random_source(seed, rng)

        def compare(prior: Law) -> dict[str, Any]:
            drawn = metrics.to_bytes(self.sample(samples, prior=prior, rng=rng))
            return metrics.compare_sets(reference, drawn, network, quiet)

        found = compare("learned")
        if self.prior is not None:
            normal = compare("normal")
            found |= {f"{key}_normal": normal[key] for key in ("fid", "kid", "kid_deviation")}
        return found
