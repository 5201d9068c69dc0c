r"""Which layer of latents controls what: measured on images with known causes (paper, Sec. 5.4, made a number).

One layer is freshly drawn from the prior while the others stay, and a small network reads from the images how much each
factor of :mod:`shortrun.data.scenes` has changed. The share of layer l in a factor f is

.. math:: \frac{E[d(f(x), f(x'))]\ \text{where $x'$ differs from $x$ in $z_l$ alone}}
               {E[d(f(x), f(x'))]\ \text{where all latents differ}},

with ``d`` the probability of another class for digit and style, and the squared distance for position and background.
0 means that the layer does not change the factor, 1 that it decides it as much as all layers together. The shares of
the layers need not add up to 1: layers can act together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.latents import Latents
from shortrun.data.scenes import REACH, STYLES, Factors, draw_factors, paint

FACTORS = ("digit", "style", "position", "background")


class Reader(nn.Module):
    """Reads the factors from an image."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1), nn.GELU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GELU(),
            nn.Conv2d(2 * channels, 2 * channels, 3, 2, 1), nn.GELU(), nn.Flatten(),
            nn.Linear(2 * channels * 16, 128), nn.GELU(),
        )  # fmt: skip
        self.heads = nn.ModuleDict(
            {
                "digit": nn.Linear(128, 10),
                "style": nn.Linear(128, len(STYLES)),
                "position": nn.Linear(128, 2),
                "background": nn.Linear(128, 3),
            }
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Logits of digit and style; position in units of its reach; background in [0, 1]."""
        hidden = self.features(images)
        return {name: head(hidden) for name, head in self.heads.items()}


def train_reader(updates: int = 1500, batch: int = 128, seed: int = 0) -> tuple[Reader, dict[str, float]]:
    """A reader, and how well it reads new scenes: shares of right classes, root mean square errors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reader = Reader()
    rng = torch.Generator().manual_seed(seed + 100)
    optimiser = torch.optim.Adam(reader.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=updates)
    for _ in range(updates):
        factors = draw_factors(batch, rng)
        found = reader(_scaled(paint(factors)))
        loss = sum(_errors(found, factors).values(), torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    factors = draw_factors(1000, rng)
    with torch.no_grad():
        found = reader.eval()(_scaled(paint(factors)))
    quality = {name: float((found[name].argmax(1) == getattr(factors, name)).float().mean()) for name in FACTORS[:2]}
    quality["position"] = float((REACH * found["position"] - factors.position).square().mean().sqrt())
    quality["background"] = float((found["background"] - factors.background).square().mean().sqrt())
    return reader, quality


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def _errors(found: dict[str, Tensor], factors: Factors) -> dict[str, Tensor]:
    return {
        "digit": F.cross_entropy(found["digit"], factors.digit),
        "style": F.cross_entropy(found["style"], factors.style),
        "position": 4 * F.mse_loss(found["position"], factors.position / REACH),
        "background": 10 * F.mse_loss(found["background"], factors.background),
    }


def read(reader: Reader, images: Tensor) -> dict[str, Tensor]:
    """The most likely classes, shape ``(n,)``, and the numbers, shape ``(n, ...)``."""
    with torch.no_grad():
        parts = [reader(part) for part in images.split(500)]
    found = {name: torch.cat([part[name] for part in parts]) for name in FACTORS}
    return {name: found[name].argmax(1) if name in ("digit", "style") else found[name] for name in FACTORS}


def _difference(a: Tensor, b: Tensor) -> float:
    if a.ndim == 1:  # classes
        return float((a != b).float().mean())
    return float((a - b).square().sum(1).mean())


def layer_shares(
    decode: Callable[[Latents], Tensor],
    sample_prior: Callable[[int], Latents],
    reader: Any,
    pairs: int = 1000,
) -> list[dict[str, float]]:
    """For each layer, top layer first, its share in each factor (see the equation above)."""
    first, second = sample_prior(pairs), sample_prior(pairs)
    before = read(reader, decode(first))
    everything = read(reader, decode(second))
    shares = []
    for layer in range(len(first)):
        changed = tuple(b if i == layer else a for i, (a, b) in enumerate(zip(first, second, strict=True)))
        after = read(reader, decode(changed))
        shares.append(
            {
                name: _difference(before[name], after[name]) / max(_difference(before[name], everything[name]), 1e-9)
                for name in FACTORS
            }
        )
    return shares
