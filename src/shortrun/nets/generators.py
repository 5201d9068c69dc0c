"""Top-down generators: the paper's multi-layer network, and the hierarchical-features one.

Both map a tuple of latents, top layer first, to images in (-1, 1), and are decoders for
:class:`shortrun.GaussianModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.latents import Latents, Rng
from shortrun.core.model import GaussianModel
from shortrun.settings import Count

HeadChannels = Count | Literal["latent"] | None
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

    @torch.no_grad()
    def start_at(self, mean: Tensor) -> None:
        """Begin learning at images of this mean, shape (colours, height, width): the last bias has its colour.

        Otherwise the first thing to learn is a shift of all pixels, which Adam overshoots: where most of them are
        black, as in digits, into the saturation of tanh, from which there is no way back.
        """
        bias = self.layers[-1].get_parameter("bias")
        bias.copy_(mean.flatten(1).mean(1).clamp(-0.95, 0.95).atanh())

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

    def start_at(self, mean: Tensor) -> None:
        """Begin learning at the mean colour of the images: see :meth:`ToImage.start_at`."""
        self.to_image.start_at(mean)

    def to_latents(self, noises: Latents) -> Latents:
        """From ``(z_L, eps_{L-1}, ..., eps_1)`` to ``(z_L, ..., z_1)``."""
        return self._follow(noises)[1]

    def frozen(self) -> nn.Module:
        """The same function for as long as the parameters stay as they are, cheaper to evaluate."""
        from shortrun.nets.frozen import FrozenGenerator

        return FrozenGenerator(self)


class LatentCoordinates(GaussianModel):
    """A :class:`TopDownGenerator` with Gaussian noise, as a model of the latents ``z_l`` themselves.

    ``p(z) = N(z_L; 0, I) prod_l N(z_l; mu_l, sigma_l^2)`` (paper, Eq. 3); the same joint distribution of x
    and z as ``GaussianModel(generator)`` in noise coordinates.
    """

    standard_normal_prior = False

    def __init__(self, generator: TopDownGenerator, sigma: float = 0.3) -> None:
        super().__init__(self._image, generator.latent_shapes, sigma)
        self.generator = generator
        self.to(next(generator.parameters()))
        self.sigma.fill_(sigma)  # in the precision of the generator

    def _image(self, z: Latents) -> Tensor:
        """Image of the latents ``(z_L, ..., z_1)``."""
        return self._descend(z)[0]

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        with torch.no_grad():
            return self.generator.to_latents(super().sample_prior(n, rng))

    def log_prior(self, z: Latents) -> Tensor:
        _, conditionals = self._descend(z)
        total = -0.5 * z[0].square().sum(1)
        for layer, (mean, log_variance) in zip(z[1:], conditionals, strict=True):
            total = total - 0.5 * ((layer - mean).square() / log_variance.exp() + log_variance).sum(1)
        return total - 0.5 * math.log(2 * math.pi) * sum(layer.shape[1] for layer in z)

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

    def start_at(self, mean: Tensor) -> None:
        """As :meth:`TopDownGenerator.start_at`."""
        self.to_image.start_at(mean)
