"""Inverse problems: images from measurements of them, by the posterior of a generator."""

from shortrun.inverse.model import Observed
from shortrun.inverse.names import parse_operator
from shortrun.inverse.operators import (
    Blur,
    Clip,
    Compose,
    Downsample,
    FromDeepinv,
    Function,
    Grey,
    Identity,
    Mask,
    Operator,
    Project,
    Quantise,
    as_operator,
)
from shortrun.inverse.posterior import Posterior

__all__ = [
    "Blur",
    "Clip",
    "Compose",
    "Downsample",
    "FromDeepinv",
    "Function",
    "Grey",
    "Identity",
    "Mask",
    "Observed",
    "Operator",
    "Posterior",
    "Project",
    "Quantise",
    "as_operator",
    "parse_operator",
]
