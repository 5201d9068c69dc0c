"""Operators by name, for the command line."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shortrun.inverse.operators import (
    Blur,
    Clip,
    Compose,
    Downsample,
    Grey,
    Identity,
    Mask,
    Operator,
    Project,
    Quantise,
)
from shortrun.masks import make_mask

ACCEPTED = (
    "denoise, mask:KIND (as for inpaint), downsample:FACTOR, blur:WIDTH, motion:LENGTH:DEGREES, grey, project:COUNT, "
    "clip:LOW:HIGH or quantise:BITS; several in a row are joined by +, such as blur:1+downsample:2"
)
_MAKERS: dict[str, Callable[..., Operator]] = {
    "denoise": Identity,
    "downsample": lambda factor: Downsample(int(factor)),
    "blur": lambda width: Blur.gaussian(float(width)),
    "motion": lambda length, degrees="0": Blur.motion(float(length), float(degrees)),
    "grey": Grey,
    "project": lambda count: Project(int(count)),
    "clip": lambda low, high: Clip(float(low), float(high)),
    "quantise": lambda bits: Quantise(int(bits)),
}


def parse_operator(text: str, like: Tensor, rng: torch.Generator | None = None) -> Operator:
    """The operator of a name, for measurements of images like ``like``; ``rng`` is for random masks.

    >>> parse_operator("blur:1+downsample:2", torch.zeros(1, 3, 8, 8))
    Compose(Blur(7x7), Downsample(2))
    """
    operators: list[Operator] = []
    seen = like
    for part in text.split("+"):
        name, _, rest = part.strip().partition(":")
        try:
            if name == "mask":
                operators.append(Mask(make_mask(rest, seen, rng)))
            elif name in _MAKERS:
                operators.append(_MAKERS[name](*(rest.split(":") if rest else ())))
            else:
                raise ValueError("unknown name")
            with torch.no_grad():
                seen = operators[-1](seen)
        except (ValueError, TypeError) as error:
            reason = "wrong number of values" if isinstance(error, TypeError) else error
            raise ValueError(f"operator is {part.strip()!r} ({reason}); accepted: {ACCEPTED}") from None
    return operators[0] if len(operators) == 1 else Compose(*operators)
