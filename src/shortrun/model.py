"""What a model is: a prior over latents and a likelihood of the data given them.

The model's joint density (paper, Sec. 3.1, Eq. 1-3) is ``p(x, z) = p(z) p(x | z)`` with latents
``z = (z_L, ..., z_1)``, kept as a tuple of tensors, top layer first, batch first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Latents = tuple[Tensor, ...]
RandomSource = torch.Generator | Sequence[torch.Generator] | None


class LatentModel(Protocol):
    """Anything with these three methods can be inferred, tuned and learned.

    Set the class attribute ``standard_normal_prior = True`` if ``p(z)`` is N(0, I): the entropy of the
    starting point is then exact instead of a Monte Carlo average.
    """

    def sample_prior(self, n: int, generator: torch.Generator | None = None) -> Latents:
        """Draw ``z ~ p(z)``: a tuple of tensors of shape ``(n, ...)``, top layer first."""
        ...

    def log_prior(self, z: Latents) -> Tensor:
        """``log p(z)``, shape ``(n,)``, normalising constant included."""
        ...

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log p(x | z)``, shape ``(n,)``, constant included, over the pixels where ``mask`` is true."""
        ...


def standard_normal(shape: Sequence[int], like: Tensor, generator: RandomSource = None) -> Tensor:
    """N(0, 1) noise of ``shape`` on the device and in the dtype of ``like``.

    It is drawn in single precision whatever the dtype, so that one seed gives one chain in float32 and in
    float64. A list of generators, one per example, makes the noise of an example independent of the
    others in its batch.
    """
    if isinstance(generator, Sequence):
        rows = [standard_normal((1, *shape[1:]), like, g) for g in generator]
        return torch.cat(rows)
    device = like.device if generator is None else generator.device
    noise = torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32)
    return noise.to(device=like.device, dtype=like.dtype)


def fit_gaussian(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and Cholesky factor of the covariance of codes of shape ``(n, size)``, in double precision."""
    codes = codes.double()
    covariance = torch.cov(codes.T)
    ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    return codes.mean(0), torch.linalg.cholesky(covariance + ridge)


def gaussian_log_likelihood(x: Tensor, mean: Tensor, sigma: Tensor, mask: Tensor | None = None) -> Tensor:
    """``log N(x; mean, sigma^2 I)`` over the pixels where ``mask`` is true, shape ``(n,)``.

    Hidden pixels drop out before the square, so their value cannot matter, not even if it is NaN.
    """
    if mean.shape != x.shape:
        raise ValueError(
            f"the decoder returns shape {tuple(mean.shape)} but x has shape {tuple(x.shape)}; they must be equal"
        )
    residual = x - mean
    if mask is None:
        visible: Tensor | int = residual[0].numel()
    else:
        seen = mask.to(torch.bool).expand_as(x)
        residual = torch.where(seen, residual, torch.zeros((), dtype=x.dtype, device=x.device))
        visible = seen.flatten(1).sum(1)
    error = residual.flatten(1).square().sum(1)
    log_variance = 2 * sigma.log()
    return -0.5 * (error / sigma**2 + visible * (math.log(2 * math.pi) + log_variance))


class GaussianModel(nn.Module):
    r"""Standard normal latents, any torch decoder, Gaussian observation noise (paper, Eq. 2).

    .. math:: \log p(x, z) = -\tfrac12 \|z\|^2 - \tfrac1{2\sigma^2}\|x - g(z)\|^2 + c,

    with the constant ``c`` included. The multi-layer generator of the paper's appendix is this model in
    *noise coordinates*: ``z`` then holds ``(z_L, eps_{L-1}, ..., eps_1)``, all N(0, I) a priori.

    Args:
        decoder: maps the tuple of latents to the mean of ``x``.
        latent_shapes: shape of each layer without the batch, top layer first.
        sigma: standard deviation of the observation noise. It is kept as a buffer, so that annealing is
            ``model.sigma.fill_(0.15)``.

    >>> model = GaussianModel(lambda z: z[0] @ torch.ones(2, 3), latent_shapes=[(2,)], sigma=0.5)
    >>> z = model.sample_prior(4, torch.Generator().manual_seed(0))
    >>> model.log_likelihood(torch.zeros(4, 3), z).shape
    torch.Size([4])
    """

    standard_normal_prior = True
    sigma: Tensor

    def __init__(
        self,
        decoder: Callable[[Latents], Tensor],
        latent_shapes: Sequence[Sequence[int]],
        sigma: float = 0.3,
    ) -> None:
        super().__init__()
        shapes = tuple(tuple(int(size) for size in shape) for shape in latent_shapes)
        if not shapes or any(size < 1 for shape in shapes for size in shape):
            raise ValueError(
                f"latent_shapes is {latent_shapes!r}; expected one shape per layer, top layer first, "
                "such as [(16,), (32,)]"
            )
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"sigma is {sigma!r}; expected a positive number")
        self.decoder = decoder
        self.latent_shapes = shapes
        reference = next(self.parameters(), None)
        dtype = torch.get_default_dtype() if reference is None else reference.dtype
        device = None if reference is None else reference.device
        self.register_buffer("sigma", torch.tensor(float(sigma), dtype=dtype, device=device))

    def sample_prior(self, n: int, generator: RandomSource = None) -> Latents:
        """``z_0 ~ N(0, I)``."""
        return tuple(standard_normal((n, *shape), self.sigma, generator) for shape in self.latent_shapes)

    def log_prior(self, z: Latents) -> Tensor:
        """``log N(z; 0, I)`` over all layers, shape ``(n,)``."""
        flat = torch.cat([layer.flatten(1) for layer in z], dim=1)
        return -0.5 * (flat.square().sum(1) + flat.shape[1] * math.log(2 * math.pi))

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log N(x; g(z), sigma^2 I)`` over visible pixels, shape ``(n,)``.

        Hidden pixels drop out before the square (paper, Sec. 5.3), so neither their value, not even a
        NaN, nor what the decoder paints there has any influence on the result or on its gradient.
        """
        return gaussian_log_likelihood(x, self.decoder(z), self.sigma, mask)

    def frozen(self) -> FrozenModel | None:
        """The same model for as long as its parameters stay as they are, if the decoder offers one.

        Chains at fixed parameters run on it: see :class:`shortrun.generators.FrozenGenerator`. A subclass with a
        prior or a likelihood of its own is used as it is.
        """
        kind = type(self)
        same = kind.log_prior is GaussianModel.log_prior and kind.log_likelihood is GaussianModel.log_likelihood
        return FrozenModel(self) if same and hasattr(self.decoder, "frozen") else None


def freeze_if_it_pays(model: Any, evaluations: int, dimension: int) -> FrozenModel | None:
    """The frozen model, if it can be had and ``evaluations`` (images times steps) are worth folding the weights.

    Folding sends one image per latent through the linear layers, so it costs about ``dimension`` evaluations.
    """
    return model.frozen() if evaluations >= dimension and hasattr(model, "frozen") else None


class FrozenModel(GaussianModel):
    """What :meth:`GaussianModel.frozen` gives; it takes images and masks in the order of :meth:`arrange`."""

    def __init__(self, model: GaussianModel) -> None:
        super().__init__(model.decoder.frozen(), model.latent_shapes)  # type: ignore[attr-defined]
        self.sigma = model.sigma  # the same tensor: annealing is felt here too

    def arrange(self, x: Tensor) -> Tensor:
        """The pixels in the order in which the frozen decoder paints them; a sum over pixels does not mind."""
        return self.decoder.arrange(x)  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Take over the parameters as they are now."""
        self.decoder.refresh()  # type: ignore[attr-defined]
