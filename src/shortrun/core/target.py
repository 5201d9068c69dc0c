"""The log joint of one batch of chains, with the checks of what comes from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shortrun.core.latents import (
    LatentModel,
    Latents,
    Rng,
    check_shapes,
    dimensions,
    flatten,
    freeze_if_it_pays,
    shapes_of,
    standard_normal,
    unflatten,
)
from shortrun.core.layout import in_channels_last


class Target:
    """The log joint of one batch over latents, in layers or flat ``(n, d)``: inputs are checked once, here.

    ``x`` and ``mask`` are repeated ``chains`` times, so that chain ``c`` of example ``i`` is row
    ``i * chains + c``. ``evaluations`` is how often each chain will ask for the log joint: where that is
    often enough, a model that can be frozen is; others run on weights that are laid out for speed, if they can.
    """

    def __init__(
        self,
        model: LatentModel,
        x: Tensor,
        mask: Tensor | None,
        *,
        rng: Rng = None,
        start: Latents | None = None,
        chains: int = 1,
        evaluations: int = 0,
    ) -> None:
        _check_data(x, mask)
        if isinstance(rng, Sequence) and len(rng) != len(x):
            raise ValueError(f"{len(rng)} generators were given for {len(x)} examples")
        self.model: Any = model
        self._as_given: Any = None
        # Tensors made in inference mode cannot take part in differentiation; a copy can.
        x = x.clone() if x.is_inference() else x
        self.x = x.repeat_interleave(chains, 0) if chains > 1 else x
        self.mask = mask
        if mask is not None:
            self.mask = mask.expand_as(x)
            if chains > 1:
                self.mask = self.mask.repeat_interleave(chains, 0)
        self.examples, self.chains = len(x), chains
        z = self._sample_prior(rng) if start is None else tuple(start)
        _check_latents(z, self.x, "sample_prior" if start is None else "start")
        if start is not None:
            check_shapes(z, shapes_of(model), "start")
        self.start: Latents = z
        self.shapes = tuple(tuple(layer.shape[1:]) for layer in z)
        self.sizes = [dimensions([shape]) for shape in self.shapes]
        self.dimension = sum(self.sizes)
        frozen = freeze_if_it_pays(model, evaluations * len(self.x), self.dimension)
        if frozen is not None:
            self.model, self.x = frozen, frozen.arrange(self.x)
            self.mask = None if self.mask is None else frozen.arrange(self.mask)
        elif evaluations:
            self.model = in_channels_last(model)
            self._as_given = None if self.model is model else model

    def _sample_prior(self, rng: Rng) -> Latents:
        sample = self.model.sample_prior
        if isinstance(rng, Sequence):
            rows = [sample(self.chains, each) for each in rng]
            return tuple(torch.cat(layers) for layers in zip(*rows, strict=True))
        return tuple(sample(len(self.x), rng))

    def noise(self, like: Tensor, rng: Rng) -> Tensor:
        """N(0, 1) noise in the shape of ``like``, whose rows are the chains."""
        if isinstance(rng, Sequence):
            shape = (self.chains, *like.shape[1:])
            return torch.cat([standard_normal(shape, like, each) for each in rng])
        return standard_normal(like.shape, like, rng)

    def log_joint(self, z: Latents) -> Tensor:
        """``log p(x, z)``, shape ``(n,)``."""
        try:
            value = self.model.log_prior(z) + self.model.log_likelihood(self.x, z, self.mask)
        except Exception:
            if self._as_given is None:
                raise
            # Perhaps a module that needs its maps in the usual order; what else is wrong is said once more.
            self.model, self._as_given = self._as_given, None
            return self.log_joint(z)
        if value.shape != (len(self.x),):
            raise ValueError(
                f"log_prior + log_likelihood has shape {tuple(value.shape)}; expected one number "
                f"per example, shape ({len(self.x)},)"
            )
        return value

    def flatten(self, z: Latents) -> Tensor:
        """All layers side by side, shape ``(n, d)``."""
        return flatten(z)

    def unflatten(self, flat: Tensor) -> Latents:
        """The inverse of :meth:`flatten`."""
        return unflatten(flat, self.shapes)

    def flat_log_joint(self, flat: Tensor) -> Tensor:
        """:meth:`log_joint` of flat latents."""
        return self.log_joint(self.unflatten(flat))

    def check_start(self, log_joint: Tensor) -> None:
        """Raise a ValueError if the log joint is not finite where the chains start."""
        bad = ~log_joint.isfinite()
        if bad.any():
            first = int(bad.nonzero()[0])
            raise ValueError(
                f"the log joint is {log_joint[first].item()} at the start for {int(bad.sum())} of "
                f"{len(bad)} chains (first: {first}); check log_prior, log_likelihood and the "
                "parameters of the decoder for NaN"
            )


def _check_data(x: Tensor, mask: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a tensor, batch first")
    if not x.is_floating_point():
        raise TypeError(
            f"x has dtype {x.dtype}; expected floating point, images scaled to [-1, 1] "
            "(for uint8: x.float() / 127.5 - 1)"
        )
    if x.ndim < 2 or x.shape[0] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, ...) with at least one example")
    visible = x if mask is None else x[visible_part(mask, x)]
    if not visible.isfinite().all():
        count = int((~visible.isfinite()).sum())
        raise ValueError(f"x has {count} values that are NaN or infinite among the visible ones")


def visible_part(mask: Any, x: Tensor) -> Tensor:
    """A mask as booleans in the shape of ``x``, checked."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; expected a tensor, true where visible")
    try:
        seen = mask.expand_as(x)
    except RuntimeError:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to that of x, {tuple(x.shape)}"
        ) from None
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask has values other than 0 and 1; expected 1 (or True) where visible")
    return seen.bool()


def _check_latents(z: Any, x: Tensor, origin: str) -> None:
    if not isinstance(z, (tuple, list)) or not all(isinstance(layer, Tensor) for layer in z) or not z:
        raise TypeError(f"{origin} is {type(z).__name__}; expected a tuple of tensors, top layer first")
    for index, layer in enumerate(z):
        if layer.ndim < 2 or len(layer) != len(x):
            raise ValueError(f"{origin}: latent {index} has shape {tuple(layer.shape)}; expected ({len(x)}, ...)")
        if layer.dtype != x.dtype or layer.device != x.device:
            raise TypeError(
                f"{origin}: latent {index} is {layer.dtype} on {layer.device} but x is {x.dtype} on "
                f"{x.device}; move one of them, for example x.to(device, dtype) or model.to(device, dtype)"
            )
        if not layer.isfinite().all():
            raise ValueError(f"{origin}: latent {index} has NaN or infinite values")
