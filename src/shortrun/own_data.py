"""The images that a trained model was made for."""

from __future__ import annotations

from typing import Any

from shortrun.data import DataError, DataSettings, Images, Split

KNOWN = ("embedded", "scenes", "mnist", "svhn", "celeba")
"""Sets that a model may name by itself; others lead to files that its user has not named."""


def data_name(trained: Any, data: str | None = None) -> str:
    """The images to use: those named by the user, or else those of training, if their name is one we know."""
    if data is not None:
        return data
    name = str(trained.info.get("data", "embedded"))
    if name.partition(":")[0] not in KNOWN:
        raise DataError(f"the model says that its data are {name!r}; name the images to use with --data")
    return name


def data_settings(
    trained: Any, data: str | None = None, root: str | None = None, allow_large: bool = False
) -> DataSettings:
    """How these images are read: cut and chosen as in training, if they are those of training."""
    name = data_name(trained, data)
    sized = name.partition(":")[0] in ("celeba", "folder", "zip", "hf")
    same = name == trained.info.get("data")
    return DataSettings(
        name, root, size=trained.shape[1] if sized else None, crop=trained.info.get("crop") if same else None,
        train_images=trained.info.get("train_images") if same else None, allow_large=allow_large,
    )  # fmt: skip


def images_for(trained: Any, settings: DataSettings, split: Split) -> Images:
    """The images of a split, checked against the shape that the model makes."""
    images = settings.load(split)
    if images.shape != trained.shape:
        raise DataError(
            f"{settings.data} has images of shape {images.shape} but the model makes {trained.shape} "
            "(colours, height, width)"
        )
    return images
