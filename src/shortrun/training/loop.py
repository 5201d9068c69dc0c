"""The training loop: one for every method (paper, Algorithm 1, for ``short-run``)."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shortrun.core.langevin import DivergenceWarning
from shortrun.core.latents import seeded
from shortrun.core.layout import to_channels_last
from shortrun.core.model import NotPossibleError, evaluating, sample_from
from shortrun.data import Examples, Stream
from shortrun.files import append_line, read_lines, to_json, write_lines
from shortrun.learners import Batch, Info, learner_class
from shortrun.learners.short_run import ShortRun
from shortrun.masks import make_mask
from shortrun.priors import Prior, WithPrior
from shortrun.processes import Processes
from shortrun.training import checkpoints, schedules
from shortrun.training.config import Config
from shortrun.training.model_folder import Description, RunError, read_prior, write_model
from shortrun.training.run_folder import METRICS, thin

TOO_CAREFUL = 1 / 64  # of the learning rate: then undoing single iterations does not help
OFFERED_IMAGES = 16  # training images that a method gets before evaluations; it may use fewer
MAX_RECOVERIES = 5


class Loop:
    """A run: its state, one iteration of it, its evaluation and its checkpoints.

    Args:
        config: the settings.
        model: of the method of the settings.
        examples: to learn from.
        validation: held-out examples; if there are none, the model is evaluated on training examples.
        folder: where everything is written; None writes nothing.
        resume: go on from the last checkpoint of the folder.
        own_decoder: name of a decoder that is not part of this package.
        processes: those that share the work.
        log: takes messages to the user.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        examples: Examples,
        validation: Examples | None = None,
        *,
        folder: Path | None = None,
        resume: bool = False,
        own_decoder: str | None = None,
        processes: Processes | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.run, self.folder, self.log = config, config.run, folder, log
        self.processes = Processes() if processes is None else processes
        self.examples, self.validation, self.own_decoder = examples, validation, own_decoder
        self.model = _placed(model, self.processes.device, examples.shape)
        self._check_model()
        kind = learner_class(config.method)
        options: dict[str, Any] = {"warm_up": self.run.warm_up} if issubclass(kind, ShortRun) else {}
        self.learner = kind(
            self.model, learning_rate=self.run.learning_rates[0], betas=self.run.betas, settings=config.settings,
            processes=self.processes, compiled=config.compiles, log=log, **options,
        )  # fmt: skip
        self.state = self.learner.init(self.run.seed, examples)
        self.sources = {
            name: torch.Generator().manual_seed(1000 * self.run.seed + i)
            for i, name in ((0, "order"), (3, "masks"), (4, "evaluation"))
        } | {"chains": self.state.rng, "tuning": self.state.tuning_rng}
        self.seconds, self.recoveries, self.divergent = 0.0, 0, 0
        self.mse = math.nan
        self.tuning_seconds = 0.0
        self.clock = time.process_time if config.run.clock == "processor" else time.perf_counter
        """Of training time."""
        self.fitted_prior: Prior | None = None
        """Fitted to the latents of the finished model; none while it still learns."""
        self.history: list[dict[str, Any]] = []
        """The lines of metrics.jsonl: evaluations, and events such as tunings."""
        self._checkpoint: checkpoints.Checkpoint | None = None
        if self.run.mask is not None:  # one that does not fit is noticed before work starts
            make_mask(self.run.mask, torch.zeros(1, *examples.shape))
        if resume:
            assert folder is not None
            self._resume(folder)

    def _resume(self, folder: Path) -> None:
        """Go on from the last checkpoint that can be used; what was noted after it did not happen."""
        self._restore()
        self.history = [line for line in read_lines(folder / METRICS) if line["iteration"] <= self.iteration]
        if self.processes.is_main_process:
            write_lines(folder / METRICS, self.history)
        saved = read_prior(folder / "model")
        if saved is not None and (saved.kind, saved.info.get("iterations")) == (self.run.prior, self.iteration):
            self.fitted_prior = saved.to(self.processes.device)

    def _check_model(self) -> None:
        if not hasattr(self.model, "sample") and not hasattr(self.model, "decode"):
            return
        made = tuple(sample_from(self.model, 2, torch.Generator().manual_seed(0)).shape[1:])
        if made != self.examples.shape:
            raise RunError(
                f"the generator makes examples of shape {made} but those of {self.examples.name} have "
                f"{self.examples.shape} (images: colours, height, width)"
            )

    # -- checkpoints ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Take a checkpoint: into the folder, or into memory if there is none."""
        if self.folder is not None and not self.processes.is_main_process:
            return
        state = {
            "learner": self.state.as_dict(),
            "seconds": self.seconds,
            "mse": None if math.isnan(self.mse) else self.mse,
            "recoveries": self.recoveries,
            "tuning_seconds": self.tuning_seconds,
            "iteration": self.iteration,
            "identity": self._identity(),
        }
        taken = checkpoints.take(self.model, self.state.optimiser, self.sources, self.state.tensors(), state)
        if self.folder is None:
            self._checkpoint = taken
        else:
            checkpoints.write(self.folder / "checkpoints", taken)
            write_model(self.folder / "model", self.model, self.description(), self.prior)

    def description(self) -> Description:
        """What is needed to use the model as it is."""
        model, sigma = self.model, getattr(self.model, "sigma", None)
        likelihood = type(model).__name__ if self.config.method in ("short-run", "abp") else "GaussianModel"
        return Description(
            self.config.method, self.config.network, self.examples.shape, self.learner.dynamics_of_use(self.state),
            self.own_decoder, likelihood, tuple(getattr(model, "latent_shapes", ())),
            None if sigma is None else float(sigma), getattr(model, "classes", None), self.info(),
        )  # fmt: skip

    @property
    def prior(self) -> Prior | None:
        """What samples are drawn from: that fitted after training, before that what learning has seen of latents."""
        if self.run.prior == "normal":
            return None
        return self.fitted_prior or self.learner.prior(self.state)

    def info(self) -> dict[str, Any]:
        """About the training so far."""
        return {
            **self._data(),
            "train_checksum": self.examples.checksum,
            "iterations": self.iteration,
            "updates": self.updates,
            "seconds": round(self.seconds, 1),
            "share": round(min(self.share, 1.0), 4),
            "mse": None if math.isnan(self.mse) else self.mse,
            "held_out": self.validation is not None,
            "seed": self.run.seed,
            "mask": self.run.mask,
            "processes": self.processes.num_processes,
        }

    def _data(self) -> dict[str, Any]:
        """Which examples these are, whatever folder they are in."""
        return {key: getattr(self.config.data, key) for key in ("data", "size", "crop", "train_images")}

    def _restore(self) -> None:
        """Everything as it was at the last checkpoint that can be used."""
        if self.folder is not None:
            checkpoints.restore(self.folder / "checkpoints", self._put_back, self.log)
        else:
            assert self._checkpoint is not None
            self._put_back(self._checkpoint)

    def _put_back(self, taken: checkpoints.Checkpoint) -> None:
        state = taken.state
        self._check_identity(state.get("identity", {}))
        tensors = checkpoints.put_back(taken, self.model, self.state.optimiser, self.sources)
        self.state = self.state.restored(state["learner"] | {"iterations": state["iteration"]}, tensors)
        self.seconds = float(state["seconds"])
        self.mse = math.nan if state["mse"] is None else float(state["mse"])
        self.recoveries = max(self.recoveries, int(state["recoveries"]))
        self.tuning_seconds = float(state["tuning_seconds"])

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run; budget, evaluations and the like may be changed when it is resumed."""
        network = asdict(self.config.network)
        return _as_in_json({**self._data(), "method": self.config.method, "seed": self.run.seed, "model": network})

    def _check_identity(self, before: dict[str, Any]) -> None:
        """Refuse to go on as another run; checkpoints of former versions do not say what they are of."""
        now = self._identity()
        for name, value in before.items():
            if name in now and now[name] != value:
                raise checkpoints.OtherRunError(
                    f"{name} is {now[name]!r}, but this run was started with {value!r}. Put it back, or start a new run"
                )

    def recover(self, reason: str) -> None:
        """Back to the last good checkpoint, with half the learning rate for a while; less each time."""
        self.recoveries += 1
        if self.recoveries > MAX_RECOVERIES:
            raise RunError(f"{reason}; gave up after {MAX_RECOVERIES} returns to the last good checkpoint")
        self._restore()
        control = self.state.control._replace(caution=0.5**self.recoveries)
        self.state = replace(self.state, control=control)
        self.log(
            f"{reason}: went back to iteration {self.iteration}, with {control.caution:.0%} of the learning rate "
            f"({self.recoveries} of at most {MAX_RECOVERIES} returns)"
        )
        self.note({"event": "recovered", "reason": reason})

    def note(self, values: dict[str, Any]) -> None:
        """A line of the history."""
        line = {"iteration": self.iteration, "seconds": round(self.seconds, 3), **values}
        self.history.append(line)
        if self.folder is not None and self.processes.is_main_process:
            append_line(self.folder / METRICS, line)

    def agree(self, interrupted: list[str]) -> None:
        """All processes follow the clock of the first one, and stop together."""
        if self.processes.num_processes > 1:
            main = float(self.processes.is_main_process)
            values = torch.tensor([main * self.seconds, float(bool(interrupted))], device=self.processes.device)
            self.seconds, stops = self.processes.total(values).tolist()
            if stops and not interrupted:
                interrupted.append("another process")

    # -- one iteration --------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self.state.iteration

    @property
    def share(self) -> float:
        """How much of the budget is used, from 0 to 1."""
        done = [0.0]
        if self.run.iterations is not None:
            done.append(self.iteration / self.run.iterations)
        if self.run.minutes is not None:
            done.append(self.seconds / (60 * self.run.minutes))
        return max(done)

    @property
    def updates(self) -> int:
        """How often the generator was updated."""
        return self.config.updates_in(self.iteration)

    def next_batch(self) -> Batch:
        """The examples of this iteration: drawn from all, or the next ones of an epoch."""
        count = self.run.batch
        if isinstance(self.examples, Stream) or self.run.order == "random":
            return self.draw(count, "order")
        # Positions follow from the iteration alone, so that resuming needs nothing more than the seed.
        total, first = len(self.examples), self.iteration * count
        places = torch.arange(first, first + count)
        orders = {
            epoch: torch.randperm(total, generator=torch.Generator().manual_seed((self.run.seed << 32) + epoch))
            for epoch in set((places // total).tolist())
        }
        return self.at(torch.stack([orders[place // total][place % total] for place in places.tolist()]))

    def draw(self, count: int, source: str) -> Batch:
        """Random training examples; a DataLoader gives its next batch when learning asks, and what it likes else."""
        if isinstance(self.examples, Stream):
            x = self.examples.next_batch()
            return self.masked(x if source == "order" else x[:count], None, source)
        return self.at(torch.randint(len(self.examples), (count,), generator=self.sources[source]), source)

    def some(self, count: int) -> Batch:
        """Up to ``count`` training examples, always the same ones; of a DataLoader those that come next."""
        if not isinstance(self.examples, Stream):
            return self.at(self.examples.some(count))
        parts = [self.examples.next_batch()]
        while sum(map(len, parts)) < count:
            parts.append(self.examples.next_batch())
        return self.masked(torch.cat(parts)[:count], None)

    def at(self, indices: Tensor, source: str = "order") -> Batch:
        return self.masked(self.examples.batch(indices), indices, source)

    def masked(self, x: Tensor, indices: Tensor | None, source: str = "order") -> Batch:
        """Masks of what is learned from have a source of their own; others must not draw from it."""
        if self.run.mask is None:
            return Batch(x, None, indices)
        rng = self.sources["masks" if source == "order" else source]
        return Batch(x, make_mask(self.run.mask, x, rng), indices)

    def advance(self) -> Info:
        """One iteration: tune if it is time, then learn from the next batch."""
        self.fitted_prior = None
        moment = schedules.moment(self.run, self.iteration, self.share)
        if hasattr(self.model, "sigma"):
            self.model.sigma.fill_(schedules.sigma(self.run, self.share))
        if self.learner.tuning_is_due(self.state):
            self.learner.set_rate(self.state, moment)  # which says how far tuning may lead the step
            begun = self.clock()
            self.state = self.learner.tune(self.state, self.draw(self.config.settings.tune_images, "tuning"))
            self.tuning_seconds += self.clock() - begun
            event = "tuning failed" if self.state.tuning is None else "tuned"
            self.note({"event": event, "step_size": self.state.dynamics.step_size, **(self.state.tuning or {})})
        batch = self.next_batch()
        self.state, info = self.learner.update(self.state, batch, moment)
        self.divergent += info.divergent
        if not info.kept:
            self.note({"event": "undone", "divergent": info.divergent, "caution": self.state.control.caution})
            if self.state.control.caution < TOO_CAREFUL:
                self.recover(
                    "updates had to be undone again and again, because the loss is not finite or chains diverge"
                )
        return info

    # -- evaluation -----------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Of the examples that the model is evaluated on."""
        return "training" if self.validation is None else "held-out"

    def held_out(self) -> Tensor:
        """The examples that the model is evaluated on; those of training, if there are no others."""
        if self.validation is None and isinstance(self.examples, Stream):
            return self.examples.next_batch()[: self.run.evaluate_images]
        seen = self.examples if self.validation is None else self.validation
        count = min(self.run.evaluate_images, len(seen))
        world = self.processes.num_processes
        return seen.batch(torch.arange(max(count // world, 1) * world) % len(seen))

    def evaluate(self, pictures: bool = False) -> float:
        """MSE of held-out reconstructions per pixel, by the method's own inference.

        The images are shared between the processes; each has random numbers of its own.
        """
        offered = self.draw(OFFERED_IMAGES, "evaluation")
        self.state = self.learner.ready(self.state, offered, self.sources["evaluation"])
        if not hasattr(self.model, "decode"):
            return self.mse
        x = self.held_out().to(self.processes.device)
        rngs = seeded(torch.Generator().manual_seed(self.run.seed), len(x))
        own = self.processes.own
        images: Tensor | None = None
        with contextlib.suppress(NotPossibleError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # the number of divergent chains is in the log
            images = self.processes.gather(self.learner.reconstruct(self.state, own(x), own(rngs)))
        if images is not None:
            self._judge(x, images)
        if pictures and self.folder is not None and self.processes.is_main_process and len(self.examples.shape) == 3:
            self._draw_pictures(self.folder / "pictures", x, images)
        return self.mse

    def _judge(self, x: Tensor, images: Tensor) -> None:
        """Take the error, and notice a run that has collapsed or learns nothing."""
        self.mse = float((images - x).square().mean())
        if self._collapsed(x, images):
            self.recover("the generator collapsed: all reconstructions are the same saturated image")
        guess = float((self.examples.mean.to(x) - x).square().mean())
        if self.iteration > self.run.warm_up and not self.mse < guess:
            self.log(
                f"{self.kind} MSE {self.mse:.4f} is no better than the {guess:.4f} of the mean training image. If "
                "that lasts, try lower --learning-rates, a longer --warm-up, or a shorter --step-size"
            )

    def _collapsed(self, x: Tensor, images: Tensor) -> bool:
        """Whether all reconstructions are the same image with all its pixels at -1 or 1, and the examples are not."""
        same = len(x) > 1 and float(images.std(0).mean()) < 1e-3 and float(x.std(0).mean()) > 0.01
        edge = float(images.abs().mean()) > 0.99 and float(images.abs().max()) <= 1
        return same and edge and hasattr(self.model, "sigma")

    def _draw_pictures(self, folder: Path, x: Tensor, images: Tensor | None) -> None:
        from shortrun.pictures import save_grid

        prior = self.prior
        model = self.model if prior is None else WithPrior(self.model, prior)
        samples = sample_from(model, 30, torch.Generator().manual_seed(self.run.seed))
        folder.mkdir(exist_ok=True)
        thin(folder)
        rows = [] if images is None else [(self.kind, x[:10]), ("reconstruction", images[:10])]
        rows += [("sample" if i == 0 else "", samples[10 * i : 10 * i + 10]) for i in range(3)]
        title = f"iteration {self.iteration}" + ("" if images is None else f", {self.kind} MSE {self.mse:.4f}")
        save_grid(folder / f"{self.iteration:08d}.png", rows, title)


def _as_in_json(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values, as they are when read again: lists instead of tuples."""
    found: dict[str, Any] = json.loads(to_json(values))
    return found


def _placed(model: Any, device: torch.device, shape: tuple[int, ...]) -> Any:
    """On its device; weights of convolutions channels-last, if the model runs with these."""

    def trial() -> None:
        if hasattr(model, "log_likelihood"):
            z = model.sample_prior(2, torch.Generator().manual_seed(0))
            with torch.no_grad(), evaluating(model):
                model.log_likelihood(z[0].new_zeros(2, *shape), z)

    return to_channels_last(model.to(device), trial)
