"""What the page computes: plain functions of models and images, without a page."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shortrun.core.entropy import stability
from shortrun.core.free_energy import Estimation, free_energy_details
from shortrun.core.langevin import infer_with_diagnostics
from shortrun.core.latents import Latents, flatten
from shortrun.core.model import evaluating
from shortrun.core.target import Target
from shortrun.core.tune import Guard
from shortrun.files import read_lines
from shortrun.metrics.errors import mse_per_image
from shortrun.processes import flushed_denormals
from shortrun.studio.sources import Source

FILLS, ROW = 8, 8
SHOWN_EVERY = 10  # steps between two looks at chains that run
STEP_GRID = (*(2.0**j for j in range(-7, -1)), *(2 ** (j / 2) for j in range(-3, 5)))
"""Step sizes that are shown, in units of the tuned one."""
CURVE_IMAGES, CURVE_CHAINS = 4, 4
NO_STEEPNESS = Guard(limit=math.inf)


class Stopped(Exception):
    """The user has pressed Stop."""


def as_it_goes(work: Callable[[Callable[[Any], None]], Any], stop: threading.Event) -> Iterator[Any]:
    """What ``work`` tells while it runs in a thread, and what it returns at last.

    Where ``stop`` is set, or nobody listens any longer, the next thing that it tells ends it with :class:`Stopped`.
    """
    told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def tell(something: Any) -> None:
        if stop.is_set():
            raise Stopped
        told.put(("told", something))

    def run() -> None:
        try:
            told.put(("returned", work(tell)))
        except BaseException as error:
            told.put(("raised", error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = told.get()
            if kind == "raised":
                raise value
            yield value
            if kind == "returned":
                return
    finally:
        stop.set()
        thread.join()


# --- inpainting ---------------------------------------------------------------------------------------


class Fills(NamedTuple):
    """Fills of one image, finished or on their way."""

    step: int
    steps: int
    images: Tensor
    """Shape ``(fills, colours, height, width)``."""
    error: float
    """Mean squared error of their mean on hidden pixels."""


def inpaint(
    source: Source, x: Tensor, visible: Tensor, seed: int, stop: threading.Event, fills: int = FILLS
) -> Iterator[Fills]:
    """Fills of one image ``x`` of shape ``(1, ...)``, every few steps of their chains and at the end."""
    trained = source.trained

    def judged(step: int, images: Tensor) -> Fills:
        hidden = ~visible.expand_as(x)
        return Fills(step, steps, images, float((images.mean(0, keepdim=True) - x)[hidden].square().mean()))

    guided = trained.prior is not None and not hasattr(trained.model, "encode")
    steps = trained.dynamics.steps * (4 if guided else 1)

    def work(tell: Callable[[Any], None]) -> Fills:
        def watch(k: int, z: Latents, log_joint: Tensor) -> None:
            if k % SHOWN_EVERY == 0:
                tell(judged(k, torch.where(visible, x, trained.decode(z).cpu())))

        return judged(steps, trained.inpaint(x, visible, fills, seed=seed, watch=watch)[:, 0])

    return as_it_goes(work, stop)


# --- one chain ----------------------------------------------------------------------------------------


class Film(NamedTuple):
    """The steps of one chain, from k = 0 to K."""

    images: Tensor
    log_joint: list[float]
    gradient: list[float]
    stability: list[float]
    """s * lambda_max / (1 + momentum) at each point, with the longest step of the schedule: stable below 2."""
    step_size: float


def watch_chain(source: Source, x: Tensor, seed: int, noise: bool) -> Film:
    """The chain of one image ``(1, ...)``; the same start for the same seed."""
    model = source.trained.model
    dynamics = replace(source.trained.dynamics, noise=noise)
    points: list[Latents] = []
    with evaluating(model), flushed_denormals():
        _, log = infer_with_diagnostics(
            model, x, dynamics, rng=torch.Generator().manual_seed(seed), watch=lambda k, z, _: points.append(z)
        )
        path = tuple(torch.cat(layers) for layers in zip(*points, strict=True))
        flat = flatten(path)
        target = Target(model, x.expand(len(flat), *x.shape[1:]), None, start=path)
        probe = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
        lengths = torch.full_like(flat[:1], dynamics.step_size)
        curvature = stability(target, flat, lengths, probe) / (1 + dynamics.momentum)
    columns = (log.log_joint[:, 0], log.gradient_norm[:, 0], curvature)
    lists = [[float(value) for value in column] for column in columns]
    return Film(source.trained.decode(path), lists[0], lists[1], lists[2], dynamics.step_size)


# --- the step size ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step size: what it costs by both criteria, and what it makes of images."""

    place: int
    """Its index in STEP_GRID."""
    step_size: float
    ours: float
    paper: float
    diverges: bool
    """More than a tenth of the chains diverge."""
    steep: bool
    """Beyond the guard's limit of s * lambda at a tenth of the chains."""
    error: float
    images: Tensor


def step_sizes(source: Source, stop: threading.Event) -> Iterator[Step]:
    """The free energy over step sizes, by both criteria, with reconstructions; the tuned one first."""
    trained, guard = source.trained, Guard()
    x = source.images[:ROW]
    how = Estimation(entropy="marginal", estimator="endpoint", chains=CURVE_CHAINS, probes=1, depth=8)
    order = sorted(range(len(STEP_GRID)), key=lambda i: abs(i - STEP_GRID.index(1.0)))

    def work(tell: Callable[[Any], None]) -> None:
        for i in order:
            dynamics = replace(trained.dynamics, step_size=trained.dynamics.step_size * STEP_GRID[i])
            values, diverges, steep = [], False, False
            with flushed_denormals(), evaluating(trained.model):
                for entropy in ("marginal", "conditional"):
                    found = free_energy_details(
                        trained.model, x[:CURVE_IMAGES], dynamics, replace(how, entropy=entropy),
                        rng=torch.Generator().manual_seed(0),
                    )  # fmt: skip
                    values.append(float(found.value.mean()))
                    diverges = diverges or NO_STEEPNESS.excludes(found)
                    steep = steep or guard.measure(found) > guard.limit
                z, _ = infer_with_diagnostics(trained.model, x, dynamics, rng=torch.Generator().manual_seed(0))
            images = trained.decode(z)
            error = float(mse_per_image(images.nan_to_num().clamp(-1, 1), x).mean())
            tell(Step(i, dynamics.step_size, values[0], values[1], diverges, steep, error, images))

    return (step for step in as_it_goes(work, stop) if step is not None)


# --- layers -------------------------------------------------------------------------------------------


def resample_layers(source: Source, x: Tensor | None, seed: int) -> list[tuple[str, Tensor]]:
    """For each layer a row of images in which only that layer is drawn again; of ``x``, or of a sample."""
    trained = source.trained
    rng = torch.Generator().manual_seed(seed)
    z = trained.sample_latents(1, rng) if x is None else trained.infer(x, by="centre", seed=seed)
    base = trained.decode(z)
    rows = []
    for layer in range(len(z)):
        others = trained.traverse(z, layer, ROW - 1, seed=seed + 1)[:, 0]
        place = "top" if layer == 0 else "bottom" if layer == len(z) - 1 else "between"
        rows.append((f"Layer {layer} ({place})", torch.cat([base, others])))
    return rows


def interpolate(source: Source, first: Tensor, last: Tensor, count: int = 10) -> Tensor:
    """Images on the arc between the latents of two others."""
    trained = source.trained
    a, b = (trained.infer(x, by="centre", seed=0) for x in (first, last))
    return trained.interpolate(a, b, count)[:, 0]


def samples(source: Source, seed: int, count: int = 16) -> list[tuple[str, Tensor]]:
    """Samples under each prior that the model has."""
    trained = source.trained
    rows = [("N(0, I)" if trained.method != "glo" else "Gaussian", trained.sample(count, prior="normal", seed=seed))]
    if trained.prior is not None:
        rows.insert(0, (f"learned prior ({trained.prior.kind})", trained.sample(count, seed=seed)))
    return rows


# --- methods ------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """What one model makes of an image."""

    label: str
    method: str
    reconstruction: Tensor
    error: float
    seconds: float
    fills: Tensor | None
    """None for methods that cannot leave pixels out."""
    samples: Tensor


def compare(sources: list[Source], x: Tensor, visible: Tensor, seed: int) -> Iterator[Compared]:
    """The same image by several models, one after the other."""
    for source in sources:
        trained = source.trained
        begun = time.perf_counter()
        made = trained.reconstruct(x, seed=seed)
        seconds = time.perf_counter() - begun
        try:
            fills = trained.inpaint(x, visible, 4, seed=seed)[:, 0]
        except ValueError:
            fills = None
        error = float(mse_per_image(made, x).mean())
        yield Compared(source.label, trained.method, made, error, seconds, fills, trained.sample(4, seed=seed))


# --- a run --------------------------------------------------------------------------------------------


class RunState(NamedTuple):
    """What a run folder says of its training so far."""

    name: str
    evaluations: list[dict[str, Any]]
    picture: bytes | None
    age: float
    """Seconds since it last wrote."""


def read_run(folder: Path) -> RunState:
    """Raises ValueError where there is no run."""
    lines = folder / "metrics.jsonl"
    if not lines.is_file():
        raise ValueError(f"{folder.name or folder} holds no metrics.jsonl, so it is not the folder of a run.")
    evaluations = [line for line in read_lines(lines) if line.get("loss") is not None]
    pictures = sorted((folder / "pictures").glob("*.png"))
    picture = pictures[-1].read_bytes() if pictures else None
    return RunState(folder.name, evaluations, picture, time.time() - lines.stat().st_mtime)


def run_folders(below: Path) -> list[str]:
    """Run folders in a folder, the newest first."""
    found = [path.parent for path in below.glob("*/metrics.jsonl")] if below.is_dir() else []
    return [str(path) for path in sorted(found, key=lambda path: -(path / "metrics.jsonl").stat().st_mtime)]
