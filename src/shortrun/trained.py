"""What one gets from :func:`shortrun.fit` and :func:`shortrun.load`: a model that knows what it can do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shortrun.core.free_energy import Estimation
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, dimensions, flatten, has_normal_prior, shapes_of, standard_normal, unflatten
from shortrun.core.model import Inferred, NotPossibleError, fit_gaussian, infer_new, sample_from, widen
from shortrun.core.tune import TuneResult, tune_by_grid
from shortrun.processes import CHUNK, flushed_denormals, processes
from shortrun.training.history import History
from shortrun.training.model_folder import Description, RunError, read_model, write_model

By = Literal["method", "draw", "dynamics"]
"""The model's own inference (the end of a chain, or the centre of an encoder's q(z | x)); a draw from q(z | x), from an
encoder too; or short run dynamics on the decoder, whatever the method."""
WEIGHTS = 64  # samples of the importance-weighted estimate of log p(x)
SHIPPED = Path(__file__).parent / "pretrained"


class Reconstruction(NamedTuple):
    z: Latents
    images: Tensor
    divergent: Tensor
    """Which chains diverged, shape ``(n,)``."""


class Trained(nn.Module):
    """A trained model with the dynamics that was tuned for it.

    It takes examples as one holds them (8-bit images, arrays, floats in [-1, 1]) and works with and without
    ``torch.no_grad``. Randomness comes from ``seed``, or from ``rng`` where a ``torch.Generator`` is given.
    """

    def __init__(self, model: Any, description: Description, history: History | None = None) -> None:
        super().__init__()
        self.model, self.description = model, description
        self.dynamics: Langevin = description.dynamics
        self.widths: tuple[float, ...] = description.widths
        self.history = History() if history is None else history

    @property
    def method(self) -> str:
        return self.description.method

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return self.description.shape

    @property
    def network(self) -> Any:
        """Settings of the network."""
        return self.description.network

    @property
    def info(self) -> dict[str, Any]:
        """About its training: data, iterations, seconds, seed, mse .."""
        return self.description.info

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def __repr__(self) -> str:
        return (
            f"Trained({self.method}, {type(self.model).__name__}, examples of shape {self.shape}, "
            f"{self.parameter_count:,} parameters, {self.dynamics.steps} steps of s = {self.dynamics.step_size:.4g})"
        )

    def prepare(self, x: Any, what: str = "x") -> Tensor:
        """Examples as the model takes them, on the CPU; checked here, at the door."""
        x = torch.as_tensor(x)
        if tuple(x.shape[1:]) != tuple(self.shape) or not len(x):
            raise ValueError(
                f"{what} has shape {tuple(x.shape)}; the model takes (n, {', '.join(map(str, self.shape))}), with n "
                "at least one"
            )
        return self.model.prepare(x).cpu() if hasattr(self.model, "prepare") else x.float()

    # -- inference ------------------------------------------------------------------------------------

    def infer(self, x: Any, **options: Any) -> Latents:
        """Latents of ``x``, a tuple, top layer first; the arguments are those of :meth:`reconstruction`."""
        return self.reconstruction(x, decode=False, **options).z

    def reconstruct(self, x: Any, **options: Any) -> Tensor:
        """What the decoder makes of the inferred latents; the arguments are those of :meth:`reconstruction`."""
        return self.reconstruction(x, **options).images

    def reconstruction(
        self,
        x: Any,
        *,
        mask: Tensor | None = None,
        by: By = "method",
        quiet_steps: int = 0,
        decode: bool = True,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Reconstruction:
        """Infer the latents of ``x``, and decode them; the work is shared between processes.

        Args:
            mask: true where a pixel is visible; hidden pixels have no influence.
            by: how latents are inferred: see :data:`By`.
            quiet_steps: number of final noise-free steps of the dynamics: the result is near the centre of
                q(z | x) instead of a draw from it.
            decode: whether ``images`` are wanted; else they are empty.
        """
        x = self.prepare(x)
        dynamics = self.dynamics
        if quiet_steps:
            if not 0 <= quiet_steps <= dynamics.steps:
                raise ValueError(f"quiet_steps is {quiet_steps}; expected 0 to {dynamics.steps}, the steps there are")
            dynamics, by = replace(dynamics, quiet_steps=quiet_steps), "dynamics"
        masks = None if mask is None else mask.expand(len(x), *mask.shape[1:])

        def work(rows: slice, source: torch.Generator) -> list[Tensor]:
            part = None if masks is None else masks[rows].to(self.device)
            z, divergent = self._infer(x[rows].to(self.device), dynamics, part, by, source)
            images = self.decode(z) if decode else z[0][:, :0]
            return [images.cpu(), divergent.cpu(), *(layer.cpu() for layer in z)]

        images, divergent, *z = processes().in_chunks(len(x), work, _source(seed, rng))
        return Reconstruction(tuple(z), images, divergent)

    def _infer(self, x: Tensor, dynamics: Langevin, mask: Tensor | None, by: By, rng: torch.Generator) -> Inferred:
        names = {"method": "infer", "draw": "draw", "dynamics": "infer_by_dynamics"}
        if by not in names:
            raise ValueError(f"by is {by!r}; accepted: {', '.join(names)}")
        if by == "method" or not hasattr(self.model, "infer"):
            return infer_new(self.model, x, dynamics, mask=mask, rng=rng)
        return getattr(self.model, names[by])(x, dynamics, mask=mask, rng=rng)

    @torch.no_grad()
    def decode(self, z: Latents) -> Tensor:
        """What the decoder makes of latents, a few hundred at a time."""
        if not hasattr(self.model, "decode"):
            raise NotPossibleError(f"{type(self.model).__name__} has no method decode(z), so there is nothing to show")
        parts = zip(*(layer.to(self.device).split(CHUNK) for layer in z), strict=True)
        return torch.cat([self.model.decode(part) for part in parts])

    def inpaint(
        self,
        x: Any,
        mask: Tensor,
        fills: int = 4,
        *,
        keep_known: bool = True,
        by: By = "method",
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Tensor:
        """Infer from the visible pixels alone and paint the rest (paper, Sec. 5.3), several times.

        Args:
            mask: true where a pixel is visible: see :func:`shortrun.make_mask`.
            fills: how many fills of each example.
            keep_known: copy the visible pixels; else they are re-generated as well.
            by: how latents are inferred: see :data:`By`.

        Returns:
            Shape ``(fills, n, ...)``.
        """
        if fills < 1:
            raise ValueError(f"fills is {fills}; expected one or more")
        x, rng = self.prepare(x), _source(seed, rng)
        seen = mask.expand_as(x)
        visible = torch.where(seen, x, torch.zeros(()).to(x))  # what is hidden never reaches the model
        results = []
        for _ in range(fills):
            images = self.reconstruct(visible, mask=mask, by=by, rng=rng)
            results.append(torch.where(seen, x, images) if keep_known else images)
        return torch.stack(results)

    # -- samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample_latents(self, count: int, rng: torch.Generator, fitted_to: Any = None) -> Latents:
        """Latents to make samples of.

        From the prior, in the width that the latents had in training; or, if there are examples that the law is
        ``fitted_to``, from the Gaussian N(mean, covariance) of their inferred latents, all layers together. The latents
        of images need not follow their prior, above all after a short training: the brightness of SVHN may take up one
        direction with a hundred times the variance of the others, which no draw from the prior will reach.
        """
        if fitted_to is None:
            return widen(self.model.sample_prior(count, rng), self.widths)
        shapes = shapes_of(self.model)
        size = dimensions(shapes)
        if len(fitted_to) <= size:
            raise ValueError(
                f"a Gaussian over {size} latents cannot be fitted to {len(fitted_to)} images; expected more than {size}"
                ", better ten times as many"
            )
        inferred = self.reconstruction(fitted_to, decode=False, rng=rng)
        mean, factor = fit_gaussian(flatten(inferred.z)[~inferred.divergent])
        drawn = mean + standard_normal((count, size), mean, rng) @ factor.T
        return unflatten(drawn.float().to(self.device), shapes)

    def sample(self, count: int, *, seed: int = 0, rng: torch.Generator | None = None, fitted_to: Any = None) -> Tensor:
        """Examples drawn from the model, shared between processes; latents as in :meth:`sample_latents`."""
        if count < 1:
            raise ValueError(f"{count} samples were asked for; expected one or more")
        rng = _source(seed, rng)
        if fitted_to is not None:
            return self.decode(self.sample_latents(count, rng, fitted_to)).cpu()

        def work(rows: slice, source: torch.Generator) -> list[Tensor]:
            return [sample_from(self.model, rows.stop - rows.start, source, self.widths).cpu()]

        return processes().in_chunks(count, work, rng)[0]

    def traverse(
        self,
        z: Latents,
        layer: int,
        count: int = 9,
        *,
        amount: float | None = None,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Tensor:
        """Examples as one layer changes while the others stay; shape ``(count, n, ...)``.

        The layer is freshly drawn, as for a sample; or, with ``amount``, moved along one random direction from
        ``-amount`` to ``+amount``.
        """
        if not 0 <= layer < len(z):
            raise ValueError(f"layer is {layer}; the model has {len(z)}, counted from 0 at the top")
        rng = _source(seed, rng)
        images = []
        direction = torch.randn(z[layer].shape[1:], generator=rng)
        direction = direction / direction.norm()
        for i in range(count):
            changed = list(z)
            if amount is None:
                changed[layer] = self.sample_latents(len(z[layer]), rng)[layer].to(z[layer])
            else:
                position = amount * (2 * i / max(count - 1, 1) - 1)
                changed[layer] = z[layer] + position * direction.to(z[layer])
            images.append(self.decode(tuple(changed)))
        return torch.stack(images)

    def interpolate(self, first: Latents, last: Latents, count: int = 10) -> Tensor:
        """Examples along the arc between latents, shape ``(count, n, ...)``; the norm changes evenly, not the chord."""
        images = []
        for t in torch.linspace(0, 1, count).tolist():
            between = []
            for a, b in zip(first, last, strict=True):
                flat_a, flat_b = a.flatten(1), b.flatten(1)
                cosine = torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=1).clamp(-0.999, 0.999)
                angle = torch.arccos(cosine)[:, None]
                mixed = (torch.sin((1 - t) * angle) * flat_a + torch.sin(t * angle) * flat_b) / torch.sin(angle)
                between.append(mixed.view_as(a))
            images.append(self.decode(tuple(between)))
        return torch.stack(images)

    # -- numbers --------------------------------------------------------------------------------------

    def tune(
        self,
        x: Any,
        step_sizes: Iterable[float] | None = None,
        how: Estimation | None = None,
        *,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> TuneResult:
        """The free energy over step sizes: see :func:`shortrun.tune_by_grid`.

        By default with four chains per example and the curvature at their ends, where the prior allows it.
        """
        if getattr(self.model, "no_dynamics", None) is not None:
            raise NotPossibleError(self.model.no_dynamics)
        x = self.prepare(x).to(self.device)
        if how is None:
            how = Estimation(estimator="endpoint" if has_normal_prior(self.model) else "auto", chains=4)
        with flushed_denormals():
            return tune_by_grid(self.model, x, self.dynamics, step_sizes, how, rng=_source(seed, rng))

    def log_likelihood(
        self, x: Any, *, stages: int = 200, seed: int = 0, rng: torch.Generator | None = None
    ) -> dict[str, Any]:
        """What is known of log p(x): means over the examples, each with its standard error over them.

        * ``lower_bound``: the ELBO of an encoder, or the density itself for Glow. Methods by chains have none.
        * ``importance_weighted``: for methods with an encoder; it lies between the ELBO and log p(x).
        * ``annealed``: annealed importance sampling in so many stages, for all that have latents; for chains and codes
          it is the likelihood. It, too, is a lower bound in expectation, which more stages make tighter.

        Nats per example, for images the density in [-1, 1], and bits per dimension: of 8-bit images, or of what is
        discrete itself.
        """
        from shortrun.metrics.likelihood import annealed_importance, bits_per_dimension, importance_weighted

        x, rng = self.prepare(x).to(self.device), _source(seed, rng)
        found: dict[str, Any] = {"likelihood_images": len(x)}

        def note(name: str, values: Tensor) -> None:
            values, count = values.double(), x[0].numel()
            density = hasattr(self.model, "sigma")  # else a probability, of what is discrete itself
            bits = bits_per_dimension(values, count) if density else -values / count / math.log(2)
            for key, each in ((name, values), (f"{name}_bits", bits)):
                found[key] = float(each.mean())
                if len(x) > 1:
                    found[f"{key}_error"] = float(each.std() / math.sqrt(len(x)))

        with contextlib.suppress(NotPossibleError):
            if hasattr(self.model, "lower_bound"):
                note("lower_bound", self.model.lower_bound(x, rng))
        if hasattr(self.model, "encode"):
            note("importance_weighted", importance_weighted(self.model, x, self.model.encode, rng, WEIGHTS))
            found["importance_weights"] = WEIGHTS
        if stages and hasattr(self.model, "log_prior"):
            with flushed_denormals():
                note("annealed", annealed_importance(self.model, x, rng, stages))
        return found

    def score(
        self,
        reference: Tensor,
        samples: int,
        *,
        seed: int = 0,
        rng: torch.Generator | None = None,
        network: Any = None,
        quiet: bool = False,
        fitted_to: Any = None,
    ) -> dict[str, Any]:
        """FID and KID of ``samples`` drawn from the model (as :meth:`sample` does) against 8-bit reference images."""
        from shortrun import metrics

        network = network or metrics.inception(device=self.device)
        drawn = metrics.to_bytes(self.sample(samples, seed=seed, rng=rng, fitted_to=fitted_to))
        return metrics.compare_sets(reference, drawn, network, quiet)

    # -- files ----------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, which :func:`shortrun.load` reads; and never over a run."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - MODEL_FILES):
            raise RunError(f"{folder} holds other things than a saved model; name another folder")
        write_model(folder, self.model, replace(self.description, dynamics=self.dynamics, widths=self.widths))

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Publish the model with a card: see :func:`shortrun.hub.push_to_hub`."""
        from shortrun.hub import push_to_hub

        return push_to_hub(self, name, **options)

    @classmethod
    def from_pretrained(cls, name: str | Path, decoder: Any = None, model: Any = None) -> Trained:
        """:func:`load` under the name that users of model hubs look for."""
        return load(name, decoder, model)


MODEL_FILES = {"model.safetensors", "config.json", "README.md", "samples.png", "reconstructions.png"}


def _source(seed: int, rng: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(seed) if rng is None else rng


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED.iterdir() if p.is_dir()) if SHIPPED.is_dir() else []


def load(name: str | Path, decoder: Any = None, model: Any = None) -> Trained:
    """Load a model: the name of a shipped one, a run folder, a folder with a saved model, or a hub name.

    Only networks of this package are built; nothing is imported or run because a file says so.

    Args:
        decoder: where the model was trained around a decoder of one's own: an equal one, whose weights are replaced.
        model: where the model itself was one's own, with a likelihood that is not of this package.

    >>> load("mnist-small").shape
    (1, 28, 28)
    """
    path = Path(name).expanduser()
    for folder in (path / "model", path, SHIPPED / str(name)):
        if (folder / "config.json").is_file():
            return Trained(*read_model(folder, decoder, model))
    if path.exists():
        raise RunError(f"{path} holds no model: expected config.json and model.safetensors there or in model/")
    if str(name).count("/") == 1 and not str(name).startswith((".", "/")):
        from shortrun.hub import download

        return Trained(*read_model(download(str(name)), decoder, model))
    raise RunError(
        f"{name} is neither a run folder, nor a saved model, nor a shipped one ({', '.join(shipped_models())})"
    )
