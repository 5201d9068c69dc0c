"""Models with a decoder: standard normal latents, and a likelihood of the data given what the decoder makes of them.

Each knows how it is inferred, drawn from, sampled and bounded; methods with an encoder override what they do in
another way. A model needs none of this to be inferred or tuned: :class:`shortrun.core.latents.LatentModel` is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shortrun.core.inference import Inferred, infer_and_mend
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, Rng, flatten, standard_normal


class NotPossibleError(ValueError):
    """The model cannot do what was asked; the message says why."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in the mode for use instead of learning: batch normalisation neither sees nor learns from the batch."""
    learning = isinstance(model, nn.Module) and model.training
    if learning:
        model.eval()
    try:
        yield
    finally:
        if learning:
            model.train()


def fit_gaussian(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and Cholesky factor of the covariance of codes of shape ``(n, size)``, in double precision."""
    codes = codes.double()
    covariance = torch.cov(codes.T)
    ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    return codes.mean(0), torch.linalg.cholesky(covariance + ridge)


def from_bytes(x: Tensor) -> Tensor:
    """8-bit levels as floats in [-1, 1]; other numbers as they are.

    >>> from_bytes(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return x.float() / 127.5 - 1 if x.dtype == torch.uint8 else x


def visible_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of each example over the places where ``mask`` is true; values elsewhere have no influence, not even NaN."""
    if mask is not None:
        seen = mask.to(torch.bool).expand_as(values)
        values = torch.where(seen, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return values.flatten(1).sum(1)


def check_shape(made: Tensor, x: Tensor) -> None:
    if made.shape != x.shape:
        raise ValueError(
            f"the decoder returns shape {tuple(made.shape)} but x has shape {tuple(x.shape)}; they must be equal"
        )


def gaussian_log_likelihood(x: Tensor, mean: Tensor, sigma: Tensor, mask: Tensor | None = None) -> Tensor:
    """``log N(x; mean, sigma^2 I)`` over the pixels where ``mask`` is true, shape ``(n,)``.

    Hidden pixels drop out before the square, so their value cannot matter, not even if it is NaN.
    """
    check_shape(mean, x)
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


class DecoderModel(nn.Module):
    """Standard normal latents and a decoder; subclasses say what the decoder's output means for ``x``.

    Args:
        decoder: maps the tuple of latents, top layer first, to the parameters of ``p(x | z)``.
        latent_shapes: shape of each layer without the batch, top layer first.
    """

    standard_normal_prior = True
    no_dynamics: str | None = None
    """Why its latents cannot be inferred by short run dynamics, if they cannot."""
    latent_shapes: tuple[tuple[int, ...], ...]
    reference: Tensor
    """An empty tensor on the device and in the precision of the model."""

    def __init__(self, decoder: Callable[[Latents], Tensor], latent_shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        try:
            shapes = tuple(tuple(int(size) for size in shape) for shape in latent_shapes)
        except (TypeError, ValueError):
            shapes = ()
        if not shapes or any(size < 1 for shape in shapes for size in shape):
            raise ValueError(
                f"latent_shapes is {latent_shapes!r}; expected one shape per layer, top layer first, "
                "such as [(16,), (32,)]"
            )
        self.decoder = decoder
        self.latent_shapes = shapes
        parameter = next(self.parameters(), None)
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
        device = None if parameter is None else parameter.device
        self.register_buffer("reference", torch.empty(0, dtype=dtype, device=device), persistent=False)

    # -- the density ----------------------------------------------------------------------------------

    def sample_prior(self, n: int, rng: Rng = None) -> Latents:
        """``z_0 ~ N(0, I)``."""
        return tuple(standard_normal((n, *shape), self.reference, rng) for shape in self.latent_shapes)

    def log_prior(self, z: Latents) -> Tensor:
        """``log N(z; 0, I)`` over all layers, shape ``(n,)``."""
        flat = flatten(z)
        return -0.5 * (flat.square().sum(1) + flat.shape[1] * math.log(2 * math.pi))

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log p(x | z)`` over visible places, shape ``(n,)``."""
        raise NotImplementedError

    def decode(self, z: Latents) -> Tensor:
        """The mean of ``x`` given ``z``: what reconstructions and samples show."""
        return self.decoder(z)

    def prepare(self, x: Tensor) -> Tensor:
        """From data as people hold it to what :meth:`log_likelihood` takes: a tensor like the model's."""
        return x.to(self.reference)

    # -- use ------------------------------------------------------------------------------------------

    def infer(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        """Latents of ``x`` by the model's own inference; hidden pixels have no influence."""
        return self.infer_by_dynamics(x, dynamics, mask=mask, rng=rng)

    def draw(self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
        """A draw from the model's q(z | x), which is what a chain ends in; an encoder infers the centre instead."""
        return self.infer(x, dynamics, mask=mask, rng=rng)

    def infer_by_dynamics(
        self, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None
    ) -> Inferred:
        """Latents of ``x`` by short run dynamics on the decoder, whatever the model's own inference is."""
        if self.no_dynamics is not None:
            raise NotPossibleError(self.no_dynamics)
        with evaluating(self):
            return infer_and_mend(self, x, dynamics, mask=mask, rng=rng)

    def sample(self, count: int, rng: Rng = None) -> Tensor:
        """What the decoder makes of latents from the prior."""
        with torch.no_grad(), evaluating(self):
            return self.decode(self.sample_prior(count, rng))

    def lower_bound(self, x: Tensor, rng: Rng = None) -> Tensor:
        """A lower bound of log p(x), shape ``(n,)``, for models that have one.

        Chains have none. Minus the free energy with the conditional entropy, ``E log p(x, z_K) + H(z_0) + E sum_k
        log|det A_k|``, is one only where the map from ``z_0`` to ``z_K`` is one-to-one for given noise: where it folds,
        the log-determinants count the same volume several times, and the sum can exceed log p(x).
        """
        raise NotPossibleError(
            "the density of the end of a chain is not known: its conditional entropy is no lower bound of the true one "
            "where the map of the chain folds, so there is no lower bound of log p(x); annealed importance sampling "
            "estimates it"
        )


def infer_new(model: Any, x: Tensor, dynamics: Langevin, *, mask: Tensor | None = None, rng: Rng = None) -> Inferred:
    """By the model's own inference; for a model with the three methods of ``LatentModel`` alone, by the dynamics."""
    if hasattr(model, "infer"):
        return model.infer(x, dynamics, mask=mask, rng=rng)
    return infer_and_mend(model, x, dynamics, mask=mask, rng=rng)


def sample_from(model: Any, count: int, rng: Rng = None) -> Tensor:
    """By the model's own way to draw samples; for any other with a method ``decode``, of latents from its prior."""
    if hasattr(model, "sample"):
        return model.sample(count, rng)
    if not hasattr(model, "decode"):
        raise NotPossibleError(f"{type(model).__name__} has no method decode(z), so there is nothing to show")
    with torch.no_grad(), evaluating(model):
        return model.decode(model.sample_prior(count, rng))


class GaussianModel(DecoderModel):
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

    sigma: Tensor

    def __init__(
        self,
        decoder: Callable[[Latents], Tensor],
        latent_shapes: Sequence[Sequence[int]],
        sigma: float = 0.3,
    ) -> None:
        super().__init__(decoder, latent_shapes)
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"sigma is {sigma!r}; expected a positive number")
        like = self.reference
        device = "cpu" if like.is_meta else like.device  # a model without numbers still knows its noise
        self.register_buffer("sigma", torch.tensor(float(sigma), dtype=like.dtype, device=device))

    def prepare(self, x: Tensor) -> Tensor:
        """8-bit images become floats in [-1, 1]; floats stay as they are."""
        return super().prepare(from_bytes(x))

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        """``log N(x; g(z), sigma^2 I)`` over visible pixels, shape ``(n,)``.

        Hidden pixels drop out before the square (paper, Sec. 5.3), so neither their value, not even a
        NaN, nor what the decoder paints there has any influence on the result or on its gradient.
        """
        return gaussian_log_likelihood(x, self.decoder(z), self.sigma, mask)

    def lowest_log_likelihood(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What latents that explain ``x`` reach, shape ``(n,)``: ``|x - g|^2 / sigma^2`` is chi-squared with as many
        degrees of freedom as there are visible pixels, ``n``, and hardly ever beyond ``n + 10 sqrt(2 n)``.
        """
        n = torch.full((len(x),), x[0].numel()) if mask is None else mask.expand_as(x).flatten(1).sum(1)
        n = n.to(x)
        return -0.5 * (n + 10 * (2 * n).sqrt() + n * (math.log(2 * math.pi) + 2 * self.sigma.log()))

    def frozen(self) -> FrozenModel | None:
        """The same model for as long as its parameters stay as they are, if the decoder offers one.

        Chains at fixed parameters run on it: see :class:`shortrun.nets.frozen.FrozenGenerator`. A subclass with a
        prior or a likelihood of its own is used as it is.
        """
        kind = type(self)
        same = kind.log_prior is DecoderModel.log_prior and kind.log_likelihood is GaussianModel.log_likelihood
        return FrozenModel(self) if same and hasattr(self.decoder, "frozen") else None


class FrozenModel(GaussianModel):
    """What :meth:`GaussianModel.frozen` gives; it takes images and masks in the order of :meth:`arrange`."""

    def __init__(self, model: GaussianModel) -> None:
        super().__init__(model.decoder.frozen(), model.latent_shapes)  # type: ignore[attr-defined]
        self.sigma = model.sigma  # the same tensors: annealing is felt here too

    def arrange(self, x: Tensor) -> Tensor:
        """The pixels in the order in which the frozen decoder paints them; a sum over pixels does not mind."""
        return self.decoder.arrange(x)  # type: ignore[attr-defined]

    def decode(self, z: Latents) -> Tensor:
        """Images with their pixels in the usual order."""
        return self.decoder.restored(self.decoder(z))  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Take over the parameters as they are now."""
        self.decoder.refresh()  # type: ignore[attr-defined]


class BernoulliModel(DecoderModel):
    r"""Standard normal latents and binary data: the decoder gives the logit of each place.

    .. math:: \log p(x \mid z) = \sum_i x_i \log \pi_i + (1 - x_i) \log(1 - \pi_i), \qquad
              \pi = \mathrm{sigmoid}(g(z)) .

    ``x`` holds zeros and ones, as booleans, integers or floats; :meth:`decode` gives the probabilities.

    >>> model = BernoulliModel(lambda z: z[0] @ torch.ones(2, 3), latent_shapes=[(2,)])
    >>> model.log_likelihood(torch.ones(4, 3), model.sample_prior(4)).shape
    torch.Size([4])
    """

    def prepare(self, x: Tensor) -> Tensor:
        x = super().prepare(x)
        if not bool(((x == 0) | (x == 1) | x.isnan()).all()):
            raise ValueError("a BernoulliModel takes zeros and ones; other values were given (images: x > 0)")
        return x

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        logits = self.decoder(z)
        check_shape(logits, x)
        clean = x if mask is None else torch.where(mask.to(torch.bool).expand_as(x), x, torch.zeros_like(x))
        return -visible_sum(F.binary_cross_entropy_with_logits(logits, clean, reduction="none"), mask)

    def decode(self, z: Latents) -> Tensor:
        return torch.sigmoid(self.decoder(z))


class CategoricalModel(DecoderModel):
    r"""Standard normal latents and places that hold one of several classes, such as quantised pixels or tokens.

    .. math:: \log p(x \mid z) = \sum_i \log \mathrm{softmax}(g(z)_{:, i})_{x_i} .

    The decoder gives logits of shape ``(n, classes, ...)`` for ``x`` of shape ``(n, ...)``, whose values are the
    numbers of the classes from 0 on; :meth:`decode` gives the most likely class of each place.

    Args:
        classes: how many there are.

    >>> logits = torch.nn.Linear(2, 12)
    >>> model = CategoricalModel(lambda z: logits(z[0]).view(-1, 4, 3), latent_shapes=[(2,)], classes=4)
    >>> model.log_likelihood(torch.ones(5, 3), model.sample_prior(5)).shape
    torch.Size([5])
    """

    def __init__(
        self, decoder: Callable[[Latents], Tensor], latent_shapes: Sequence[Sequence[int]], classes: int
    ) -> None:
        super().__init__(decoder, latent_shapes)
        if classes < 2:
            raise ValueError(f"classes is {classes!r}; expected two or more")
        self.classes = classes

    def prepare(self, x: Tensor) -> Tensor:
        x = super().prepare(x)
        if not bool(((x == x.round()) & (x >= 0) & (x < self.classes) | x.isnan()).all()):
            last = self.classes - 1
            raise ValueError(f"a CategoricalModel of {self.classes} classes takes whole numbers 0 to {last}")
        return x

    def log_likelihood(self, x: Tensor, z: Latents, mask: Tensor | None = None) -> Tensor:
        logits = self.decoder(z)
        expected = (len(x), self.classes, *x.shape[1:])
        if tuple(logits.shape) != expected:
            raise ValueError(f"the decoder returns shape {tuple(logits.shape)}; expected {expected}, classes second")
        clean = x if mask is None else torch.where(mask.to(torch.bool).expand_as(x), x, torch.zeros_like(x))
        return -visible_sum(F.cross_entropy(logits, clean.long(), reduction="none"), mask)

    def decode(self, z: Latents) -> Tensor:
        return self.decoder(z).argmax(1).to(self.reference)
