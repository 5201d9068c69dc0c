"""Speed and memory on this machine, as ratios within one run: what `shortrun bench` measures.

The yardsticks are the machine's own matrix multiplication, a plain loop in the style of the published training
script, and a VAE with the same generator. Times are the best of several repeats, taken in turn so that drifts of the
machine meet all of them; run it on a quiet machine.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shortrun import data
from shortrun.core.free_energy import Estimation, Estimator
from shortrun.core.langevin import Langevin, infer
from shortrun.core.tune import tune_by_grid
from shortrun.learners import Batch, Learner, Method, Moment, learner_class
from shortrun.trained import load
from shortrun.training.config import Config
from shortrun.training.presets import Preset, preset

SHAPES: dict[str, tuple[int, int, int]] = {"mnist": (1, 28, 28), "svhn": (3, 32, 32)}
STEP_SIZE = 0.001  # speed does not depend on it, as long as no chain diverges
MEMORY_BATCHES = (32, 128, 512)
MEMORY_STEPS = (5, 25, 100)
CHOICE_STEPS = 8  # few, because the exact estimator needs a Hessian at each
HALFWAY = Moment(0.5)
INFER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Case:
    """A preset for images of one data set's shape; their content is random, because speed does not depend on it."""

    preset: Preset
    data: str

    @property
    def name(self) -> str:
        return f"{self.preset} {self.data}"

    def config(self, method: Method = "short-run", **changes: Any) -> Config:
        """Settings with a fixed step; the VAE takes over generator and batch of short run inference."""
        ours = preset(self.preset, self.data)
        base: Preset = "paper" if self.preset == "authors-script" and method != "short-run" else self.preset
        generator = {each.name: getattr(ours.network, each.name) for each in fields(ours.network)}
        fixed: dict[str, Any] = {"step_size": STEP_SIZE, "compile": "off", "batch": ours.run.batch}
        if method == "short-run":
            fixed["tune"] = "off"
        return preset(base, self.data, method).changed(network=generator, **{**fixed, **changes})

    def images(self, count: int) -> Tensor:
        rng = torch.Generator().manual_seed(0)
        return torch.rand(count, *SHAPES[self.data], generator=rng) * 2 - 1

    def learner(self, config: Config, log: Callable[[str], None] = print) -> Learner:
        torch.manual_seed(0)
        method, run = learner_class(config.method), config.run
        model: Any = method.build(config.network, SHAPES[self.data], 0.3)
        return method(
            model.to(memory_format=torch.channels_last), learning_rate=run.learning_rates[0], betas=run.betas,
            settings=config.settings, compiled=run.compile == "on", log=log,
        )  # fmt: skip

    def update(self, config: Config, log: Callable[[str], None] = print) -> Callable[[], object]:
        """One iteration of training as a function without arguments."""
        learner, batch = self.learner(config, log), batch_of(self.images(config.run.batch))
        state = learner.init(seed=0)

        def run() -> None:
            nonlocal state
            state, _ = learner.update(state, batch, HALFWAY)

        return run


def steps_of(config: Config) -> int:
    settings: Any = config.settings
    return settings.steps


def batch_of(x: Tensor) -> Batch:
    return Batch(x, None, torch.arange(len(x)))


def plain_update(case: Case) -> Callable[[], object]:
    """K Langevin steps and one update as the published script makes them; for authors-script, of its own network.

    Autograd calls and nothing else: contiguous tensors, a graph that includes the parameters, and the last one is
    alive until the next one is built.
    """
    config = case.config()
    torch.manual_seed(0)
    model: Any = learner_class("short-run").build(config.network, SHAPES[case.data], 0.3)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = case.images(config.run.batch)
    steps = steps_of(config)

    def run() -> None:
        z = list(model.sample_prior(len(x)))
        for _ in range(steps):
            z = [layer.detach().requires_grad_() for layer in z]
            error = (x - model.decoder(z)).square().sum() / (2 * model.sigma**2)
            loss = error + sum(0.5 * layer.square().sum() for layer in z)
            drift = torch.autograd.grad(loss, z)
            z = [
                layer - STEP_SIZE * direction + math.sqrt(2 * STEP_SIZE) * torch.randn_like(layer)
                for layer, direction in zip(z, drift, strict=True)
            ]
        optimiser.zero_grad()
        (x - model.decoder([layer.detach() for layer in z])).square().sum().backward()
        optimiser.step()

    return run


def best_of(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest time of each in seconds; the functions take turns."""
    for function in functions.values():
        function()
    shortest = dict.fromkeys(functions, math.inf)
    for _ in range(repeats):
        for name, function in functions.items():
            begun = time.perf_counter()
            function()
            shortest[name] = min(shortest[name], time.perf_counter() - begun)
    return shortest


def best(function: Callable[[], object], repeats: int) -> float:
    """Shortest time of one function in seconds."""
    return best_of({"": function}, repeats)[""]


def multiplication() -> float:
    """GFLOP/s of a matrix multiplication in float32: the most that this machine gives."""
    rates = []
    for size in (1024, 2048, 3072):
        a, b = torch.randn(size, size), torch.randn(size, size)
        rates.append(2 * size**3 / best(functools.partial(torch.matmul, a, b), 12) / 1e9)
    return max(rates)


def arithmetic(model: Any, x: Tensor) -> float:
    """GFLOP of one image and one Langevin step, forward and backward."""
    z = tuple(layer.requires_grad_() for layer in model.sample_prior(len(x)))
    model.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        (model.log_prior(z) + model.log_likelihood(x, z)).sum().backward()
    model.requires_grad_(True)
    return counter.get_total_flops() / len(x) / 1e9


# --- memory -------------------------------------------------------------------------------------------


def high_water() -> float:
    """Largest resident size of this process so far, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not report VmHWM")


def memory(case: Case, kind: str, batch: int, steps: int) -> float:
    """Peak memory in MB beyond that of a process with the same model that has worked on two images."""
    command = [sys.executable, "-m", "shortrun.studies.bench", case.preset, case.data, kind, str(batch), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring memory of {kind} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def _measure_memory(words: list[str]) -> None:
    case = Case(words[0], words[1])  # type: ignore[arg-type]
    kind, batch, steps = words[2], int(words[3]), int(words[4])
    config = case.config("vae" if kind == "vae" else "short-run", batch=batch)
    learner: Any = case.learner(config)
    state = learner.init(seed=0)
    if kind == "train":  # whether it pays to freeze the generator depends on the first batch, which is to be a full one
        learner.evaluator(case.images(batch), learner.model.sample_prior(batch))

    def work(count: int) -> None:
        nonlocal state
        if kind == "infer":
            infer(learner.model, case.images(count), Langevin(steps, STEP_SIZE))
        else:
            state, _ = learner.update(state, batch_of(case.images(count)), HALFWAY)

    work(2)  # what libraries load and optimisers allocate at first use does not depend on the batch
    resting = high_water()
    work(batch)
    print(high_water() - resting)


# --- the parts of the benchmark -----------------------------------------------------------------------


def measure_updates(case: Case, peak: float, repeats: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Time of one iteration: plain, ours for the same algorithm, ours as the preset has it, and the VAE."""
    published, shipped = case.config(learn_last=1), case.config()
    steps, batch = steps_of(published), published.run.batch
    along = shipped.updates_along(0)
    functions = {
        "plain": plain_update(case),
        "ours": case.update(published, log),
        "ours compiled": case.update(published.changed(compile="on"), log),
        "vae": case.update(case.config("vae"), log),
    }
    if along > 1:
        functions["as shipped"] = case.update(shipped, log)
        functions["as shipped, compiled"] = case.update(shipped.changed(compile="on"), log)
    seconds = best_of(functions, repeats)
    model: Any = case.learner(published, log).model
    x = case.images(2)
    frozen = model.frozen()
    nominal, done = arithmetic(model, x), arithmetic(frozen, frozen.arrange(x))
    ours = min(seconds["ours"], seconds["ours compiled"])
    evaluations = (steps + 1) * batch
    result = {
        "batch": batch, "steps": steps, "seconds": seconds,
        "gflop_per_image_and_step": nominal, "gflop_done": done,
        "plain_share_of_peak": evaluations * nominal / seconds["plain"] / peak,
        "ours_share_of_peak": evaluations * nominal / ours / peak,
        "ours_share_of_peak_done": evaluations * done / ours / peak,
        "times_plain": seconds["plain"] / ours,
        "vae_updates_per_second": 1 / seconds["vae"], "iteration": ours,
    }  # fmt: skip
    if along > 1:
        iteration = min(seconds["as shipped"], seconds["as shipped, compiled"])
        result["iteration"] = iteration
        result["updates_per_second"] = along / iteration
        result["updates_times_plain"] = along * seconds["plain"] / iteration
    return result


def measure_memory(case: Case) -> dict[str, Any]:
    config = case.config()
    batches = list(MEMORY_BATCHES) if case.preset == "cpu" else [config.run.batch]
    steps = list(MEMORY_STEPS) if case.preset == "cpu" else [2, 10]
    result: dict[str, Any] = {
        "infer_by_steps": {k: memory(case, "infer", config.run.batch, k) for k in steps},
        "infer_by_batch": {n: memory(case, "infer", n, 5) for n in batches},
    }
    for kind in ("train", "vae"):
        result[kind] = {n: memory(case, kind, n, steps_of(config)) for n in batches}
    result["times_vae"] = {n: result["train"][n] / result["vae"][n] for n in batches}
    return result


def measure_tuning(case: Case, update: float, repeats: int) -> dict[str, Any]:
    """One tuning pass of a step that is led by the free energy, as a share of the updates between two passes."""
    cpu: Any = preset("cpu", case.data).settings
    config = case.config(
        tune="grid", step_control="bound", entropy=cpu.entropy, estimator=cpu.estimator, tune_deltas=(),
        tune_images=cpu.tune_images, tune_chains=cpu.tune_chains,
    )  # fmt: skip
    settings: Any = config.settings
    learner, batch = case.learner(config), batch_of(case.images(settings.tune_images))
    seconds = best(lambda: learner.tune(learner.init(seed=0), batch), repeats)
    return {"seconds": seconds, "share_at_100": seconds / (seconds + 100 * update), "tune_every": settings.tune_every}


def measure_choice(images: int) -> dict[str, Any]:
    """The step size that the matrix-free estimators choose for a trained model, against the exact one."""
    trained = load("mnist-small")
    x = data.load("embedded", "test").batch(slice(0, images))
    longest = trained.dynamics.step_size
    grid = [longest * 2 ** (j / 2) for j in range(-10, -4)]
    chosen: dict[str, Any] = {"grid": grid}
    estimators: tuple[Estimator, ...] = ("exact", "lanczos", "endpoint")
    for estimator in estimators:
        begun = time.perf_counter()
        how = Estimation(estimator=estimator, chains=2)
        rng = torch.Generator().manual_seed(0)
        result = tune_by_grid(trained.model, x, Langevin(CHOICE_STEPS, longest), grid, how, rng=rng)
        chosen[estimator] = {"cell": result.best, "seconds": time.perf_counter() - begun}
    return chosen


def measure_scaling(case: Case, repeats: int) -> dict[int, float]:
    """Images per second of `infer` for growing batches, K = 25."""
    model = case.learner(case.config()).model
    dynamics = Langevin(25, STEP_SIZE)
    rates = {}
    for count in INFER_BATCHES:
        rates[count] = count / best(functools.partial(infer, model, case.images(count), dynamics), repeats)
    return rates


def measure_loader(batch: int, update: float) -> dict[str, float]:
    """Seconds to put a batch together, and their share of an update."""
    images = data.load("embedded", "train")
    order = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return images.batch(torch.randint(len(images), (batch,), generator=order))

    seconds = best(draw, 50)
    return {"seconds": seconds, "share_of_update": seconds / update}


# --- all of it ----------------------------------------------------------------------------------------


def bench(
    sizes: Sequence[str] = ("cpu", "authors-script"),
    quick: bool = False,
    log: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure everything and log it line by line; the figures are saved after each part, and returned."""
    torch.set_flush_denormal(True)
    repeats = 1 if quick else 5
    known = (Case("cpu", "mnist"), Case("cpu", "svhn"), Case("paper", "svhn"), Case("authors-script", "svhn"))
    cases = [case for case in known if case.preset in sizes]
    log(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    result: dict[str, Any] = {
        "machine": {
            "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "processor": platform.machine(),
            "torch": torch.__version__, "quick": quick,
        }
    }  # fmt: skip
    for case in cases:
        count = repeats if case.preset == "cpu" else min(repeats, 2)
        peak = multiplication()  # for each case: the speed of shared machines drifts
        row = result[case.name] = {
            "gemm_gflops": peak,
            "updates": measure_updates(case, peak, count, lambda text: None),
        }
        timing = row["updates"]
        seconds = timing["seconds"]
        log(f"\n{case.name}: batch {timing['batch']}, K = {timing['steps']}; seconds per iteration")
        for name, value in seconds.items():
            log(f"  {name:44s} {value:8.3f}")
        log(f"  {'K steps and one update, times the plain loop':44s} {timing['times_plain']:8.2f}")
        if "updates_times_plain" in timing:
            log(f"  {'updates per second as shipped, times plain':44s} {timing['updates_times_plain']:8.2f}")
        log(f"  {'matrix multiplication, GFLOP/s':44s} {peak:8.0f}")
        log(f"  {'plain loop, share of matrix multiplication':44s} {timing['plain_share_of_peak']:8.2f}")
        log(f"  {'ours, share (arithmetic of the plain loop)':44s} {timing['ours_share_of_peak']:8.2f}")
        log(f"  {'ours, share (arithmetic really done)':44s} {timing['ours_share_of_peak_done']:8.2f}")
        row["tuning"] = measure_tuning(case, timing["iteration"], repeats if case.preset == "cpu" else 1)
        log(f"  {'one tuning pass, share of training, T_s = 100':44s} {row['tuning']['share_at_100']:8.3f}")
        row["memory"] = measure_memory(case)
        log(f"  memory of infer by K, MB: {_rounded(row['memory']['infer_by_steps'])}")
        log(f"  memory of infer by batch, MB: {_rounded(row['memory']['infer_by_batch'])}")
        log(f"  memory of training, MB: {_rounded(row['memory']['train'])}, VAE {_rounded(row['memory']['vae'])}")
        if case.preset == "cpu":
            row["loader"] = measure_loader(timing["batch"], timing["iteration"])
            log(f"  {'drawing a batch, share of an update':44s} {row['loader']['share_of_update']:8.5f}")
            row["infer_images_per_second"] = measure_scaling(case, 1 if quick else 3)
            log(f"  infer, K = 25, images/s by batch: {_rounded(row['infer_images_per_second'])}")
        save(result)
    result["choice"] = measure_choice(1 if quick else 3)
    cells = {name: result["choice"][name]["cell"] for name in ("exact", "lanczos", "endpoint")}
    log(f"\nstep size of mnist-small, cell of the grid that is chosen: {cells}")
    save(result)
    return result


def _rounded(values: dict[int, float]) -> str:
    return ", ".join(f"{key}: {value:.0f}" for key, value in values.items())


if __name__ == "__main__":  # one measurement of memory, in a process of its own
    _measure_memory(sys.argv[1:])
