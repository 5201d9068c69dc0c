"""Commands that draw from a model: samples, the law they come from, how good they are, what each layer changes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shortrun.cli.use import Use
from shortrun.data import Split
from shortrun.loading import SHIPPED
from shortrun.masks import make_mask
from shortrun.measured import Law
from shortrun.priors import PriorKind
from shortrun.progress import Progress
from shortrun.training.model_folder import PRIOR, check_folder, write_prior


@dataclass
class Sample(Use):
    """Draw images from the model.

    Example: shortrun sample mnist-small --images 64 --out pictures

    As in the paper, from N(0, I): shortrun sample mnist-small --prior normal --out pictures
    """

    images: int = 64
    """Number of samples."""
    prior: Law = "learned"
    """learned: from the prior that was fitted to the latents of training images, if there is one; normal: from that of
    training, N(0, I)."""

    def __call__(self) -> None:
        trained, rng = self.open()
        images = trained.sample(self.images, prior=self.prior, rng=rng)
        print(self.draw("samples.png", [("", row) for row in images.split(10)]))


@dataclass
class Prior(Use):
    """Learn the law of the latents of a trained model, for its samples, and save it with the model.

    Example: shortrun prior runs/svhn --kind mixture --out pictures

    Of a shipped model: shortrun prior mnist-small --data mnist --save models/mine --out pictures
    """

    kind: PriorKind = "mixture"
    """gaussian: full covariance; mixture: of Gaussians, as many as held-out latents ask for; flow: neural splines;
    energy: a network that tilts the Gaussian, learned by chains; normal: N(0, I), which removes what was learned."""
    images: int = 10_000
    """Number of training images whose latents are inferred (at most all there are)."""
    save: Path | None = None
    """Folder for the model with its new prior; by default where it is."""

    def __call__(self) -> None:
        from shortrun.pictures import sample_rows

        trained, rng = self.open()
        folder = trained.folder if self.save is None else self.save
        if self.images < 1:
            raise ValueError(f"images is {self.images}; expected one or more")
        if self.save is None and (folder is None or folder.parent == SHIPPED):
            raise ValueError(f"{self.run} is a shipped model, which stays as it is; name a folder with --save")
        if self.save is not None:
            check_folder(self.save)  # before the long work
        seen = self.load_set(trained, "train")
        x = seen.batch(seen.some(self.images))
        mask = trained.info.get("mask")
        with Progress(what="prior") as progress:
            prior = trained.fit_prior(
                x, self.kind, mask=None if mask is None else make_mask(mask, x, rng), seed=self.seed,
                report=progress.show,
            )  # fmt: skip
        if self.save is not None:
            trained.save(self.save)
        elif prior is not None:
            assert folder is not None
            prior.info["iterations"] = trained.info.get("iterations")
            write_prior(folder, prior)
        else:
            assert folder is not None
            (folder / PRIOR).unlink(missing_ok=True)
        self.draw("prior.png", sample_rows(trained, 30, self.seed))
        self.write("prior", {"kind": self.kind, "seed": self.seed, **({} if prior is None else prior.info)})


@dataclass
class Fid(Use):
    """FID and KID of samples; where a prior was learned, of samples from N(0, I) as well.

    Example: shortrun fid mnist-small --data mnist --samples 2000 --out results

    As the authors' script does, 40,000 samples against all training images: shortrun fid RUN --protocol paper --out DIR
    """

    samples: int = 2000
    """Number of samples, and of reference images (at most all there are)."""
    protocol: Literal["n", "paper"] = "n"
    """paper: 40,000 samples against all training images."""
    reference: Split = "train"
    """Which images the samples are compared with."""

    def __call__(self) -> None:
        from shortrun import metrics

        trained, rng = self.open()
        network = metrics.inception(device=trained.device)
        paper = self.protocol == "paper"
        samples = metrics.PAPER_SAMPLES if paper else self.samples
        if samples < 2:
            raise ValueError(f"samples is {samples}; expected two or more")
        known = self.load_set(trained, "train" if paper else self.reference)
        reference = known.array if paper else known.part(samples)
        begun = time.perf_counter()
        values = trained.score(reference, samples, rng=rng, network=network)
        facts = {
            "reference": f"{known.name} ({known.split})",
            "reference_checksum": known.checksum,
            "protocol": self.protocol,
            "prior": "normal" if trained.prior is None else trained.prior.kind,
            "seed": self.seed,
            "seconds": round(time.perf_counter() - begun, 1),
        }
        self.write("fid", values | facts)


@dataclass
class Traverse(Use):
    """Change one layer of latents at a time while the others stay fixed.

    Example: shortrun traverse mnist-small --out pictures
    """

    images: int = 4
    layer: int | None = None
    """Layer to change, 0 at the top; by default each in turn."""
    amount: float | None = None
    """Move along a random direction from -amount to +amount instead of drawing the layer at random."""

    def __call__(self) -> None:
        trained, rng = self.open()
        if self.amount is not None and not 0 < self.amount < math.inf:
            raise ValueError(f"amount is {self.amount}; expected a positive number")
        x = self.held_out(trained)
        z = trained.infer(x, rng=rng)
        for layer in range(len(z)) if self.layer is None else [self.layer]:
            images = trained.traverse(z, layer, 10, amount=self.amount, rng=rng)
            title = f"only z_{len(z) - layer} changes" + (" (top layer)" if layer == 0 else "")
            rows = [(f"image {i + 1}", images[:, i]) for i in range(len(x))]
            print(self.draw(f"traverse_layer_{len(z) - layer}.png", rows, title))


@dataclass
class Interpolate(Use):
    """Walk through the latents from one held-out image to another.

    Example: shortrun interpolate mnist-small --out pictures
    """

    def __call__(self) -> None:
        trained, rng = self.open()
        if self.images < 2:
            raise ValueError(f"images is {self.images}; expected two or more, to walk from one to another")
        z = trained.infer(self.held_out(trained), rng=rng)
        count = len(z[0]) // 2
        first, last = tuple(layer[0 : 2 * count : 2] for layer in z), tuple(layer[1::2] for layer in z)
        images = trained.interpolate(first, last, 10)
        print(self.draw("interpolation.png", [("", images[:, i]) for i in range(count)]))
