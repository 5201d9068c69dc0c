"""Generators of the user's own, named on the command line; never by a file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from torch import nn

from shortrun.nets.build import ModelError


def import_decoder(path: str) -> nn.Module:
    """The module ``package.module:Class``, built without arguments; it has the attribute ``latent_shapes``."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"the decoder is {path!r}; expected package.module:Class")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that it shadows nothing that is installed
    try:
        decoder = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot import {path}: {error}") from None
    if not isinstance(decoder, nn.Module) or not hasattr(decoder, "latent_shapes"):
        raise ModelError(f"{path} must be an nn.Module with the attribute latent_shapes, such as [(16,), (32,)]")
    return decoder
