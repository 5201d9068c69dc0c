"""Speed and memory of inference and of the free energy, as ratios within one run.

    python benchmarks/inference.py [--quick | --tiny] [--json FILE]

Baselines, written plainly:

* *row by row*: the paper's recipe (Sec. 5.5). The K steps are one graph, the Jacobian dz_K/dz_0 is built one
  row at a time by vector-Jacobian products, and its log-determinant taken. It is timed for one example at a
  time, and for a whole batch at once, where a row is one backward pass for all examples.
* *bare loop*: autograd calls and nothing else, against `shortrun.infer`.

Times are the best of several repeats. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import shortrun as sr
from shortrun import Estimation
from shortrun.core.free_energy import Entropy, FreeEnergy, free_energy_details
from shortrun.core.latents import dimensions, unflatten
from shortrun.studies.bench import best, high_water

STEPS = 25
STEP_SIZE = 0.004
GREY, COLOURED = ([64], 16, 7, 1), ([64, 64, 64, 96, 128], 32, 8, 3)
TINY_GREY, TINY_COLOURED = ([4], 4, 7, 1), ([3, 4], 4, 8, 3)


class SmallConv(nn.Module):
    """All latents through one linear map to 7x7 or 8x8 maps, then two transposed convolutions."""

    def __init__(self, sizes: list[int], channels: int, base: int, colours: int) -> None:
        super().__init__()
        self.base = base
        self.project = nn.Linear(sum(sizes), channels * base * base)
        self.up = nn.ConvTranspose2d(channels, channels, 4, 2, 1)
        self.out = nn.ConvTranspose2d(channels, colours, 4, 2, 1)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        hidden = nn.functional.gelu(self.project(torch.cat(z, 1)))
        hidden = nn.functional.gelu(self.up(hidden.view(len(hidden), -1, self.base, self.base)))
        return torch.tanh(self.out(hidden))


def build(sizes: list[int], channels: int, base: int, colours: int) -> tuple[sr.GaussianModel, Tensor]:
    torch.manual_seed(0)
    decoder = SmallConv(sizes, channels, base, colours)
    with torch.no_grad():
        for module in (decoder.project, decoder.up, decoder.out):
            module.weight.mul_(2.5)  # so that the curvature is that of a trained generator
    model = sr.GaussianModel(decoder, [(size,) for size in sizes], 0.3).requires_grad_(False)
    return model, decoder(model.sample_prior(64, torch.Generator().manual_seed(1)))


def log_joint(model: sr.GaussianModel, x: Tensor, flat: Tensor) -> Tensor:
    z = unflatten(flat, model.latent_shapes)
    return model.log_prior(z) + model.log_likelihood(x, z)


def row_by_row(model: sr.GaussianModel, x: Tensor, rows: int | None = None) -> Tensor | None:
    """log|det dz_K/dz_0| through the K-step graph; ``rows`` stops early, to extrapolate the time."""
    d = dimensions(model.latent_shapes)
    start = torch.randn(len(x), d, requires_grad=True)
    z = start
    for _ in range(STEPS):
        (drift,) = torch.autograd.grad(log_joint(model, x, z).sum(), z, create_graph=True)
        z = z + STEP_SIZE * drift + math.sqrt(2 * STEP_SIZE) * torch.randn_like(z)
    jacobian = [torch.autograd.grad(z[:, i].sum(), start, retain_graph=True)[0] for i in range(rows or d)]
    if rows is not None:
        return None
    return torch.linalg.slogdet(torch.stack(jacobian, 1))[1]


def row_by_row_seconds(model: sr.GaussianModel, x: Tensor, repeats: int) -> float:
    """Seconds for all rows, from the times of few and of more rows (time is linear in their number)."""
    d = dimensions(model.latent_shapes)
    if d <= 64:
        return best(lambda: row_by_row(model, x), repeats)
    few, more = (best(lambda n=n: row_by_row(model, x, n), repeats) for n in (4, 24))
    return few + (more - few) / 20 * (d - 4)


def peak_memory(kind: str, steps: int) -> float:
    """Megabytes that K = ``steps`` needs on top of K = 2, in a process of its own."""
    code = [sys.executable, __file__, "--memory", kind, str(steps)]
    return float(subprocess.run(code, check=True, capture_output=True, text=True).stdout)


def measure_memory(kind: str, steps: int) -> None:
    model, x = build(*GREY)

    def work(count: int) -> None:
        if kind == "infer":
            sr.infer(model, x.repeat(4, 1, 1, 1), sr.Langevin(count, STEP_SIZE))
        elif kind == "rows":
            global STEPS
            STEPS = count
            row_by_row(model, x, 1)
        else:
            sr.free_energy(model, x[:8], sr.Langevin(count, STEP_SIZE), Estimation(estimator="exact", chains=4))

    work(2)  # what the libraries load at first use is not ours
    resting = high_water()
    work(steps)
    print(high_water() - resting)


def bare_loop(model: sr.GaussianModel, x: Tensor) -> list[Tensor]:
    z = [torch.randn(len(x), *shape) for shape in model.latent_shapes]
    for _ in range(STEPS):
        z = [layer.detach().requires_grad_() for layer in z]
        value = model.log_prior(z) + model.log_likelihood(x, z)
        drift = torch.autograd.grad(value.sum(), z)
        with torch.no_grad():
            z = [
                layer + STEP_SIZE * g + math.sqrt(2 * STEP_SIZE) * torch.randn_like(layer)
                for layer, g in zip(z, drift, strict=True)
            ]
    return z


def main(words: Sequence[str] | None = None) -> None:
    global STEPS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of everything")
    parser.add_argument("--tiny", action="store_true", help="tiny models and three steps, to see that it runs")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--memory", nargs=2, metavar=("KIND", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.memory:
        measure_memory(arguments.memory[0], int(arguments.memory[1]))
        return
    repeats = 1 if arguments.quick or arguments.tiny else 3
    grey, coloured = (TINY_GREY, TINY_COLOURED) if arguments.tiny else (GREY, COLOURED)
    STEPS = 3 if arguments.tiny else STEPS
    figures: dict[str, float] = {}

    def report(key: str, value: float, text: str) -> None:
        figures[key] = value
        print(f"{text:78s} {value:10.4g}", flush=True)

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    print(f"Exact free energy: d = {sum(grey[0])}, K = {STEPS}, 28x28 conv generator; seconds per example and chain")
    model, x = build(*grey)
    alone = row_by_row_seconds(model, x[:1], repeats)
    batched = min(row_by_row_seconds(model, x[:n], repeats) / n for n in (16, 64))
    dynamics = sr.Langevin(STEPS, STEP_SIZE)
    rng = torch.Generator().manual_seed(0)

    def exact(entropy: Entropy) -> float:
        def run() -> None:
            sr.free_energy(model, x[:16], dynamics, Estimation(entropy, "exact", chains=8), rng=rng)

        return best(run, repeats) / 128

    conditional, marginal = exact("conditional"), exact("marginal")
    report("exact_rows_alone_s", alone, "  row by row, one example at a time")
    report("exact_rows_batched_s", batched, "  row by row, its best batch")
    report("exact_conditional_s", conditional, "  shortrun, conditional")
    report("exact_marginal_s", marginal, "  shortrun, marginal")
    report("exact_speedup", alone / marginal, "  speed-up over one example at a time (marginal)")
    report("exact_speedup_batched", batched / marginal, "  speed-up over its best batch (marginal)")

    print("\nPeak memory beyond that of K = 2, MB")
    for kind, text in (("exact", "free energy"), ("infer", "infer"), ("rows", "row by row")):
        for steps in (3,) if arguments.tiny else (10, 40):
            memory = peak_memory(kind, steps)
            report(f"memory_{kind}_{steps}", memory, f"  {text}, K = {steps}")

    sizes = coloured[0]
    print(f"\nMatrix-free: d = {sum(sizes)}, K = {STEPS}, 32x32x3 conv generator")
    model, x = build(*coloured)
    alone = row_by_row_seconds(model, x[:1], repeats)
    batched = min(row_by_row_seconds(model, x[:n], repeats) / n for n in (8, 32))
    count = 32
    how = Estimation("conditional", "lanczos", chains=1, probes=2, depth=4)

    def lanczos(how: Estimation = how) -> FreeEnergy:
        return free_energy_details(model, x[:count], dynamics, how, rng=torch.Generator().manual_seed(0))

    seconds = best(lanczos, repeats) / count
    estimate = lanczos()
    truth = lanczos(Estimation("conditional", "exact", chains=1))
    start = 0.5 * sum(sizes) * math.log(2 * math.pi * math.e)
    logdet, guess = truth.entropy - start, estimate.entropy - start
    report("lanczos_rows_alone_s", alone, "  row by row, one example at a time, s per example")
    report("lanczos_rows_batched_s", batched, "  row by row, its best batch, s per example")
    report("lanczos_s", seconds, f"  shortrun lanczos, {how.probes} probes x {how.depth} steps, s per example")
    report("lanczos_speedup", alone / seconds, "  speed-up over one example at a time")
    report("lanczos_speedup_batched", batched / seconds, "  speed-up over its best batch")
    report("lanczos_logdet", float(logdet.mean()), "  log-determinant, exact, mean")
    report("stability", float(truth.stability.max()), "  largest s * lambda_max")
    error = float((guess.mean() / logdet.mean() - 1).abs())
    report("lanczos_error_mean", 100 * error, f"  error of the mean over {count} examples, %")
    error = float((guess / logdet - 1).square().mean().sqrt())
    report("lanczos_error", 100 * error, "  error of one example, root mean square, %")

    print(f"\ninfer against the bare loop of autograd calls: batch 64, K = {STEPS}")
    for name, arguments_ in (("28x28", grey), ("32x32x3", coloured)):
        model, x = build(*arguments_)
        pairs = []
        for _ in range(2 if repeats == 1 else 8):  # interleaved, so that drifts of the machine cancel
            pairs.append(
                (
                    best(lambda: sr.infer(model, x, dynamics), 1),  # noqa: B023
                    best(lambda: bare_loop(model, x), 1),  # noqa: B023
                )
            )
        ours, bare = (min(column) for column in zip(*pairs, strict=True))
        report(f"infer_overhead_{name}", 100 * (ours / bare - 1), f"  {name}: overhead, %")
    if arguments.json:
        figures["threads"] = torch.get_num_threads()
        machine = {"torch": torch.__version__, "cpus": os.cpu_count()}
        Path(arguments.json).write_text(json.dumps({**machine, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
