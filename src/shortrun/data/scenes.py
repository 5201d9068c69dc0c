"""A data set with known causes: digits of a font over coloured backgrounds, drawn when asked for.

Each scene has a digit, a style (the font), a position and a background colour, all independent, so it can be measured
which layer of a model controls which of them (:mod:`shortrun.studies.hierarchy`).
"""

from __future__ import annotations

import colorsys
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

STYLES = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono-Oblique.ttf")
SIZE = 32
GLYPH = 20
REACH = 5  # how far a digit may be from the centre, in pixels
HUES = 24


class Factors(NamedTuple):
    """The causes of ``n`` scenes."""

    digit: Tensor
    """0 to 9, shape ``(n,)``."""
    style: Tensor
    """Position in :data:`STYLES`, shape ``(n,)``."""
    position: Tensor
    """Right and down from the centre in pixels, whole numbers up to :data:`REACH`, shape ``(n, 2)``."""
    background: Tensor
    """RGB in [0, 1], shape ``(n, 3)``."""


@functools.lru_cache
def _glyphs() -> Tensor:
    """Masks of all digits in all styles in [0, 1], shape ``(10, styles, GLYPH, GLYPH)``."""
    import matplotlib
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    masks = torch.zeros(10, len(STYLES), GLYPH, GLYPH)
    for s, name in enumerate(STYLES):
        font = ImageFont.truetype(str(folder / name), 22)
        for digit in range(10):
            image = Image.new("L", (GLYPH, GLYPH))
            ImageDraw.Draw(image).text((GLYPH / 2, GLYPH / 2), str(digit), 255, font, anchor="mm")
            masks[digit, s] = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
    return masks


@functools.lru_cache
def _palette() -> Tensor:
    """Background colours: all hues, saturated and not too bright, so that white digits stand out."""
    return torch.tensor([colorsys.hsv_to_rgb(i / HUES, 0.75, 0.65) for i in range(HUES)])


def draw_factors(count: int, rng: torch.Generator) -> Factors:
    """Independent and uniform."""

    def whole(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, (count, *shape), generator=rng)

    position = whole(2 * REACH + 1, 2) - REACH
    return Factors(whole(10), whole(len(STYLES)), position, _palette()[whole(HUES)])


def paint(factors: Factors) -> Tensor:
    """White digits over their backgrounds: uint8, shape ``(n, 3, 32, 32)``."""
    count = len(factors.digit)
    masks = torch.zeros(count, SIZE, SIZE)
    glyphs = _glyphs()[factors.digit, factors.style]
    corner = (SIZE - GLYPH) // 2 + factors.position
    for i, (right, down) in enumerate(corner.tolist()):
        masks[i, down : down + GLYPH, right : right + GLYPH] = glyphs[i]
    cover = masks[:, None]
    images = cover + (1 - cover) * factors.background[:, :, None, None]
    return (images * 255).round().to(torch.uint8)


def scenes(count: int, seed: int) -> tuple[Tensor, Factors]:
    factors = draw_factors(count, torch.Generator().manual_seed(seed))
    return paint(factors), factors
