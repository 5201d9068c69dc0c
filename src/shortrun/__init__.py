"""Deep generative models without an encoder: short run Langevin inference that tunes its own step size."""

from shortrun.entropy import Entropy, Estimator
from shortrun.langevin import Diagnostics, DivergenceError, Langevin, infer
from shortrun.linear_gaussian import LinearGaussian
from shortrun.model import GaussianModel, LatentModel
from shortrun.tune import (
    Guard,
    StepSizeError,
    TuneResult,
    free_energy,
    tune_by_gradient,
    tune_by_grid,
)

__version__ = "0.1.0"

__all__ = [
    "Diagnostics",
    "DivergenceError",
    "Entropy",
    "Estimator",
    "GaussianModel",
    "Guard",
    "Langevin",
    "LatentModel",
    "LinearGaussian",
    "StepSizeError",
    "TuneResult",
    "free_energy",
    "infer",
    "tune_by_gradient",
    "tune_by_grid",
]
