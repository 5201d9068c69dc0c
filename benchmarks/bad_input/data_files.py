"""Files of images that are broken, hostile or unusual: folders, zips, npz, mat and idx."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bad_input.case import CANARY, Case

SIDE = 16
DATA = ["data", "folder:images", "--size", str(SIDE), "--out", "out"]
Make = Callable[[Path], None]


def gradient(levels: int = 256, side: int = SIDE) -> np.ndarray[Any, Any]:
    """From dark to light, by column."""
    return np.tile(np.linspace(0, levels - 1, side), (side, 1))


def png(mode: str = "L", side: int = SIDE, name: str = "PNG", **options: Any) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    image = Image.fromarray(gradient(side=side).astype(np.uint8)).convert(mode)
    image.save(out, name, **options)
    return out.getvalue()


def folder_of(files: dict[str, bytes], good: int = 4) -> Make:
    """``images/`` with these files among good ones; files named a.. are read first."""

    def make(folder: Path) -> None:
        for i in range(good):
            files.setdefault(f"m{i}.png", png())
        for name, content in files.items():
            path = folder / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return make


def loaded(split: str = "train", data: str = "folder:images") -> Any:
    from shortrun.data import load

    return load(data, split, size=SIDE)


def same_as_grey(folder: Path) -> str | None:
    """All images are the gradient that the good ones are, to two levels."""
    os.chdir(folder)
    for split in ("train", "test"):
        images = loaded(split)
        off = np.abs(images.array.numpy() - np.round(gradient())).max((1, 2, 3))
        if images.skipped or float(off.max()) > 2:
            return f"{split}: off by {off.tolist()} levels, skipped {images.skipped}"
    return None


def one_shape(folder: Path) -> str | None:
    os.chdir(folder)
    shapes = {split: loaded(split).shape for split in ("train", "test")}
    return None if shapes["train"] == shapes["test"] == (3, SIDE, SIDE) else f"shapes {shapes}"


def skips(*names: str) -> Callable[[Path], str | None]:
    """The named files are skipped and said to be, the others are read."""

    def check(folder: Path) -> str | None:
        said = (folder / ".stdout").read_text()
        return None if all(name in said and "skipped" in said for name in names) else f"said {said!r}"

    return check


def sixteen_bit() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray((gradient() * 257).astype(np.uint16)).save(out, "PNG")
    return out.getvalue()


def float_tiff(scale: float = 1 / 255, worst: float = 0.0) -> bytes:
    from PIL import Image

    values = (gradient() * scale).astype(np.float32)
    values[0, 0] = worst
    out = io.BytesIO()
    Image.fromarray(values).save(out, "TIFF")
    return out.getvalue()


def hidden_colour() -> bytes:
    """White where it is transparent, which must not be seen: on black it is the gradient."""
    from PIL import Image

    out = io.BytesIO()
    alpha = np.round(gradient()).astype(np.uint8)
    pixels = np.stack([np.full_like(alpha, 255)] * 3 + [alpha], -1)
    Image.fromarray(pixels, "RGBA").save(out, "PNG")
    return out.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A valid PNG of 3.6 thousand million pixels, in some megabytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    row = b"\0" * (side // 8 + 1)
    body = b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def image_cases() -> Iterator[Case]:
    def case(name: str, make: Make, works: Any = None, names: tuple[str, ...] = ("images",), **more: Any) -> Case:
        return Case("images", name, DATA, make, names, works, **more)

    for name, content in {
        "empty": b"",
        "text": b"not an image",
        "cut off": png()[:48],
        "cut in the middle": png(side=64)[:-40],
        "a wrong checksum": png()[:45] + b"\xff\xff" + png()[47:],
        "a header alone": b"\x89PNG\r\n\x1a\n",
        "zeros": bytes(5000),
        "a corrupt jpeg": png(name="JPEG")[:-200] + bytes(20),
        "a jpeg header": b"\xff\xd8\xff",
        "a gif of no size": b"GIF89a" + bytes(20),
        "a bmp of no size": b"BM" + bytes(60),
        "a tiff that refers to itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
        "a pickle": b"\x80\x04K\x01.",
    }.items():
        yield case(f"{name} among good ones", folder_of({"a.png": content}), skips("a.png"))
        yield case(f"{name}, alone", folder_of({"a.png": content}, good=0))
    yield case("16-bit PNG, first", folder_of({"a.png": sixteen_bit()}), same_as_grey)
    yield case("16-bit PNG, last", folder_of({"z.png": sixteen_bit()}), same_as_grey)
    yield case("float TIFF in [0, 1]", folder_of({"a.tif": float_tiff()}), same_as_grey)
    yield case("float TIFF with NaN", folder_of({"a.tif": float_tiff(worst=np.nan)}), skips("a.tif"))
    yield case("float TIFF up to 255", folder_of({"a.tif": float_tiff(1.0)}), skips("a.tif"))
    yield case("float TIFF, negative", folder_of({"a.tif": float_tiff(worst=-1)}), skips("a.tif"))
    yield case("transparent white, first", folder_of({"a.png": hidden_colour()}, good=0), _hidden_is_black)
    yield case("a palette", folder_of({"a.png": png("P")}), one_or_grey)
    yield case("black and white", folder_of({"a.png": png("1")}), works=lambda folder: None)
    yield case("grey with alpha", folder_of({"a.png": png("LA")}), same_as_grey)
    yield case("CMYK", folder_of({f"{i}.jpg": png("CMYK", name="JPEG") for i in range(4)}, good=0), one_shape)
    yield case("grey first, colour last", folder_of({"a.png": png(), "z.png": png("RGB")}), one_shape)
    yield case("colour first, grey last", folder_of({"a.png": png("RGB"), "z.png": png()}), one_shape)
    yield case("an animation", folder_of({"a.gif": png("P", name="GIF")}), one_or_grey)
    yield case("one pixel", folder_of({"a.png": png(side=1)}, good=0), works=lambda folder: None)
    yield Case(
        "images", "smaller than the crop", [*DATA, "--crop", "10"], folder_of({"a.png": png(side=4)}, good=0), ("crop",)
    )
    yield case("an image bomb", folder_of({"a.png": bomb()}), skips("a.png"), seconds=20)
    yield case("no images", lambda folder: (folder / "images").mkdir())
    yield case("one image", folder_of({"a.png": png()}, good=0), works=lambda folder: None)
    yield case("a file instead of a folder", lambda folder: (folder / "images").write_bytes(png()))
    yield case("names with line ends", folder_of({"a\nb.png": b""}), works=lambda folder: None)

    def special(kind: str) -> Make:
        def make(folder: Path) -> None:
            folder_of({})(folder)
            path = folder / "images" / "a.png"
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            elif kind == "loop":
                path.symlink_to(path)
            elif kind == "dangling":
                path.symlink_to(folder / "nowhere")
            elif kind == "large":
                with path.open("wb") as file:
                    file.truncate(6 << 30)
            else:
                path.symlink_to(kind)

        return make

    for kind in ("fifo", "loop", "dangling", "/dev/zero", "/dev/full", "large"):
        yield case(f"{kind} named a.png", special(kind), skips("a.png"), seconds=15)
    yield case("a folder named a.png", special("folder"), works=lambda folder: None)


def one_or_grey(folder: Path) -> str | None:
    os.chdir(folder)
    shapes = {split: loaded(split).shape for split in ("train", "test")}
    return None if len(set(shapes.values())) == 1 else f"shapes {shapes}"


def _hidden_is_black(folder: Path) -> str | None:
    os.chdir(folder)
    off = np.abs(loaded().array.numpy() - np.round(gradient())).max()
    return None if float(off) <= 2 else f"off by {float(off)} levels"


# --- archives of images --------------------------------------------------------------------------------


def zip_cases() -> Iterator[Case]:
    def case(name: str, content: Callable[[], bytes], works: Any = None, **more: Any) -> Case:
        words = ["data", "zip:images.zip", "--size", str(SIDE), "--out", "out"]
        return Case(
            "zip", name, words, lambda folder: _write(folder / "images.zip", content()), ("images",), works, **more
        )

    def archive(files: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", kind) as into:
            for name, content in files.items():
                into.writestr(name, content)
        return out.getvalue()

    good = {f"{i}.png": png() for i in range(4)}
    whole = archive(good)
    yield case("empty file", lambda: b"")
    yield case("text", lambda: b"no zip")
    yield case("no members", lambda: archive({}))
    yield case("no images", lambda: archive({"a.txt": b"x"}))
    yield case("cut off", lambda: whole[:-30])
    yield case("cut in half", lambda: whole[: len(whole) // 2])
    yield case("a corrupt stream", lambda: whole[:50] + b"\xff" * 12 + whole[62:], skips("0.png"))
    yield case(
        "a wrong checksum",
        lambda: whole.replace(struct.pack("<I", zlib.crc32(good["0.png"])), b"abcd"),
        lambda folder: None,
    )
    yield case(
        "paths that lead out",
        lambda: archive({"../../a.png": png(), **good}),
        lambda folder: None if not list(folder.parent.glob("a.png")) else "written outside",
    )
    yield case("a member of 600 MB", _large_member, skips("a.png"), seconds=20)
    yield case("a zip in a zip", lambda: archive({"a.png": whole}))
    yield case(
        "an unknown compression",
        lambda: whole.replace(b"PK\x03\x04\x14\0\0\0\x08\0", b"PK\x03\x04\x14\0\0\0\x63\0").replace(
            b"PK\x01\x02\x14\x03\x14\0\0\0\x08\0", b"PK\x01\x02\x14\x03\x14\0\0\0\x63\0"
        ),
    )
    yield case(
        "encrypted",
        lambda: whole.replace(b"PK\x03\x04\x14\0\0\0", b"PK\x03\x04\x14\0\x01\0").replace(
            b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\x01\0"
        ),
    )


def _large_member() -> bytes:
    """Zeros that take little in the archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as into:
        with into.open("a.png", "w", force_zip64=True) as member:
            block = bytes(1 << 24)
            for _ in range(36):
                member.write(block)
        for i in range(4):
            into.writestr(f"m{i}.png", png())
    return out.getvalue()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# --- arrays --------------------------------------------------------------------------------------------


class Malicious:
    """Writes the canary when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, (CANARY, "w")


def npy_header(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def npz_cases() -> Iterator[Case]:
    def case(name: str, make: Callable[[Path], Any], works: Any = None, **more: Any) -> Case:
        words = ["data", "npz:images.npz", "--out", "out"]
        return Case("npz", name, words, lambda folder: make(folder / "images.npz"), ("images.npz",), works, **more)

    def arrays(**values: Any) -> Callable[[Path], None]:
        return lambda path: np.savez(path, **values)

    def member(content: bytes) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            with zipfile.ZipFile(path, "w") as into:
                into.writestr("images.npy", content)

        return make

    good = np.tile(np.round(gradient()).astype(np.uint8), (20, 1, 1))
    for kind in ("float32", "float64", "int32", "int8", "uint16", "bool", "complex64", "U3", "datetime64[s]"):
        yield case(f"{kind} numbers", arrays(images=np.zeros((20, 8, 8)).astype(kind)))
    for shape in (
        (),
        (20,),
        (20, 8),
        (20, 8, 8, 3, 1),
        (0, 8, 8),
        (20, 0, 8),
        (20, 8, 0),
        (20, 8, 8, 0),
        (1, 8, 8, 2),
        (20, 8, 8, 5),
    ):
        yield case(f"shape {shape}", arrays(images=np.zeros(shape, np.uint8)))
    yield case("one image", arrays(images=good[:1]))
    yield case("splits of different shapes", arrays(train=good, test=good[:, :8]))
    yield case("a train split alone", arrays(train=good), _splits_are_apart)
    yield case("several arrays of other names", arrays(a=good, b=good))
    yield case("no arrays", arrays())
    yield case("objects with code", lambda path: np.savez(path, images=np.array([Malicious()], object)))
    yield case("a header of 9 TB", member(npy_header((9, 1_000_000, 1_000_000)) + bytes(100)))
    yield case("a header of negative size", member(npy_header((-1, 8, 8)) + bytes(100)))
    yield case("a header that is no header", member(b"\x93NUMPY\x01\x00\x10\x00__import__('os')"))
    yield case("a header with code", member(npy_header((1,), f"'+open('{CANARY}','w')+'") + bytes(10)))
    yield case("6 GB, as its header says", member(npy_header((6 << 16, 128, 128)) + bytes(100)))
    yield case("fewer bytes than its header says", member(npy_header((20, 8, 8)) + bytes(100)))
    yield case("a member that is no array", member(b"text"))
    yield case("text", lambda path: path.write_text("no npz"))
    yield case("empty", lambda path: path.write_bytes(b""))
    yield case("a folder", lambda path: path.mkdir())
    yield case("a single npy", lambda path: np.save(path.open("wb"), good))
    yield case("a pickle", lambda path: path.write_bytes(b"\x80\x04cbuiltins\nopen\n(X\x06\0\0\0canaryX\x01\0\0\0wtR."))

    def cut(path: Path) -> None:
        np.savez_compressed(path, images=good)
        path.write_bytes(path.read_bytes()[:-50])

    def corrupt(path: Path) -> None:
        np.savez_compressed(path, images=good)
        content = path.read_bytes()
        path.write_bytes(content[:80] + b"\xff" * 10 + content[90:])

    yield case("cut off", cut)
    yield case("a corrupt stream", corrupt)


def _splits_are_apart(folder: Path) -> str | None:
    os.chdir(folder)
    counts = [len(loaded_npz(split)) for split in ("train", "test")]
    return None if counts == [18, 2] else f"splits of {counts} images"


def loaded_npz(split: str) -> Any:
    from shortrun.data import load

    return load("npz:images.npz", split)


def mat_cases() -> Iterator[Case]:
    def case(name: str, make: Callable[[Path], Any], **more: Any) -> Case:
        def prepare(folder: Path) -> None:
            (folder / "svhn").mkdir()
            for split in ("train", "test"):
                make(folder / "svhn" / f"{split}_32x32.mat")

        return Case("mat", name, ["data", "svhn", "--data-root", ".", "--out", "out"], prepare, ("32x32.mat",), **more)

    def variable(value: Any, name: str = "X") -> Callable[[Path], None]:
        def make(path: Path) -> None:
            from scipy.io import savemat

            savemat(path, {name: value})

        return make

    for kind in ("float64", "int32", "int8", "uint16", "complex64"):
        yield case(f"{kind} numbers", variable(np.zeros((32, 32, 3, 5)).astype(kind)))
    yield case("NaN", variable(np.full((32, 32, 3, 5), np.nan)))
    for shape in ((32, 32, 3), (32, 32), (5, 3, 32, 32), (32, 32, 1, 5), (0, 0, 3, 5), (32, 32, 3, 0)):
        yield case(f"shape {shape}", variable(np.zeros(shape, np.uint8)))
    yield case("another name", variable(np.zeros((32, 32, 3, 5), np.uint8), "Y"))
    yield case("a string", variable("text"))
    yield case("cells", variable(np.array([1, "a"], object)))
    yield case("text", lambda path: path.write_text("no mat file"))
    yield case("empty", lambda path: path.write_bytes(b""))
    yield case("zeros", lambda path: path.write_bytes(bytes(4096)))
    yield case("a folder", lambda path: path.mkdir())

    def cut(path: Path) -> None:
        variable(np.zeros((32, 32, 3, 50), np.uint8))(path)
        path.write_bytes(path.read_bytes()[:-500])

    def large(path: Path) -> None:
        """The size of its element says 4 GB."""
        variable(np.zeros((32, 32, 3, 5), np.uint8))(path)
        content = bytearray(path.read_bytes())
        content[132:136] = b"\xff\xff\xff\xff"
        path.write_bytes(bytes(content))

    yield case("cut off", cut)
    yield case("an element that says it has 4 GB", large, works=lambda folder: None)


def idx_cases() -> Iterator[Case]:
    def case(name: str, content: bytes, packed: bool = True, **more: Any) -> Case:
        def prepare(folder: Path) -> None:
            for stem in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
                if packed:
                    _write(folder / "mnist" / f"{stem}.gz", content)
                else:
                    _write(folder / "mnist" / stem, content)

        return Case(
            "idx", name, ["data", "mnist", "--data-root", ".", "--out", "out"], prepare, ("idx3-ubyte",), **more
        )

    def idx(count: int, height: int = 28, width: int = 28, magic: int = 2051, body: int | None = None) -> bytes:
        return struct.pack(">iiii", magic, count, height, width) + bytes(
            count * height * width if body is None else body
        )

    for packed in (True, False):
        pack: Callable[[bytes], bytes] = gzip.compress if packed else bytes
        kind = "gz" if packed else "plain"
        yield case(f"cut off, {kind}", pack(idx(20))[:-9], packed)
        yield case(f"another magic number, {kind}", pack(idx(20, magic=2049)), packed)
        yield case(f"fewer images than it says, {kind}", pack(idx(20, body=100)), packed)
        yield case(f"more images than it says, {kind}", pack(idx(20, body=99999)), packed)
        yield case(f"negative sizes, {kind}", pack(idx(-1, -1, 784, body=784)), packed)
        yield case(f"no images, {kind}", pack(idx(0)), packed)
        yield case(f"images without pixels, {kind}", pack(idx(20, 0, 28)), packed)
        yield case(f"sizes that overflow, {kind}", pack(idx(2**31 - 1, 2**31 - 1, 2**31 - 1, body=10)), packed)
        yield case(f"empty, {kind}", b"", packed)
        yield case(f"text, {kind}", b"text", packed)
    yield case("6 GB, as it says, packed", gzip.compress(idx(6 << 20, 32, 32, body=1 << 24)))
    yield case("a corrupt stream", gzip.compress(idx(20))[:20] + b"\xff" * 20)


def partition_cases() -> Iterator[Case]:
    def case(name: str, text: bytes) -> Case:
        def prepare(folder: Path) -> None:
            for i in range(4):
                _write(folder / "celeba" / "img_align_celeba" / f"{i}.png", png())
            _write(folder / "celeba" / "list_eval_partition.txt", text)

        return Case(
            "celeba",
            name,
            ["data", "celeba", "--data-root", ".", "--size", "16", "--out", "out"],
            prepare,
            ("list_eval_partition.txt",),
        )

    yield case("no columns", b"0.png\n1.png\n")
    yield case("three columns", b"0.png 0 1\n")
    yield case("names of other images", b"a.png 0\nb.png 2\n")
    yield case("no test part", b"0.png 0\n1.png 0\n")
    yield case("empty", b"")
    yield case("bytes that are no text", b"\xff\xfe\x00 0\n")


def data_cases() -> Iterator[Case]:
    yield from image_cases()
    yield from zip_cases()
    yield from npz_cases()
    yield from mat_cases()
    yield from idx_cases()
    yield from partition_cases()
