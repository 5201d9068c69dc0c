"""Short run Langevin dynamics (paper, Sec. 4.1-4.2): K steps from the prior towards the posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from shortrun.model import LatentModel, Latents, RandomSource, freeze_if_it_pays, standard_normal

StepSize = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Langevin:
    r"""Settings of the dynamics (paper, Eq. 10).

    .. math:: z_0 \sim p(z), \qquad
              z_{k+1} = z_k + s \nabla_z \log p(z_k \mid x) + \sqrt{2s}\, \epsilon_k .

    Args:
        steps: K.
        step_size: s. A number; or one number per step; or, for each step, one number per layer (top layer
            first). Drift and noise always scale together, so the target stays the posterior.
        noise: whether the noise is injected. Without it the dynamics is gradient ascent from the prior.

    The authors' training script writes the same step as ``delta^2/2 * gradient + delta * noise``; the
    paper's figures show ``delta``. Hence ``s = delta^2 / 2``:

    >>> round(Langevin.from_delta(0.05, steps=25).step_size, 6)
    0.00125
    >>> Langevin(steps=2, step_size=[0.02, 0.01]).step_size
    (0.02, 0.01)
    """

    steps: int = 25
    step_size: Any = 0.01
    noise: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"steps is {self.steps!r}; expected a whole number, zero or more")
        object.__setattr__(self, "step_size", _as_step_size(self.step_size, self.steps))

    @classmethod
    def from_delta(cls, delta: float, steps: int = 25, noise: bool = True) -> Langevin:
        """The dynamics whose noise has standard deviation ``delta`` (the authors' script)."""
        return cls(steps=steps, step_size=delta**2 / 2, noise=noise)

    @property
    def delta(self) -> Any:
        """``sqrt(2 s)``, the step size in the convention of the authors' script, shaped as ``step_size``."""
        return _map_numbers(lambda s: math.sqrt(2 * s), self.step_size)

    @property
    def longest(self) -> float:
        """The longest of the step sizes."""
        return float(torch.tensor(self.step_size, dtype=torch.float64).max())

    def scaled(self, factor: float) -> Langevin:
        """All step sizes times ``factor``, so that a schedule keeps its form.

        >>> Langevin(2, [0.5, 0.25]).scaled(2).longest
        1.0
        """
        return replace(self, step_size=torch.tensor(self.step_size, dtype=torch.float64) * factor)

    def part(self, first: int, last: int, noise: bool = True) -> Langevin:
        """Steps ``first`` to ``last`` (not included), without their noise if ``noise`` is false.

        >>> Langevin(3, [0.03, 0.02, 0.01]).part(1, 3, noise=False)
        Langevin(steps=2, step_size=(0.02, 0.01), noise=False)
        """
        size = self.step_size[first:last] if isinstance(self.step_size, tuple) else self.step_size
        return Langevin(last - first, size, self.noise and noise)

    def table(self, layers: int) -> Tensor:
        """Step sizes as a float64 tensor of shape ``(K, layers)``."""
        size = torch.tensor(self.step_size, dtype=torch.float64)
        if size.ndim == 2 and size.shape[1] != layers:
            raise ValueError(f"step_size has {size.shape[1]} numbers per step but the model has {layers} layers")
        if size.ndim == 1:
            size = size[:, None]
        return size.expand(self.steps, layers)


def _map_numbers(function: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_numbers(function, item) for item in value)
    return function(value)


def _as_step_size(value: Any, steps: int) -> StepSize:
    if isinstance(value, Tensor):
        value = value.detach().tolist()
    advice = f"expected a positive number, {steps} of them (one per step), or {steps} rows of one number per layer"

    def convert(item: Any, depth: int) -> Any:
        if isinstance(item, Iterable) and not isinstance(item, str) and depth < 2:
            return tuple(convert(part, depth + 1) for part in item)
        try:
            number = float(item)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"step_size contains {item!r}; {advice}")
        return number

    size = convert(value, 0)
    if isinstance(size, tuple):
        widths = {len(row) if isinstance(row, tuple) else 0 for row in size}
        if len(size) != steps or len(widths) > 1:
            raise ValueError(f"step_size has {len(size)} entries for {steps} steps; {advice}")
    return size


class Diagnostics(NamedTuple):
    """What happened along the chains: each field has shape ``(K + 1, n)``, the start included."""

    log_joint: Tensor
    """``log p(x, z_k)``."""
    gradient_norm: Tensor
    """``|grad_z log p(x, z_k)|`` over all layers."""
    divergent: Tensor
    """Whether the chain was off its way at this point: see :func:`is_divergent`. The last row is what counts: with
    long steps a chain may overshoot on its way and come back."""


class DivergenceError(FloatingPointError):
    """Chains left the range of floating point numbers; a smaller step size is needed."""


def is_divergent(log_joint: Tensor, best: Tensor, dimension: int) -> Tensor:
    """Chains that are not finite, or more than ``d + 10 sqrt(d)`` nats below ``best``, their best log joint so far.

    A posterior sample lies about ``d/2`` nats below the mode of its log joint, give or take ``sqrt(d/2)``. So a
    chain that has arrived does not fall that far below its best, however much it gained before.
    """
    lost = best - log_joint
    return ~(lost <= dimension + 10 * math.sqrt(dimension))


def running_best(log_joints: Tensor) -> Tensor:
    """The best log joint of each chain up to each of its points, shape ``(K + 1, n)``; what is not finite is none."""
    return log_joints.nan_to_num(nan=-math.inf, posinf=-math.inf).cummax(0).values


class Target:
    """The log joint of one batch over flat latents ``(n, d)``: inputs are checked once, here, at the door.

    ``x`` and ``mask`` are repeated ``chains`` times, so that chain ``c`` of example ``i`` is row
    ``i * chains + c``. ``evaluations`` says how often each chain will ask for the log joint: where that is
    often enough, a model that can be frozen is.
    """

    def __init__(
        self,
        model: LatentModel,
        x: Tensor,
        mask: Tensor | None,
        *,
        generator: RandomSource = None,
        start: Latents | None = None,
        chains: int = 1,
        evaluations: int = 0,
    ) -> None:
        _check_data(x, mask)
        if isinstance(generator, Sequence) and len(generator) != len(x):
            raise ValueError(f"{len(generator)} generators were given for {len(x)} examples")
        self.model = model
        # Tensors made in inference mode cannot take part in differentiation; a copy can.
        x = x.clone() if x.is_inference() else x
        self.x = x.repeat_interleave(chains, 0) if chains > 1 else x
        self.mask = mask
        if mask is not None:
            self.mask = mask.expand_as(x)
            if chains > 1:
                self.mask = self.mask.repeat_interleave(chains, 0)
        self.examples, self.chains = len(x), chains
        z = self._sample_prior(generator) if start is None else tuple(start)
        _check_latents(z, self.x, "sample_prior" if start is None else "start")
        self.start: Latents = z
        self.shapes = tuple(layer.shape[1:] for layer in z)
        self.sizes = [layer[0].numel() for layer in z]
        self.dimension = sum(self.sizes)
        frozen = freeze_if_it_pays(model, evaluations * len(self.x), self.dimension)
        if frozen is not None:
            self.model, self.x = frozen, frozen.arrange(self.x)
            self.mask = None if self.mask is None else frozen.arrange(self.mask)

    def _sample_prior(self, generator: RandomSource) -> Latents:
        sample = self.model.sample_prior
        if isinstance(generator, Sequence):
            rows = [sample(self.chains, g) for g in generator]
            return tuple(torch.cat(layers) for layers in zip(*rows, strict=True))
        return tuple(sample(len(self.x), generator))

    def noise(self, like: Tensor, generator: RandomSource) -> Tensor:
        if isinstance(generator, Sequence):
            shape = (self.chains, *like.shape[1:])
            return torch.cat([standard_normal(shape, like, g) for g in generator])
        return standard_normal(like.shape, like, generator)

    def log_joint(self, z: Latents) -> Tensor:
        """``log p(x, z)``, shape ``(n,)``."""
        value = self.model.log_prior(z) + self.model.log_likelihood(self.x, z, self.mask)
        if value.shape != (len(self.x),):
            raise ValueError(
                f"log_prior + log_likelihood has shape {tuple(value.shape)}; expected one number "
                f"per example, shape ({len(self.x)},)"
            )
        return value

    def flatten(self, z: Latents) -> Tensor:
        return torch.cat([layer.flatten(1) for layer in z], dim=1)

    def unflatten(self, flat: Tensor) -> Latents:
        parts = flat.split(self.sizes, dim=1)
        return tuple(p.reshape(len(p), *s) for p, s in zip(parts, self.shapes, strict=True))

    def flat_log_joint(self, flat: Tensor) -> Tensor:
        return self.log_joint(self.unflatten(flat))

    def check_start(self, log_joint: Tensor) -> None:
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
    if mask is None:
        visible = x
    else:
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
        visible = x[seen.bool()]
    if not visible.isfinite().all():
        count = int((~visible.isfinite()).sum())
        raise ValueError(f"x has {count} values that are NaN or infinite among the visible ones")


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


def gradient(target: Target, z: Latents) -> tuple[Tensor, Latents]:
    """``log p(x, z)`` and ``R(z) = grad_z log p(x, z)`` (paper, Eq. 11), detached.

    The gradient of log p(z | x) is that of the log joint, because log p(x) does not depend on z.
    Only latents are differentiated; the ``.grad`` of parameters is left alone.
    """
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in z)
        log_joint = target.log_joint(leaves)
        return log_joint.detach(), torch.autograd.grad(log_joint.sum(), leaves)


def step(
    target: Target,
    z: Latents,
    drift: Latents,
    sizes: Sequence[float],
    noise: bool,
    generator: RandomSource,
) -> Latents:
    """One step of Eq. 10, ``z + s R(z) + sqrt(2 s) eps``, with its own s for each layer."""
    moved = []
    for layer, direction, s in zip(z, drift, sizes, strict=True):
        new = torch.add(layer, direction, alpha=s)
        if noise:
            new.add_(target.noise(layer, generator), alpha=math.sqrt(2 * s))
        moved.append(new)
    return tuple(moved)


@overload
def infer(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = ...,
    start: Latents | None = ...,
    generator: RandomSource = ...,
    return_diagnostics: Literal[False] = ...,
) -> Latents: ...


@overload
def infer(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = ...,
    start: Latents | None = ...,
    generator: RandomSource = ...,
    return_diagnostics: Literal[True],
) -> tuple[Latents, Diagnostics]: ...


def infer(
    model: LatentModel,
    x: Tensor,
    dynamics: Langevin,
    *,
    mask: Tensor | None = None,
    start: Latents | None = None,
    generator: RandomSource = None,
    return_diagnostics: bool = False,
) -> Latents | tuple[Latents, Diagnostics]:
    """Infer the latents of ``x``: a sample ``z_K`` of the short run distribution (paper, Eq. 10 and 12).

    Args:
        model: any :class:`LatentModel`.
        x: observed batch, shape ``(n, ...)``, in the dtype and on the device of the model.
        dynamics: number of steps, step size, noise.
        mask: true where a pixel is visible; broadcast to ``x``. Hidden pixels have no influence, and may
            hold anything.
        start: latents to start from instead of ``z_0 ~ p(z)``.
        generator: source of all randomness. A list with one generator per example makes the result for
            an example independent of the batch it came in.
        return_diagnostics: also return :class:`Diagnostics`, at the price of one more evaluation.

    Returns:
        Tuple of latents, top layer first. If chains have left the range of floating point numbers, a
        :class:`DivergenceError` is raised; with ``return_diagnostics`` they are marked there instead.

    >>> from shortrun import GaussianModel
    >>> model = GaussianModel(lambda z: z[0] @ torch.ones(2, 3), latent_shapes=[(2,)], sigma=0.5)
    >>> g = torch.Generator().manual_seed(0)
    >>> z = infer(model, torch.ones(5, 3), Langevin(steps=10, step_size=0.02), generator=g)
    >>> z[0].shape
    torch.Size([5, 2])
    """
    with torch.inference_mode(False), torch.no_grad():
        target = Target(model, x, mask, generator=generator, start=start, evaluations=dynamics.steps)
        table = dynamics.table(len(target.sizes)).tolist()
        z = target.start
        history: list[tuple[Tensor, Tensor]] = []
        for k, sizes in enumerate(table):
            log_joint, drift = gradient(target, z)
            if k == 0:
                target.check_start(log_joint)
            if return_diagnostics:
                history.append((log_joint, target.flatten(drift).norm(dim=1)))
            z = step(target, z, drift, sizes, dynamics.noise, generator)
        if not return_diagnostics:
            finite = torch.stack([layer.flatten(1).isfinite().all(1) for layer in z]).all(0)
            if not finite.all():
                raise DivergenceError(
                    f"{int((~finite).sum())} of {len(finite)} chains diverged with step size "
                    f"{dynamics.step_size}; lower it, or let tune_by_grid choose it"
                )
            return z
        log_joint, drift = gradient(target, z)
        history.append((log_joint, target.flatten(drift).norm(dim=1)))
        log_joints, norms = (torch.stack(column) for column in zip(*history, strict=True))
        if not dynamics.steps:
            target.check_start(log_joint)
        divergent = is_divergent(log_joints, running_best(log_joints), target.dimension)
        return z, Diagnostics(log_joints, norms, divergent)
