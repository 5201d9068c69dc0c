"""One step of the dynamics, and the chain that its steps make (paper, Sec. 4.1, Eq. 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.latents import Latents, flatten


class Point(NamedTuple):
    """What is known at one point of each chain."""

    log_joint: Tensor
    """``log p(x, z)``, shape ``(n,)``."""
    drift: Latents
    """``R(z)``, its gradient with respect to the latents."""
    gradients: tuple[Tensor, ...] = ()
    """Of the sum of the log joints with respect to the parameters, where learning asks for them."""


def move(
    z: Latents,
    drift: Latents,
    sizes: Iterable[Any],
    noise: Iterable[Tensor | None],
    momentum: float = 0.0,
    before: Latents | None = None,
) -> Latents:
    """One step, ``z + s R(z) + beta (z - z_before) + sqrt(2 (1 - beta) s) eps``, with its own s and eps for each layer.

    ``s`` is a number, or a tensor that broadcasts to the layer; the step can be differentiated with respect to it.
    """
    moved = []
    for layer, direction, s, eps, old in zip(z, drift, sizes, noise, z if before is None else before, strict=True):
        new = layer + s * direction
        if momentum:
            new = new + momentum * (layer - old)
        moved.append(new if eps is None else new + (2 * (1 - momentum) * s) ** 0.5 * eps)
    return tuple(moved)


def chain(
    z: Latents,
    sizes: Sequence[Any] | Tensor,
    visit: Callable[[int, Latents], tuple[Latents, Point]],
    noise: Callable[[int, Tensor], Tensor | None],
    evaluate_end: bool = True,
    momentum: float = 0.0,
) -> Iterator[tuple[int, Latents, Point | None]]:
    """The K steps of the dynamics from ``z``: yields ``(k, z_k, point)`` for k = 0 to K.

    Args:
        sizes: K rows of one s per layer, as :func:`move` takes them.
        visit: ``(k, z_k) -> (z_k, point)``: evaluates a point; the latents it returns are those the chain goes on from.
            Chains that it puts somewhere else start from there at rest.
        noise: ``(k, layer) -> eps`` for a layer of ``z_k``, None for a step without noise.
        evaluate_end: whether ``z_K`` is visited; else its point is None.
    """
    before = z
    for k, row in enumerate(sizes):
        arrived = z
        z, point = visit(k, arrived)
        yield k, z, point
        if momentum:
            before = _at_rest_where_moved(arrived, z, before)
        z, before = move(z, point.drift, row, [noise(k, layer) for layer in z], momentum, before), z
    if evaluate_end:
        z, point = visit(len(sizes), z)
        yield len(sizes), z, point
    else:
        yield len(sizes), z, None


def _at_rest_where_moved(arrived: Latents, z: Latents, before: Latents) -> Latents:
    """The points before ``z``; ``z`` itself for chains that have not arrived there but were put there."""
    if z is arrived:
        return before
    moved = (flatten(arrived) != flatten(z)).any(1)
    return tuple(
        torch.where(moved.view(-1, *[1] * (layer.ndim - 1)), layer, old) for layer, old in zip(z, before, strict=True)
    )


def gradient(log_joint: Callable[[Latents], Tensor], z: Latents) -> Point:
    """``log p(x, z)`` and ``R(z) = grad_z log p(x, z)`` (paper, Eq. 11), detached.

    The gradient of log p(z | x) is that of the log joint, because log p(x) does not depend on z.
    Only latents are differentiated; the ``.grad`` of parameters stays as it is.
    """
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in z)
        value = log_joint(leaves)
        return Point(value.detach(), torch.autograd.grad(value.sum(), leaves))
