"""Images from folders, zip files and tables: decoded, cut square, resized; many are decoded once, into the cache."""

from __future__ import annotations

import hashlib
import io
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
from shortrun.settings import Count

Crop = Count | Literal["whole"] | None
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
# Sets of so many images or more are decoded into the cache folder.
CACHED_FROM = 20_000

OpenImage = Callable[[], Any]
"""Returns a PIL image."""


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


def _open_files(path: Path) -> list[tuple[str, Callable[[], bytes]]]:
    """(name, function that returns the bytes), sorted by name."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS)
        return [(str(p.relative_to(path)), p.read_bytes) for p in files]
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise DataError(f"{path} is neither a folder nor a zip file") from None
    names = sorted(n for n in archive.namelist() if n.lower().endswith(IMAGE_ENDINGS) and not n.startswith("__MACOSX"))
    return [(name, lambda name=name: archive.read(name)) for name in names]  # type: ignore[misc]


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
) -> Images:
    """The images of a folder or a zip file.

    The last ``held_out(count)`` files by name are the test split, unless ``members`` names those of ``split``; a single
    image is both.
    """
    files = _open_files(path)
    if not files:
        raise DataError(f"{name} holds no images (endings {', '.join(IMAGE_ENDINGS)})")
    if members is not None:
        files = [(label, read) for label, read in files if Path(label).name in members]
        if not files:
            raise DataError(f"none of the images of {name} is in the {split} part of list_eval_partition.txt")
    elif len(files) > 1:
        count = held_out(len(files))
        files = files[:-count] if split == "train" else files[-count:]
    files = files[:limit]
    stat = path.stat()
    key = [
        str(path.resolve()), stat.st_size, stat.st_mtime_ns, square.size, square.crop, square.share,
        [label for label, _ in files],
    ]  # fmt: skip
    return stack(name, [(label, _decode(read)) for label, read in files], split, square, key, cached_from)


def _decode(read: Callable[[], bytes]) -> OpenImage:
    def open_image() -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(read()))

    return open_image


def stack(
    name: str,
    images: Sequence[tuple[str, OpenImage]],
    split: Split,
    square: Square,
    key: Any,
    cached_from: int = CACHED_FROM,
) -> Images:
    """Decode, cut and resize all images, each with its label; ``key`` identifies them in the cache."""
    if len(images) < cached_from:
        return _decode_all(name, images, split, square, torch.empty)
    folder = cache_folder()
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    pixels, facts = folder / f"{stem}.npy", folder / f"{stem}.json"
    if not facts.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{stem}.{os.getpid()}.npy"

        def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.lib.format.open_memmap(temporary, "w+", np.uint8, shape))

        decoded = _decode_all(name, images, split, square, allocate)
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
    allocate: Callable[..., Tensor],
) -> Images:
    from rich.console import Console
    from rich.progress import track

    array: Tensor | None = None
    skipped: list[str] = []
    used = 0
    progress = track(
        images,
        f"decoding {len(images)} images",
        console=Console(stderr=True),
        transient=True,
        disable=len(images) < 5000,
    )
    for label, open_image in progress:
        try:
            image = open_image()
            image.load()
        except Exception as error:
            skipped.append(f"{label} (unreadable: {error})")
            continue
        side = square.side(image)
        if side > min(image.size):
            skipped.append(f"{label} ({image.size[0]}x{image.size[1]}, smaller than the crop of {side})")
            continue
        if array is None:
            grey = image.mode in ("1", "L", "LA", "I", "I;16")
            array = allocate(len(images), 1 if grey else 3, square.size, square.size, dtype=torch.uint8)
        image = square.of(image.convert("L" if array.shape[1] == 1 else "RGB"))
        pixels = torch.from_numpy(np.asarray(image).copy())
        array[used] = pixels[None] if array.shape[1] == 1 else pixels.permute(2, 0, 1)
        used += 1
    if array is None:
        raise DataError(f"none of the {len(images)} images of {name} could be used: {'; '.join(skipped[:3])}")
    return Images(array[:used], name, split, tuple(skipped))
