"""Loaders read the real formats: small files in each, written here; real ones where SHORTRUN_DATA has them."""

import gzip
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from shortrun import data


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)


def write_idx(path, pixels):
    content = struct.pack(">4i", 2051, *pixels.shape) + pixels.tobytes()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_idx(tmp_path, pixels, ending):
    write_idx(tmp_path / "mnist" / f"train-images-idx3-ubyte{ending}", pixels)
    images = data.load("mnist", root=tmp_path)
    assert images.shape == (1, 28, 28)
    assert np.array_equal(images.array[:, 0].numpy(), pixels)
    batch = images.batch(torch.tensor([3]))
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch[0, 0], torch.from_numpy(pixels[3]) / 127.5 - 1)


def test_svhn_mat(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    (tmp_path / "svhn").mkdir()
    savemat(tmp_path / "svhn" / "test_32x32.mat", {"X": pixels, "y": np.ones((5, 1))})
    images = data.load("svhn", "test", root=tmp_path)
    assert images.array.shape == (5, 3, 32, 32)
    assert np.array_equal(images.array[2, 1].numpy(), pixels[:, :, 1, 2])


def write_images(folder, count, size=(89, 109), mode="RGB"):
    folder.mkdir(parents=True)
    for i in range(count):
        colour = (i, 2 * i, 3 * i) if mode == "RGB" else i
        Image.new(mode, size, colour).save(folder / f"{i:06d}.png")


def test_celeba_folder_and_zip_are_the_same(tmp_path):
    write_images(tmp_path / "a" / "celeba" / "img_align_celeba", 6)
    first = data.load("celeba", root=tmp_path / "a", size=32)
    (tmp_path / "b" / "celeba").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "b" / "celeba" / "img_align_celeba.zip", "w") as archive:
        for path in sorted((tmp_path / "a" / "celeba" / "img_align_celeba").iterdir()):
            archive.write(path, f"img_align_celeba/{path.name}")
    second = data.load("celeba", root=tmp_path / "b", size=32)
    assert first.checksum == second.checksum
    assert first.array.shape == (3, 3, 32, 32)
    test = data.load("celeba", "test", root=tmp_path / "b", size=32)
    assert test.array[-1, :, 16, 16].tolist() == [5, 10, 15]  # the last files by name
    assert first.checksum != test.checksum


def test_celeba_follows_the_published_partition(tmp_path):
    write_images(tmp_path / "celeba" / "img_align_celeba", 6)
    rows = [f"{i:06d}.png {part}" for i, part in enumerate([0, 2, 0, 1, 2, 0])]
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("\n".join(rows) + "\n")
    red = {split: data.load("celeba", split, root=tmp_path).array[:, 0, 16, 16].tolist() for split in ("train", "test")}
    assert red == {"train": [0, 2, 5], "test": [1, 4]}


def test_celeba_as_the_paper_and_the_script_resize_it(tmp_path):
    """The shorter side becomes 32, bilinear; then the centre is cut out: columns 0..31, rows 4..35 of 32 x 39."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for i in range(4):
        Image.fromarray(generator.integers(0, 256, (218, 178, 3), dtype=np.uint8)).save(folder / f"{i:06d}.png")
    images = data.load("celeba", root=tmp_path, size=32, crop="whole")
    with Image.open(folder / "000000.png") as whole:
        resized = np.asarray(whole.resize((32, 39), Image.Resampling.BILINEAR))
    assert np.array_equal(images.array[0].permute(1, 2, 0).numpy(), resized[4:36])
    assert not torch.equal(images.array, data.load("celeba", root=tmp_path, size=32).array)  # cut to the face
    assert not torch.equal(images.array, data.load("celeba", root=tmp_path, size=32, crop=140).array)


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_the_first_images_alone(tmp_path, kind):
    if kind == "folder":
        write_images(tmp_path / "set", 10)
        name = f"folder:{tmp_path / 'set'}"
    else:
        np.savez(tmp_path / "set.npz", train=np.arange(10, dtype=np.uint8).repeat(16).reshape(10, 4, 4))
        name = f"npz:{tmp_path / 'set.npz'}"
    everything, some = data.load(name), data.load(name, limit=3)
    assert len(some) == 3
    assert torch.equal(some.array, everything.array[:3])


def test_many_images_are_decoded_once_into_a_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHED_FROM", 4)
    monkeypatch.setenv("SHORTRUN_CACHE", str(tmp_path / "cache"))
    write_images(tmp_path / "f", 12, (40, 40))
    (tmp_path / "f" / "000003.png").write_bytes(b"not an image")
    first = data.load(f"folder:{tmp_path / 'f'}", size=16)
    stored = next((tmp_path / "cache").glob("*.npy"))
    before = stored.read_bytes()
    monkeypatch.setattr(data, "_decode_all", None)  # a second decoding would fail
    second = data.load(f"folder:{tmp_path / 'f'}", size=16)
    assert torch.equal(first.array, second.array)
    assert first.skipped == second.skipped
    assert len(second) == 10
    second.array.fill_(7)
    assert stored.read_bytes() == before
    with pytest.raises(TypeError):  # another size is another set
        data.load(f"folder:{tmp_path / 'f'}", size=8)


def test_a_data_set_of_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, count in (("train", 5), ("test", 2)):
        write_images(tmp_path / "set" / split, count, (40, 40))
    name = f"hf:{tmp_path / 'set'}"
    images = data.load(name, size=16)
    assert images.array.shape == (5, 3, 16, 16)
    assert sorted(images.array[:, 2, 8, 8].tolist()) == [0, 3, 6, 9, 12]
    assert len(data.load(name, "test", size=16)) == 2
    with pytest.raises(data.DataError, match="cannot load"):
        data.load(f"hf:{tmp_path / 'nothing'}")


def test_centre_crop_and_resize(tmp_path):
    canvas = np.zeros((40, 60, 3), np.uint8)
    canvas[10:30, 20:40] = 255  # a white square in the centre
    (tmp_path / "f").mkdir()
    Image.fromarray(canvas).save(tmp_path / "f" / "a.png")
    inside = data.load(f"folder:{tmp_path / 'f'}", size=16, crop=20)
    assert (inside.array == 255).all()
    whole = data.load(f"folder:{tmp_path / 'f'}", size=16)
    assert 0.2 < (whole.array > 127).float().mean() < 0.3


def test_grey_images_stay_grey(tmp_path):
    write_images(tmp_path / "g", 3, (20, 20), "L")
    assert data.load(f"folder:{tmp_path / 'g'}", size=16).shape == (1, 16, 16)


def test_corrupt_and_small_images_are_named_and_counted(tmp_path):
    write_images(tmp_path / "f", 12, (40, 40))
    (tmp_path / "f" / "000003.png").write_bytes(b"not an image")
    Image.new("RGB", (8, 8)).save(tmp_path / "f" / "000004.png")
    images = data.load(f"folder:{tmp_path / 'f'}", size=16, crop=32)
    assert len(images) == 9  # 11 for training, of which 2 are unusable
    text = images.describe()
    assert "skipped 2 files" in text
    assert "000003.png (unreadable" in text
    assert "000004.png (8x8, smaller than the crop of 32)" in text


def test_npz(tmp_path, pixels):
    np.savez(tmp_path / "a.npz", images=pixels)
    train = data.load(f"npz:{tmp_path / 'a.npz'}")
    test = data.load(f"npz:{tmp_path / 'a.npz'}", "test")
    assert (len(train), len(test)) == (18, 2)
    np.savez(tmp_path / "b.npz", images=pixels.astype(np.float32))
    with pytest.raises(data.DataError, match="expected uint8"):
        data.load(f"npz:{tmp_path / 'b.npz'}")


def test_embedded_digits_are_split_without_overlap():
    train, test = data.load("embedded"), data.load("embedded", "test")
    assert (len(train), len(test)) == (4500, 500)
    seen = {row.numpy().tobytes() for row in train.array}
    assert not any(row.numpy().tobytes() in seen for row in test.array)
    assert train.checksum == data.load("embedded").checksum


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet", "accepted: embedded, scenes:COUNT, mnist"),
        ("folder:", "write folder:PATH"),
        ("folder:/nowhere", "/nowhere does not exist"),
        ("npz:/nowhere.npz", "does not exist"),
        ("mnist", "SHORTRUN_DATA"),
        ("celeba", "published at https://mmlab"),
    ],
)
def test_what_is_missing_is_named(name, message, monkeypatch):
    monkeypatch.delenv("SHORTRUN_DATA", raising=False)
    with pytest.raises(data.DataError, match=message):
        data.load(name)


def test_damaged_files_are_named(tmp_path, pixels):
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte", pixels)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(data.DataError, match="cut off"):
        data.load("mnist", root=tmp_path)
    with pytest.raises(data.DataError, match=r"t10k-images-idx3-ubyte\.gz does not exist"):
        data.load("mnist", "test", root=tmp_path)
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(b"nonsense")
    with pytest.raises(data.DataError, match="not a file of cropped digits"):
        data.load("svhn", root=tmp_path)
    (tmp_path / "e").mkdir()
    with pytest.raises(data.DataError, match="holds no images"):
        data.load(f"folder:{tmp_path / 'e'}")


@pytest.mark.skipif("SHORTRUN_DATA" not in os.environ, reason="SHORTRUN_DATA is not set")
@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("svhn", (3, 32, 32)), ("celeba", (3, 32, 32))])
def test_real_files(name, shape):
    images = data.load(name, "test")
    assert images.shape == shape
    assert len(images) >= 1000
    assert images.array.float().std() > 20
