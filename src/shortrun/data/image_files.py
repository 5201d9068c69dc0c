"""Images from folders, zip files and tables: decoded, cut square, resized; many are decoded once, into the cache."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shortrun.data.examples import DataError, Images, Split
from shortrun.files import cache_folder, write_json
from shortrun.limits import MOST_FILE_BYTES, MOST_PIXELS, too_large
from shortrun.settings import Count

Crop = Count | Literal["whole"] | None
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
# Sets of so many images or more are decoded into the cache folder.
CACHED_FROM = 20_000

OpenImage = Callable[[], Any]
"""Returns a PIL image, whose pixels may not have been read yet."""
GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")
"""Modes of PIL without colours."""
LOOKED_AT = 100  # images of a table that decide whether it has colours


@dataclass(frozen=True)
class Square:
    """How a square of ``size`` pixels is made of an image."""

    size: int
    crop: Crop = None
    """Side of the square cut from the centre before resizing; ``"whole"``: the shorter side is resized first."""
    share: float = 1.0
    """Without ``crop``: the share of the shorter side that the square takes."""

    def side(self, image: Any) -> int:
        """Side of the square to cut out of ``image``."""
        return self.crop if isinstance(self.crop, int) else round(min(image.size) * self.share)

    def of(self, image: Any) -> Any:
        if self.crop == "whole":
            return _shorter_side(image, self.size)
        side = self.side(image)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return image.crop((left, top, left + side, top + side)).resize((self.size, self.size), resample=3)


def _shorter_side(image: Any, size: int) -> Any:
    """Resize (bilinear) so that the shorter side is ``size``, then cut out the centre, rounding as torchvision does."""
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), resample=2).crop((left, top, left + size, top + size))


def _image_files(path: Path, allow_large: bool) -> list[tuple[str, OpenImage]]:
    """(name, function that opens it), sorted by name; the function says why a file cannot be used."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS and not p.is_dir())
        return [(str(p.relative_to(path)), functools.partial(_open_file, p, allow_large)) for p in files]
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path} is neither a folder nor a zip file that can be read: {error}") from None
    members = [
        member for member in archive.infolist()
        if member.filename.lower().endswith(IMAGE_ENDINGS) and not member.filename.startswith("__MACOSX")
    ]  # fmt: skip
    members.sort(key=lambda member: member.filename)
    return [(m.filename, functools.partial(_open_member, archive, m, allow_large)) for m in members]


def _open_file(path: Path, allow_large: bool) -> Any:
    if not path.is_file():  # a pipe or a device may never end
        raise DataError("not a regular file")
    return _open(path, path.stat().st_size, allow_large)


def _open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, allow_large: bool) -> Any:
    # What it says is what is read of it: a member that holds more than it says is cut off there.
    return _open(lambda: archive.open(member), member.file_size, allow_large)


def _open(file: Any, size: int, allow_large: bool) -> Any:
    from PIL import Image

    if (reason := too_large("it has {} bytes", size, MOST_FILE_BYTES, allow_large)) is not None:
        raise DataError(reason)
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # our own limit follows
    try:
        image = Image.open(file() if callable(file) else file)
    finally:
        Image.MAX_IMAGE_PIXELS = usual
    if (reason := too_large("it has {} pixels", image.width * image.height, MOST_PIXELS, allow_large)) is not None:
        raise DataError(reason)
    return image


def from_files(
    name: str,
    path: Path,
    split: Split,
    square: Square,
    held_out: Callable[[int], int],
    *,
    members: set[str] | None = None,
    limit: int | None = None,
    cached_from: int = CACHED_FROM,
    allow_large: bool = False,
) -> Images:
    """The images of a folder or a zip file.

    The last ``held_out(count)`` files by name are the test split, unless ``members`` names those of ``split``; a single
    image is both. If any file of either split has colours, all images have.
    """
    files = _image_files(path, allow_large)
    if not files:
        raise DataError(f"{name} holds no images (endings {', '.join(IMAGE_ENDINGS)})")
    stat = path.stat()
    place = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    colours = _colours(files, place, cached_from)
    if members is not None:
        files = [(label, opened) for label, opened in files if Path(label).name in members]
        if not files:
            raise DataError(f"none of the images of {name} is in the {split} part of list_eval_partition.txt")
    elif len(files) > 1:
        count = held_out(len(files))
        files = files[:-count] if split == "train" else files[-count:]
    files = files[:limit]
    key = [*place, square.size, square.crop, square.share, [label for label, _ in files]]
    return stack(name, files, split, square, key, colours, cached_from)


def _colours(files: Sequence[tuple[str, OpenImage]], key: Any, cached_from: int) -> int:
    """3 if any of the files has colours, else 1. For sets that are cached, so is this: it opens each file."""
    if len(files) < cached_from:
        return colours_of([opened for _, opened in files])
    facts = cache_folder() / f"{_stem([key, len(files), 'colours'])}.json"
    if not facts.is_file():
        write_json(facts, {"colours": colours_of([opened for _, opened in files])})
    return int(json.loads(facts.read_text())["colours"])


def colours_of(images: Sequence[OpenImage]) -> int:
    """3 if any of them that can be opened has colours, else 1."""
    for opened in images:
        try:
            with opened() as image:
                if image.mode not in GREY and not _grey_palette(image):
                    return 3
        except Exception:
            continue
    return 1


def _grey_palette(image: Any) -> bool:
    palette = image.getpalette("RGB") if image.mode == "P" else None
    return palette is not None and palette[0::3] == palette[1::3] == palette[2::3]


def _stem(key: Any) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


def stack(
    name: str,
    images: Sequence[tuple[str, OpenImage]],
    split: Split,
    square: Square,
    key: Any,
    colours: int,
    cached_from: int = CACHED_FROM,
) -> Images:
    """Decode, cut and resize all images, each with its label; ``key`` identifies them in the cache."""
    if len(images) < cached_from:
        return _decode_all(name, images, split, square, colours, torch.empty)
    folder = cache_folder()
    stem = _stem([key, colours])
    pixels, facts = folder / f"{stem}.npy", folder / f"{stem}.json"
    if not facts.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{stem}.{os.getpid()}.npy"

        def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.lib.format.open_memmap(temporary, "w+", np.uint8, shape))

        decoded = _decode_all(name, images, split, square, colours, allocate)
        temporary.replace(pixels)
        write_json(facts, {"count": len(decoded), "skipped": decoded.skipped})
    known = json.loads(facts.read_text())
    # Copy on write: the file stays as it is whatever is done to the tensor.
    array = torch.from_numpy(np.load(pixels, mmap_mode="c"))[: known["count"]]
    return Images(array, name, split, tuple(known["skipped"]))


def _decode_all(
    name: str,
    images: Sequence[tuple[str, OpenImage]],
    split: Split,
    square: Square,
    colours: int,
    allocate: Callable[..., Tensor],
) -> Images:
    from rich.console import Console
    from rich.progress import track

    array = allocate(len(images), colours, square.size, square.size, dtype=torch.uint8)
    skipped: list[str] = []
    used = 0
    progress = track(
        images,
        f"decoding {len(images)} images",
        console=Console(stderr=True),
        transient=True,
        disable=len(images) < 5000,
    )
    for label, opened in progress:
        try:
            with opened() as image:
                side = square.side(image)
                if side > min(image.size):
                    raise DataError(f"{image.size[0]}x{image.size[1]}, smaller than the crop of {side}")
                cut = square.of(eight_bits(image, colours))
        except Exception as error:  # PIL raises many kinds
            reason = str(error) if isinstance(error, DataError) else f"unreadable: {error}"
            skipped.append(f"{label!r} ({reason})" if not label.isprintable() else f"{label} ({reason})")
            continue
        pixels = torch.from_numpy(np.asarray(cut).copy())
        array[used] = pixels[None] if colours == 1 else pixels.permute(2, 0, 1)
        used += 1
    if not used:
        raise DataError(f"none of the {len(images)} images of {name} could be used: {'; '.join(skipped[:3])}")
    return Images(array[:used], name, split, tuple(skipped))


def eight_bits(image: Any, colours: int) -> Any:
    """An image of PIL as grey (1) or colours (3) of 8 bits: 16-bit and float levels scaled, transparent parts black."""
    from PIL import Image

    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise DataError(f"levels from {levels.min()} to {levels.max()}; expected 16 bits, 0 to 65535")
        image = Image.fromarray(np.round(levels / 257).astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # nor with NaN
            raise DataError(f"float levels from {values.min():g} to {values.max():g}; expected 0 to 1")
        image = Image.fromarray(np.round(values * 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return image.convert("L" if colours == 1 else "RGB")
