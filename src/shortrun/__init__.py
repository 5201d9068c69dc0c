"""Deep generative models without an encoder: short run Langevin inference that tunes its own step size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shortrun.core.free_energy import Estimation, free_energy
from shortrun.core.langevin import (
    Diagnostics,
    DivergenceError,
    DivergenceWarning,
    Langevin,
    cool_down,
    infer,
    infer_with_diagnostics,
)
from shortrun.core.latents import LatentModel
from shortrun.core.linear_gaussian import LinearGaussian
from shortrun.core.model import BernoulliModel, CategoricalModel, GaussianModel
from shortrun.core.tune import Guard, StepSizeError, TuneResult, tune_by_gradient, tune_by_grid

if TYPE_CHECKING:
    from shortrun.fitting import fit
    from shortrun.learners.abp import ABP
    from shortrun.learners.base import Batch, Moment
    from shortrun.learners.glo import GLO
    from shortrun.learners.glow import Glow
    from shortrun.learners.ladder_vae import LadderVAE
    from shortrun.learners.short_run import ShortRun
    from shortrun.learners.vae import VAE
    from shortrun.learners.vae_iaf import VAEWithIAF
    from shortrun.masks import make_mask
    from shortrun.trained import Trained, load

__version__ = "0.2.0"

# What lies above the core is imported when it is first used, so that `import shortrun` costs little more than torch.
_HOMES = {
    "ABP": "learners.abp", "Batch": "learners.base", "GLO": "learners.glo", "Glow": "learners.glow",
    "LadderVAE": "learners.ladder_vae", "Moment": "learners.base", "ShortRun": "learners.short_run",
    "Trained": "trained", "VAE": "learners.vae", "VAEWithIAF": "learners.vae_iaf", "fit": "fitting", "load": "trained",
    "make_mask": "masks",
}  # fmt: skip

__all__ = [
    "ABP",
    "GLO",
    "VAE",
    "Batch",
    "BernoulliModel",
    "CategoricalModel",
    "Diagnostics",
    "DivergenceError",
    "DivergenceWarning",
    "Estimation",
    "GaussianModel",
    "Glow",
    "Guard",
    "LadderVAE",
    "Langevin",
    "LatentModel",
    "LinearGaussian",
    "Moment",
    "ShortRun",
    "StepSizeError",
    "Trained",
    "TuneResult",
    "VAEWithIAF",
    "cool_down",
    "fit",
    "free_energy",
    "infer",
    "infer_with_diagnostics",
    "load",
    "make_mask",
    "tune_by_gradient",
    "tune_by_grid",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "metrics", "priors"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
