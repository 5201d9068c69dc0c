"""Can the spread of draws be trusted? Coverage of intervals on data from the model itself.

    python benchmarks/calibration.py mnist-small --json results/calibration.json --plot docs/images/calibration.png

Latents are drawn from the prior, images from the model, measurements from images; then draws are inferred, and it is
counted how often the central intervals of a pixel of the clean image, and of a latent, hold the truth. With the
posterior itself 90 % intervals hold it in 90 % of all cases; less means too sure, more too unsure. The ranks of the
latents among the draws say the same in one number: their variance over that of uniform ranks, above 1 if too sure
(simulation-based calibration, Talts et al. 2018).

Six settings start from N(0, I), which the data then come from, too: the step by the paper's criterion (conditional
entropy), by ours (marginal), one step size per step, each tuned on other images; then longer chains. The others are
``Trained.posterior`` with the learned prior: three measurements, and chains of K, 4 K (the default) and 16 K steps. Of
methods with an encoder, draws from its q(z | x) are judged as well; their chains are tuned first.

The file is written after each setting, and settings that it has from the same command are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shortrun as sr
from shortrun.core.latents import flatten, unflatten
from shortrun.inverse import Downsample, Mask, Operator
from shortrun.studies.sources import Cells

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
GREY_LEVEL = 2 / 255
TIE = 2e-6
"""Pixels that differ by less are equal: that much the arithmetic of a decoder changes with the batch an image is in."""
SEED = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="shipped models or run folders")
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--long", type=int, nargs="*", default=[100, 400], help="lengths of longer chains from N(0, I)")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 4, 16], help="lengths with the learned prior, in K")
    parser.add_argument("--only", default="", help="settings whose names have this in them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of all that the file of --json holds")
    words = parser.parse_args(argv)
    if words.plot and not words.json:
        parser.error("--plot shows what --json holds: name its file")
    for name in words.models:
        command = f"python benchmarks/calibration.py {name} --images {words.images} --draws {words.draws}"
        cells = Cells(words.json, Path(name).name, command)
        judge = Judge(sr.load(name), words.images, words.draws)
        for setting, measure in judge.settings(words.long, words.times):
            if words.only in setting:
                found = cells.measure(setting, measure)
                print(f"{Path(name).name:12} {setting:34} " + line(found), flush=True)
    if words.plot:
        plot({name: part["cells"] for name, part in json.loads(words.json.read_text()).items()}, words.plot)


def line(found: dict[str, Any]) -> str:
    at = LEVELS.index(0.9)
    shown = {f"{what} 90%": f"{found[what][at]:.3f}+-{found[f'{what}_error']:.3f}" for what in ("pixels", "latents")}
    shown |= {key: f"{found[key]:.3g}" for key in ("rank_variance", "mse", "r_hat") if found.get(key) is not None}
    return "  ".join(f"{key} {value}" for key, value in shown.items())


class Judge:
    """A model, and how well its draws are calibrated."""

    def __init__(self, trained: sr.Trained, images: int, draws: int) -> None:
        self.trained, self.images, self.draws = trained, images, draws
        self.has_encoder = hasattr(trained.model, "encode")

    def settings(self, long: Sequence[int], times: Sequence[int]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        for name, tuned in (("paper's criterion", self.conditional), ("ours", self.ours), ("per step", self.per_step)):
            yield f"N(0, I), {name}", lambda tuned=tuned: self.from_normal(tuned())
        for steps in long:
            yield f"N(0, I), {steps} steps", lambda steps=steps: self.from_normal(self.ours().longer(steps))
        if long:  # the step that is best for few is too long for many
            most = long[-1]
            yield f"N(0, I), {most} steps of s / 4", lambda: self.from_normal(self.ours().longer(most).scaled(0.25))
        if self.has_encoder:
            yield "encoder", lambda: self.from_normal(self.trained.dynamics, by="draw")
        if self.trained.prior is not None:
            half = Mask(torch.arange(self.trained.shape[-2])[:, None] < self.trained.shape[-2] // 2)
            measurements = (("whole image", None), ("upper half", half), ("downsample 4", Downsample(4)))
            for what, operator in measurements:
                for factor in times:
                    length = "K" if factor == 1 else f"{factor} K"
                    yield f"learned prior, {what}, {length}", partial(self.from_learned, operator, factor)
                if operator is None and long:
                    yield f"learned prior, {what}, 16 K of s / 4", partial(self.from_learned, operator, 16, 0.25)

    # -- dynamics, tuned on a few images of the model itself ------------------------------------------

    @cache  # noqa: B019 - a judge lives as long as the script
    def ours(self) -> sr.Langevin:
        if not self.has_encoder:
            return self.trained.dynamics
        return self.trained.tune(self.others(), seed=SEED).dynamics

    def conditional(self) -> sr.Langevin:
        plain = replace(self.ours(), momentum=0.0, profile=())
        grid = [plain.step_size * 2 ** (j / 2) for j in range(-5, 1)]
        how = sr.Estimation(entropy="conditional", estimator="endpoint", chains=4, probes=1, depth=8)
        return sr.tune_by_grid(self.trained.model, self.others(), plain, grid, how, rng=_rng(SEED)).dynamics

    def per_step(self) -> sr.Langevin:
        how = sr.Estimation(estimator="endpoint", chains=4, probes=1, depth=8)
        return sr.tune_by_gradient(
            self.trained.model, self.others(), self.ours(), "step", how, iterations=20, rng=_rng(SEED)
        ).dynamics

    def others(self) -> Tensor:
        return self.examples(self.trained.model.sample_prior(2, _rng(9)), 9)

    def examples(self, z: Any, seed: int) -> Tensor:
        clean = self.trained.decode(z)
        return clean + float(self.trained.model.sigma) * torch.randn(clean.shape, generator=_rng(seed))

    # -- draws ----------------------------------------------------------------------------------------

    def from_normal(self, dynamics: sr.Langevin, by: str = "dynamics") -> dict[str, Any]:
        z = self.trained.model.sample_prior(self.images, _rng(SEED + 1))
        x = self.examples(z, SEED + 2)
        before, self.trained.dynamics = self.trained.dynamics, dynamics
        found = self.trained.infer(x.repeat(self.draws, *[1] * (x.ndim - 1)), by=by, seed=SEED + 3)
        self.trained.dynamics = before
        draws = flatten(found).unflatten(0, (self.draws, self.images))
        facts = {"steps": dynamics.steps, "step_size": dynamics.step_size} if by == "dynamics" else {}
        return self.judged(flatten(z), draws) | facts

    def from_learned(self, operator: Operator | None, times: int, share: float = 1.0) -> dict[str, Any]:
        z = self.trained.joint.sample_prior(self.images, _rng(SEED + 1))
        if operator is None or isinstance(operator, Mask):
            y, sigma = self.examples(z, SEED + 2), None
        else:
            sigma = self.trained.noise_of(operator)
            clean = operator(self.trained.decode(z))
            y = clean + sigma * torch.randn(clean.shape, generator=_rng(SEED + 2))
        before, steps = self.trained.dynamics, times * self.trained.dynamics.steps
        self.trained.dynamics = before.scaled(share)
        found = self.trained.posterior(y, operator, sigma, draws=self.draws, steps=steps, seed=SEED + 3)
        self.trained.dynamics = before
        draws = torch.cat([layer.flatten(2) for layer in found.z], 2)
        return self.judged(flatten(z), draws) | {
            "steps": found.steps, "step_size": found.step_size,
            "r_hat": None if found.r_hat is None else float(found.r_hat.median()),
        }  # fmt: skip

    def judged(self, truth: Tensor, draws: Tensor) -> dict[str, Any]:
        """Coverage of pixels and latents, and the variance of ranks.

        Args:
            truth: latents, shape ``(n, d)``.
            draws: of them, shape ``(draws, n, d)``.

        Of pixels only those count that vary at all, by a grey level or more among truth and draws; the others are
        background, which no interval of any use is asked for. The truth is one of the values that decide it, so with
        the posterior itself the rank of the truth among them is uniform still.
        """
        shapes = self.trained.model.latent_shapes
        images = self.trained.decode(unflatten(draws.flatten(0, 1), shapes)).unflatten(0, draws.shape[:2])
        clean = self.trained.decode(unflatten(truth, shapes))
        lowest, highest = torch.cat([images, clean[None]]).aminmax(dim=0)
        varies = highest - lowest > GREY_LEVEL
        result: dict[str, Any] = {"levels": list(LEVELS)}
        for what, values, true, counts in (
            ("pixels", images, clean, varies),
            ("latents", draws, truth, torch.ones_like(truth, dtype=torch.bool)),
        ):
            ranks = random_ranks(values, true, _rng(SEED))
            of_images = torch.stack([within(ranks, len(draws), level) * counts for level in LEVELS]).flatten(2).sum(2)
            result[what] = (of_images.sum(1) / counts.sum()).tolist()
            result[f"{what}_error"] = standard_error(of_images[LEVELS.index(0.9)], counts.flatten(1).sum(1))
        count = len(draws)
        ranks = random_ranks(draws, truth, _rng(SEED)).double()
        result["rank_variance"] = float((ranks - count / 2).square().mean() / ((count + 1) ** 2 / 12 - 1 / 12))
        result["varying_pixels"] = float(varies.double().mean())
        result["tied_pixels"] = float(((images - clean).abs() <= TIE).any(0)[varies].double().mean())
        result["mse"] = float((images.mean(0) - clean).square().mean())
        return result


def random_ranks(draws: Tensor, truth: Tensor, rng: torch.Generator) -> Tensor:
    """How many draws lie below the truth; among draws that equal it its place is random.

    Pixels saturate: the generator ends in tanh, and the background of a digit is -1 in the truth and in every draw.
    Draws ``(draws, ..)`` and truth ``(..)``; ranks from 0 to the number of draws.
    """
    tied = (draws - truth).abs() <= TIE
    below = ((draws < truth) & ~tied).sum(0)
    places = tied.sum(0) + 1
    return below + (torch.rand(truth.shape, generator=rng) * places).long().clamp_max(places - 1)


def within(ranks: Tensor, count: int, level: float) -> Tensor:
    """Whether the truth lies within the central interval of ``count`` draws: 0, 1, or between at its very ends.

    Among n draws the truth has one of n + 1 ranks, all as likely if it is a draw as well; the interval between the k-th
    draw from below and the k-th from above holds it with probability 1 - 2 k / (n + 1), which is interpolated.
    """
    k = (1 - level) / 2 * (count + 1)
    low, share = int(k), k - int(k)
    inside = ((ranks >= low) & (ranks <= count - low)).double()
    inner = ((ranks >= low + 1) & (ranks <= count - low - 1)).double()
    return (1 - share) * inside + share * inner


def standard_error(inside: Tensor, counts: Tensor) -> float:
    """Of the ratio of sums over images, which are independent while the pixels of one are not."""
    ratio = inside.sum() / counts.sum()
    return float((inside - ratio * counts).square().sum().sqrt() / counts.sum())


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FAMILIES = ("N(0, I)", "learned prior, whole image", "learned prior, upper half", "learned prior, downsample 4")


def plot(parts: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Measured coverage minus nominal: a row for each model, a column for each family of settings, a line for each
    setting, solid for pixels and dashed for latents.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(FAMILIES) + 0.4, 2.5 * len(parts) + 0.8), layout="constrained")
    axes = figure.subplots(len(parts), len(FAMILIES), squeeze=False, sharex=True, sharey=True)
    for row, (name, cells) in zip(axes, parts.items(), strict=True):
        for axis, family in zip(row, FAMILIES, strict=True):
            axis.axhspan(-5, 5, color="0.93", zorder=0)
            axis.axhline(0, color="0.6", linewidth=1, zorder=0)
            chosen = [each for each in cells if family in each or (each == "encoder" and family == FAMILIES[0])]
            for i, setting in enumerate(chosen):
                colour = matplotlib.colormaps["turbo"]((i + 0.5) / len(chosen))
                nominal = torch.tensor(cells[setting]["levels"])
                for what, style in (("pixels", "-"), ("latents", "--")):
                    beyond = 100 * (torch.tensor(cells[setting][what]) - nominal)
                    label = setting.removeprefix(family).strip(", ") if what == "pixels" else None
                    axis.plot(nominal, beyond, style, color=colour, label=label)
            axis.set_title(f"{name}: {family.removeprefix('learned prior, ')}", fontsize=10)
            axis.grid(alpha=0.25)
            axis.set_ylim(-15, 15)
            if chosen:
                axis.legend(fontsize=7, frameon=False, loc="upper left", handlelength=1.2, ncols=2)
    figure.supxlabel("nominal coverage of an interval (with the learned prior, but for the first column)", fontsize=10)
    figure.supylabel("measured minus nominal coverage, points: pixels solid, latents dashed", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
