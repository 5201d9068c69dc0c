"""Latents, random numbers, and what a model is: a prior over latents and a likelihood of the data given them.

The joint density (paper, Sec. 3.1, Eq. 1-3) is ``p(x, z) = p(z) p(x | z)`` with latents ``z = (z_L, ..., z_1)``, kept
as a tuple of tensors, top layer first, batch first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Latents = tuple[Tensor, ...]
Rng = torch.Generator | Sequence[torch.Generator] | None
"""Source of random numbers: a generator; one per example, which makes an example independent of its batch; or none."""


class LatentModel(Protocol):
    """Anything with these three methods can be inferred, tuned and learned.

    Set the class attribute ``standard_normal_prior = True`` if ``p(z)`` is N(0, I): the entropy of the
    starting point is then exact instead of a Monte Carlo average.
    """

    def sample_prior(self, n: int, rng: torch.Generator | None = None) -> Latents:
        """Draw ``z ~ p(z)``: a tuple of tensors of shape ``(n, ...)``, top layer first."""
        ...

    def log_prior(self, z: Latents) -> Tensor:
        """``log p(z)``, shape ``(n,)``, normalising constant included."""
        ...

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log p(x | z)``, shape ``(n,)``, constant included, over the pixels where ``mask`` is true."""
        ...


def freeze_if_it_pays(model: Any, evaluations: int, dimension: int) -> Any:
    """``model.frozen()``, if it can be had and ``evaluations`` (examples times steps) are worth folding the weights.

    Folding sends one example per latent through the linear layers, so it costs about ``dimension`` evaluations.
    """
    return model.frozen() if evaluations >= dimension and hasattr(model, "frozen") else None


def standard_normal(shape: Sequence[int], like: Tensor, rng: Rng = None) -> Tensor:
    """N(0, 1) noise of ``shape`` on the device and in the dtype of ``like``.

    It is drawn in single precision whatever the dtype, so that one seed gives one chain in float32 and in
    float64.
    """
    if isinstance(rng, Sequence):
        rows = [standard_normal((1, *shape[1:]), like, each) for each in rng]
        return torch.cat(rows)
    device = like.device if rng is None else rng.device
    noise = torch.randn(tuple(shape), generator=rng, device=device, dtype=torch.float32)
    return noise.to(device=like.device, dtype=like.dtype)


def seeded(rng: torch.Generator, count: int) -> list[torch.Generator]:
    """A generator for each part of some work, so that results do not depend on how the parts are shared out."""
    seeds = torch.randint(2**62, (count,), generator=rng).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def flatten(z: Latents) -> Tensor:
    """All layers side by side, shape ``(n, d)``."""
    return torch.cat([layer.flatten(1) for layer in z], dim=1)


def unflatten(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Latents:
    """The inverse of :func:`flatten`; ``shapes`` are those of the layers without the batch."""
    parts = flat.split([math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.reshape(len(part), *shape) for part, shape in zip(parts, shapes, strict=True))


def between(a: Tensor, b: Tensor, share: float) -> Tensor:
    """A point on the arc from ``a`` to ``b``, rows of latents: the norm changes evenly, not the chord."""
    flat_a, flat_b = a.flatten(1), b.flatten(1)
    cosine = torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=1).clamp(-0.999, 0.999)
    angle = torch.arccos(cosine)[:, None]
    mixed = (torch.sin((1 - share) * angle) * flat_a + torch.sin(share * angle) * flat_b) / torch.sin(angle)
    return mixed.view_as(a)


def has_normal_prior(model: Any) -> bool:
    """Whether the prior is N(0, I), as a model says by ``standard_normal_prior``."""
    return bool(getattr(model, "standard_normal_prior", False))


def shapes_of(model: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the layers without the batch: what the model says, or those of a draw from its prior."""
    known = getattr(model, "latent_shapes", None)
    if known is None:
        known = [layer.shape[1:] for layer in model.sample_prior(1, torch.Generator().manual_seed(0))]
    return tuple(tuple(shape) for shape in known)


def check_shapes(z: Any, shapes: Sequence[Sequence[int]], what: str = "z") -> None:
    """Raise an error unless ``z`` is a tuple of layers of these shapes, batch first."""
    if not isinstance(z, (tuple, list)) or not all(isinstance(layer, Tensor) for layer in z):
        raise TypeError(f"{what} is {type(z).__name__}; expected a tuple of tensors, one per layer, top layer first")
    found, wanted = [tuple(layer.shape[1:]) for layer in z], [tuple(shape) for shape in shapes]
    if found != wanted:
        raise ValueError(f"{what} has layers of the shapes {found} without the batch; the model has {wanted}")


def dimensions(shapes: Sequence[Sequence[int]]) -> int:
    """How many numbers all layers hold together: d."""
    return sum(math.prod(shape) for shape in shapes)
