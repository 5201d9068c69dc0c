"""What the page shows: models with images, and images that users bring."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun.data import DataError, DataSettings
from shortrun.data.image_files import Square, eight_bits
from shortrun.own_data import data_settings, images_for
from shortrun.trained import Trained, load

IMAGES = 12
"""Images to choose from, for each model."""
SAMPLE_SEED = 1
MOST_UPLOAD_BYTES, MOST_UPLOAD_PIXELS = 5_000_000, 20_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")


@dataclass(frozen=True)
class Source:
    """A model and the images to choose from."""

    name: str
    """What :func:`shortrun.load` takes."""
    trained: Trained
    images: Tensor
    """Shape ``(n, colours, height, width)``, in [-1, 1]."""
    data: DataSettings | None
    """Where the images come from; None for samples of the model itself."""

    @property
    def label(self) -> str:
        """Its name without its folder."""
        return Path(self.name).name

    @property
    def told(self) -> str:
        """What the images are, in words."""
        if self.data is None:
            return "its own samples (no data set is at hand)"
        held_out = self.data.data == self.trained.info.get("data")  # others may be among those it was trained on
        return f"{'held-out ' * held_out}images of {self.data.data}"


def open_source(name: str, data_root: str | None = None) -> Source:
    """Load a model with held-out images, or with samples of its own where its data are not at hand."""
    trained = load(name).eval()
    if len(trained.shape) != 3 or trained.shape[0] not in (1, 3):
        raise ValueError(f"{name} makes examples of shape {trained.shape}; the studio shows images, grey or coloured")
    for data in (None, "embedded"):  # digits are always at hand
        try:
            settings = data_settings(trained, data, data_root)
            images = images_for(trained, settings, "test").batch(slice(0, IMAGES))
            return Source(name, trained, images, settings)
        except (DataError, ImportError):
            pass
    return Source(name, trained, trained.sample(IMAGES, seed=SAMPLE_SEED), None)


def read_upload(content: bytes, shape: tuple[int, ...]) -> Tensor:
    """An image that somebody sent, as one of the model's: cut to its central square, resized, of 8 bits.

    Raises:
        ValueError: it is no image, or too large, or moves.
    """
    from PIL import Image, UnidentifiedImageError

    if len(content) > MOST_UPLOAD_BYTES:
        raise ValueError(f"The file has {len(content):,} bytes; images of up to {MOST_UPLOAD_BYTES:,} are accepted.")
    try:
        image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MOST_UPLOAD_PIXELS:
            raise ValueError(
                f"The image has {image.width} x {image.height} pixels; up to {MOST_UPLOAD_PIXELS:,} are accepted."
            )
        if getattr(image, "n_frames", 1) > 1:
            raise ValueError(f"The image has {image.n_frames} frames; images that do not move are accepted.")
        square = Square(shape[-1]).of(eight_bits(image, shape[0]))
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise ValueError("The file is not an image; PNG, JPEG, WebP, BMP, TIFF and GIF are accepted.") from None
    except (OSError, SyntaxError, DataError) as error:
        raise ValueError(f"The image cannot be read: {error}.") from None
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    return pixels.view(*square.size[::-1], shape[0]).permute(2, 0, 1)[None].float() / 127.5 - 1


def hidden_places(text: Any, shape: tuple[int, ...]) -> Tensor:
    """Which pixels a painted mask leaves visible, shape ``(1, 1, height, width)``.

    Args:
        text: a character for each pixel, row by row: 1 where it is hidden.
    """
    height, width = shape[-2:]
    if not isinstance(text, str) or len(text) != height * width or set(text) - {"0", "1"}:
        raise ValueError(f"The mask is not one of {height} x {width} zeros and ones.")
    if "1" not in text:
        raise ValueError("Nothing is hidden: paint over a part of the image, or choose a mask.")
    if "0" not in text:
        raise ValueError("Everything is hidden: leave at least one pixel visible.")
    return torch.tensor([letter == "0" for letter in text]).view(1, 1, height, width)
