"""A model of what is measured: the prior and the generator of another one, seen through an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shortrun.core.latents import Latents, Rng, has_normal_prior, shapes_of
from shortrun.core.model import GaussianModel, check_shape
from shortrun.inverse.operators import FromDeepinv, Operator

NOISES = 8  # images of noise that are sent through an operator, to see what is left of it


class Through(nn.Module):
    """``A(g(z))``: the decoder of what is measured."""

    def __init__(self, model: Any, operator: Operator) -> None:
        super().__init__()
        self.model, self.operator = model, operator

    def forward(self, z: Latents) -> Tensor:
        return self.operator.smooth(self.model.decode(z))


class Observed(GaussianModel):
    """``p(y, z) = p(z) p(y | A(g(z)))`` with prior and generator of a model, for inference, tuning and learning.

    Args:
        model: with a method ``decode`` that can be differentiated; its own likelihood plays no part.
        operator: what is known of the measurement.
        sigma: standard deviation of ``y`` around ``A(g(z))``.
    """

    def __init__(self, model: Any, operator: Operator, sigma: float) -> None:
        super().__init__(Through(model, operator), shapes_of(model), sigma)
        self.operator = operator
        self.training = getattr(model, "training", False)

    @property
    def model(self) -> Any:
        """The model behind the operator."""
        return self.decoder.model  # type: ignore[attr-defined]

    @property
    def standard_normal_prior(self) -> bool:  # type: ignore[override]
        return has_normal_prior(self.model)

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        return self.model.sample_prior(n, rng)

    def log_prior(self, z: Latents) -> Tensor:
        return self.model.log_prior(z)

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log p(y | A(g(z)))``, shape ``(n,)``; ``mask`` is true where ``y`` was measured."""
        seen = self.decoder(z)
        check_shape(seen, x)
        mask = self.operator.visible if mask is None else mask
        return self.operator.log_likelihood(x, seen, self.sigma, mask)

    def prepare(self, x: Tensor) -> Tensor:
        return x.to(self.reference) if x.is_floating_point() else super().prepare(x)

    def lowest_log_likelihood(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """As for Gaussian noise; operators with a likelihood of their own have no bound."""
        if type(self.operator).log_likelihood is not Operator.log_likelihood:
            return torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
        return super().lowest_log_likelihood(x, mask)

    def frozen(self) -> Observed | None:  # type: ignore[override]
        """The same model for as long as its parameters stay as they are, if the one behind it offers that."""
        inner = self.model.frozen() if hasattr(self.model, "frozen") else None
        if inner is None:
            return None
        frozen = Observed(inner, self.operator, float(self.sigma))
        frozen.sigma = self.sigma  # the same tensor: annealing is felt here too
        return frozen

    def arrange(self, x: Tensor) -> Tensor:
        """Measurements stay in their order."""
        return x

    def refresh(self) -> None:
        """Of a frozen model: take over the parameters as they are now."""
        self.model.refresh()


def noise_through(model: Any, operator: Operator, z: Latents, rng: torch.Generator) -> float:
    r"""What the operator lets pass of the observation noise of a model, per entry of ``y``: the default of sigma.

    .. math:: \sigma_y^2 = \sigma^2 \, \frac{E |A(g(z) + \epsilon) - A(g(z))|^2 / |y|}{E |\epsilon|^2 / |x|},
              \qquad \epsilon \sim N(0, \sigma^2 I) :

    sigma for a mask, sigma / 4 for the means of 4x4 pixels.
    """
    with torch.no_grad():
        image = model.decode(tuple(layer[:1].expand(NOISES, *layer.shape[1:]) for layer in z))
        noise = float(model.sigma) * torch.randn(image.shape, generator=rng).to(image)
        change = (operator.smooth(image + noise) - operator.smooth(image)).square().mean().sqrt()
        return float(model.sigma) * float(change / noise.square().mean().sqrt())


def check_operator(model: Any, operator: Operator, y: Tensor) -> None:
    """Raise an error unless the operator fits the measurements and can be differentiated."""
    with torch.enable_grad():
        z = tuple(layer.detach().to(y.device) for layer in model.sample_prior(2, torch.Generator().manual_seed(0)))
        with torch.no_grad():
            image = model.decode(z)
        leaf = image.detach().clone().requires_grad_()
        made = operator.smooth(leaf)
        if not isinstance(made, Tensor) or not made.ndim or len(made) != len(leaf):
            shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(f"{operator!r} makes {shape} of {len(leaf)} images; expected a tensor with a row for each")
        if made.shape[1:] != y.shape[1:]:
            units = "; deepinv's physics measure images in [0, 1]" if isinstance(operator, FromDeepinv) else ""
            raise ValueError(
                f"y has shape {tuple(y.shape)}; of images {tuple(leaf.shape[1:])} {operator!r} makes measurements of "
                f"shape (n, {', '.join(map(str, made.shape[1:]))}){units}"
            )
        if made.requires_grad:
            (slope,) = torch.autograd.grad(made.square().sum() + made.sum(), leaf, allow_unused=True)
        if not made.requires_grad or slope is None or not slope.abs().sum() > 0:
            raise ValueError(
                f"{operator!r} cannot be differentiated: its result has no gradient with respect to the image. Write "
                "it in torch, without numpy, detach, round or argmax (for rounded pixels: shortrun.inverse.Quantise)"
            )
