"""Generators from their settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from shortrun.core.model import DecoderModel, GaussianModel
from shortrun.nets.generators import HeadChannels, HierarchicalFeatures, LatentCoordinates, TopDownGenerator
from shortrun.settings import Count, check


class ModelError(ValueError):
    """The model that the settings ask for cannot be built; the message says why."""


@contextmanager
def needs_extra(method: str, extra: str) -> Iterator[None]:
    """Around the import of a library that is installed with an extra of this package."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"{method} needs {error.name}: pip install 'shortrun[{extra}]'") from None


@dataclass(frozen=True)
class GeneratorNetwork:
    """The generator."""

    kind: str = "top-down"
    """top-down (the paper's), hierarchical (independent latents at different depths), or on the command line the import
    path of your own nn.Module, such as mypackage.models:Decoder; it is built without arguments and has the
    attribute latent_shapes."""
    latent_sizes: tuple[Count, ...] = (32, 64, 128)
    """Sizes of the latents, top layer first."""
    channels: Count = 16
    """n_f, the number of maps inside."""
    base: Count | None = None
    """Height of the maps inside; by default half of that of the image."""
    head_channels: HeadChannels = None
    """Width of the heads for mean and variance: a number, latent for the size of the latent that the head is for, or by
    default that of the maps."""
    coordinates: Literal["noise", "latent"] = "noise"
    """Whether the dynamics runs on the noises (the authors' script) or on the latents themselves."""
    last_block: bool = True
    """One more block before the output, as in the authors' script; the paper's table has none."""
    activated: bool = False
    """GELU inside projections and heads, as in the authors' script; the paper's text names none there."""

    def __post_init__(self) -> None:
        check(self)
        if not self.latent_sizes:
            raise ModelError("latent_sizes is empty; expected one or more")


@dataclass(frozen=True)
class EncoderNetwork(GeneratorNetwork):
    """The generator and its encoder."""

    encoder_channels: Count = 16
    """Maps of the encoder before its first halving; they double with each."""


Shape = tuple[int, ...]


def build_generator(network: GeneratorNetwork, shape: Shape) -> Any:
    """The decoder for images of shape (colours, height, width)."""
    if len(shape) != 3:
        raise ModelError(
            f"the generators of this package make images (colours, height, width); the data have shape {shape}. Bring "
            "a decoder of your own: sr.fit(sr.GaussianModel(decoder, latent_shapes), data)"
        )
    if network.kind == "top-down":
        return TopDownGenerator(
            network.latent_sizes, shape, network.channels, network.base, network.head_channels, network.last_block,
            network.activated,
        )  # fmt: skip
    if network.kind == "hierarchical":
        return HierarchicalFeatures(network.latent_sizes, shape, network.channels, network.base)
    if ":" in network.kind:
        raise ModelError(
            f"this model has a decoder of its own, {network.kind}, which is not part of this package and is never "
            f"imported because a file says so: pass it (--decoder {network.kind}, or decoder= in Python)"
        )
    raise ModelError(f"model kind is {network.kind!r}; accepted: top-down, hierarchical, or package.module:Class")


def build_model(network: GeneratorNetwork, shape: Shape, sigma: float) -> DecoderModel:
    """The model of the settings, for images of shape (colours, height, width)."""
    decoder = build_generator(network, shape)
    if network.coordinates == "latent":
        if network.kind != "top-down":
            raise ModelError(f"latent coordinates need the top-down generator, not {network.kind}")
        return LatentCoordinates(decoder, sigma)
    return GaussianModel(decoder, decoder.latent_shapes, sigma)


def decoder_of(model: Any, method: str, layers: int | None = None) -> nn.Module:
    """The decoder that a method of comparison learns with an inference of its own; checks that it can."""
    if type(model) is not GaussianModel:
        raise ModelError(f"{method} needs a GaussianModel in noise coordinates; {type(model).__name__} was given")
    if not isinstance(model.decoder, nn.Module):
        raise ModelError(f"{method} needs a decoder that is an nn.Module; {type(model.decoder).__name__} was given")
    if layers is not None and len(model.latent_shapes) != layers:
        raise ModelError(
            f"{method} has one layer of latents, but the shapes {model.latent_shapes} were given; choose one size, or "
            "the method ladder-vae"
        )
    return model.decoder
