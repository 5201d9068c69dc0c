"""What training costs on GPUs that are not here: a model of arithmetic, memory traffic and communication, checked here.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --json results/scaling.json

The real networks are traced on tensors without data, operation by operation. An operation takes as long as the slowest
of its arithmetic (compared with ``torch.utils.flop_counter.FlopCounterMode``), its memory traffic and the launch
of a kernel. Around these come what one iteration of Algorithm 1 does besides: folding the weights, noise, the update
with its all-reduce, the batch. The first tables are predictions for the preset ``paper`` and for images of 256x256,
with the published figures of an A100. The last ones compare the same model, with the speed of a matrix multiplication
on this machine, to iterations measured here, in one process and in two (torchrun on loopback, gloo).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from shortrun.core.chain import gradient, move
from shortrun.core.latents import dimensions, freeze_if_it_pays
from shortrun.core.model import GaussianModel
from shortrun.data.examples import Images
from shortrun.files import write_json
from shortrun.learners.adapt import Rules, curvature_along
from shortrun.learners.gradients import Joint, gradients_of, learning_point
from shortrun.learners.short_run import ShortRun
from shortrun.nets.build import GeneratorNetwork, build_model
from shortrun.processes import Processes, processes
from shortrun.studies.bench import HALFWAY, SHAPES, Case, batch_of, best_of
from shortrun.studies.sources import machine
from shortrun.training.config import Config

PAPER = Case("paper", "svhn")
IMAGES = 300_000 * 100  # iterations of the preset paper, times its batch
ACCURACY = 1e-6  # of the sum over operations, beside what FlopCounterMode finds
UPDATE_BYTES = 56  # per parameter: fused Adam reads p, g, m, v and writes p, m, v; the gradient is moved three times
TUNINGS, TUNED_IMAGES = (15, 25), 4  # candidates and steps of one tuning of the preset paper; its images


# --- what a device does in a second --------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Rates that can be had, in FLOP/s, bytes/s and seconds."""

    convolution: float
    matrix: float
    memory: float
    """Of operations whose tensors are not in a cache."""
    launch: float
    """The shortest time of an operation in a function that may be compiled."""
    outside: float
    """The same elsewhere."""
    fill: float = 0.0
    """The shortest time of one with arithmetic: a few images cannot keep a whole device busy."""
    width: float = 1.0
    """Of the numbers inside the network, in units of float32."""

    def seconds(self, work: Work) -> float:
        total = 0.0
        for kind, flops, moved in work.operations:
            rate = self.convolution if kind == "convolution" else self.matrix
            total += max(flops / rate, self.width * moved / self.memory, self.fill if flops else 0.0, self.launch)
        return total


@dataclass(frozen=True)
class Host:
    """What each process does on its CPU, whatever the number of processes: noise and the batch are drawn in full."""

    normals: float
    """Numbers from N(0, 1) per second."""
    pixels: float
    """Pixels per second that are taken from a set of images."""


@dataclass(frozen=True)
class Links:
    """Of an all-reduce by a ring: a latency per hop, and bytes per second of the slowest link."""

    latency: float
    bandwidth: float

    def seconds(self, size: float, count: int) -> float:
        if count == 1:
            return 0.0
        return 2 * (count - 1) * self.latency + 2 * (count - 1) / count * size / self.bandwidth


ARITHMETIC, BANDWIDTH = 0.5, 0.7  # assumed: what is had of the published peaks
LAUNCH, FILL = {"eager": 8e-6, "graphs": 2e-6}, 6e-6  # assumed, in seconds
PEAKS = {  # of convolutions and matrices
    "fp32": (19.5e12, 19.5e12), "as torch comes": (156e12, 19.5e12), "tf32": (156e12, 156e12), "bf16": (312e12, 312e12),
}  # fmt: skip


def a100(precision: str, launch: str = "eager") -> Device:
    """An A100 with 40 GB, by its data sheet and the assumptions above; torch comes with TF32 for convolutions alone."""
    convolution, matrix = (ARITHMETIC * peak for peak in PEAKS[precision])
    width = 0.5 if precision == "bf16" else 1.0
    return Device(convolution, matrix, BANDWIDTH * 1.555e12, LAUNCH[launch], LAUNCH["eager"], FILL, width)


def links(count: int) -> Links:
    """NVLink (300 GB/s each way) within a machine of 8; between machines 200 Gb/s for each."""
    return Links(5e-6, BANDWIDTH * (300e9 if count <= 8 else 25e9))


# --- what is to be done --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Operations as (kind, FLOP, bytes that are read and written)."""

    operations: tuple[tuple[str, float, float], ...] = ()

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.operations)

    @property
    def bytes(self) -> float:
        return sum(moved for _, _, moved in self.operations)


class Tracer(TorchDispatchMode):
    """Notes the operations that run inside it; those that only look at a tensor in another way move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        looks = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if looks or func._schema.name in ("aten::empty", "aten::empty_like"):
            return found
        packet = func._overloadpacket
        flops = float(flop_registry[packet](*args, **kwargs, out_val=found)) if packet in flop_registry else 0.0
        kind = "convolution" if "convolution" in str(packet) else "matrix" if flops else "other"
        tensors = {id(t): t for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)}
        self.operations.append((kind, flops, float(sum(t.numel() * t.element_size() for t in tensors.values()))))
        return found


def traced(function: Callable[[], Any]) -> Work:
    with Tracer() as tracer:
        function()
    return Work(tuple(tracer.operations))


def compare(work: Work, joint: Joint, x: Tensor, z: Sequence[Tensor], learning: bool = False) -> None:
    """Raise an error unless torch's own counter finds the arithmetic that the trace has."""
    leaves = tuple(layer.detach().requires_grad_() for layer in z)
    joint.requires_grad_(learning)
    with FlopCounterMode(display=False) as counter:  # which follows backward() alone
        joint(leaves, x, None).sum().backward()
    joint.requires_grad_(True).zero_grad()
    if abs(work.flops - counter.get_total_flops()) > ACCURACY * work.flops:
        raise RuntimeError(f"{work.flops} FLOP in the trace, {counter.get_total_flops()} by FlopCounterMode")


class Pyramid(nn.Module):
    """A generator for 256x256 that this package does not have: blocks at every size, latents as maps at four of them.

    It has as many latents per pixel as the paper's network, 26,624 of them.
    """

    WIDTHS: ClassVar = {4: 512, 8: 512, 16: 512, 32: 256, 64: 128, 128: 64, 256: 32}
    LATENTS = ((64, 4, 4), (16, 8, 8), (16, 16, 16), (20, 32, 32))

    def __init__(self) -> None:
        super().__init__()
        self.latent_shapes = self.LATENTS
        widths = list(self.WIDTHS.values())
        self.enter = nn.ModuleList(nn.Conv2d(maps, self.WIDTHS[side], 3, padding=1) for maps, side, _ in self.LATENTS)
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in itertools.pairwise(widths))
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4)) for width in widths
        )
        self.out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        hidden = self.enter[0](z[0])
        for i, layers in enumerate(self.blocks):
            if i:
                hidden = F.interpolate(self.narrow[i - 1](hidden), scale_factor=2.0)
                hidden = hidden + self.enter[i](z[i]) if i < len(z) else hidden
            for first, second in zip(layers[::2], layers[1::2], strict=True):
                hidden = hidden + second(F.gelu(first(F.gelu(hidden))))
        return torch.tanh(self.out(hidden))


class Task(NamedTuple):
    """A network and how it is learned."""

    network: GeneratorNetwork | None
    """None: :class:`Pyramid`."""
    shape: tuple[int, int, int]
    batch: int
    steps: int
    updates: int = 1
    """m, at the last points of the chain."""
    bounded: bool = False
    """Whether steepness has a price, as in the preset cpu."""
    tune_every: int | None = None
    """None: tuning is left out."""

    @classmethod
    def of(cls, case: Case, config: Config, tuned: bool = False) -> Task:
        settings: Any = config.settings
        return cls(
            config.network, SHAPES[case.data], config.run.batch, settings.steps, config.updates_along(0),
            settings.step_control == "bound", settings.tune_every if tuned else None,
        )  # fmt: skip

    @property
    def moves(self) -> int:
        """Points of a chain before the first update."""
        return self.steps + 1 - self.updates


class Parts(NamedTuple):
    """One iteration of one process, with ``rows`` images of its own."""

    parameters: int
    tensors: int
    layers: int
    latents: int
    frozen: bool
    step: Work
    """An evaluation with gradients of latents before the first update."""
    plain: Work
    """The same without folded weights."""
    learning: Work
    """An evaluation with gradients of latents and parameters."""
    move: Work
    fold: Work
    priced: Work
    saved: int
    """Bytes that autograd keeps of all rows for the backward pass."""

    def flops(self, task: Task) -> float:
        """Of one iteration, without tuning."""
        chain = task.moves * self.step.flops + task.updates * self.learning.flops
        return chain + self.fold.flops + self.priced.flops


@functools.cache
def parts(task: Task, rows: int) -> Parts:
    """Traced on tensors without data; of the task, its batch plays no part."""
    meta = torch.device("meta")
    with meta:
        pyramid = Pyramid()
        model: Any = (
            GaussianModel(pyramid, pyramid.latent_shapes) if task.network is None
            else build_model(task.network, task.shape, 0.3)
        )  # fmt: skip
    model = model.to(memory_format=torch.channels_last)
    x = torch.empty(rows, *task.shape, device=meta).to(memory_format=torch.channels_last)
    z = tuple(torch.empty(rows, *shape, device=meta) for shape in model.latent_shapes)
    size = dimensions(model.latent_shapes)
    parameters = list(model.parameters())
    plainly = Processes().autocast
    joint = Joint(model, plainly)
    step = plain = traced(lambda: gradient(lambda leaves: joint(leaves, x, None), z))
    fold = Work()
    frozen = freeze_if_it_pays(model, task.moves * rows, size)
    if frozen is not None:
        arranged, still = frozen.arrange(x), Joint(frozen, plainly)
        step = traced(lambda: gradient(lambda leaves: still(leaves, arranged, None), z))
        compare(step, still, arranged, z)
        fold = traced(frozen.refresh)
    learning = traced(lambda: learning_point(joint, parameters, z, x, None))
    compare(learning, joint, x, z, learning=True)
    paying = max(round(rows * Rules().share), 1)
    direction = torch.empty(paying, size, device=meta)

    def steepness() -> None:
        found = curvature_along(model, x[:paying], None, tuple(layer[:paying] for layer in z), direction, 0.1)
        gradients_of(found.sum(), parameters)

    return Parts(
        sum(p.numel() for p in parameters), len(parameters), len(z), size, frozen is not None, step, plain,
        learning, traced(lambda: move(z, z, [0.1] * len(z), z)),
        fold, traced(steepness) if task.bounded else Work(),
        kept(lambda: joint(tuple(layer.detach().requires_grad_() for layer in z), x, None), parameters),
    )  # fmt: skip


@functools.cache
def hessian(network: GeneratorNetwork, shape: tuple[int, int, int], by_rows: bool, columns: int) -> Work:
    """Products with columns of the Hessian of one image: by ``vmap``, as tuning makes them, or as rows of a batch.

    By ``vmap`` torch runs the convolutions one column after the other.
    """
    meta = torch.device("meta")
    with meta:
        frozen: Any = build_model(network, shape, 0.3).to(memory_format=torch.channels_last).frozen()
    joint = Joint(frozen, Processes().autocast)
    rows = columns if by_rows else 1
    x = frozen.arrange(torch.empty(rows, *shape, device=meta))
    z = tuple(torch.empty(rows, *each, device=meta).requires_grad_() for each in frozen.latent_shapes)

    def slopes() -> tuple[Tensor, ...]:
        return torch.autograd.grad(joint(z, x, None).sum(), z, create_graph=True)

    if by_rows:
        return traced(lambda: torch.autograd.grad(slopes(), z, tuple(torch.empty_like(layer) for layer in z)))
    found, vectors = slopes(), tuple(torch.empty(columns, *layer.shape, device=meta) for layer in z)
    return traced(lambda: torch.autograd.grad(found, z, vectors, is_grads_batched=True))


def kept(forward: Callable[[], Any], without: Sequence[Tensor]) -> int:
    """Bytes of what autograd keeps, without the parameters themselves."""
    known = {p.untyped_storage()._cdata for p in without}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in known:
            held[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


# --- seconds -------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Of one iteration."""

    chain: float
    learning: float
    fold: float
    noise: float
    data: float
    update: float
    communication: float
    tuning: float

    @property
    def total(self) -> float:
        return sum(self)


def seconds(
    task: Task, count: int, device: Device, host: Host, between: Links, found: Parts, changes: str = ""
) -> Seconds:
    """One iteration of ``count`` processes that share a batch, each with the ``found`` parts.

    ``changes`` to the package: ``shares``, each process draws the noise and takes the data of its own images alone;
    ``moments``, of the latents only means and variances are kept, not their covariance; ``columns``, tuning works on
    many columns of a Hessian as one batch.
    """
    p, rows = found, math.ceil(task.batch / count) if "shares" in changes else task.batch
    moments = 2 * p.latents if "moments" in changes else p.latents**2 + p.latents
    outside = replace(device, launch=device.outside, width=1.0)
    small = (8 + p.layers) * device.outside  # of a step besides: divergence, best points, noise from the host
    tuning = 0.0
    if task.tune_every is not None:
        images = max(TUNED_IMAGES // count, 1)
        assert task.network is not None
        if "columns" in changes:
            all_columns = outside.seconds(hessian(task.network, task.shape, True, p.latents))
        else:  # each column adds the same
            four, eight = (outside.seconds(hessian(task.network, task.shape, False, n)) for n in (4, 8))
            all_columns = eight + (p.latents - 8) * (eight - four) / 4
        tuning = math.prod(TUNINGS) * images * all_columns / task.tune_every
    update = UPDATE_BYTES * p.parameters / device.memory + 2 * p.tensors * device.outside
    return Seconds(
        task.moves * device.seconds(p.step) + task.steps * (outside.seconds(p.move) + small),
        task.updates * device.seconds(p.learning) + outside.seconds(p.priced),
        outside.seconds(p.fold),
        task.steps * rows * p.latents / host.normals,
        rows * math.prod(task.shape) / host.pixels,
        task.updates * update + 3 * p.tensors * task.bounded * device.outside,  # copies, for undo
        task.updates * between.seconds(4 * (p.parameters + 2), count) + between.seconds(8 * moments, count),
        tuning,
    )


# --- this machine --------------------------------------------------------------------------------------


def shortest(function: Callable[[], object], repeats: int) -> float:
    function()
    return best_of({"": function}, repeats)[""]


def this_machine(size: int, repeats: int) -> Device:
    """A matrix multiplication, GELU over a megabyte, and small operations and convolutions with their gradients."""
    peak = 0.0
    for side in (size // 4, size // 2, size):
        a, b = torch.randn(side, side), torch.randn(side, side)
        peak = max(peak, 2 * side**3 / shortest(functools.partial(torch.matmul, a, b), repeats * (size // side)))
    maps = torch.randn(2**18)
    memory = 2 * 4 * maps.numel() / shortest(lambda: F.gelu(maps), 20 * repeats)
    leaf, depth = torch.zeros(8, requires_grad=True), 50

    def small() -> None:
        value = leaf
        for _ in range(depth):
            value = value * 1.01
        torch.autograd.grad(value.sum(), leaf)

    image, weight = torch.zeros(1, 8, 7, 7, requires_grad=True), torch.zeros(8, 8, 3, 3)

    def convolution() -> None:
        torch.autograd.grad(F.conv2d(image, weight, padding=1).sum(), image)

    launch = shortest(small, 20 * repeats) / (2 * depth)
    return Device(peak, peak, memory, launch, launch, shortest(convolution, 100 * repeats) / 2)


def this_host(repeats: int) -> Host:
    rng = torch.Generator().manual_seed(0)
    count = 100 * 416
    images = Images(torch.zeros(2000, 3, 32, 32, dtype=torch.uint8), "random", "train")

    def batch() -> Tensor:
        return images.batch(torch.randint(len(images), (100,), generator=rng))

    normals = count / shortest(lambda: torch.randn(count, generator=rng), 20 * repeats)
    return Host(normals, 100 * 3072 / shortest(batch, 20 * repeats))


def updates(case: Case, config: Config, shared: Processes) -> tuple[ShortRun, Callable[[], object]]:
    """A learner, and one iteration of it as a function."""
    learner: Any = case.learner(config)
    learner.processes = shared
    batch, state = batch_of(case.images(config.run.batch)), learner.init(seed=0)

    def run() -> None:
        nonlocal state
        state, _ = learner.update(state, batch, HALFWAY)

    return learner, run


def check_one(case: Case, batch: int, device: Device, host: Host, repeats: int) -> dict[str, Any]:
    """Predicted and measured seconds of an iteration, and the arithmetic of a real one as torch counts it."""
    config = case.config(batch=batch)
    task = Task.of(case, config)
    found = parts(task, task.batch)
    expected = seconds(task, 1, device, replace(host, pixels=math.inf), Links(0.0, math.inf), found)
    _, run = updates(case, config, Processes())
    run()
    counted = traced(run).flops
    measured = shortest(run, repeats)
    return {
        "case": case.name, "batch": task.batch, "updates": task.updates, "gflop": found.flops(task) / 1e9,
        "gflop_counted": counted / 1e9, "predicted": expected.total, "measured": measured,
        "ratio": measured / expected.total, "by_part": expected._asdict(),
    }  # fmt: skip


# --- two processes -------------------------------------------------------------------------------------


def work(folder: Path, case: Case, batch: int, iterations: int) -> None:
    """What each of the processes does: a few iterations, timed, and the time of sums over processes."""
    torch.set_num_threads(1)
    shared = processes()
    learner, run = updates(case, case.config(batch=batch), shared)
    before = torch.cat([p.detach().flatten() for p in learner.parameters])
    times = []
    for _ in range(iterations):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    weights = torch.cat([p.detach().flatten() for p in learner.parameters])
    result: dict[str, Any] = {"seconds": min(times[1:] or times), "moved": weights - before}
    if shared.num_processes > 1:
        few, many = torch.zeros(2), torch.zeros(2**20)
        latency = shortest(lambda: shared.total(few), 20) / (2 * (shared.num_processes - 1))
        whole = shortest(lambda: shared.total(many), 10) - latency
        share = 2 * (shared.num_processes - 1) / shared.num_processes
        result |= {"latency": latency, "bandwidth": share * 4 * many.numel() / max(whole, 1e-9)}
    if shared.is_main_process:
        torch.save(result, folder / f"{shared.num_processes}.pt")
    if shared.num_processes > 1:
        torch.distributed.destroy_process_group()


def launched(count: int, folder: Path, case: Case, batch: int, iterations: int) -> dict[str, Any]:
    """What :func:`work` finds, in this process or in several that torchrun starts."""
    if count == 1:
        work(folder, case, batch, iterations)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--master_addr", "127.0.0.1"]
        words = ["--master_port", port, __file__, "--work", str(folder), case.preset, case.data, str(batch)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, *words, str(iterations)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{count} processes failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = torch.load(folder / f"{count}.pt", weights_only=True)
    return found


def check_two(case: Case, batch: int, device: Device, host: Host, iterations: int) -> dict[str, Any]:
    """How much faster two processes are than one, predicted and measured, and whether they find the same weights."""
    with tempfile.TemporaryDirectory() as name:
        one, two = (launched(count, Path(name), case, batch, iterations) for count in (1, 2))
    task, inside = Task.of(case, case.config(batch=batch)), replace(host, pixels=math.inf)
    apart = one["moved"] - two["moved"]
    loopback = Links(two["latency"], two["bandwidth"])
    alone, both = (
        seconds(task, count, device, inside, loopback, parts(task, math.ceil(batch / count))).total for count in (1, 2)
    )
    return {
        "case": case.name, "batch": batch, "iterations": iterations, "one_predicted": alone, "two_predicted": both,
        "one_measured": one["seconds"], "two_measured": two["seconds"], "ratio_predicted": alone / both,
        "ratio_measured": one["seconds"] / two["seconds"],
        "difference": float(apart.norm() / one["moved"].norm()),
        "share_apart": float((apart.abs() > 0.01 * one["moved"].abs().max()).double().mean()),
        "latency": loopback.latency, "bandwidth": loopback.bandwidth,
    }  # fmt: skip


# --- tables --------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def predict(host: Host, task: Task, count: int, precision: str, launch: str, changes: str = "") -> dict[str, Any]:
    rows = math.ceil(task.batch / count)
    found = parts(task._replace(batch=rows), rows)
    spent = seconds(task, count, a100(precision, launch), host, links(count), found, changes)
    return {
        "gpus": count, "batch": task.batch, "updates": task.updates, "precision": precision, "launch": launch,
        "changes": changes, **spent._asdict(), "total": spent.total,
    }  # fmt: skip


def paper_task(batch: int) -> Task:
    config = PAPER.config(batch=batch)
    return Task.of(PAPER, config.changed(tune="grid"), tuned=True)


def of_one_image(found: Parts, rows: int) -> str:
    """Arithmetic and memory traffic."""
    works = {
        "Langevin step, as the network is": found.plain, "Langevin step, folded": found.step,
        "the step that also learns": found.learning,
    }  # fmt: skip
    return table([
        {
            "per image": name, "GFLOP": f"{work.flops / rows / 1e9:.2f}", "MB moved": f"{work.bytes / rows / 1e6:.1f}",
            "FLOP per byte": f"{work.flops / work.bytes:.0f}", "operations": str(len(work.operations)),
        }
        for name, work in works.items()
    ])  # fmt: skip


def by_part(rows: Sequence[dict[str, Any]]) -> str:
    return table([
        {
            "GPUs": str(row["gpus"]), "batch": f"{row['batch']:,}", "updates": str(row["updates"]),
            "launches": row["launch"], "changes": row["changes"] or "none",
            **{name: f"{1e3 * row[name]:.1f}" for name in Seconds._fields}, "all": f"{1e3 * row['total']:.1f}",
            "hours": f"{row['total'] * IMAGES / row['batch'] / 3600:.3g}",
        }
        for row in rows
    ])  # fmt: skip


def hours(rows: Sequence[dict[str, Any]]) -> str:
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["precision"], row["launch"]), {})
        line[str(row["gpus"])] = f"{row['total'] * IMAGES / row['batch'] / 3600:.1f}"
    return table([{"hours": ", ".join(kind), **line} for kind, line in lines.items()])


def predicted(host: Host, counts: Sequence[int], rows: int, log: Callable[[str], None]) -> dict[str, Any]:
    """The tables for the preset ``paper`` and for images of 256x256."""
    task, some = paper_task(100), [count for count in counts if count in (1, 8, 64)]
    whole = parts(task, 100)
    log(f"\nthe preset paper: {whole.parameters:,} parameters, {whole.latents} latents\n")
    log(of_one_image(whole, 100))
    log(f"\nfolding once: {whole.fold.flops / 1e9:.1f} GFLOP; kept for the backward pass: {whole.saved / 1e8:.1f} MB")
    kinds = [(precision, launch) for launch in LAUNCH for precision in PEAKS]
    strong = [predict(host, task, count, *kind) for kind in kinds for count in counts]
    log("\n300,000 iterations of batch 100: hours by the number of GPUs\n")
    log(hours(strong))
    usual = "as torch comes"
    shown = [row for row in strong if row["precision"] == usual and row["gpus"] in some]
    along = task._replace(updates=18, tune_every=None)
    shown += [predict(host, task, count, usual, "graphs", "columns") for count in some]
    shown += [predict(host, along, count, usual, "graphs") for count in some]
    log("\none iteration of batch 100, as torch comes: milliseconds, and hours for all images\n")
    log(by_part(shown))
    each = [(paper_task(100 * count), count) for count in some if count > 1 or len(some) == 1]
    weak = [predict(host, *pair, usual, "graphs", changes) for changes in ("", "shares, columns") for pair in each]
    log("\nthe same with 100 images per GPU\n")
    log(by_part(weak))
    large = [predict_large(host, *words) for words in LARGE[:rows]]
    log(f"\n256x256, batch {BIG_BATCH:,}: seconds of one iteration, and days for {BIG_IMAGES:,} images\n")
    log(table([shown_large(row) for row in large]))
    return {"paper": strong, "along": shown, "weak": weak, "large": large}


BIG_IMAGES, BIG_BATCH = 100_000_000, 1024  # a million images, a hundred times
AT_16 = GeneratorNetwork(
    latent_sizes=(64, 64, 64, 96, 128), channels=64, base=16, head_channels="latent", last_block=False
)
NETWORKS = {"paper's, 64 maps": AT_16, "paper's, 256 maps": replace(AT_16, channels=256), "pyramid": None}
LARGE = (
    ("paper's, 64 maps", 64, "as torch comes", "eager", ""),
    ("paper's, 256 maps", 64, "as torch comes", "eager", ""),
    ("pyramid", 64, "as torch comes", "eager", ""),
    ("pyramid", 64, "as torch comes", "eager", "shares"),
    ("pyramid", 64, "as torch comes", "eager", "shares, moments"),
    ("pyramid", 64, "bf16", "graphs", "shares, moments"),
    ("pyramid", 8, "bf16", "graphs", "shares, moments"),
)


def predict_large(host: Host, name: str, count: int, precision: str, launch: str, changes: str) -> dict[str, Any]:
    task, rows = Task(NETWORKS[name], (3, 256, 256), BIG_BATCH, 25), math.ceil(BIG_BATCH / count)
    found, row = parts(task._replace(batch=rows), rows), predict(host, task, count, precision, launch, changes)
    return row | {
        "network": name, "parameters": found.parameters, "latents": found.latents,
        "gflop": found.step.flops / rows / 1e9, "kept_mb": found.saved / rows / 1e6,
        "moments_gb": 8 * found.latents**2 / 1e9, "days": row["total"] * BIG_IMAGES / BIG_BATCH / 86400,
    }  # fmt: skip


def shown_large(row: dict[str, Any]) -> dict[str, str]:
    return {
        "network": row["network"], "parameters": f"{row['parameters'] / 1e6:.0f} M", "latents": f"{row['latents']:,}",
        "GFLOP per step": f"{row['gflop']:.1f}", "MB kept": f"{row['kept_mb']:.0f}",
        "covariance, GB": f"{row['moments_gb']:.2g}", "GPUs": str(row["gpus"]),
        "arithmetic": f"{row['precision']}, {row['launch']}", "changes": row["changes"] or "none",
        **{part: f"{row[part]:.2f}" for part in ("chain", "noise", "data", "communication")},
        "all": f"{row['total']:.2f}", "days": f"{row['days']:.1f}",
    }  # fmt: skip


def shown_check(rows: Sequence[dict[str, Any]]) -> str:
    return table([
        {
            "preset": row["case"], "batch": str(row["batch"]), "updates": str(row["updates"]),
            "GFLOP, model": f"{row['gflop']:.1f}", "GFLOP, counted": f"{row['gflop_counted']:.1f}",
            "predicted, s": f"{row['predicted']:.3f}", "measured, s": f"{row['measured']:.3f}",
            "measured / predicted": f"{row['ratio']:.2f}",
        }
        for row in rows
    ])  # fmt: skip


def shown_two(rows: Sequence[dict[str, Any]]) -> str:
    return table([
        {
            "preset": row["case"], "batch": str(row["batch"]), "one, s": f"{row['one_measured']:.3f}",
            "two, s": f"{row['two_measured']:.3f}", "times faster, predicted": f"{row['ratio_predicted']:.2f}",
            "measured": f"{row['ratio_measured']:.2f}", "difference of the weights": f"{row['difference']:.1e}",
            "weights apart": f"{row['share_apart']:.1e}",
            "loopback, GB/s": f"{row['bandwidth'] / 1e9:.1f}",
        }
        for row in rows
    ])  # fmt: skip


def cases(words: Sequence[str]) -> list[tuple[Case, int]]:
    """``paper:svhn:4`` is the preset paper with images of SVHN's shape, four at a time."""
    found = []
    for word in words:
        name, data, batch = word.split(":")
        found.append((Case(name, data), int(batch)))  # type: ignore[arg-type]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--large", type=int, default=len(LARGE), help="rows of the table for 256x256")
    parser.add_argument("--one", nargs="*", default=["cpu:mnist:64", "cpu:svhn:64", "paper:svhn:4"],
                        help="measured in one process, PRESET:SHAPE:BATCH")  # fmt: skip
    parser.add_argument("--two", nargs="*", default=["cpu:svhn:16", "cpu:svhn:64", "paper:svhn:4"],
                        help="measured in one process and in two")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured; the shortest time counts")
    parser.add_argument("--size", type=int, default=1536, help="of the matrices that are multiplied")
    parser.add_argument("--only-check", action="store_true", help="leave out the predictions for GPUs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    if words.work:
        folder, name, data, batch, iterations = words.work
        return work(Path(folder), Case(name, data), int(batch), int(iterations))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(words)
    finally:
        torch.set_num_threads(threads)


def run(words: argparse.Namespace) -> None:
    host = this_host(words.repeats)
    normals, pixels = host.normals / 1e6, host.pixels / 1e6
    print(f"this host: {normals:.0f} million normal numbers and {pixels:.0f} million pixels a second")
    result: dict[str, Any] = {"machine": machine(), "host": vars(host)}
    if not words.only_check:
        result |= predicted(host, words.gpus, words.large, print)
    device = this_machine(words.size, words.repeats)
    print(
        f"\nthis machine, one thread: {device.matrix / 1e9:.0f} GFLOP/s, {device.memory / 1e9:.1f} GB/s, "
        f"{1e6 * device.launch:.1f} us for the smallest operation, {1e6 * device.fill:.0f} us for a convolution\n"
    )
    result |= {"device": vars(device)}
    result["one"] = [check_one(case, batch, device, host, words.repeats) for case, batch in cases(words.one)]
    if result["one"]:
        print(shown_check(result["one"]) + "\n")
    result["two"] = [check_two(case, batch, device, host, words.repeats + 1) for case, batch in cases(words.two)]
    if result["two"]:
        print(shown_two(result["two"]))
    if words.json:
        words.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(words.json, result)


if __name__ == "__main__":
    main()
