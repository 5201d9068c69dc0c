"""A generator whose parameters stay as they are for a while: the same function, less arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.latents import Latents
from shortrun.nets.generators import Head, Projection, TopDownGenerator, as_log_variance

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

    def restored(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        return F.pixel_shuffle(x, 2)

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
