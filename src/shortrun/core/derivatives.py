"""Gradients, Hessians and their products with vectors, for batches of functions of flat latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Hessians are built from blocks of about this many rows (chains x columns): large enough to keep the
# processor busy, small enough to bound the memory whatever the number of latents.
HESSIAN_ROWS = 1024


def differentiable_gradient(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``z`` as a point that can be differentiated at, the value and the gradient there with its graph."""
    if not (torch.is_grad_enabled() and z.requires_grad):
        z = z.detach().requires_grad_()
    with torch.enable_grad():
        value = function(z)
        (gradient,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    return z, value.detach(), gradient


def products(gradient: Tensor, z: Tensor, vectors: Tensor, create_graph: bool = False) -> Tensor:
    """Hessian-vector products: ``vectors`` is ``(p, n, d)`` and so is the result."""
    if not gradient.requires_grad:  # the log joint is linear here
        return torch.zeros_like(vectors)
    return torch.autograd.grad(
        gradient, z, vectors, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )[0]


def value_gradient_hessian(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value ``(n,)``, gradient ``(n, d)`` and Hessian ``(n, d, d)`` of ``function: (n, d) -> (n,)``, row by row.

    In a ``torch.enable_grad`` block, with ``z`` requiring a gradient, the latter two can be differentiated further.
    """
    create_graph = torch.is_grad_enabled() and z.requires_grad
    n, d = z.shape
    z, value, gradient = differentiable_gradient(function, z)
    columns = torch.eye(d, dtype=z.dtype, device=z.device)
    blocks = [
        products(gradient, z, block[:, None].expand(-1, n, -1), create_graph)
        for block in columns.split(max(1, HESSIAN_ROWS // n))
    ]
    hessian = torch.cat(blocks).transpose(0, 1)
    return value, gradient if create_graph else gradient.detach(), hessian


class Recompute(torch.autograd.Function):
    """``function(*tensors)`` whose graph is built again in the backward pass, so memory is that of one step.

    Unlike ``torch.utils.checkpoint`` it differentiates its inputs alone and does not touch the ``.grad`` of
    parameters.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.function(*tensors)
        wanted = [i for i, output in enumerate(outputs) if output.requires_grad]
        values = torch.autograd.grad(
            [outputs[i] for i in wanted], tensors, [grads[i] for i in wanted], allow_unused=True
        )
        return None, *values
