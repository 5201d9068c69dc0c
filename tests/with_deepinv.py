"""deepinv beside a build of torch whose torchvision does not import until its operators have been declared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NAMES = (
    "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "nms", "qnms", "qroi_align", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
_declared: list[Any] = []  # a library lives as long as somebody holds it


def declare_operators() -> None:
    """Once; and the folder that ``make setup`` puts deepinv into is looked into."""
    if not _declared:
        sys.path.append(str(Path(sys.prefix) / "deepinv"))
        library = torch.library.Library("torchvision", "DEF")
        for name in NAMES:
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)


def import_deepinv() -> Any:
    """The package, or a skip that says why."""
    declare_operators()
    return pytest.importorskip("deepinv", reason="deepinv is not installed", exc_type=ImportError)
