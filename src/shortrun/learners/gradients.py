"""Log joint and gradients of a batch of chains: by autograd, or as one compiled function for both passes.

Compiling takes from seconds to half a minute, and torch keeps what it compiled for the next run. It pays for long
training at one batch size; :func:`shortrun.infer` does without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from shortrun.core.chain import Point, gradient
from shortrun.core.latents import Latents, freeze_if_it_pays

Autocast = Callable[[], AbstractContextManager[Any]]


class Joint(nn.Module):
    """``log p(x, z)`` as a module, so that its parameters can be handed over as arguments."""

    def __init__(self, model: Any, autocast: Autocast) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, z: Latents, x: Tensor, mask: Tensor | None) -> Tensor:
        with self.autocast():
            value = self.model.log_prior(z) + self.model.log_likelihood(x, z, mask)
        return value.float()


# --- by autograd --------------------------------------------------------------------------------------


def gradients_of(value: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a scalar; zero for what it does not depend on, such as a part of a network that is not used."""
    return torch.autograd.grad(value, list(parameters), allow_unused=True, materialize_grads=True)


def learning_point(
    joint: Joint, parameters: Sequence[Tensor], z: Latents, x: Tensor, mask: Tensor | None, used: Tensor | None = None
) -> Point:
    """Differentiate latents and parameters, the latter for the chains that are ``used``."""
    leaves = tuple(layer.detach().requires_grad_() for layer in z)
    value = joint(leaves, x, mask)
    if used is not None:
        drift = torch.autograd.grad(value.sum(), leaves, retain_graph=True)
        return Point(value.detach(), drift, gradients_of(torch.where(used, value, 0.0).sum(), parameters))
    both = gradients_of(value.sum(), [*leaves, *parameters])
    return Point(value.detach(), both[: len(z)], both[len(z) :])


# --- compiled -----------------------------------------------------------------------------------------


def _options(device: torch.device) -> dict[str, Any]:
    return {"dynamic": False, **({"mode": "reduce-overhead"} if device.type == "cuda" else {})}  # CUDA graphs


def compile_point(joint: Joint, device: torch.device) -> Callable[[Latents, Tensor, Tensor | None], Point]:
    """:func:`shortrun.core.langevin.gradient` as one function without a graph of autograd in between."""

    def loss(z: Latents, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        value = joint(z, x, mask)
        return value.sum(), value

    function = torch.compile(grad(loss, has_aux=True), **_options(device))

    def evaluate(z: Latents, x: Tensor, mask: Tensor | None) -> Point:
        with torch.no_grad():
            drift, value = function(z, x, mask)
        return Point(value, drift, ())

    return evaluate


def compile_learning_point(
    joint: Joint, parameters: Sequence[Tensor], device: torch.device
) -> Callable[[Latents, Tensor, Tensor | None], Point]:
    """:func:`learning_point` as one function, for batches in which all chains are used."""
    places = {id(p): i for i, p in enumerate(parameters)}
    values = {name: p.detach() for name, p in joint.named_parameters() if id(p) in places}  # they share memory
    order = [places[id(p)] for p in joint.parameters() if id(p) in places]
    first_names = {id(p): name for name, p in joint.named_parameters()}
    # Each module once, however often it is used: what torch does by itself with shared weights cannot be compiled.
    names = {
        f"{place}.{name}": first_names[id(p)]
        for place, module in joint.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in places
    }

    def loss(z: Latents, values: dict[str, Tensor], x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        everywhere = {name: values[first] for name, first in names.items()}
        value = functional_call(joint, everywhere, (z, x, mask), tie_weights=False)
        return value.sum(), value

    function = torch.compile(grad(loss, argnums=(0, 1), has_aux=True), **_options(device))

    def evaluate(z: Latents, x: Tensor, mask: Tensor | None) -> Point:
        with torch.no_grad():
            (drift, gradients), value = function(z, values, x, mask)
        sorted_gradients = [gradient for _, gradient in sorted(zip(order, gradients.values(), strict=True))]
        return Point(value, drift, tuple(sorted_gradients))

    return evaluate


def checked(
    name: str,
    fast: Callable[..., Any],
    plain: Callable[..., Any],
    tolerance: float,
    log: Callable[[str], None],
) -> Callable[..., Any]:
    """``fast`` from its second call on, if its first one works and agrees with ``plain``; else ``plain``.

    One line says how long compiling took, or why there is no compiled function.
    """
    chosen: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if chosen:
            return chosen[0](*arguments)
        expected = plain(*arguments)
        begun = time.perf_counter()
        chosen.append(plain)
        try:
            difference = distance(fast(*arguments), expected)
        except Exception as error:  # whatever a compiler fails with, the work can go on without it
            lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
            reason = lines[0] if lines else type(error).__name__
            log(f"{name}: not compiled ({reason}); going on without, slower")
            return expected
        if difference <= tolerance:
            chosen[0] = fast
            log(f"{name}: compiled in {time.perf_counter() - begun:.0f} s")
        else:
            log(f"{name}: the compiled function is wrong by {difference:.2g}; going on without, slower")
        return expected

    return call


def distance(result: Any, expected: Any) -> float:
    """Largest difference between two equal structures of tensors, relative to the largest value of each tensor."""
    worst = 0.0
    for a, b in zip(_tensors(result), _tensors(expected), strict=True):
        scale = b.detach().abs().max().clamp_min(1e-12)
        worst = max(worst, float((a.detach() - b.detach()).abs().max() / scale))
    return worst


def _tensors(structure: Any) -> Iterable[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    else:
        for part in structure:
            yield from _tensors(part)


# --- the chains of a training run ---------------------------------------------------------------------


class Evaluator:
    """Evaluates the points of the chains of a run.

    Args:
        model: a module with the methods of :class:`shortrun.core.latents.LatentModel`.
        parameters: what is learned.
        autocast: context of the mixed precision; latents and log joint stay in float32.
        moves: examples times calls of :meth:`point` between two changes of the parameters.
        dimension: number of latents of an example.
        compiled: whether to compile.
        tolerance: how far compiled gradients may be from plain ones.
        log: takes the lines about compiling.
    """

    def __init__(
        self,
        model: Any,
        parameters: Sequence[Tensor],
        autocast: Autocast,
        moves: int,
        dimension: int,
        compiled: bool = False,
        tolerance: float = 1e-3,
        log: Callable[[str], None] = print,
    ) -> None:
        self.parameters = parameters
        self.joint = Joint(model, autocast)
        self.frozen = freeze_if_it_pays(model, moves, dimension)
        still = self.joint if self.frozen is None else Joint(self.frozen, autocast)
        device = parameters[0].device

        def plain(z: Latents, x: Tensor, mask: Tensor | None) -> Point:
            return gradient(lambda leaves: still(leaves, x, mask), z)

        def plain_learning(z: Latents, x: Tensor, mask: Tensor | None) -> Point:
            return learning_point(self.joint, parameters, z, x, mask)

        self._point, self._learning_point = plain, plain_learning
        if compiled:
            fast = compile_point(still, device)
            fast_learning = compile_learning_point(self.joint, parameters, device)
            self._point = checked("Langevin step", fast, plain, tolerance, log)
            self._learning_point = checked("learning step", fast_learning, plain_learning, tolerance, log)

    def begin(self, x: Tensor, mask: Tensor | None) -> None:
        """New chains for these images, at the parameters as they are now."""
        self.x, self.mask = x, mask
        self.still_x, self.still_mask = x, mask
        if self.frozen is not None:
            self.frozen.refresh()
            self.still_x = self.frozen.arrange(x)
            self.still_mask = None if mask is None else self.frozen.arrange(mask.expand_as(x))

    def point(self, z: Latents) -> Point:
        """Log joint and drift, at the parameters of :meth:`begin`."""
        return self._point(z, self.still_x, self.still_mask)

    def learning_point(self, z: Latents, used: Tensor) -> Point:
        """Also the gradients of the parameters, for the chains that are ``used``, at the parameters as they are."""
        if bool(used.all()):
            return self._learning_point(z, self.x, self.mask)
        return learning_point(self.joint, self.parameters, z, self.x, self.mask, used)
