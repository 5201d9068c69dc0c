"""What one gets from :func:`shortrun.fit` and :func:`shortrun.load`: a model that knows what it can do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from shortrun.core.inference import Inferred, infer_and_mend
from shortrun.core.langevin import Langevin
from shortrun.core.latents import Latents, between, check_shapes, shapes_of
from shortrun.core.model import NotPossibleError, evaluating, infer_new, sample_from
from shortrun.loading import find_model
from shortrun.measured import By as By
from shortrun.measured import Law, random_source
from shortrun.priors import Prior, PriorKind, Report, WithPrior, infer_and_fit
from shortrun.processes import CHUNK, processes
from shortrun.restoring import Restoring
from shortrun.training.history import History
from shortrun.training.model_folder import Description, check_folder, read_model, write_model

FAR_OUT = 10.0
"""Values beyond it are grey levels from 0 to 255, not images in [-1, 1]."""


class Reconstruction(NamedTuple):
    z: Latents
    images: Tensor
    divergent: Tensor
    """Which chains diverged, shape ``(n,)``."""
    mended: Tensor
    """Which had got lost and end where a later try did, shape ``(n,)``."""


class Trained(Restoring):
    """A trained model with the dynamics that was tuned for it.

    It takes examples as one holds them (8-bit images, arrays, floats in [-1, 1]) and works with and without
    ``torch.no_grad``. Randomness comes from ``seed``, or from ``rng`` where a ``torch.Generator`` is given.
    """

    def __init__(
        self, model: Any, description: Description, prior: Prior | None = None, history: History | None = None
    ) -> None:
        super().__init__()
        self.model, self.description = model, description
        self.prior = prior
        """The learned law of the latents; None for that of the model itself, mostly N(0, I)."""
        self.dynamics: Langevin = description.dynamics
        self.history = History() if history is None else history
        self.folder: Path | None = None
        """Where it was loaded from."""

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
    def joint(self) -> Any:
        """The model with its learned prior, if it has one: what p(x) is."""
        return self.model if self.prior is None else WithPrior(self.model, self.prior)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def __repr__(self) -> str:
        return (
            f"Trained({self.method}, {type(self.model).__name__}, examples of shape {self.shape}, "
            f"{self.parameter_count:,} parameters, {self.dynamics.steps} steps of s = {self.dynamics.step_size:.4g}, "
            f"prior {'normal' if self.prior is None else self.prior.kind})"
        )

    def prepare(self, x: Any, what: str = "x") -> Tensor:
        """Examples as the model takes them, on the CPU; checked here, at the door."""
        x = torch.as_tensor(x)
        images = self.description.own_decoder is None and x.is_floating_point()  # networks of this package end in tanh
        if images and x.numel() and float(x.nan_to_num().abs().max()) > FAR_OUT:
            raise ValueError(f"{what} has values up to {float(x.abs().max()):g}; the model takes images in [-1, 1]")
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
        with_prior: bool = False,
        start: Latents | None = None,
        steps: int | None = None,
        quiet_steps: int = 0,
        decode: bool = True,
        seed: int = 0,
        rng: torch.Generator | None = None,
    ) -> Reconstruction:
        """Infer the latents of ``x``, and decode them; the work is shared between processes.

        Args:
            mask: true where a pixel is visible; hidden pixels have no influence.
            by: how latents are inferred: see :data:`By`.
            with_prior: let chains start from the learned prior and drift with it; else with that of training, N(0, I).
            start: latents that chains start from, instead of draws from the prior.
            steps: of the chains, instead of as many as in training.
            quiet_steps: number of final noise-free steps of the dynamics: the result is near the centre of
                q(z | x) instead of a draw from it.
            decode: whether ``images`` are wanted; else they are empty.
        """
        x = self.prepare(x)
        dynamics = self.dynamics
        if steps is not None:
            if steps < 1:
                raise ValueError(f"steps is {steps}; expected one or more")
            dynamics = dynamics.longer(steps)
        if quiet_steps:
            if not 0 <= quiet_steps <= dynamics.steps:
                raise ValueError(f"quiet_steps is {quiet_steps}; expected 0 to {dynamics.steps}, the steps there are")
            dynamics, by = replace(dynamics, quiet_steps=quiet_steps), "dynamics"
        if by == "centre":
            dynamics, by = dynamics.towards_centre(), "method"
        model = self.model
        if start is not None or (with_prior and self.prior is not None):
            self._check_dynamics()
            model, by = self.joint if with_prior else self.model, "dynamics"
        masks = None if mask is None else mask.expand(len(x), *mask.shape[1:])

        def work(rows: slice, source: torch.Generator) -> list[Tensor]:
            part = None if masks is None else masks[rows].to(self.device)
            begin = None if start is None else tuple(layer[rows].to(self.device) for layer in start)
            z, *lost = _infer(model, x[rows].to(self.device), dynamics, part, by, source, begin)
            images = self.decode(z) if decode else z[0][:, :0]
            return [images.cpu(), *(which.cpu() for which in lost), *(layer.cpu() for layer in z)]

        images, divergent, mended, *z = processes().in_chunks(len(x), work, random_source(seed, rng))
        return Reconstruction(tuple(z), images, divergent, mended)

    @torch.no_grad()
    def decode(self, z: Latents) -> Tensor:
        """What the decoder makes of latents, a few hundred at a time."""
        if not hasattr(self.model, "decode"):
            raise NotPossibleError(f"{type(self.model).__name__} has no method decode(z), so there is nothing to show")
        check_shapes(z, shapes_of(self.model))
        parts = zip(*(layer.to(self.device).split(CHUNK) for layer in z), strict=True)
        return torch.cat([self.model.decode(part) for part in parts])

    # -- samples --------------------------------------------------------------------------------------

    def fit_prior(
        self,
        x: Any,
        kind: PriorKind = "mixture",
        *,
        mask: Tensor | None = None,
        seed: int = 0,
        report: Report = lambda share, text: None,
    ) -> Prior | None:
        """Learn the law of the latents from examples of training, for :meth:`sample` and all that draws from the model.

        Training leaves latents that do not follow N(0, I): on SVHN brightness takes up one direction with a hundred
        times the variance of the others, on digits there are clusters. The latents of ``x`` are draws from q(z | x);
        those of chains that diverged do not count.

        Args:
            kind: see :func:`shortrun.priors.fit_prior`; normal goes back to the prior of training.
            mask: true where a pixel is visible, if training did not see all.
            report: told of the progress.
        """
        if kind == "normal":
            self.prior = None
            return None
        if not hasattr(self.model, "log_prior"):
            raise NotPossibleError(f"{self.method} has no latents whose law could be learned")
        masks = None if mask is None else mask.expand(len(x), *mask.shape[1:])
        rng = torch.Generator().manual_seed(seed)

        def latents(rows: slice) -> Inferred:
            seen = None if masks is None else masks[rows]
            found = self.reconstruction(x[rows], mask=seen, by="draw", decode=False, rng=rng)
            return Inferred(found.z, found.divergent, found.mended)

        self.prior = infer_and_fit(latents, len(x), kind, seed, report).to(self.device)
        return self.prior

    @torch.no_grad()
    def sample_latents(self, count: int, rng: torch.Generator, prior: Law = "learned") -> Latents:
        """Latents to make samples of: from the learned prior, if there is one, or from that of training."""
        return self._drawn_from(prior).sample_prior(count, rng)

    def _drawn_from(self, prior: Law) -> Any:
        if prior not in get_args(Law):
            raise ValueError(f"prior is {prior!r}; accepted: {', '.join(get_args(Law))}")
        return self.joint if prior == "learned" else self.model

    def sample(
        self, count: int, *, prior: Law = "learned", seed: int = 0, rng: torch.Generator | None = None
    ) -> Tensor:
        """Examples drawn from the model, shared between processes; latents as in :meth:`sample_latents`."""
        if count < 1:
            raise ValueError(f"{count} samples were asked for; expected one or more")
        model = self._drawn_from(prior)

        def work(rows: slice, source: torch.Generator) -> list[Tensor]:
            return [sample_from(model, rows.stop - rows.start, source).cpu()]

        return processes().in_chunks(count, work, random_source(seed, rng))[0]

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
        check_shapes(z, shapes_of(self.model))
        if count < 1 or not (amount is None or 0 < amount < math.inf):
            raise ValueError(f"count is {count} and amount {amount}; expected one or more, and a positive number")
        if not 0 <= layer < len(z):
            raise ValueError(f"layer is {layer}; the model has {len(z)}, counted from 0 at the top")
        rng = random_source(seed, rng)
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
        for name, z in (("first", first), ("last", last)):
            check_shapes(z, shapes_of(self.model), name)
        if count < 1:
            raise ValueError(f"count is {count}; expected one or more")
        shares, pairs = torch.linspace(0, 1, count).tolist(), list(zip(first, last, strict=True))
        return torch.stack([self.decode(tuple(between(a, b, share) for a, b in pairs)) for share in shares])

    # -- files ----------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the model with its prior, for :func:`shortrun.load` to read; and never over a run."""
        check_folder(Path(folder))
        write_model(Path(folder), self.model, replace(self.description, dynamics=self.dynamics), self.prior)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Publish the model with a card: see :func:`shortrun.hub.push_to_hub`."""
        from shortrun.hub import push_to_hub

        return push_to_hub(self, name, **options)

    @classmethod
    def from_pretrained(cls, name: str | Path, decoder: Any = None, model: Any = None) -> Trained:
        """:func:`load` under the name that users of model hubs look for."""
        return load(name, decoder, model)


def _infer(
    model: Any,
    x: Tensor,
    dynamics: Langevin,
    mask: Tensor | None,
    by: By,
    rng: torch.Generator,
    start: Latents | None = None,
) -> Inferred:
    if start is not None:
        with evaluating(model):
            return infer_and_mend(model, x, dynamics, mask=mask, start=start, rng=rng)
    names = {"method": "infer", "draw": "draw", "dynamics": "infer_by_dynamics"}
    if by not in names:
        raise ValueError(f"by is {by!r}; accepted: {', '.join(get_args(By))}")
    if by == "method" or not hasattr(model, "infer"):
        return infer_new(model, x, dynamics, mask=mask, rng=rng)
    return getattr(model, names[by])(x, dynamics, mask=mask, rng=rng)


def load(name: str | Path, decoder: Any = None, model: Any = None, allow_large: bool = False) -> Trained:
    """Load a model: the name of a shipped one, a run folder, a folder with a saved model, or a hub name.

    Only networks of this package are built; nothing is imported or run because a file says so.

    Args:
        decoder: where the model was trained around a decoder of one's own: an equal one, whose weights are replaced.
        model: where the model itself was one's own, with a likelihood that is not of this package.
        allow_large: load a model whose chains are longer than the limit of :mod:`shortrun.limits`.

    >>> load("mnist-small").shape
    (1, 28, 28)
    """
    folder = find_model(name)
    trained = Trained(*read_model(folder, decoder, model, allow_large))
    trained.folder = folder
    return trained
