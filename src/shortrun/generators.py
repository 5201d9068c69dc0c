"""Top-down generators: the paper's multi-layer network, and the hierarchical-features one.

Both map a tuple of latents, top layer first, to images in (-1, 1), and are decoders for
:class:`shortrun.GaussianModel`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.config import HeadChannels, ModelConfig
from shortrun.model import GaussianModel, Latents, RandomSource, gaussian_log_likelihood, standard_normal

LOG_VARIANCE_OFFSET, LOG_VARIANCE_LIMIT = 1e-8, 10.0  # of the authors' script; the text of the paper has neither


class Projection(nn.Module):
    """``p_l``: a linear layer to a few maps, then a transposed convolution to ``channels`` maps.

    With ``activated`` it is that of the authors' script: GELU after each of the two, and no bias in the second.
    """

    def __init__(self, size: int, channels: int, base: tuple[int, int], maps: int = 4, activated: bool = False) -> None:
        super().__init__()
        self.shape = (maps, *base)
        self.linear = nn.Linear(size, math.prod(self.shape))
        self.spread = nn.ConvTranspose2d(maps, channels, 5, padding=2, bias=not activated)
        self.activation = F.gelu if activated else _identity

    def forward(self, z: Tensor) -> Tensor:
        return self.activation(self.spread(self.activation(self.linear(z.flatten(1))).view(-1, *self.shape)))


def _identity(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """``d_l``: two convolutions with GELU and a skip connection; the size of the maps is kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 5, padding=2)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + F.gelu(self.second(F.gelu(self.first(maps))))


class Head(nn.Module):
    """``mu_l`` or ``sigma_l``: an unpadded convolution, then a linear layer to the size of ``z_l``.

    With ``activated``, as in the authors' script, there is a GELU between the two.
    """

    def __init__(self, channels: int, width: int, base: tuple[int, int], size: int, activated: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 5)
        self.linear = nn.Linear(width * (base[0] - 4) * (base[1] - 4), size)
        self.activation = F.gelu if activated else _identity

    def forward(self, maps: Tensor) -> Tensor:
        return self.linear(self.activation(self.conv(maps)).flatten(1))


def as_log_variance(raw: Tensor) -> Tensor:
    """``log sigma_l^2``, positive and bounded, from what the head for the variance says."""
    return (F.softplus(raw) + LOG_VARIANCE_OFFSET).clamp(0.0, LOG_VARIANCE_LIMIT)


class ToImage(nn.Module):
    """``o_0``: transposed convolutions that double the size until it is that of the image, then tanh."""

    def __init__(self, channels: int, colours: int, doublings: int) -> None:
        super().__init__()
        widths = [max(channels // 2**i, 8) for i in range(doublings)] + [colours]
        self.layers = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 4, stride=2, padding=1)
            for a, b in zip([channels, *widths[1:-1]], widths[1:], strict=True)
        )

    def hidden(self, maps: Tensor) -> Tensor:
        """All but the last doubling."""
        for layer in self.layers[:-1]:
            maps = F.gelu(layer(maps))
        return maps

    def forward(self, maps: Tensor) -> Tensor:
        return torch.tanh(self.layers[-1](self.hidden(maps)))


def _doublings(image: Sequence[int], base: int | None) -> tuple[tuple[int, int], int]:
    """Size of the maps inside the network, and how often they are doubled to reach the image."""
    _, height, width = image
    if base is None:
        base = height // 2
    count = round(math.log2(height / base)) if 0 < base < height else 0
    inner = (height >> count, width >> count)
    if count < 1 or base << count != height or inner[1] << count != width:
        raise ValueError(
            f"images of {height}x{width} cannot be reached by doubling maps of height {base}; choose a base "
            f"such as {height // 2} (height and width must divide evenly)"
        )
    return inner, count


class TopDownGenerator(nn.Module):
    r"""The paper's generator (appendix, "Model specification"), any number of layers L.

    .. math:: z_{l} = \mu_{l}(h_l) + \sigma_{l}(h_l) \otimes \epsilon_{l}, \qquad
              h_l = d_l(p_l(z_{l+1})) + h_{l+1}, \qquad x = \tanh(o_0(h_0)) .

    ``forward`` takes *noise coordinates* ``(z_L, eps_{L-1}, ..., eps_1)``, all N(0, I) a priori, as in the
    authors' script. :class:`LatentCoordinates` is the same joint distribution in ``(z_L, ..., z_1)``.

    Args:
        latent_sizes: sizes of the latents, top layer first.
        image: (colours, height, width).
        channels: ``n_f``.
        base: height of the maps inside; by default half of that of the image.
        head_channels: width of the convolution in the heads for mean and variance: a number, ``"latent"`` for the size
            of the latent that the head is for, or by default that of the maps.
        last_block: one more deterministic block before the output, as in the authors' script; the paper has none.
        activated: GELU inside projections and heads, as in the authors' script; the paper names none there.

    ``docs/networks.md`` says which network each preset has.

    >>> generator = TopDownGenerator([4, 8], image=(1, 28, 28), channels=8)
    >>> generator((torch.zeros(2, 4), torch.zeros(2, 8))).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        latent_sizes: Sequence[int],
        image: Sequence[int],
        channels: int = 64,
        base: int | None = None,
        head_channels: HeadChannels = None,
        last_block: bool = False,
        activated: bool = False,
    ) -> None:
        super().__init__()
        if not latent_sizes or min(latent_sizes) < 1:
            raise ValueError(f"latent_sizes is {latent_sizes!r}; expected one positive size per layer")
        maps, doublings = _doublings(image, base)
        if len(latent_sizes) > 1 and min(maps) < 5:
            raise ValueError(f"maps of {maps[0]}x{maps[1]} are too small for the 5x5 heads; choose a larger base")

        def head(size: int) -> Head:
            width = channels if head_channels is None else size if head_channels == "latent" else head_channels
            return Head(channels, width, maps, size, activated)

        self.latent_shapes = tuple((int(size),) for size in latent_sizes)
        self.image, self.maps, self.activated = tuple(image), maps, activated
        self.projections = nn.ModuleList(Projection(size, channels, maps, 4, activated) for size in latent_sizes)
        self.blocks = nn.ModuleList(Block(channels) for _ in latent_sizes)
        self.means = nn.ModuleList(head(size) for size in latent_sizes[1:])
        self.variances = nn.ModuleList(head(size) for size in latent_sizes[1:])
        self.last_block = Block(channels) if last_block else nn.Identity()
        self.to_image = ToImage(channels, image[0], doublings)

    def descend(self, top: Tensor, choose: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Tensor, Latents]:
        """Image and latents ``(z_L, ..., z_1)``, where ``choose(i, mean, log_variance)`` gives the i-th lower latent.

        What it is told is the conditional prior ``p(z_l | z_{l+1}, ..., z_L)`` of that layer, i from 1.
        """
        hidden = self.blocks[0](self.projections[0](top))
        z = [top]
        for i in range(1, len(self.blocks)):
            mean = self.means[i - 1](hidden)
            z.append(choose(i, mean, as_log_variance(self.variances[i - 1](hidden))))
            hidden = self.blocks[i](self.projections[i](z[-1])) + hidden
        return self.to_image(self.last_block(hidden)), tuple(z)

    def _follow(self, noises: Latents) -> tuple[Tensor, Latents]:
        return self.descend(noises[0], lambda i, mean, log_variance: mean + torch.exp(0.5 * log_variance) * noises[i])

    def forward(self, z: Latents) -> Tensor:
        return self._follow(z)[0]

    def to_latents(self, noises: Latents) -> Latents:
        """From ``(z_L, eps_{L-1}, ..., eps_1)`` to ``(z_L, ..., z_1)``."""
        return self._follow(noises)[1]

    def frozen(self) -> FrozenGenerator:
        """The same function for as long as the parameters stay as they are, cheaper to evaluate."""
        return FrozenGenerator(self)


# A transposed convolution with kernel 4, stride 2 and padding 1 puts pixel 2 i + a together from the inputs
# i - 1, i, i + 1 through the elements k = a + 1 - 2 (offset) of its kernel; entry (a, offset + 1, k) is 1 there.
DOUBLING = torch.zeros(2, 3, 4)
DOUBLING[0, 0, 3] = DOUBLING[0, 1, 1] = DOUBLING[1, 1, 2] = DOUBLING[1, 2, 0] = 1


class FrozenGenerator(nn.Module):
    """A :class:`TopDownGenerator` whose parameters stay as they are for a while: the same function, less work.

    Where no nonlinearity stands between the two parts of a projection or of a head, each is one matrix, and the two
    heads of a layer share one; the network of the authors' script has a GELU there, so it keeps its own. The last
    doubling of the maps is a 3x3 convolution that paints the four pixels of each 2x2
    square side by side, as :meth:`arrange` puts those of an image: transposed convolutions to few colours are slow.
    """

    squares_weight: Tensor
    squares_bias: Tensor

    def __init__(self, generator: TopDownGenerator) -> None:
        super().__init__()
        self.generator = generator
        self.refresh()

    def refresh(self) -> None:
        """Fold the present parameters; the tensors stay where they are, so that compiled code stays valid."""
        source: Any = self.generator
        with torch.no_grad():
            if not source.activated:
                for i, projection in enumerate(source.projections):
                    self._keep(f"projection_{i}", *_fold_projection(projection))
                for i, heads in enumerate(zip(source.means, source.variances, strict=True), 1):
                    weights, biases = zip(*(_fold_head(head, source.maps) for head in heads), strict=True)
                    self._keep(f"head_{i}", torch.cat(weights), torch.cat(biases))
            last = source.to_image.layers[-1]
            step = DOUBLING.to(last.weight)
            squares = torch.einsum("iokl,ahk,bwl->oabihw", last.weight, step, step)
            layout = _layout(last.weight)
            self._keep(
                "squares", squares.flatten(0, 2).contiguous(memory_format=layout), last.bias.repeat_interleave(4)
            )

    def _keep(self, name: str, weight: Tensor, bias: Tensor) -> None:
        for part, value in (("weight", weight), ("bias", bias)):
            key = f"{name}_{part}"
            if hasattr(self, key):
                getattr(self, key).copy_(value)
            else:
                self.register_buffer(key, value)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias"))

    def _project(self, i: int, z: Tensor) -> Tensor:
        """Maps in channels-last order, which is the order of the folded matrices."""
        if self.generator.activated:
            return self.generator.projections[i](z)
        height, width = self.generator.maps
        return self._linear(f"projection_{i}", z.flatten(1)).view(len(z), height, width, -1).permute(0, 3, 1, 2)

    def _heads(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads for mean and variance of the i-th lower latent say."""
        if self.generator.activated:
            return self.generator.means[i - 1](hidden), self.generator.variances[i - 1](hidden)
        mean, raw = self._linear(f"head_{i}", hidden.permute(0, 2, 3, 1).flatten(1)).chunk(2, 1)
        return mean, raw

    def arrange(self, x: Tensor) -> Tensor:
        """Pixels (n, colours, 2 h, 2 w) as (n, 4 colours, h, w), a channel for each place in a 2x2 square."""
        return F.pixel_unshuffle(x, 2).contiguous(memory_format=torch.channels_last)

    def forward(self, z: Latents) -> Tensor:
        """The image of noises ``(z_L, eps_{L-1}, ..., eps_1)``, arranged."""
        source = self.generator
        hidden = source.blocks[0](self._project(0, z[0]))
        for i in range(1, len(z)):
            mean, raw = self._heads(i, hidden)
            latent = mean + torch.exp(0.5 * as_log_variance(raw)) * z[i].flatten(1)
            hidden = source.blocks[i](self._project(i, latent)) + hidden
        hidden = source.to_image.hidden(source.last_block(hidden))
        return torch.tanh(F.conv2d(hidden, self.squares_weight, self.squares_bias, padding=1))


def _layout(weight: Tensor) -> torch.memory_format:
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _fold_projection(projection: Projection) -> tuple[Tensor, Tensor]:
    linear, spread = projection.linear, projection.spread
    columns = linear.weight.t().reshape(-1, *projection.shape)
    maps = F.conv_transpose2d(columns, spread.weight, padding=2)
    bias = spread(linear.bias.view(1, *projection.shape))
    return maps.permute(2, 3, 1, 0).flatten(0, 2).contiguous(), bias.permute(0, 2, 3, 1).flatten().contiguous()


def _fold_head(head: Head, maps: tuple[int, int]) -> tuple[Tensor, Tensor]:
    height, width = maps
    rows = head.linear.weight.view(-1, head.conv.out_channels, height - 4, width - 4)
    weight = F.conv_transpose2d(rows, head.conv.weight)
    assert head.conv.bias is not None
    bias = head.linear.bias + rows.sum((2, 3)) @ head.conv.bias
    return weight.permute(0, 2, 3, 1).flatten(1), bias


class LatentCoordinates(nn.Module):
    """A :class:`TopDownGenerator` with Gaussian noise, as a model of the latents ``z_l`` themselves.

    ``p(z) = N(z_L; 0, I) prod_l N(z_l; mu_l, sigma_l^2)`` (paper, Eq. 3); the same joint distribution of x
    and z as ``GaussianModel(generator)`` in noise coordinates.
    """

    sigma: Tensor

    def __init__(self, generator: TopDownGenerator, sigma: float = 0.3) -> None:
        super().__init__()
        self.generator = generator
        self.latent_shapes = generator.latent_shapes
        reference = next(generator.parameters())
        self.register_buffer("sigma", torch.full((), sigma, dtype=reference.dtype, device=reference.device))

    def decoder(self, z: Latents) -> Tensor:
        """Image of the latents ``(z_L, ..., z_1)``."""
        return self._descend(z)[0]

    def sample_prior(self, n: int, generator: RandomSource = None) -> Latents:
        noises = tuple(standard_normal((n, *s), self.sigma, generator) for s in self.latent_shapes)
        with torch.no_grad():
            return self.generator.to_latents(noises)

    def log_prior(self, z: Latents) -> Tensor:
        _, conditionals = self._descend(z)
        total = -0.5 * z[0].square().sum(1)
        for layer, (mean, log_variance) in zip(z[1:], conditionals, strict=True):
            total = total - 0.5 * ((layer - mean).square() / log_variance.exp() + log_variance).sum(1)
        return total - 0.5 * math.log(2 * math.pi) * sum(layer.shape[1] for layer in z)

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        return gaussian_log_likelihood(x, self._descend(z)[0], self.sigma, mask)

    def _descend(self, z: Latents) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Image, and mean and log-variance of each lower layer given those above it."""
        conditionals: list[tuple[Tensor, Tensor]] = []

        def choose(i: int, mean: Tensor, log_variance: Tensor) -> Tensor:
            conditionals.append((mean, log_variance))
            return z[i]

        return self.generator.descend(z[0], choose)[0], conditionals


class HierarchicalFeatures(nn.Module):
    """Independent latents that enter at different depths (paper, Sec. 5.4, after Zhao et al. 2017).

    The top latent passes through all of the network, the bottom one only through its last part, so each
    layer controls what that much of the network can express.

    Args: as for :class:`TopDownGenerator`.

    >>> generator = HierarchicalFeatures([4, 4, 4], image=(3, 32, 32), channels=8, base=8)
    >>> generator(tuple(torch.zeros(2, 4) for _ in range(3))).shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self, latent_sizes: Sequence[int], image: Sequence[int], channels: int = 64, base: int | None = None
    ) -> None:
        super().__init__()
        maps, doublings = _doublings(image, base)
        self.latent_shapes = tuple((int(size),) for size in latent_sizes)
        self.image = tuple(image)
        self.projections = nn.ModuleList(Projection(size, channels, maps) for size in latent_sizes)
        self.mixers = nn.ModuleList(nn.Conv2d(2 * channels, channels, 1) for _ in latent_sizes[1:])
        self.blocks = nn.ModuleList(Block(channels) for _ in latent_sizes)
        self.to_image = ToImage(channels, image[0], doublings)

    def forward(self, z: Latents) -> Tensor:
        hidden = self.blocks[0](self.projections[0](z[0]))
        for i, mixer in enumerate(self.mixers, 1):
            entering = F.gelu(self.projections[i](z[i]))
            hidden = self.blocks[i](mixer(torch.cat([hidden, entering], 1)))
        return self.to_image(hidden)


# --- from a configuration ---------------------------------------------------------------------------


class ModelError(ValueError):
    """The model that the configuration asks for cannot be built; the message says why."""


def build_model(config: ModelConfig, image: tuple[int, int, int], sigma: float) -> nn.Module:
    """The model of a configuration, for images of shape (colours, height, width)."""
    decoder: Any
    if config.kind == "top-down":
        decoder = TopDownGenerator(
            config.latent_sizes, image, config.channels, config.base, config.head_channels, config.last_block,
            config.activated,
        )  # fmt: skip
        if config.coordinates == "latent":
            return LatentCoordinates(decoder, sigma)
    elif config.kind == "hierarchical":
        decoder = HierarchicalFeatures(config.latent_sizes, image, config.channels, config.base)
    else:
        decoder = _import_decoder(config.kind)
    if config.coordinates == "latent":
        raise ModelError(f"latent coordinates need the top-down generator, not {config.kind}")
    return GaussianModel(decoder, decoder.latent_shapes, sigma)


def _import_decoder(path: str) -> nn.Module:
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ModelError(f"model kind is {path!r}; accepted: top-down, hierarchical, or package.module:Class")
    try:
        decoder = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot import {path}: {error}") from None
    if not isinstance(decoder, nn.Module) or not hasattr(decoder, "latent_shapes"):
        raise ModelError(f"{path} must be an nn.Module with the attribute latent_shapes, such as [(16,), (32,)]")
    return decoder
