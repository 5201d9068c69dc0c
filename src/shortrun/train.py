"""The training loop: one for every method (paper, Algorithm 1, for ``short-run``)."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shortrun import data
from shortrun.config import DECAY_FROM, TrainConfig
from shortrun.learners import METHODS
from shortrun.learners.base import Batch, NotPossibleError, Update
from shortrun.masks import make_mask
from shortrun.parallel import accelerator, seeded
from shortrun.pictures import save_grid
from shortrun.runs import RunError, load_checkpoint, save_checkpoint, save_pretrained

PATIENCE = 20
OFFERED_IMAGES = 16  # training images that a method gets before evaluations; it may use fewer
MAX_RECOVERIES = 5


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    iteration: int
    seconds: float
    mse: float
    """Held-out MSE per pixel, images in [-1, 1], on the images used for evaluation during training."""
    stopped: bool
    """Whether it was interrupted before its budget was used up."""

    def __str__(self) -> str:
        error = "" if math.isnan(self.mse) else f", held-out MSE {self.mse:.4f}"
        return f"{self.iteration} iterations in {self.seconds:.0f} s{error}; run folder {self.folder}"


def prepare_folder(folder: Path, resume: bool) -> None:
    """Refuse to start into a folder that holds a run, or to resume where there is none."""
    if resume:
        if not (folder / "config.yaml").is_file():
            raise RunError(f"{folder} is not a run folder: it has no config.yaml")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty. Continue it with `shortrun resume {folder}`, or name another folder")


def load_images(config: TrainConfig, split: data.Split) -> data.Images:
    """The images of a run, cut and chosen as its settings say."""
    limit = config.train_images if split == "train" else None
    return data.load(config.data, split, root=config.data_root, size=config.size, crop=config.crop, limit=limit)


def schedule(config: TrainConfig, iteration: int, share: float) -> tuple[float, float]:
    """Learning rate and sigma after ``share`` of the run."""
    rates = config.learning_rates
    if config.rate_changes:
        rate = rates[sum(iteration >= change for change in config.rate_changes)]
    else:
        rate = rates[min(int(share * len(rates)), len(rates) - 1)]
    if config.warm_up:
        rate *= min(1.0, (iteration + 1) / config.warm_up)
    if config.decay and share > DECAY_FROM:
        rate *= max(0.02, 0.5 * (1 + math.cos(math.pi * min(1.0, (share - DECAY_FROM) / (1 - DECAY_FROM)))))
    first, last = config.sigma
    passed = 1.0
    if share < config.anneal:
        passed = max(0.0, (share - config.anneal_from) / (config.anneal - config.anneal_from))
    linear = config.anneal_shape == "linear"
    sigma = first + (last - first) * passed if linear else first * (last / first) ** passed
    return rate, sigma


class Loop:
    """State of a run; :func:`train` drives it."""

    def __init__(self, config: TrainConfig, folder: Path, resume: bool, say: Callable[[str], None]) -> None:
        self.config, self.folder, self.say = config, folder, say
        self.accelerator = accelerator(config.mixed_precision)
        torch.set_flush_denormal(True)  # saturated tanh units give denormal gradients, which are slow
        self.train_images, self.test_images = load_images(config, "train"), load_images(config, "test")
        say(self.train_images.describe())
        say(self.test_images.describe())
        torch.manual_seed(config.seed)
        method = METHODS[config.method]
        model = method.build(config.model, self.train_images.shape, config.sigma[0])
        self.model: Any = model.to(device=self.accelerator.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._check_model()
        self.learner = method(self.model, config, self.accelerator, self.train_images)
        self.learner.say = say
        self.generators = {
            name: torch.Generator().manual_seed(1000 * config.seed + i)
            for i, name in enumerate(("order", "chains", "tuning", "masks", "evaluation"))
        }
        self.iteration, self.seconds, self.recoveries, self.patience = 0, 0.0, 0, 0
        self.mse = math.nan
        self.tuning_seconds, self.rate_factor = 0.0, 1.0
        if resume:
            self._restore()

    def _check_model(self) -> None:
        image = METHODS[self.config.method].sample(self.model, 2, torch.Generator().manual_seed(0))
        if tuple(image.shape[1:]) != self.train_images.shape:
            raise RunError(
                f"the generator makes images of shape {tuple(image.shape[1:])} but those of "
                f"{self.config.data} have {self.train_images.shape} (colours, height, width)"
            )

    # -- checkpoints ----------------------------------------------------------------------------------

    def save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "learner": self.learner.state(),
            "seconds": self.seconds,
            "mse": self.mse,
            "recoveries": self.recoveries,
            "tuning_seconds": self.tuning_seconds,
            "rate_factor": self.rate_factor,
            "patience": self.patience,
        }
        save_checkpoint(
            self.folder / "checkpoints",
            self.iteration,
            self.model,
            self.learner.optimiser,
            self.generators,
            self.learner.tensors(),
            state,
        )
        info = {
            "data": self.config.data,
            "crop": self.config.crop,
            "train_images": self.config.train_images,
            "train_checksum": self.train_images.checksum,
            "iterations": self.iteration,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            "seed": self.config.seed,
            "processes": self.accelerator.num_processes,
        }
        save_pretrained(
            self.model, self.folder / "model", method=self.config.method, config=self.config.model,
            image=self.train_images.shape, dynamics=self.learner.dynamics, spread=self.learner.spread, info=info,
        )  # fmt: skip

    def _restore(self) -> None:
        state, extra = load_checkpoint(self.folder / "checkpoints", self.model, self.learner.optimiser, self.generators)
        self.learner.load_state(state["learner"])
        self.learner.load_tensors(extra)
        self.iteration, self.seconds = state["iteration"], state["seconds"]
        self.mse, self.recoveries = state["mse"], max(self.recoveries, state["recoveries"])
        self.tuning_seconds, self.rate_factor = state["tuning_seconds"], state["rate_factor"]
        self.patience = state["patience"]

    def recover(self, reason: str) -> None:
        """Back to the last good checkpoint, with half the learning rate."""
        self.recoveries += 1
        if self.recoveries > MAX_RECOVERIES:
            raise RunError(f"{reason}; gave up after {MAX_RECOVERIES} returns to the last good checkpoint")
        recoveries, factor = self.recoveries, self.rate_factor
        self._restore()
        self.recoveries, self.rate_factor, self.patience = recoveries, factor / 2, 0
        self.say(
            f"{reason}: went back to iteration {self.iteration}, and halved the learning rate "
            f"({self.recoveries} of at most {MAX_RECOVERIES} returns)"
        )
        self.log({"event": "recovered", "reason": reason})

    def log(self, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            line = {"iteration": self.iteration, "seconds": round(self.seconds, 3), **values}
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def agree(self, interrupted: list[str]) -> None:
        """All processes follow the clock of the first one, and stop together."""
        if self.accelerator.num_processes > 1:
            main = float(self.accelerator.is_main_process)
            values = torch.tensor([main * self.seconds, float(bool(interrupted))], device=self.accelerator.device)
            seconds, stops = self.accelerator.reduce(values, "sum").tolist()
            self.seconds = seconds
            if stops and not interrupted:
                interrupted.append("another process")

    # -- one iteration --------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """How much of the budget is used, from 0 to 1."""
        done = [0.0]
        if self.config.iterations is not None:
            done.append(self.iteration / self.config.iterations)
        if self.config.minutes is not None:
            done.append(self.seconds / (60 * self.config.minutes))
        return max(done)

    @property
    def updates(self) -> int:
        """How often the generator was updated."""
        return self.learner.updates_in(self.iteration)

    def next_batch(self) -> Batch:
        """The images of this iteration: drawn from all, or the next ones of an epoch."""
        count = self.config.batch
        if self.config.order == "random":
            return self.draw(count, "order")
        # Positions follow from the iteration alone, so that resuming needs nothing more than the seed.
        total, begin = len(self.train_images), self.iteration * count
        places = torch.arange(begin, begin + count)
        orders = {
            epoch: torch.randperm(total, generator=torch.Generator().manual_seed((self.config.seed << 32) + epoch))
            for epoch in set((places // total).tolist())
        }
        return self.at(torch.stack([orders[place // total][place % total] for place in places.tolist()]))

    def draw(self, count: int, generator: str) -> Batch:
        return self.at(torch.randint(len(self.train_images), (count,), generator=self.generators[generator]))

    def at(self, indices: torch.Tensor) -> Batch:
        count = len(indices)
        x = self.train_images.batch(indices)
        if self.config.mask is None:
            return Batch(x, None, indices)
        height, width = x.shape[2:]
        return Batch(x, make_mask(self.config.mask, count, height, width, self.generators["masks"]), indices)

    def advance(self) -> Update:
        rate, sigma = schedule(self.config, self.iteration, self.share)
        self.model.sigma.fill_(sigma)
        for group in self.learner.optimiser.param_groups:
            group["lr"] = rate * self.rate_factor * self.learner.caution
        if self.learner.tuning_is_due(self.iteration):
            begun = time.perf_counter()
            self.learner.tune(self.draw(self.config.tune_images, "tuning"), self.generators["tuning"])
            self.tuning_seconds += time.perf_counter() - begun
            event = "tuning failed" if self.learner.last_tuning is None else "tuned"
            size = self.learner.dynamics.step_size
            self.log({"event": event, "step_size": size, **(self.learner.last_tuning or {})})
        update = self.learner.update(self.next_batch(), self.share, self.generators["chains"])
        self.patience = self.patience + 1 if update.divergent > self.config.batch / 2 else 0  # never, if tuned
        if not update.finite:
            self.recover("the loss is not finite")
        elif self.patience > PATIENCE:
            self.recover(f"more than half of the chains diverged in {PATIENCE} iterations")
        else:
            self.iteration += 1
        return update

    # -- evaluation -----------------------------------------------------------------------------------

    def evaluate(self, pictures: bool) -> float:
        """MSE of held-out reconstructions per pixel in [-1, 1], by the method's own inference.

        The images are shared between the processes; each has random numbers of its own.
        """
        self.learner.prepare(self.draw(OFFERED_IMAGES, "evaluation"), self.generators["evaluation"])
        count = min(self.config.evaluate_images, len(self.test_images))
        world = self.accelerator.num_processes
        count = max(count // world, 1) * world
        x = self.test_images.batch(torch.arange(count) % len(self.test_images)).to(self.accelerator.device)
        sources = seeded(torch.Generator().manual_seed(self.config.seed), count)
        try:
            images = self.accelerator.gather(self.learner.reconstruct(self.learner.own(x), self.learner.own(sources)))
        except NotPossibleError:
            images = None
        else:
            self.mse = float((images - x).square().mean())
            if float(images.std(0).mean()) < 1e-3 and float(images.abs().mean()) > 0.99:
                self.recover("the generator collapsed: all reconstructions are the same saturated image")
            guess = float((self.train_images.mean_image.to(x) - x).square().mean())
            if self.iteration > self.config.warm_up and not self.mse < guess:
                self.say(
                    f"held-out MSE {self.mse:.4f} is no better than the {guess:.4f} of the mean training image. If "
                    "that lasts, try lower --learning-rates, a longer --warm-up, or a shorter --step-size"
                )
        if pictures and self.accelerator.is_main_process:
            self._draw_pictures(x, images)
        return self.mse

    def _draw_pictures(self, x: torch.Tensor, images: torch.Tensor | None) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        samples = self.learner.sample(self.model, 30, generator, self.learner.spread)
        folder = self.folder / "pictures"
        folder.mkdir(exist_ok=True)
        rows = [] if images is None else [("held out", x[:10]), ("reconstruction", images[:10])]
        rows += [("sample" if i == 0 else "", samples[10 * i : 10 * i + 10]) for i in range(3)]
        title = f"iteration {self.iteration}" + ("" if images is None else f", held-out MSE {self.mse:.4f}")
        save_grid(folder / f"{self.iteration:08d}.png", rows, title)


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    watch: Callable[[Loop], None] | None = None,
) -> Outcome:
    """Train a model into a run folder. Ctrl-C and SIGTERM save and end it; ``resume`` continues it.

    ``watch`` is called after each evaluation; its time does not count as training.
    """
    folder = Path(folder)
    prepare_folder(folder, resume)
    console = Console(stderr=True, quiet=quiet)
    loop = Loop(config, folder, resume, lambda text: console.print(text, highlight=False))
    if loop.accelerator.is_main_process and not resume:
        folder.mkdir(parents=True, exist_ok=True)
        config.save(folder / "config.yaml")
    loop.accelerator.wait_for_everyone()
    if not resume:
        loop.save()
    writer = None
    if config.tensorboard and loop.accelerator.is_main_process:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

    interrupted: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(signal.Signals(number).name)

    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, interrupt)
        _run(loop, console, writer, interrupted, watch)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    loop.save()
    if interrupted:
        console.print(
            f"{interrupted[0]}: saved at iteration {loop.iteration}. Continue with `shortrun resume {folder}`"
        )
    return Outcome(folder, loop.iteration, loop.seconds, loop.mse, bool(interrupted))


def _run(
    loop: Loop, console: Console, writer: Any, interrupted: list[str], watch: Callable[[Loop], None] | None
) -> None:
    config = loop.config
    by_time = config.minutes is not None
    divergent = 0
    status_column = TextColumn("{task.fields[status]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), status_column)

    def clock() -> float:
        return loop.seconds if by_time else float(loop.iteration)

    next_evaluation, next_checkpoint = clock() + config.evaluate_every, clock() + config.checkpoint_every
    began_at, began = loop.iteration, time.perf_counter()
    with Progress(*columns, console=console, transient=False, disable=console.quiet) as progress:
        task = progress.add_task("training", total=1.0, status="")
        mark = time.perf_counter()
        while loop.share < 1 and not interrupted:
            update = loop.advance()
            divergent += update.divergent
            now = time.perf_counter()
            loop.seconds, mark = loop.seconds + now - mark, now
            loop.agree(interrupted)
            speed = (loop.iteration - began_at) / (now - began)
            left = (now - began) * (1 - loop.share) / max(loop.share, 1e-9) if loop.share < 1 else 0.0
            size = loop.learner.dynamics.step_size
            mean = loop.learner.dynamics.longest
            progress.update(
                task,
                completed=loop.share,
                status=f"{loop.iteration} it, {speed:.2f}/s, MSE {loop.mse:.4f}, s {mean:.4g} (delta "
                f"{math.sqrt(2 * mean):.3g}), {divergent} divergent, {left:.0f} s left",
            )
            if clock() >= next_evaluation or loop.share >= 1:
                next_evaluation = clock() + config.evaluate_every
                begun = time.perf_counter()
                mse = loop.evaluate(pictures=True)
                values = {
                    "mse": mse,
                    "loss": update.loss,
                    "step_size": size,
                    "sigma": float(loop.model.sigma),
                    "divergent": divergent,
                    "latent_std": update.latent_std,
                    "tuning_share": loop.tuning_seconds / max(loop.seconds, 1e-9),
                    "updates": loop.updates,
                    "updates_per_second": (loop.updates - loop.learner.updates_in(began_at)) / (now - began),
                    "evaluation_seconds": time.perf_counter() - begun,
                }
                if math.isnan(mse):  # the method has no reconstructions
                    del values["mse"]
                loop.log(values)
                if writer is not None:
                    for key in ("mse", "loss", "sigma", "divergent"):
                        if key in values:
                            writer.add_scalar(key, values[key], loop.iteration)
                if watch is not None:
                    watch(loop)
                mark = time.perf_counter()  # evaluation is not training time
            if clock() >= next_checkpoint:
                next_checkpoint = clock() + config.checkpoint_every
                loop.save()
                mark = time.perf_counter()
