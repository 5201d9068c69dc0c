"""Labelled grids of images and small plots, as PNG.

Figures are made without pyplot, so that nothing here changes how a notebook or a program of the user shows its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from shortrun.core.tune import TuneResult

Line = tuple[str, tuple[str, str], Sequence[float], Sequence[Any]]
"""Name, colour and style, x, y."""


def _save(figure: Figure, path: Path, dpi: int = 110) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def _pixels(image: Tensor) -> np.ndarray[Any, Any]:
    array = ((image.detach().cpu().float().nan_to_num() + 1) / 2).clamp(0, 1).numpy()
    return array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)


def sample_rows(trained: Any, count: int, seed: int = 0) -> list[tuple[str, Tensor]]:
    """Samples for :func:`save_grid`, ten in a row: from N(0, I), and from the learned prior where there is one."""
    laws = [("normal", "N(0, I)" if trained.method != "glo" else "Gaussian")]
    if trained.prior is not None:
        laws.append(("learned", f"learned ({trained.prior.kind})"))
    rows = []
    for law, label in laws:
        parts = trained.sample(count, prior=law, seed=seed).split(10)
        rows += [(label if i == 0 else "", part) for i, part in enumerate(parts)]
    return rows


def save_grid(path: Path, rows: Sequence[tuple[str, Tensor]], title: str = "") -> None:
    """Each row is a label and images of shape ``(n, colours, height, width)`` in [-1, 1]."""
    width = max(len(images) for _, images in rows)
    image_height, image_width = rows[0][1].shape[2:]
    gap, scale = 2, max(1, round(56 / image_height))
    step_y, step_x = image_height * scale + gap, image_width * scale + gap
    canvas = np.ones((len(rows) * step_y - gap, width * step_x - gap, 3), np.float32)
    for r, (_, images) in enumerate(rows):
        for c, image in enumerate(images):
            pixels = np.kron(np.atleast_3d(_pixels(image)), np.ones((scale, scale, 1), np.float32))
            canvas[r * step_y :, c * step_x :][: pixels.shape[0], : pixels.shape[1]] = pixels
    labelled = any(label for label, _ in rows)
    margin = 1.5 if labelled else 0.1
    inches = canvas.shape[1] / 100, canvas.shape[0] / 100
    head = 0.3 if title else 0.05
    figure = Figure(figsize=(inches[0] + margin, inches[1] + head))
    axes = figure.add_axes((
        margin / (inches[0] + margin), 0, inches[0] / (inches[0] + margin), inches[1] / (inches[1] + head),
    ))  # fmt: skip
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.axis("off")
    for r, (label, _) in enumerate(rows):
        axes.text(-6, (r + 0.5) * step_y - gap, label, ha="right", va="center", fontsize=9)
    if title:
        figure.text(0.5, 1 - 0.06 / (inches[1] + head), title, ha="center", va="top", fontsize=10)
    _save(figure, path, dpi=100)


def save_lines(
    path: Path,
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    title: str = "",
    log_y: bool = False,
    level: tuple[float, str] | None = None,
) -> None:
    """Lines (name, x, y); ``level`` draws a named horizontal line."""
    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, x, y in series:
        axes.plot(x, y, "o-", markersize=3, linewidth=1.3, label=name)
    if level is not None:
        axes.axhline(level[0], color="0.6", linestyle="--", linewidth=1)
        axes.annotate(level[1], (0.99, level[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                      fontsize=8, color="0.4")  # fmt: skip
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    if len(series) > 4:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    elif len(series) > 1:
        axes.legend(fontsize=8)
    _save(figure, path)


def save_panels(
    path: Path,
    panels: dict[str, list[Line]],
    labels: tuple[str, str],
    log_x: bool = False,
) -> None:
    """Panels side by side, with one legend for all."""
    figure = Figure(figsize=(3.5 * len(panels), 3.3), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        for name, (colour, line), x, y in series:
            axis.plot(x, y, color=colour, linestyle=line, marker="o", markersize=4, linewidth=1.5, label=name)
        if log_x:
            axis.set_xscale("log")
        ticks = sorted({value for _, _, x, _ in series for value in x})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel(labels[0])
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(labels[1])
    named = dict(zip(*axes[0][0].get_legend_handles_labels()[::-1], strict=True))
    columns = min(len(named), len(panels) + 1)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    _save(figure, path)


def save_curves(path: Path, panels: dict[str, list[Line]], labels: tuple[str, str]) -> None:
    """Curves over time in panels side by side, errors on a logarithmic scale, with one legend for all."""
    figure = Figure(figsize=(3.7 * len(panels), 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    named: dict[str, Any] = {}
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        for name, (colour, line), x, y in series:
            named[name] = axis.plot(x, y, color=colour, linestyle=line, linewidth=1.5, label=name)[0]
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:.3g}")
        axis.yaxis.set_minor_formatter("{x:.2g}")
        axis.tick_params(labelsize=8, which="both")
        axis.set_xlabel(labels[0])
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(labels[1])
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    _save(figure, path)


def save_objectives(
    path: Path,
    panels: dict[str, list[tuple[str, Sequence[float], Sequence[float | None]]]],
    mark: tuple[float, str],
) -> None:
    """Free energy over delta, one panel per objective and one curve (name, delta, nats) per moment of learning.

    Stars are the lowest points; ``mark`` is a named delta.
    """
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        colours = matplotlib.colormaps["viridis"](np.linspace(0.9, 0.0, len(curves)))
        sizes = np.linspace(22, 10, len(curves))  # so that stars at the same place can be told apart
        for colour, size, (name, deltas, values) in zip(colours, sizes, curves, strict=True):
            points = [(delta, value) for delta, value in zip(deltas, values, strict=True) if value is not None]
            if not points:
                continue
            best, lowest = min(points, key=lambda point: point[1])
            above = [value - lowest for _, value in points]
            label = f"{name}: {best:.3g}"
            axis.plot(
                [delta for delta, _ in points], above, "o-", color=colour, markersize=3, linewidth=1.3, label=label
            )
            axis.plot([best], [0], "*", color=colour, markersize=size, mec="white", mew=0.6, clip_on=False, zorder=3)
        axis.axvline(mark[0], color="0.6", linestyle=":", linewidth=1.3)
        axis.text(mark[0] * 1.04, 0.97, mark[1], transform=axis.get_xaxis_transform(), ha="left", va="top",
                  fontsize=8, color="0.4")  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=10)  # the lowest point is at zero
        axis.set_ylim(bottom=0)
        ticks = [0.01, 0.02, 0.05, 0.1, 0.2]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("delta")
        above_axis = axis.secondary_xaxis("top", functions=(lambda d: d**2 / 2, lambda s: np.sqrt(2 * np.abs(s))))
        above_axis.set_xscale("log")
        above_axis.set_xlabel("s = delta$^2$ / 2", fontsize=8)
        above_axis.tick_params(labelsize=8)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, title="lowest at delta (star)", title_fontsize=8)
    axes[0][0].set_ylabel("nats per image above the lowest")
    _save(figure, path)


def save_curve(path: Path, result: TuneResult) -> None:
    """Free energy against step size, the choice, and what the guard ruled out."""
    sizes = result.step_sizes
    fine = [i for i in range(len(sizes)) if not result.ruled_out[i]]
    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(
        [sizes[i] for i in fine], [float(result.free_energy[i]) for i in fine],
        [float(result.standard_error[i]) for i in fine], fmt="o-", color="#2a6fb0", markersize=3.5, capsize=2,
    )  # fmt: skip
    axes.plot([sizes[result.best]], [float(result.free_energy[result.best])], "*", markersize=16, color="#2a6fb0")
    excluded = [size for size, out in zip(sizes, result.ruled_out, strict=True) if out]
    if excluded:
        axes.axvspan(min(excluded), max(sizes) * 1.1, color="0.88", zorder=0)
        axes.text(0.98, 0.95, "ruled out by the guard", transform=axes.transAxes, ha="right", va="top", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) * 0.9, max(sizes) * 1.1)
    axes.set_xlabel("step size s (the longest of the chain)")
    axes.set_ylabel("free energy, nats per image")
    axes.set_title(f"chosen: s = {sizes[result.best]:.4g}", fontsize=10)
    axes.grid(alpha=0.25)
    _save(figure, path)


def save_bars(path: Path, panels: dict[str, dict[str, float]]) -> None:
    """One panel of horizontal bars per measure, each from a name to its value."""
    if not panels:
        return
    height = 0.8 + 0.32 * max(len(values) for values in panels.values())
    figure = Figure(figsize=(3.4 * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, values) in zip(axes[0], panels.items(), strict=True):
        names = list(values)[::-1]
        colours = ["#2a6fb0" if name == "short-run" else "#b8c4cf" for name in names]
        bars = axis.barh(names, [values[name] for name in names], color=colours)
        axis.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axis.margins(x=0.18)
        axis.set_title(f"{title} (lower is better)", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    _save(figure, path)


def plot_history(evaluations: Sequence[dict[str, Any]], path: str | Path | None = None) -> Figure:
    """Error (or loss, where there is none) and step size over the seconds of training."""
    measure = "mse" if any("mse" in line for line in evaluations) else "loss"
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), (measure, "step_size"), (measure.upper(), "step size s"), strict=True
    ):
        points = [(line["seconds"], line[key]) for line in evaluations if line.get(key) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=3, linewidth=1.3)
        if all(y > 0 for _, y in points):
            axes.set_yscale("log")
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    return figure
