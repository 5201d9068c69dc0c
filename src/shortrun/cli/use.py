"""What trained models are used for: each command loads one, does one thing with held-out images and writes files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from shortrun.cli.decoder import import_decoder
from shortrun.core.free_energy import Entropy, Estimation, Estimator
from shortrun.data import Crop, DataSettings, Images, Split
from shortrun.files import check_writable, write_json
from shortrun.masks import make_mask
from shortrun.metrics.errors import hidden_errors, mean_image_error, mse_per_image
from shortrun.own_data import data_name, data_settings, images_for
from shortrun.processes import processes
from shortrun.trained import By, Trained, load


@dataclass
class Use:
    """What every task takes."""

    run: Positional[str]
    """A run folder, a saved model, or the name of a shipped one."""
    out: Path
    """Folder for pictures and numbers."""
    data: str | None = None
    """Images to use, by name; by default those that the model was trained on."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""
    images: int = 10
    """Number of held-out images: the first ones."""
    seed: int = 0
    """Seed of everything random."""
    decoder: str | None = None
    """Your own generator, package.module:Class, for models that were trained with it: nothing is imported because a
    file names it."""
    allow_large: bool = False
    """Read files and models beyond the usual limits of bytes, pixels and steps."""

    def open(self) -> tuple[Trained, torch.Generator]:
        check_writable(self.out)  # before the long work
        decoder = None if self.decoder is None else import_decoder(self.decoder)
        trained = load(self.run, decoder=decoder, allow_large=self.allow_large)
        return trained.to(processes().device), torch.Generator().manual_seed(self.seed)

    def load_set(self, trained: Trained, split: Split) -> Images:
        return images_for(trained, data_settings(trained, self.data, self.data_root, self.allow_large), split)

    def held_out(self, trained: Trained) -> torch.Tensor:
        """The first held-out images."""
        if self.images < 1:
            raise ValueError(f"images is {self.images}; expected one or more")
        images = self.load_set(trained, "test")
        return images.batch(slice(0, min(self.images, len(images))))

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Into a JSON file, and on the screen."""
        path = self.out / f"{name}.json"
        write_json(path, values)
        print(path.read_text(), end="")

    def draw(self, name: str, rows: list[tuple[str, torch.Tensor]], title: str = "") -> Path:
        """Rows of images as a picture."""
        from shortrun.pictures import save_grid

        save_grid(self.out / name, rows, title)
        return self.out / name


@dataclass
class Evaluate(Use):
    """Held-out reconstruction error (MSE per pixel, images in [-1, 1], same K and step size as in training).

    Example: shortrun evaluate mnist-small --data mnist --images 10000 --out results
    """

    images: int = 10_000
    likelihood_images: int = 0
    """Number of images whose log p(x) is estimated as well, by annealed importance sampling; for encoders also the ELBO
    and the importance-weighted estimate, for glow the density itself. Each has its standard error over the images."""
    stages: int = 200
    """Stages of annealed importance sampling; 0 leaves it out."""
    by: By = "method"
    """The method's own inference (an encoder's centre, where there is one), a draw from its q(z | x), its centre (from
    chains too: their steps then take no noise), or short run dynamics on the decoder."""
    infer_with_prior: bool = False
    """Let chains start from the learned prior and drift with it; else with N(0, I), as in training."""
    quiet_steps: int = 0
    """Number of final noise-free steps: the result is near the centre of q(z | x) instead of a draw from it."""

    def __call__(self) -> None:
        if self.likelihood_images < 0 or self.stages < 0:
            raise ValueError(
                f"likelihood_images is {self.likelihood_images} and stages {self.stages}; expected zero or more of both"
            )
        trained, rng = self.open()
        x = self.held_out(trained)
        begun = time.perf_counter()
        inferred = trained.reconstruction(
            x, by=self.by, with_prior=self.infer_with_prior, quiet_steps=self.quiet_steps, rng=rng
        )
        errors = mse_per_image(inferred.images, x)
        likelihood = {}
        if self.likelihood_images:
            likelihood = trained.log_likelihood(x[: self.likelihood_images], stages=self.stages, rng=rng)
        values = {
            "method": trained.method,
            "by": "dynamics" if self.quiet_steps else self.by,
            "mse": float(errors.mean()),
            "standard_error": float(errors.std() / len(errors) ** 0.5),
            "median": float(errors.median()),
            "images": len(x),
            "data": data_name(trained, self.data),
            "steps": trained.dynamics.steps,
            "quiet_steps": self.quiet_steps,
            "longest_step": trained.dynamics.step_size,
            "divergent": int(inferred.divergent.sum()),
            "mended": int(inferred.mended.sum()),
            "latent_std": [round(float(layer.std()), 4) for layer in inferred.z],
            "parameters": trained.parameter_count,
            "seconds": round(time.perf_counter() - begun, 1),
            "seed": self.seed,
            "convention": "mean square error per pixel, images in [-1, 1]",
        }
        self.write("evaluate", values | likelihood)


@dataclass
class Reconstruct(Use):
    """Infer held-out images and decode them again.

    Example: shortrun reconstruct mnist-small --data embedded --out pictures
    """

    quiet_steps: int = 0
    """Number of final noise-free steps: the result is near the centre of q(z | x) instead of a draw from it."""

    def __call__(self) -> None:
        trained, rng = self.open()
        x = self.held_out(trained)
        images = trained.reconstruct(x, quiet_steps=self.quiet_steps, rng=rng)
        errors = mse_per_image(images, x)
        rows = []
        for originals, made in zip(x.split(10), images.split(10), strict=True):
            rows += [("original", originals), ("reconstruction", made)]
        self.draw("reconstructions.png", rows[:12], f"mean MSE {errors.mean():.4f}")
        per_image = [round(float(error), 6) for error in errors]
        self.write("reconstruct", {"mse": float(errors.mean()), "per_image": per_image})


@dataclass
class Inpaint(Use):
    """Hide part of each image, infer from the rest, paint what is hidden, several times.

    Example: shortrun inpaint mnist-small --mask lower-half --fills 5 --out pictures
    """

    mask: str = "lower-half"
    """lower-half (or upper-, left-, right-half), random:SHARE, blocks:SIDE:COUNT, box:TOP,LEFT,HEIGHT,WIDTH or
    file:PATH (black hides)."""
    fills: int = 4
    """Number of fills per image."""
    keep_known: bool = True
    """Copy the visible pixels instead of re-generating them."""
    by: By = "method"
    """The method's own inference (an encoder's centre, where there is one), a draw from its q(z | x), its centre (from
    chains too: their steps then take no noise), or short run dynamics on the decoder."""
    infer_with_prior: bool = True
    """Of chains: start from the modes of the learned prior that the visible pixels suggest, and drift with that prior;
    else from N(0, I), as in training."""
    steps: int | None = None
    """Of the chains; by default four times those of training with the learned prior, else as many."""

    def __call__(self) -> None:
        trained, rng = self.open()
        x = self.held_out(trained)
        mask = make_mask(self.mask, x, rng)
        begun = time.perf_counter()
        fills = trained.inpaint(
            x, mask, self.fills, keep_known=self.keep_known, by=self.by, with_prior=self.infer_with_prior,
            steps=self.steps, rng=rng,
        )  # fmt: skip
        seconds = round(time.perf_counter() - begun, 1)
        shown = torch.where(mask.expand_as(x), x, torch.zeros(()))
        rows = [("original", x[:10]), ("visible", shown[:10])]
        rows += [(f"fill {i + 1}", fill[:10]) for i, fill in enumerate(fills)]
        rows.append(("mean", fills.mean(0)[:10]))
        if self.fills > 1:
            spread = fills.std(0)
            rows.append(("spread", (2 * spread / spread.max().clamp_min(1e-6) - 1)[:10]))
        self.draw("inpainting.png", rows, f"mask {self.mask}")
        errors = hidden_errors(fills, x, mask)
        values = {
            "hidden_mse": errors.single_fill,
            "hidden_mse_of_mean_fill": errors.mean_fill,
            "hidden_mse_of_mean_image": mean_image_error(self.load_set(trained, "train"), x, mask),
            "mask": self.mask,
            "fills": self.fills,
            "images": len(x),
            "prior": trained.prior.kind if self.infer_with_prior and trained.prior is not None else "normal",
            "seconds": seconds,
        }
        self.write("inpaint", values)


@dataclass
class Tune(Use):
    """The free energy of a trained model over step sizes.

    Example: shortrun tune mnist-small --images 16 --out pictures

    By the paper's criterion: shortrun tune RUN --entropy conditional --estimator lanczos --deltas 0.02 0.04 0.06 0.1
    --out pictures
    """

    images: int = 16
    entropy: Entropy = "marginal"
    """conditional is the paper's; averaged its Eq. 17 to the letter; marginal also counts the injected noise."""
    estimator: Estimator = "endpoint"
    """exact: a Hessian at each step; lanczos: products with it; endpoint: the curvature where the chain ends; auto:
    exact for up to 64 latents, else endpoint where it applies, else lanczos."""
    chains: int = 4
    """Chains of each image."""
    deltas: tuple[float, ...] = ()
    """Candidates as delta = sqrt(2 s), instead of thirteen around the step of the model."""

    def __call__(self) -> None:
        from shortrun.pictures import save_curve

        trained, rng = self.open()
        if any(not delta > 0 for delta in self.deltas):
            raise ValueError(f"deltas is {self.deltas}; expected positive numbers")
        how = Estimation(entropy=self.entropy, estimator=self.estimator, chains=self.chains)
        result = trained.tune(self.held_out(trained), [delta**2 / 2 for delta in self.deltas] or None, how, rng=rng)
        print(result)
        save_curve(self.out / "free_energy.png", result)
        values = {
            "entropy": self.entropy,
            "estimator": self.estimator,
            "step_size": result.dynamics.step_size,
            "step_sizes": result.step_sizes,
            "free_energy": result.free_energy.tolist(),
            "standard_error": result.standard_error.tolist(),
            "stability": result.stability.tolist(),
            "divergent": result.divergent.tolist(),
            "ruled_out": result.ruled_out.tolist(),
        }
        self.write("tune", values)


@dataclass
class Data:
    """Look at a data set: number, size and checksum, and a picture of it.

    Example: shortrun data svhn --out pictures
    """

    name: Positional[str]
    """embedded, scenes:COUNT, mnist, svhn, celeba, folder:PATH, zip:PATH, npz:PATH or hf:NAME."""
    out: Path | None = None
    """Folder for a picture of the first images."""
    data_root: str | None = None
    """Folder with the data sets; by default the environment variable SHORTRUN_DATA."""
    size: int | None = None
    """Side of the images, for celeba, folder, zip and hf."""
    crop: Crop = None
    """Side of the centre square that is cut out before resizing, or whole (see shortrun train --help)."""

    def __call__(self) -> None:
        from shortrun.pictures import save_grid

        settings = DataSettings(self.name, self.data_root, size=self.size, crop=self.crop)
        splits: tuple[Split, ...] = ("train", "test")
        for split, images in [(split, settings.load(split)) for split in splits]:
            print(images.describe())
            if self.out is not None:
                shown = images.batch(slice(0, 40))
                save_grid(self.out / f"{split}.png", [("", row) for row in shown.split(10)])
