"""Masks by name: which values are visible."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

ACCEPTED = (
    "lower-half, upper-half, left-half, right-half, random:SHARE, blocks:SIDE:COUNT, "
    "box:TOP,LEFT,HEIGHT,WIDTH or file:PATH"
)
MOST_BLOCKS = 1000
ACCEPTED_WITHOUT_ROWS = "left-half, right-half or random:SHARE"


def make_mask(kind: str, like: Tensor, rng: torch.Generator | None = None) -> Tensor:
    """A boolean mask for the batch ``like``, true where a value is visible.

    ``lower-half`` (or upper-, left-, right-half) hides that half; ``random:0.3`` keeps that share of the pixels
    visible; ``blocks:6:3`` hides three squares of side 6 at random places; ``box:8,8,12,12`` hides one rectangle;
    ``file:mask.png`` hides what is black there. For vectors and signals there are ``left-half`` (the first half),
    ``right-half`` and ``random``.

    Args:
        like: images ``(n, colours, height, width)``, signals ``(n, channels, length)`` or vectors ``(n, length)``;
            the mask has the shape ``(n, 1, height, width)``, ``(n, 1, length)`` or ``(n, length)``.
        rng: for the random kinds; by default seeded with 0.

    >>> make_mask("lower-half", torch.zeros(1, 3, 4, 2))[0, 0].int().tolist()
    [[1, 1], [1, 1], [0, 0], [0, 0]]
    """
    if like.ndim not in (2, 3, 4):
        raise ValueError(
            f"a mask was asked for data of shape {tuple(like.shape)}; expected (n, colours, height, width), "
            "(n, channels, length) or (n, length)"
        )
    rng = torch.Generator().manual_seed(0) if rng is None else rng
    shape = like.shape if like.ndim == 2 else (len(like), 1, *like.shape[2:])
    try:
        if kind.partition(":")[0] in ("left-half", "right-half", "random"):
            mask = _of_any_shape(kind, torch.Size(shape), rng)
        elif like.ndim == 4:
            mask = _of_images(kind, torch.Size(shape), rng)
        else:
            raise ValueError(f"data of shape {tuple(like.shape)} are not images")
    except ValueError as error:
        accepted = ACCEPTED if like.ndim == 4 else ACCEPTED_WITHOUT_ROWS
        raise ValueError(f"mask is {kind!r} ({error}); accepted: {accepted}") from None
    return mask.to(like.device)


def _of_any_shape(kind: str, shape: torch.Size, rng: torch.Generator) -> Tensor:
    name, _, rest = kind.partition(":")
    if name == "random":
        share = float(rest or 0.3)
        if not 0 < share <= 1:
            raise ValueError("the visible share is above 0 and at most 1")
        return torch.rand(shape, generator=rng, device=rng.device) < share
    if rest:
        raise ValueError("a half has no number")
    mask = torch.ones(shape, dtype=torch.bool)
    middle = shape[-1] // 2
    mask[..., slice(middle) if name == "left-half" else slice(middle, None)] = False
    return mask


def _of_images(kind: str, shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Kinds that tell rows from columns."""
    count, _, height, width = shape
    name, _, rest = kind.partition(":")
    mask = torch.ones(shape, dtype=torch.bool)
    if kind == "lower-half":
        mask[..., height // 2 :, :] = False
    elif kind == "upper-half":
        mask[..., : height // 2, :] = False
    elif name == "blocks":
        side, number = (int(part) for part in (rest or "6:3").split(":"))
        if not 0 < side <= min(height, width):
            raise ValueError(f"blocks of {side} do not fit")
        if not 1 <= number <= MOST_BLOCKS:
            raise ValueError(f"{number} blocks; from 1 to {MOST_BLOCKS} are possible")
        tops = torch.randint(height - side + 1, (count, number), generator=rng, device=rng.device)
        lefts = torch.randint(width - side + 1, (count, number), generator=rng, device=rng.device)
        in_rows = _within(tops, side, height)
        in_columns = _within(lefts, side, width)
        mask = ~(in_rows[..., :, None] & in_columns[..., None, :]).any(1, keepdim=True)
    elif name == "box":
        top, left, tall, wide = (int(part) for part in rest.split(","))
        if top < 0 or left < 0 or tall < 1 or wide < 1 or top + tall > height or left + wide > width:
            raise ValueError(f"the box must lie within {height}x{width}")
        mask[..., top : top + tall, left : left + wide] = False
    elif name == "file":
        mask = _from_file(Path(rest), height, width).expand(shape)
    else:
        raise ValueError("unknown kind")
    return mask


def _within(firsts: Tensor, side: int, length: int) -> Tensor:
    """For each block, which of ``length`` rows it covers, shape ``(n, blocks, length)``."""
    places = torch.arange(length, device=firsts.device)
    return (places >= firsts[..., None]) & (places < firsts[..., None] + side)


def _from_file(path: Path, height: int, width: int) -> Tensor:
    import numpy as np
    from PIL import Image

    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        image = Image.open(path).convert("L").resize((width, height), resample=0)
    except OSError as error:
        raise ValueError(f"{path} is not a readable image: {error}") from None
    return torch.from_numpy(np.asarray(image).copy()) > 127
