"""What a trained model is for: sample, reconstruct, inpaint, traverse, interpolate, tune, evaluate.

Each function takes a :class:`shortrun.runs.Pretrained` model and images in [-1, 1], and returns tensors; the
command line writes them as pictures and JSON.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shortrun import metrics
from shortrun.data import Images
from shortrun.entropy import Entropy, Estimator
from shortrun.learners.base import Inferred, NotPossibleError
from shortrun.likelihood import annealed_importance, bits_per_dimension, importance_weighted
from shortrun.model import Latents, fit_gaussian, standard_normal
from shortrun.parallel import CHUNK, in_chunks
from shortrun.runs import Pretrained
from shortrun.tune import TuneResult, tune_by_grid

By = Literal["method", "draw", "dynamics"]
WEIGHTS = 64  # samples of the importance-weighted estimate of log p(x)


@torch.no_grad()
def decode(trained: Pretrained, z: Latents) -> Tensor:
    """Images of latents, a few hundred at a time."""
    parts = zip(*(layer.split(CHUNK) for layer in z), strict=True)
    return torch.cat([trained.model.decoder(part) for part in parts])


def sample(trained: Pretrained, count: int, generator: torch.Generator, fitted_to: Tensor | None = None) -> Tensor:
    """Images drawn from the model, shared between processes.

    Latents come from the prior in the widths of training; or from the Gaussian of :func:`fitted_latents`, if there are
    images that it is ``fitted_to``.
    """
    if fitted_to is not None:
        return decode(trained, fitted_latents(trained, fitted_to, count, generator)).cpu()

    def work(rows: slice, source: torch.Generator) -> list[Tensor]:
        return [trained.method.sample(trained.model, rows.stop - rows.start, source, trained.spread).cpu()]

    return in_chunks(count, work, generator)[0]


class Reconstruction(NamedTuple):
    z: Latents
    images: Tensor
    divergent: Tensor
    """Which chains diverged."""


def reconstruct(
    trained: Pretrained,
    x: Tensor,
    generator: torch.Generator,
    mask: Tensor | None = None,
    by: By = "method",
    quiet_steps: int = 0,
) -> Reconstruction:
    """Infer the latents of ``x``, and decode them; shared between processes.

    ``by="method"`` is the method's own inference: the end of a chain, or the centre of an encoder's q(z | x);
    ``by="draw"`` is a draw from q(z | x) there too; ``by="dynamics"`` is short run dynamics on the decoder, whatever
    the method. If so many of the last steps of the dynamics are to be ``quiet_steps``, without noise, the result is
    near the centre of q(z | x) instead of a draw from it.
    """
    infer: Callable[..., Inferred] = trained.method.draw if by == "draw" else trained.method.infer
    if by == "dynamics" or quiet_steps:
        if not 0 <= quiet_steps <= trained.dynamics.steps:
            raise ValueError(
                f"quiet_steps is {quiet_steps}; expected 0 to {trained.dynamics.steps}, the steps there are"
            )
        infer = functools.partial(trained.method.infer_by_dynamics, quiet_steps=quiet_steps)
    masks = None if mask is None else mask.expand(len(x), *mask.shape[1:])

    def work(rows: slice, source: torch.Generator) -> list[Tensor]:
        part = None if masks is None else masks[rows].to(trained.device)
        z, divergent = infer(trained.model, x[rows].to(trained.device), trained.dynamics, part, source)
        return [decode(trained, z).cpu(), divergent.cpu(), *(layer.cpu() for layer in z)]

    images, divergent, *z = in_chunks(len(x), work, generator)
    return Reconstruction(tuple(z), images, divergent)


def fitted_latents(trained: Pretrained, x: Tensor, count: int, generator: torch.Generator) -> Latents:
    """Latents drawn from the Gaussian ``N(mean, covariance)`` of the inferred latents of ``x``, all layers together.

    The latents of images need not follow their prior, above all after a short training: the brightness of SVHN may
    take up one direction with a hundred times the variance of the others, which no draw from the prior will reach.
    """
    shapes = trained.model.latent_shapes
    sizes = [math.prod(shape) for shape in shapes]
    size = sum(sizes)
    if len(x) <= size:
        raise ValueError(
            f"a Gaussian over {size} latents cannot be fitted to {len(x)} images; expected more than {size}, better "
            "ten times as many"
        )
    inferred = reconstruct(trained, x, generator)
    z = torch.cat([layer.flatten(1) for layer in inferred.z], 1)
    mean, factor = fit_gaussian(z[~inferred.divergent])
    drawn = mean + standard_normal((count, size), mean, generator) @ factor.T
    parts = drawn.float().to(trained.device).split(sizes, 1)
    return tuple(part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True))


def mse_per_image(images: Tensor, x: Tensor) -> Tensor:
    """Mean square error per pixel, images in [-1, 1]; shape ``(n,)``."""
    return (images - x).square().flatten(1).mean(1)


def mean_image_error(seen: Images, x: Tensor, mask: Tensor) -> float:
    """Error on the hidden pixels if they are filled with the mean of the training images: what inpainting must beat."""
    return float((seen.mean_image - x).square()[~mask.expand_as(x)].mean())


class Inpainting(NamedTuple):
    fills: Tensor
    """Shape ``(fills, n, colours, height, width)``."""
    hidden_mse: float
    """Error of the mean over fills on the hidden pixels."""
    hidden_mse_single: float
    """Error of a single fill on the hidden pixels."""


def inpaint(
    trained: Pretrained,
    x: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    fills: int = 4,
    keep_known: bool = True,
    by: By = "method",
) -> Inpainting:
    """Infer from the visible pixels alone and paint the rest (paper, Sec. 5.3), several times; ``by`` as above.

    ``keep_known`` copies the visible pixels; else they are re-generated as well.
    """
    seen = mask.expand_as(x)
    hidden = torch.where(seen, torch.zeros(()), x)  # what is hidden never reaches the model
    visible = x - hidden
    results = []
    for _ in range(fills):
        images = reconstruct(trained, visible, generator, mask, by).images
        results.append(torch.where(seen, x, images) if keep_known else images)
    stacked = torch.stack(results)
    squares = (stacked - x).square()[:, ~seen]
    mean_square = (stacked.mean(0) - x).square()[~seen]
    return Inpainting(stacked, float(mean_square.mean()), float(squares.mean()))


def traverse(
    trained: Pretrained,
    z: Latents,
    layer: int,
    count: int,
    generator: torch.Generator,
    amount: float | None = None,
) -> Tensor:
    """Images as one layer changes while the others stay; shape ``(count, n, ...)``.

    The layer is drawn anew, as for a sample; or, with ``amount``, moved along one random direction from
    ``-amount`` to ``+amount``.
    """
    if not 0 <= layer < len(z):
        raise ValueError(f"layer is {layer}; the model has {len(z)}, counted from 0 at the top")
    images = []
    direction = torch.randn(z[layer].shape[1:], generator=generator)
    direction = direction / direction.norm()
    for i in range(count):
        changed = list(z)
        if amount is None:
            changed[layer] = trained.sample_latents(len(z[layer]), generator)[layer].to(z[layer])
        else:
            position = amount * (2 * i / max(count - 1, 1) - 1)
            changed[layer] = z[layer] + position * direction
        images.append(decode(trained, tuple(changed)))
    return torch.stack(images)


def interpolate(trained: Pretrained, first: Latents, last: Latents, count: int) -> Tensor:
    """Images along the arc between latents, shape ``(count, n, ...)``; the norm changes evenly, not the chord."""
    images = []
    for t in torch.linspace(0, 1, count).tolist():
        between = []
        for a, b in zip(first, last, strict=True):
            flat_a, flat_b = a.flatten(1), b.flatten(1)
            cosine = torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=1).clamp(-0.999, 0.999)
            angle = torch.arccos(cosine)[:, None]
            mixed = (torch.sin((1 - t) * angle) * flat_a + torch.sin(t * angle) * flat_b) / torch.sin(angle)
            between.append(mixed.view_as(a))
        images.append(decode(trained, tuple(between)))
    return torch.stack(images)


def tune(
    trained: Pretrained,
    x: Tensor,
    generator: torch.Generator,
    step_sizes: Sequence[Any] | None = None,
    *,
    entropy: Entropy = "marginal",
    estimator: Estimator = "endpoint",
    samples: int = 4,
) -> TuneResult:
    """The free-energy curve of a trained model over step sizes, from ``samples`` chains per image."""
    if trained.method.no_dynamics is not None:
        raise NotPossibleError(trained.method.no_dynamics)
    return tune_by_grid(
        trained.model, x.to(trained.device), trained.dynamics, step_sizes, entropy=entropy, estimator=estimator,
        samples=samples, generator=generator,
    )  # fmt: skip


def log_likelihood(trained: Pretrained, x: Tensor, generator: torch.Generator, stages: int = 200) -> dict[str, Any]:
    """What is known of log p(x): means over the images, each with its standard error over them.

    * ``lower_bound``: the ELBO of an encoder, or the density itself for Glow. Methods by chains have none.
    * ``importance_weighted``: for methods with an encoder; it lies between the ELBO and log p(x).
    * ``annealed``: annealed importance sampling in so many stages, for all that have latents; for chains and codes it
      is the likelihood. It, too, is a lower bound in expectation, which more stages make tighter.

    Nats per image for the density of images in [-1, 1], and bits per dimension of 8-bit images.
    """
    x = x.to(trained.device)
    dimensions = x[0].numel()
    found: dict[str, Any] = {"likelihood_images": len(x)}

    def note(name: str, values: Tensor) -> None:
        for key, each in ((name, values.double()), (f"{name}_bits", bits_per_dimension(values.double(), dimensions))):
            found[key] = float(each.mean())
            if len(x) > 1:
                found[f"{key}_error"] = float(each.std() / math.sqrt(len(x)))

    with contextlib.suppress(NotPossibleError):
        note("lower_bound", trained.method.lower_bound(trained.model, x, trained.dynamics, generator))
    if hasattr(trained.model, "encode"):
        note("importance_weighted", importance_weighted(trained.model, x, trained.model.encode, generator, WEIGHTS))
        found["importance_weights"] = WEIGHTS
    if stages and hasattr(trained.model, "log_prior"):
        note("annealed", annealed_importance(trained.model, x, generator, stages))
    return found


def score(
    trained: Pretrained,
    reference: Tensor,
    samples: int,
    generator: torch.Generator,
    network: metrics.FeatureNetwork | None = None,
    quiet: bool = False,
    fitted_to: Tensor | None = None,
) -> dict[str, Any]:
    """FID and KID of ``samples`` drawn from the model (as :func:`sample` does) against 8-bit reference images."""
    network = network or metrics.inception(device=trained.device)
    drawn = metrics.to_bytes(sample(trained, samples, generator, fitted_to))
    return metrics.compare_sets(reference, drawn, network, quiet)
