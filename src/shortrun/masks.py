"""Masks by name: which pixels are visible."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

ACCEPTED = (
    "lower-half, upper-half, left-half, right-half, random:SHARE, blocks:SIDE:COUNT, "
    "box:TOP,LEFT,HEIGHT,WIDTH or file:PATH"
)


def make_mask(name: str, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """A boolean mask of shape ``(count, 1, height, width)``, true where a pixel is visible.

    ``lower-half`` (or upper-, left-, right-half) hides that half; ``random:0.3`` leaves that share of the
    pixels visible; ``blocks:6:3`` hides three squares of side 6 at random places; ``box:8,8,12,12`` hides
    one rectangle; ``file:mask.png`` hides what is black there.

    >>> make_mask("lower-half", 1, 4, 2, torch.Generator())[0, 0].int().tolist()
    [[1, 1], [1, 1], [0, 0], [0, 0]]
    """
    kind, _, rest = name.partition(":")
    mask = torch.ones(count, 1, height, width, dtype=torch.bool)
    try:
        if name == "lower-half":
            mask[..., height // 2 :, :] = False
        elif name == "upper-half":
            mask[..., : height // 2, :] = False
        elif name == "left-half":
            mask[..., : width // 2] = False
        elif name == "right-half":
            mask[..., width // 2 :] = False
        elif kind == "random":
            share = float(rest or 0.3)
            if not 0 <= share <= 1:
                raise ValueError("the visible share lies between 0 and 1")
            mask = torch.rand(mask.shape, generator=generator) < share
        elif kind == "blocks":
            side, number = (int(part) for part in (rest or "6:3").split(":"))
            if not 0 < side <= min(height, width):
                raise ValueError(f"blocks of {side} do not fit")
            tops = torch.randint(height - side + 1, (count, number), generator=generator)
            lefts = torch.randint(width - side + 1, (count, number), generator=generator)
            rows, columns = torch.arange(height), torch.arange(width)
            in_rows = (rows >= tops[..., None]) & (rows < tops[..., None] + side)
            in_columns = (columns >= lefts[..., None]) & (columns < lefts[..., None] + side)
            mask = ~(in_rows[..., :, None] & in_columns[..., None, :]).any(1, keepdim=True)
        elif kind == "box":
            top, left, tall, wide = (int(part) for part in rest.split(","))
            if top < 0 or left < 0 or tall < 1 or wide < 1 or top + tall > height or left + wide > width:
                raise ValueError(f"the box must lie within {height}x{width}")
            mask[..., top : top + tall, left : left + wide] = False
        elif kind == "file":
            import numpy as np
            from PIL import Image

            if not Path(rest).is_file():
                raise ValueError(f"{rest} does not exist")
            image = Image.open(rest).convert("L").resize((width, height), resample=0)
            mask = (torch.from_numpy(np.asarray(image).copy()) > 127).expand(count, 1, height, width)
        else:
            raise ValueError("unknown kind")
    except ValueError as error:
        raise ValueError(f"mask is {name!r} ({error}); accepted: {ACCEPTED}") from None
    return mask
