"""Examples to learn from and to test on: :class:`Examples` and what becomes one by :func:`as_examples`.

Values are held as people hold them and come out as a model takes them: by default as float32, with the levels 0 to 255
of uint8 as [-1, 1].
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shortrun.core.model import from_bytes

Split = Literal["train", "test"]
Prepare = Callable[[Tensor], Tensor]
EXPECTED = "expected a tensor or numpy array (batch first), a torch Dataset, a DataLoader, or a set that load() gives"
# For the mean, and for the checksum of data that are read item by item.
MEAN_OF, CHECKED_ITEMS = 5000, 256


class DataError(ValueError):
    """The data cannot be found or read; the message says what was expected."""


def as_floats(batch: Tensor) -> Tensor:
    """What a model takes, in float32: the levels of uint8 as [-1, 1], all other numbers as they are.

    >>> as_floats(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return from_bytes(batch).float()


class Examples(ABC):
    """Numbered examples of one shape."""

    name: str
    split: str

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""

    @abstractmethod
    def batch(self, indices: Tensor | slice) -> Tensor:
        """Examples as the model takes them, shape ``(n, *shape)``."""

    @property
    @abstractmethod
    def checksum(self) -> str:
        """First 12 digits of a sha256 of the values: equal for two people who use the same data."""

    def some(self, count: int) -> Tensor:
        """Indices of ``count`` examples drawn at random, always the same ones (all, if there are fewer)."""
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:count]

    @functools.cached_property
    def mean(self) -> Tensor:
        """Mean of the first 5,000 examples: the guess that any model must beat."""
        return self.batch(slice(0, MEAN_OF)).mean(0)

    def describe(self) -> str:
        shape = "x".join(map(str, self.shape)) or "1"
        return f"{self.name} ({self.split}): {len(self)} examples of {shape}, checksum {self.checksum}"


@dataclass(frozen=True)
class Images(Examples):
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
        return as_floats(self.array[indices])

    def part(self, count: int) -> Tensor:
        """Pixels of :meth:`some` images."""
        return self.array[self.some(count)]

    @functools.cached_property
    def checksum(self) -> str:
        return _digest(self.array.shape, self.array.split(4096))

    def describe(self) -> str:
        colours, height, width = self.shape
        text = f"{self.name} ({self.split}): {len(self)} images {height}x{width}x{colours}"
        text += f", checksum {self.checksum}"
        if self.skipped:
            shown = "; ".join(self.skipped[:5])
            more = f"; and {len(self.skipped) - 5} more" if len(self.skipped) > 5 else ""
            text += f"\n  skipped {len(self.skipped)} files: {shown}{more}"
        return text


class _Own(Examples):
    """Data of one's own, with the function that makes them what the model takes."""

    def __init__(self, name: str, split: str, prepare: Prepare | None, first: Tensor) -> None:
        """``first``: one example or more, unprepared, to learn the shape from."""
        self.name, self.split = name, split
        self._prepare = as_floats if prepare is None else prepare
        self._shape = tuple(self.prepared(first).shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def prepared(self, values: Tensor) -> Tensor:
        batch: Any = self._prepare(values)
        if not isinstance(batch, Tensor) or len(batch) != len(values):
            found = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise DataError(f"{self.name}: prepare made {found} of shape {tuple(values.shape)}; expected as many rows")
        return batch


class Tensors(_Own):
    """A tensor or an array in memory, batch first."""

    def __init__(self, array: Tensor, name: str = "data", split: str = "train", prepare: Prepare | None = None) -> None:
        if not array.numel():
            raise DataError(f"{name} is empty: it has the shape {tuple(array.shape)}")
        for start, part in zip(range(0, len(array), 4096), array.split(4096), strict=True):
            _check_finite(part, name, "row", range(start, start + 4096))
        self.array = array
        super().__init__(name, split, prepare, array[:1])

    def __len__(self) -> int:
        return len(self.array)

    def batch(self, indices: Tensor | slice) -> Tensor:
        return self.prepared(self.array[indices])

    @functools.cached_property
    def checksum(self) -> str:
        return _digest(self.array.shape, self.array.split(4096))


class Items(_Own):
    """A map-style dataset, read item by item when a batch is asked for.

    An item is a tensor or an array, or a tuple, list or dict whose first value is one.
    """

    def __init__(self, dataset: Any, name: str = "data", split: str = "train", prepare: Prepare | None = None) -> None:
        if not len(dataset):
            raise DataError(f"{name} is empty: the dataset has no items")
        self.dataset, self.name = dataset, name
        super().__init__(name, split, prepare, self.raw([0]))

    def __len__(self) -> int:
        return len(self.dataset)

    def raw(self, indices: list[int]) -> Tensor:
        """Items as they are, one or more."""
        items = []
        for i in indices:
            try:
                item = self.dataset[i]
            except Exception as error:  # whatever the dataset may raise
                raise DataError(f"{self.name}: item {i} cannot be read: {type(error).__name__}: {error}") from error
            items.append(_first_value(item, f"{self.name}: item {i}"))
            if (items[-1].shape, items[-1].dtype) != (items[0].shape, items[0].dtype):
                raise DataError(
                    f"{self.name}: item {i} is {items[-1].dtype} of shape {tuple(items[-1].shape)}, item {indices[0]} "
                    f"{items[0].dtype} of shape {tuple(items[0].shape)}; expected one shape and one type for all"
                )
        values = torch.stack(items)
        _check_finite(values, self.name, "item", indices)
        return values

    def batch(self, indices: Tensor | slice) -> Tensor:
        chosen = torch.arange(len(self))[indices].tolist()
        return self.prepared(self.raw(chosen)) if chosen else torch.empty(0, *self.shape)

    @functools.cached_property
    def checksum(self) -> str:
        """Of the number of items and of 256 of them: to read all could take hours."""
        values = self.raw(self.some(CHECKED_ITEMS).tolist())
        return _digest((len(self), *values.shape[1:]), [values])


class Stream(_Own):
    """The batches of a DataLoader, for learning: they come in its order and cannot be chosen by index."""

    def __init__(
        self, loader: DataLoader[Any], name: str = "data", split: str = "train", prepare: Prepare | None = None
    ) -> None:
        self.loader, self.name = loader, name
        self._batches: Iterator[Any] = iter(loader)
        self._first: Tensor | None = self._read()
        super().__init__(name, split, prepare, self._first)
        # One batch tells where the examples lie, well enough for a guess to compare with.
        self._mean = self.prepared(self._first).mean(0)

    def __len__(self) -> int:
        try:
            return len(self.loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{self.name}: the dataset of the DataLoader has no length") from None

    def next_batch(self) -> Tensor:
        """The next batch of the DataLoader, which starts over (and shuffles again, if it does) at its end."""
        values = self._read() if self._first is None else self._first
        self._first = None
        return self.prepared(values)

    def _read(self) -> Tensor:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            try:
                batch = next(self._batches)
            except StopIteration:
                raise DataError(f"{self.name}: the DataLoader gives no batches") from None
        values = _first_value(batch, f"{self.name}: the batch")
        if not values.ndim or not values.numel():
            raise DataError(f"{self.name}: the batch has the shape {tuple(values.shape)}; expected (n, ...)")
        _check_finite(values, self.name, "row", range(len(values)))
        return values

    def batch(self, indices: Tensor | slice) -> Tensor:
        raise self._no_choice()

    def some(self, count: int) -> Tensor:
        raise self._no_choice()

    def _no_choice(self) -> DataError:
        return DataError(
            f"{self.name} is a DataLoader, whose examples cannot be chosen by index; pass the dataset itself "
            "(loader.dataset) where that is needed"
        )

    @property
    def mean(self) -> Tensor:
        """Mean of the first batch."""
        return self._mean

    @property
    def checksum(self) -> str:
        """Empty: what a DataLoader gives cannot be identified."""
        return ""

    def describe(self) -> str:
        shape = "x".join(map(str, self.shape)) or "1"
        try:
            count = f"{len(self)} examples"
        except TypeError:
            count = "examples"
        return f"{self.name} ({self.split}): {count} of {shape} from a DataLoader"


def as_examples(data: Any, *, name: str = "data", split: str = "train", prepare: Prepare | None = None) -> Examples:
    """Data of one's own as :class:`Examples`.

    Args:
        data: a tensor or numpy array, batch first, of any shape; a map-style torch ``Dataset`` (or anything with
            ``__len__`` and ``__getitem__``), whose items are tensors or arrays, or tuples, lists or dicts whose first
            value is one; a ``DataLoader`` over such items, which becomes a :class:`Stream`; or Examples, which are
            returned as they are.
        name, split: for messages.
        prepare: from a batch of raw values to what the model takes; by default :func:`as_floats`.

    Raises:
        DataError: the data cannot be used; the message says why.

    >>> as_examples(torch.zeros(3, 2)).batch(slice(0, 1))
    tensor([[0., 0.]])
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, DataLoader):
        return Stream(data, name, split, prepare)
    if isinstance(data, TensorDataset):
        data = data.tensors[0]
    if isinstance(data, Tensor | np.ndarray):
        array = _as_tensor(data, name)
        if not array.ndim:
            raise DataError(f"{name} is a single number; {EXPECTED}")
        return Tensors(array, name, split, prepare)
    if isinstance(data, str):
        raise DataError(f"{name} is the string {data!r}; shortrun.data.load({data!r}) loads a set by its name")
    if isinstance(data, IterableDataset):
        raise DataError(f"{name} is an IterableDataset, which has no indices: pass a DataLoader over it")
    if isinstance(data, list | tuple):
        raise DataError(f"{name} is a {type(data).__name__}: make a tensor of it, by torch.tensor or torch.stack")
    lacking = [each for each in ("__len__", "__getitem__") if not hasattr(data, each)]
    if lacking or isinstance(data, Mapping | bytes):
        without = f" without {lacking[0]}" if lacking else ""
        raise DataError(f"{name} is of the type {type(data).__name__}{without}; {EXPECTED}")
    return Items(data, name, split, prepare)


# --- checks ----------------------------------------------------------------------------------------


def _first_value(item: Any, label: str) -> Tensor:
    """The tensor of an item (or batch) of a dataset: itself, or the first value of a tuple, list or dict."""
    value = item
    if isinstance(item, tuple | list | Mapping):
        if not item:
            raise DataError(f"{label} is an empty {type(item).__name__}")
        value = next(iter(item.values() if isinstance(item, Mapping) else item))
    if not isinstance(value, Tensor | np.ndarray):
        where = "" if value is item else f", the first value of its {type(item).__name__},"
        raise DataError(
            f"{label}{where} is of the type {type(value).__name__}; expected a tensor or numpy array "
            "(the transform of the dataset can make one)"
        )
    return _as_tensor(value, label)


def _as_tensor(values: Tensor | np.ndarray[Any, Any], label: str) -> Tensor:
    """A dense tensor of real numbers, without copying where that is possible."""
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{label} is a masked array, whose mask would be lost; expected a plain one")
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "buif":
            reason = ": are its rows of different shapes?" if values.dtype == object else ""
            raise DataError(f"{label} is an array of {values.dtype}{reason}; expected real numbers")
        if values.dtype.kind == "u" and values.dtype != np.uint8:
            values = values.astype(np.int64)  # torch can hold these, but hardly compute with them
        elif values.dtype == np.longdouble or not values.dtype.isnative:
            values = values.astype(np.float64 if values.dtype.kind == "f" else values.dtype.newbyteorder("="))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is read-only: nobody writes
            return torch.from_numpy(np.ascontiguousarray(values) if any(s < 0 for s in values.strides) else values)
    if values.layout != torch.strided or values.is_quantized:
        raise DataError(f"{label} is a sparse or quantized tensor; expected a dense one")
    if values.is_complex():
        raise DataError(f"{label} holds complex numbers; expected real ones")
    return values.detach()


def _check_finite(values: Tensor, name: str, unit: str, numbers: Iterable[int]) -> None:
    """``numbers``: what to call the rows of ``values`` in the message."""
    if not values.is_floating_point():
        return
    good = values.isfinite().flatten(1).all(1) if values.ndim > 1 else values.isfinite()
    if not good.all():
        worst = next(number for number, fine in zip(numbers, good.tolist(), strict=False) if not fine)
        raise DataError(f"{name}: {unit} {worst} holds NaN or infinity")


def _digest(shape: Iterable[int], parts: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(str(tuple(shape)).encode())
    for part in parts:
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
