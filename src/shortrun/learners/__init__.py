"""One file per learning method, each readable beside its paper, with its own settings."""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

from shortrun.learners.base import Batch, Info, Learner, Moment, State

Method = Literal["short-run", "abp", "glo", "vae", "vae-iaf", "ladder-vae", "glow"]
# A method is imported when it is asked for: flows need libraries that not everybody has.
_HOMES: dict[str, tuple[str, str]] = {
    "short-run": ("short_run", "ShortRun"),
    "abp": ("abp", "ABP"),
    "glo": ("glo", "GLO"),
    "vae": ("vae", "VAE"),
    "vae-iaf": ("vae_iaf", "VAEWithIAF"),
    "ladder-vae": ("ladder_vae", "LadderVAE"),
    "glow": ("glow", "Glow"),
}


def learner_class(method: str) -> type[Learner]:
    """The learner of a method by its name.

    >>> learner_class("vae").__name__
    'VAE'
    """
    if method not in _HOMES:
        raise ValueError(f"method is {method!r}; accepted: {', '.join(get_args(Method))}")
    module, name = _HOMES[method]
    return getattr(importlib.import_module(f"shortrun.learners.{module}"), name)


def __getattr__(name: str) -> Any:
    for method, (_, learner) in _HOMES.items():
        if learner == name:
            return learner_class(method)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Batch", "Info", "Learner", "Method", "Moment", "State", "learner_class"]
