"""Inference and learning of a user's own module, which offers nothing but ``forward``: as ratios within one run.

    python benchmarks/own_modules.py [--repeats N] [--tiny] [--json FILE]

The networks are those of the presets, wrapped so that they cannot be frozen, and a dense one. Measured are

* *bare loop*: autograd calls and nothing else, on the module as it is made;
* `shortrun.infer` on the same module;
* *compiled*: the chain of `infer` with gradients compiled for this batch size, as `fit --compile on` compiles them;
* updates per second of `fit`, plain and compiled;
* seconds that compiling takes, at first and with torch's cache, each in a process of its own.

Functions take turns in random order; times are the best of several. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shortrun as sr
from shortrun.core.chain import Point, chain
from shortrun.core.latents import Latents, standard_normal
from shortrun.core.layout import in_channels_last, to_channels_last
from shortrun.learners.gradients import Joint, compile_point
from shortrun.learners.short_run import ShortRun
from shortrun.nets.build import build_model
from shortrun.studies.bench import HALFWAY, STEP_SIZE, batch_of
from shortrun.training.presets import preset

BATCHES = (8, 64, 256)
SHAPES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32)}
# name: preset (none: a dense network), data that it is for, batches, K, rounds
CASES: dict[str, tuple[Any, Any, Sequence[int], int, int]] = {
    "cpu 28x28": ("cpu", "mnist", BATCHES, 25, 12),
    "cpu 32x32": ("cpu", "svhn", BATCHES, 25, 8),
    "dense 28x28": (None, "mnist", BATCHES, 25, 12),
    "authors-script 32x32": ("authors-script", "svhn", (64,), 10, 2),
}
TINY = {"tiny": (None, "mnist", (2,), 2, 1)}


class Own(nn.Module):
    """A decoder that has nothing but ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, z: Latents) -> Tensor:
        return self.network(z)


class Dense(nn.Module):
    def __init__(self, sizes: Sequence[int], width: int, image: Sequence[int]) -> None:
        super().__init__()
        self.image = tuple(image)
        self.layers = nn.Sequential(
            nn.Linear(sum(sizes), width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, math.prod(image)), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Latents) -> Tensor:
        return self.layers(torch.cat(z, 1)).view(-1, *self.image)


def own_model(name: str | None, data: str) -> sr.GaussianModel:
    torch.manual_seed(0)
    if name is None:
        return sr.GaussianModel(Own(Dense((16, 32), 256, SHAPES[data])), [(16,), (32,)], 0.3)
    made: Any = build_model(preset(name, data).network, SHAPES[data], 0.3)  # type: ignore[arg-type]
    return sr.GaussianModel(Own(made.decoder), made.latent_shapes, 0.3)


def images(data: str, count: int) -> Tensor:
    return torch.rand(count, *SHAPES[data], generator=torch.Generator().manual_seed(0)) * 2 - 1


# --- inference ----------------------------------------------------------------------------------------


def bare_loop(model: sr.GaussianModel, x: Tensor, steps: int) -> list[Tensor]:
    z = list(model.sample_prior(len(x)))
    for _ in range(steps):
        z = [layer.detach().requires_grad_() for layer in z]
        value = model.log_prior(tuple(z)) + model.log_likelihood(x, tuple(z))
        drift = torch.autograd.grad(value.sum(), z)
        with torch.no_grad():
            z = [
                layer + STEP_SIZE * g + math.sqrt(2 * STEP_SIZE) * torch.randn_like(layer)
                for layer, g in zip(z, drift, strict=True)
            ]
    return z


def compiled_chain(model: sr.GaussianModel, steps: int) -> Callable[[Tensor], Latents]:
    point = compile_point(Joint(in_channels_last(model), contextlib.nullcontext), torch.device("cpu"))

    def run(x: Tensor) -> Latents:
        def visit(k: int, z: Latents) -> tuple[Latents, Point]:
            return z, point(z, x, None)

        def noise(k: int, layer: Tensor) -> Tensor:
            return standard_normal(layer.shape, layer)

        sizes = sr.Langevin(steps, STEP_SIZE).table(len(model.latent_shapes)).tolist()
        with torch.no_grad():
            for _, z, _ in chain(model.sample_prior(len(x)), sizes, visit, noise, evaluate_end=False):
                last = z
        return last

    return run


# --- learning -----------------------------------------------------------------------------------------


def update(name: str | None, data: str, compiled: bool) -> tuple[Callable[[], object], int]:
    """One iteration of `fit` with the settings of the preset `cpu`, without tuning; and how many updates it makes."""
    config = preset("cpu", data).changed(tune="off", step_size=STEP_SIZE)  # type: ignore[arg-type]
    model = to_channels_last(own_model(name, data), lambda: None)  # as fit lays it out
    learner = ShortRun(
        model, learning_rate=config.run.learning_rates[0], betas=config.run.betas, settings=config.settings,
        compiled=compiled, log=lambda text: None,
    )  # fmt: skip
    state, batch = learner.init(seed=0), batch_of(images(data, config.run.batch))

    def run() -> None:
        nonlocal state
        state, _ = learner.update(state, batch, HALFWAY)

    return run, config.updates_along(0)


# --- time ---------------------------------------------------------------------------------------------


def best_of(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest time of each in seconds, after two calls that do not count: of a compiled function one only checks."""
    seconds = dict.fromkeys(functions, math.inf)
    names, order = list(functions), random.Random(0)
    for i in range(rounds + 2):
        order.shuffle(names)
        for name in names:
            begun = time.perf_counter()
            functions[name]()
            if i > 1:
                seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds


def seconds_to_compile(name: str, what: str, cache: str) -> float:
    """In a process of its own, so that nothing is compiled yet but what is in the cache."""
    command = [sys.executable, __file__, "--compile", name, what]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure_compiling(name: str, what: str) -> None:
    kind, data, _, steps, _ = CASES[name]
    if what == "infer":
        x, chain_of = images(data, 64), compiled_chain(own_model(kind, data), steps)
        run: Callable[[], object] = lambda: chain_of(x)  # noqa: E731
    else:
        run, _ = update(kind, data, compiled=True)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    print(times[0] - times[-1])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, help="how often each is measured; by default 2 to 12 times")
    parser.add_argument("--tiny", action="store_true", help="few steps of a small network, to see that it runs")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="these networks alone")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--compile", nargs=2, metavar=("CASE", "WHAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    torch.set_flush_denormal(True)
    if arguments.compile:
        measure_compiling(*arguments.compile)
        return
    cases = TINY if arguments.tiny else {name: CASES[name] for name in arguments.only or CASES}
    found: dict[str, Any] = {
        "torch": torch.__version__, "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "processor": platform.machine(), "infer": {}, "fit": {},
    }  # fmt: skip
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    print("| own module | batch | bare loop, s | `infer`, s | times bare | compiled, s | times bare |")
    print("|---|---|---|---|---|---|---|")
    for name, (kind, data, batches, steps, rounds) in cases.items():
        model, dynamics = own_model(kind, data), sr.Langevin(steps, STEP_SIZE)
        rows = found["infer"][name] = {}
        for count in batches:
            x, fast = images(data, count), compiled_chain(model, steps)
            functions: dict[str, Callable[[], object]] = {
                "bare": lambda: bare_loop(model, x, steps),  # noqa: B023
                "infer": lambda: sr.infer(model, x, dynamics),  # noqa: B023
                "compiled": lambda: fast(x),  # noqa: B023
            }
            row = rows[count] = best_of(functions, arguments.repeats or rounds)
            bare = row["bare"]
            print(
                f"| {name}, K = {steps} | {count} | {bare:.3f} | {row['infer']:.3f} | {bare / row['infer']:.2f} | "
                f"{row['compiled']:.3f} | {bare / row['compiled']:.2f} |",
                flush=True,
            )
    print(
        "\n| own module | updates/s of `fit` | compiled | times | seconds to compile: `fit`, first, cached | a chain |"
    )
    print("|---|---|---|---|---|---|")
    for name, (kind, data, _, steps, rounds) in cases.items():
        if steps < 25 and not arguments.tiny:  # an update of a large network takes too long here; see `shortrun bench`
            continue
        plain, updates = update(kind, data, compiled=False)
        compiled, _ = update(kind, data, compiled=True)
        best = best_of({"plain": plain, "compiled": compiled}, arguments.repeats or rounds)
        rates = {key: updates / value for key, value in best.items()}
        needed: dict[str, list[float]] = {}
        if not arguments.tiny:
            for what in ("fit", "infer"):
                with tempfile.TemporaryDirectory() as cache:
                    needed[what] = [seconds_to_compile(name, what, cache) for _ in range(2)]
        found["fit"][name] = {"updates_per_second": rates, "seconds_to_compile": needed}
        shown = [", ".join(f"{value:.0f}" for value in values) for values in needed.values()]
        print(
            f"| {name} | {rates['plain']:.1f} | {rates['compiled']:.1f} | {rates['compiled'] / rates['plain']:.2f} | "
            f"{' | '.join(shown)} |",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
