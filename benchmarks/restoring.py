"""How well known damage is undone on held-out images, by ``Trained.restore`` and by other ways with the same decoder.

    python benchmarks/restoring.py mnist-small svhn-small faces-small --json results/restoring.json [--vae RUN ..]

A row for each operator, with what is shown of the held-out images:

* simple: bicubic interpolation of what has fewer pixels, the mean training image where pixels are hidden or mixed up,
  the measurement itself where it has the size of the image;
* CSGM (Bora et al. 2017) by deepinv's ``CSGMGenerator`` on our decoder: from a uniform start 2,500 iterations of Adam
  at 0.01, which are its defaults, but that images are optimised side by side, each for itself, and none stops before
  the last iteration: on the first ``--csgm-images`` images, with our best answer for the same ones beside it in the
  file; and on all images with about as many passes through the network as ours, 100 iterations at a rate of 0.1 or
  0.3, whichever is better;
* encoder: of a VAE of the same data, if its run folder is given, at the centre of its q(z | x). Hidden pixels are
  filled in turns; else it is given the simple answer;
* best: ours, on all images; and the mean of --draws draws on the first ``--draw-images`` of them, with the share of the
  pixels of the real image that lie within the 90 % intervals of the draws with noise.

PSNR in decibels, the mean over images, with its standard error in the file; seconds for an image of all together. The
Numbers in brackets are those of "best" on the same images, where these are not all. The
file is written after each cell, and cells that it has from the same command are not measured again. ``--time``,
instead: ``restore`` of 64 images at K = 25 as a ratio to ``infer``, best of several.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shortrun as sr
from shortrun.cli.use import Use
from shortrun.core.latents import shapes_of, unflatten
from shortrun.inverse import Grey, Mask, Operator, Project, Quantise, parse_operator
from shortrun.metrics.errors import psnr
from shortrun.studies.sources import Cells

TASKS = {  # an operator and the noise that is added to its measurements
    "noise of 0.5": ("denoise", 0.5), "half of the pixels": ("mask:random:0.5", 0.0),
    "lower half hidden": ("mask:lower-half", 0.0), "downsampled by 2": ("downsample:2", 0.0),
    "downsampled by 4": ("downsample:4", 0.0), "blurred": ("blur:1.5", 0.05), "in motion": ("motion:7:30", 0.05),
    "blurred, downsampled by 2": ("blur:1+downsample:2", 0.0), "without colours": ("grey", 0.0),
    "projections, 1 for 8 values": ("project", 0.0), "clipped to +-0.5": ("clip:-0.5:0.5", 0.0),
    "1 bit": ("quantise:1", 0.0), "2 bits": ("quantise:2", 0.0),
}  # fmt: skip
LEVEL = 0.9
RATES = (0.1, 0.3)  # of CSGM with few iterations
COLUMNS = {
    "simple": "simple", "csgm": "CSGM", "csgm_short": "CSGM, short", "encoder": "encoder", "best": "best",
    "draws": "mean of draws",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mnist-small", "svhn-small", "faces-small"])
    parser.add_argument("--data", help="images by name, instead of those that each model was trained on")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--steps", type=int, help="of our chains, instead of the default")
    parser.add_argument("--csgm-iterations", type=int, default=2500)
    parser.add_argument("--csgm-images", type=int, default=16)
    parser.add_argument("--draw-images", type=int, default=30)
    parser.add_argument("--vae", nargs="*", default=[], help="run folders; each is used for the model of its data")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)
    vaes = {run: sr.load(run) for run in words.vae}
    for name in words.models:
        options = ("data", "images", "draws", "steps", "csgm_iterations", "csgm_images", "draw_images")
        given = [(key, getattr(words, key)) for key in options if getattr(words, key) != parser.get_default(key)]
        command = f"python benchmarks/restoring.py {name}"
        command += "".join(f" --{key.replace('_', '-')} {value}" for key, value in given)
        cells = Cells(words.json, Path(name).name, command)
        bench = Bench(name, words)
        if words.time:
            for task in words.tasks:
                if bench.applies(task):
                    print(f"{Path(name).name:12} {task:28} restore / infer {bench.ratio(task):.2f}", flush=True)
            continue
        data = bench.trained.info.get("data")
        run, vae = next(((run, vae) for run, vae in vaes.items() if vae.info.get("data") == data), ("", None))
        of_vae = Cells(words.json, f"{Path(name).name}, encoder", f"{command} --vae {run}")
        for task in filter(bench.applies, words.tasks):
            for way, measure in bench.ways(task, vae):
                found = (of_vae if way == "encoder" else cells).measure(f"{task}: {way}", measure)
                print(f"{Path(name).name:12} {task:28} {way:10} " + "  ".join(f"{k} {v}" for k, v in found.items()),
                      flush=True)  # fmt: skip
        print(table(name, cells.values | of_vae.values), flush=True)


class Bench:
    """A model, held-out images, and ways to restore them."""

    def __init__(self, name: str, words: argparse.Namespace) -> None:
        self.words = words
        use = Use(run=name, out=Path(), data=words.data, images=words.images)
        self.trained = sr.load(name)
        self.x = use.held_out(self.trained)
        self.mean_image = use.load_set(self.trained, "train").mean
        self.known: dict[str, tuple[Operator, Tensor, float | None]] = {}
        self.answers: dict[str, Tensor] = {}

    def applies(self, task: str) -> bool:
        return TASKS[task][0] != "grey" or self.trained.shape[0] == 3

    def measured(self, task: str) -> tuple[Operator, Tensor, float | None]:
        """The operator, the measurements, and sigma where it is not the default."""
        if task not in self.known:
            text, noise = TASKS[task]
            text = f"project:{self.x[0].numel() // 8}" if text == "project" else text
            rng = torch.Generator().manual_seed(0)
            operator = parse_operator(text, self.x, rng)
            clean = operator(self.x)
            y = clean + noise * torch.randn(clean.shape, generator=rng)
            sigma = math.hypot(noise, self.trained.noise_of(operator)) if noise else None
            self.known[task] = operator, y, sigma
        return self.known[task]

    def ways(self, task: str, vae: sr.Trained | None) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
        found: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("simple", lambda: self.judged(lambda: self.simple(task))),
            ("best", lambda: self.best(task)),
            ("draws", lambda: self.draws(task)),
        ]
        if vae is not None and TASKS[task][0] != "project":
            found.append(("encoder", lambda: self.judged(lambda: self.encoded(task, vae))))
        if deepinv() is not None:
            found.append(("csgm_short", lambda: self.csgm_short(task)))
            found.append(("csgm", lambda: self.csgm_long(task)))
        return found

    # -- ways -----------------------------------------------------------------------------------------

    def simple(self, task: str) -> Tensor:
        operator, y, _ = self.measured(task)
        if isinstance(operator, Mask):
            assert operator.visible is not None
            return torch.where(operator.visible.expand_as(y), y, self.mean_image)
        if isinstance(operator, Project):
            return self.mean_image.expand_as(self.x)
        if isinstance(operator, Grey):
            return y.expand_as(self.x)
        if y.shape[2:] != self.x.shape[2:]:
            y = F.interpolate(y, size=self.x.shape[2:], mode="bicubic", align_corners=False)
        return y.clamp(-1, 1)

    def best(self, task: str) -> dict[str, Any]:
        operator, y, sigma = self.measured(task)
        self.trained.restore(y, operator, sigma, steps=1)  # tunes the step and makes what starts come from
        return self.judged(lambda: self.answer(task), self.steps)

    def answer(self, task: str) -> Tensor:
        if task not in self.answers:
            operator, y, sigma = self.measured(task)
            self.answers[task] = self.trained.restore(y, operator, sigma, steps=self.words.steps)
        return self.answers[task]

    @property
    def steps(self) -> int:
        return self.words.steps or 4 * self.trained.dynamics.steps

    def draws(self, task: str) -> dict[str, Any]:
        """On the first images alone, as each takes as long as ``--draws`` best answers."""
        operator, y, sigma = self.first(task, min(self.words.draw_images, len(self.x)))
        x = self.x[: len(y)]
        begun = time.perf_counter()
        found = self.trained.posterior(y, operator, sigma, draws=self.words.draws, steps=self.words.steps)
        seconds = time.perf_counter() - begun
        low, high = found.with_noise().interval(LEVEL)
        covered = ((x >= low) & (x <= high)).double()
        return self.quality(found.mean, seconds, found.steps * self.words.draws) | self.best_of_first(task, len(y)) | {
            "psnr_of_a_draw": float(psnr(found.images[0], x).mean()), "coverage": float(covered.mean()),
            "divergent": float(found.divergent.mean()), "step_size": found.step_size,
            "r_hat": None if found.r_hat is None else float(found.r_hat.median()),
        }  # fmt: skip

    def encoded(self, task: str, vae: sr.Trained) -> Tensor:
        operator, y, _ = self.measured(task)
        if isinstance(operator, Mask):
            assert operator.visible is not None
            return vae.reconstruct(y, mask=operator.visible.expand_as(y))
        return vae.reconstruct(self.simple(task))

    def csgm_short(self, task: str) -> dict[str, Any]:
        steps = min(self.steps, self.words.csgm_iterations)
        tries = [self.judged(lambda rate=rate: self.csgm(task, steps, rate), steps) | {"rate": rate} for rate in RATES]
        return max(tries, key=lambda found: found["psnr"])

    def csgm_long(self, task: str) -> dict[str, Any]:
        """On the first images alone."""
        count, iterations = min(self.words.csgm_images, len(self.x)), self.words.csgm_iterations
        found = self.judged(lambda: self.csgm(task, iterations, 0.01, count), iterations)
        return found | self.best_of_first(task, count)

    def best_of_first(self, task: str, count: int) -> dict[str, Any]:
        """What our best answer makes of the same images."""
        return {"images": count, "best_psnr": float(psnr(self.answer(task)[:count], self.x[:count]).mean())}

    def first(self, task: str, count: int) -> tuple[Operator, Tensor, float | None]:
        """The measurements of the first images."""
        operator, y, sigma = self.measured(task)
        if isinstance(operator, Mask) and operator.visible is not None and len(operator.visible) == len(self.x):
            operator = Mask(operator.visible[:count])
        return operator, y[:count], sigma

    def csgm(self, task: str, iterations: int, rate: float, count: int | None = None) -> Tensor:
        operator, y, _ = self.first(task, count or len(self.x))
        package = deepinv()

        class Measurement(package.physics.Physics):
            def A(self, x: Tensor, **options: Any) -> Tensor:
                # Rounding cannot be differentiated: what is compared with rounded pixels are those that were not.
                return operator.smooth(2 * x - 1) if isinstance(operator, Quantise) else operator(2 * x - 1)

        class SideBySide(package.models.CSGMGenerator):
            def random_latent(self, device: Any, requires_grad: bool = True) -> Tensor:
                return 2 * torch.rand(len(y), self.backbone_generator.nz, 1, 1, device=device) - 1

        decoder = FlatDecoder(self.trained)
        model = SideBySide(decoder, inf_max_iter=iterations, inf_tol=0.0, inf_lr=rate).eval()
        model.inf_loss = SumOverImages()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            images = model(y, Measurement()).detach()
        return 2 * images - 1

    # -- numbers --------------------------------------------------------------------------------------

    def judged(self, way: Callable[[], Tensor], passes: int = 0) -> dict[str, Any]:
        begun = time.perf_counter()
        images = way()
        return self.quality(images, time.perf_counter() - begun, passes)

    def quality(self, images: Tensor, seconds: float, passes: int) -> dict[str, Any]:
        values = psnr(images, self.x[: len(images)]).double()
        error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
        each = seconds / len(images)
        return {"psnr": float(values.mean()), "error": error, "seconds": each, "passes": passes}

    def ratio(self, task: str, batch: int = 64, steps: int = 25, repeats: int = 5) -> float:
        """Seconds of ``restore`` over those of ``infer``, from N(0, I) both, each the best of several."""
        operator, y, sigma = self.first(task, min(batch, len(self.x)))
        x = self.x[: len(y)]
        times: dict[str, list[float]] = {"restore": [], "infer": []}
        for _ in range(repeats + 1):  # in the first the step is tuned
            for name, work in (
                ("infer", lambda: self.trained.infer(x, by="centre", steps=steps)),
                ("restore", lambda: self.trained.restore(y, operator, sigma, steps=steps, with_prior=False)),
            ):
                begun = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - begun)
        return min(times["restore"][1:]) / min(times["infer"][1:])


class SumOverImages(nn.Module):
    """deepinv's loss of each measurement; their sum, so that Adam treats each image as if it were alone."""

    def forward(self, y: Tensor, x_net: Tensor, physics: Any) -> Tensor:
        return (physics.A(x_net) - y).square().flatten(1).mean(1).sum()


class FlatDecoder(nn.Module):
    """The decoder of a model as deepinv has them: from latents ``(n, d, 1, 1)`` to images in [0, 1]."""

    def __init__(self, trained: sr.Trained) -> None:
        super().__init__()
        self.model, self.shapes = trained.model, shapes_of(trained.model)
        self.nz = sum(math.prod(shape) for shape in self.shapes)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(self, z: Tensor) -> Tensor:
        return (self.model.decode(unflatten(z.flatten(1), self.shapes)) + 1) / 2


@cache
def deepinv() -> Any:
    """The package; None, with a word, where it is not installed."""
    tests = str(Path(__file__).parents[1] / "tests")
    sys.path.append(tests)
    try:
        from with_deepinv import declare_operators

        declare_operators()
        import deepinv as package
        import deepinv.models
        import deepinv.physics
    except ImportError as error:
        print(f"without CSGM: {error}", flush=True)
        return None
    finally:
        sys.path.remove(tests)
    return package


def table(name: str, cells: dict[str, dict[str, Any]]) -> str:
    """In Markdown: PSNR of each way, coverage, and seconds for an image."""
    tasks = list(dict.fromkeys(key.partition(": ")[0] for key in cells))
    ways = [way for way in COLUMNS if any(f"{task}: {way}" in cells for task in tasks)]
    head = [Path(name).name, *(COLUMNS[way] for way in ways), f"in {LEVEL:.0%} intervals", "s: CSGM, best, draws"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for task in tasks:
        found = {way: cells.get(f"{task}: {way}") for way in COLUMNS}
        values = [f"{found[way]['psnr']:.1f}" if found[way] else "" for way in ways]
        beside = [f" ({found[way]['best_psnr']:.1f})" if "best_psnr" in (found[way] or ()) else "" for way in ways]
        values = [value + same for value, same in zip(values, beside, strict=True)]
        coverage = f"{found['draws']['coverage']:.0%}" if found["draws"] else ""
        seconds = [f"{found[way]['seconds']:.2g}" if found[way] else "-" for way in ("csgm", "best", "draws")]
        lines.append("| " + " | ".join([task, *values, coverage, ", ".join(seconds)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
