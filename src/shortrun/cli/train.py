"""Train a model, continue a run, or see what a training would cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import tyro
from tyro.conf import Positional

from shortrun.cli.decoder import import_decoder
from shortrun.core.model import GaussianModel
from shortrun.fitting import GIVEN, fit, not_interrupted
from shortrun.learners import Batch, Method, learner_class
from shortrun.nets.build import ModelError
from shortrun.processes import is_first_process, processes
from shortrun.training.config import Config
from shortrun.training.loop import Loop
from shortrun.training.model_folder import RunError
from shortrun.training.presets import Preset, preset
from shortrun.training.run_folder import prepare_folder

FLAT = tyro.conf.arg(name="")


@dataclass
class Train:
    """Train a model into a run folder. Each method has settings of its own: shortrun train --method vae --help

    Ten minutes on the embedded digits: shortrun train --out runs/digits

    House numbers for half an hour: shortrun train --data svhn --minutes 30 --out runs/svhn

    Your own images: shortrun train --data folder:photos --size 64 --out runs/photos

    Your own generator: shortrun train --model.kind mypackage.models:Decoder --out runs/own

    As published, on four GPUs: torchrun --nproc-per-node 4 -m shortrun.cli train --preset paper
    --data celeba --out runs/celeba
    """

    out: Path
    """The run folder; it must be new or empty."""
    preset: Preset = "cpu"
    """smoke: seconds; cpu: minutes; paper: as published; authors-script: the published script's variant."""
    dry_run: bool = False
    """Only print sizes, parameter count, memory and time per update."""

    def __call__(self) -> None:
        config = Config(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Config)})
        if is_first_process():  # the others may find what this one has begun
            prepare_folder(self.out, resume=False)
        kind = getattr(config.network, "kind", "")
        model = own_model(config, kind if ":" in kind else None)
        if self.dry_run:
            dry_run(config, model)
        else:
            train(config, model, self.out)


def train_command(words: Sequence[str]) -> type[Train]:
    """:class:`Train` with each setting of the method as a flag; what the preset says is its default.

    Flags and defaults depend on method, preset and data, so these are read ahead from the words.
    """
    method, name = flag(words, "--method", "short-run"), flag(words, "--preset", "cpu")
    if method not in get_args(Method) or name not in get_args(Preset):  # tyro will list what is accepted
        method, name = "short-run", "cpu"
    config = preset(name, flag(words, "--data", "embedded"), method)  # type: ignore[arg-type]
    described = tyro.conf.arg(help="How the generator is learned; other methods have other flags.")
    fields: list[Any] = [("method", Annotated[Method, described], config.method)]
    for part, style in (("data", FLAT), ("run", FLAT), ("settings", FLAT), ("network", tyro.conf.arg(name="model"))):
        value = getattr(config, part)
        fields.append((part, Annotated[type(value), style], dataclasses.field(default=value)))
    return dataclasses.make_dataclass("Train", fields, bases=(Train,), namespace={"__doc__": Train.__doc__})


def flag(words: Sequence[str], name: str, default: str) -> str:
    """The value of the flag ``name`` among the words; of several, the last."""
    for i, word in reversed(list(enumerate(words))):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return default


def own_model(config: Config, decoder: str | None) -> GaussianModel | None:
    """The model around a generator of the user's own, if one is named; it is initialised with the seed of the run."""
    if decoder is None:
        return None
    kind = getattr(config.network, "kind", config.method)
    if ":" not in kind:
        raise ModelError(f"the run has the generator {kind} of this package; it takes no decoder")
    if config.network.coordinates == "latent":
        raise ModelError(f"latent coordinates need the top-down generator, not {kind}")
    torch.manual_seed(config.run.seed)
    module: Any = import_decoder(decoder)
    return GaussianModel(module, module.latent_shapes, config.run.sigma[0])


def train(config: Config, model: GaussianModel | None, folder: Path, resume: bool = False) -> None:
    """Start a run or continue it, and print how it ended."""
    settings = config.data
    trained = fit(
        model, settings.load("train"), validation=settings.load("test"), folder=folder, resume=resume, config=config
    )
    if processes().is_main_process:
        info = trained.info
        error = "" if info["mse"] is None else f", held-out MSE {info['mse']:.4f}"
        print(f"{info['iterations']} iterations in {info['seconds']:.0f} s{error}; run folder {folder}")
    not_interrupted(trained)


def dry_run(config: Config, model: GaussianModel | None) -> None:
    """Print what a run would cost, from two iterations with the same images."""
    images = config.data.load("train")
    print(images.describe())
    torch.manual_seed(config.run.seed)
    learner = learner_class(config.method)
    if model is None:
        built = learner.build(config.network, images.shape, config.run.sigma[0])
    else:
        built = learner.adopt(model, config.network, images.shape)
    count = sum(parameter.numel() for parameter in built.parameters())
    shapes = [tuple(shape) for shape in built.latent_shapes]
    print(f"latents {shapes}, {count:,} parameters ({count * 16 / 1e6:.0f} MB with Adam)")
    loop = Loop(config, built, images, processes=processes(config.run.mixed_precision))
    x = images.batch(slice(0, config.run.batch))
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        loop.learner.update(loop.state, Batch(x, None, torch.arange(len(x))))
        times.append(time.perf_counter() - begun)
    per = min(times)
    chain = ""
    if hasattr(config.settings, "learn_last"):
        chain = f", K = {config.settings.steps}, m = {config.updates_along(0)}"
    print(f"{per:.2f} s per iteration of {config.run.batch} images{chain}")
    if config.run.iterations:
        hours = per * config.run.iterations / 3600
        print(f"{config.run.iterations} iterations would take about {hours:.1f} hours")
    if config.run.minutes:
        print(f"about {60 * config.run.minutes / per:.0f} iterations in {config.run.minutes:g} minutes")


@dataclass
class Resume:
    """Continue an interrupted run to the bit.

    Example: shortrun resume runs/digits

    For longer than it was to last: shortrun resume runs/digits --minutes 20
    """

    run: Positional[Path]
    """The run folder."""
    minutes: float | None = None
    """Another limit of training time, counted from the start of the run."""
    iterations: int | None = None
    """Another limit of iterations, counted from the start of the run."""
    decoder: str | None = None
    """Your own generator, package.module:Class, for runs that were started with it: nothing is imported because a
    file names it."""

    def __call__(self) -> None:
        prepare_folder(self.run, resume=True)
        config = Config.load(self.run / "config.yaml")
        if config.data.data == GIVEN:
            raise RunError(
                f"{self.run} was started in Python, with data that this command does not have; continue it there: "
                "fit(model, data, folder=.., resume=True)"
            )
        limits = {"minutes": self.minutes, "iterations": self.iterations}
        config = config.changed(**{name: limit for name, limit in limits.items() if limit is not None})
        train(config, own_model(config, self.decoder), self.run, resume=True)
