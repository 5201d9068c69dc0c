"""Data: sets of images by name (:func:`load`), and tensors, arrays and datasets of one's own (:func:`as_examples`)."""

from shortrun.data.examples import (
    DataError,
    Examples,
    Images,
    Items,
    Split,
    Stream,
    Tensors,
    as_examples,
    as_floats,
)
from shortrun.data.image_files import Crop
from shortrun.data.sets import NAMES, DataSettings, load

__all__ = [
    "NAMES",
    "Crop",
    "DataError",
    "DataSettings",
    "Examples",
    "Images",
    "Items",
    "Split",
    "Stream",
    "Tensors",
    "as_examples",
    "as_floats",
    "load",
]
