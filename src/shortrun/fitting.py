"""``fit``: train any method on any examples, from Python and from the command line alike."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shortrun.data import as_examples
from shortrun.inverse.model import Observed, check_operator
from shortrun.inverse.operators import as_operator
from shortrun.learners import Method, learner_class
from shortrun.processes import flushed_denormals, processes
from shortrun.progress import Progress
from shortrun.trained import Trained
from shortrun.training.config import Config, RunSettings
from shortrun.training.history import History
from shortrun.training.loop import Loop
from shortrun.training.model_folder import name_of, write_prior
from shortrun.training.presets import preset
from shortrun.training.run_folder import CONFIG, claimed, has_not_begun

GIVEN = "given in Python"
MEAN_OF = 1000  # training images, for the mean colour of what is visible
Callback = Callable[[Trained], Any]


def fit(
    model: Any,
    data: Any,
    *,
    method: Method = "short-run",
    minutes: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    validation: Any = None,
    callback: Callback | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    config: Config | None = None,
    operator: Any = None,
    **settings: Any,
) -> Trained:
    """Learn a model from examples.

    Args:
        model: for example ``GaussianModel(decoder, latent_shapes)``, or any ``nn.Module`` with the methods of
            :class:`shortrun.LatentModel`; it is trained in place. None builds the network of the settings, for images.
        data: a tensor, an array, a ``Dataset``, a ``DataLoader``, or what ``shortrun.data.load`` gives. 8-bit images
            become floats in [-1, 1]; other numbers stay as they are.
        method: short-run, abp, glo, vae, vae-iaf, ladder-vae or glow. Methods with an encoder build it around the
            decoder.
        minutes, iterations: the budget; with both, the first limit that is reached counts. By default ten minutes.
        validation: held-out examples for the error that is reported; without them it is that of training examples.
        callback: called with a :class:`Trained` after each evaluation; its time does not count, and if it returns
            true, training ends.
        folder: for checkpoints, metrics and pictures, from which a run can be resumed; None writes nothing.
        resume: continue the run in ``folder``.
        config: all settings at once, instead of single ones.
        operator: where ``data`` are measurements ``y = A(x) + noise`` and no example was ever seen whole: A, as for
            :meth:`Trained.restore`. The model is that of x, its ``sigma`` the noise of ``y`` around ``A(g(z))``; errors
            that are reported are those of measurements. By short run inference alone: encoders would see only y.
        settings: any setting of the run or the method by its name, such as ``steps=40``, ``batch=64``,
            ``learning_rates=(1e-3,)``, ``mask="random:0.5"``; ``network={..}`` for that of model=None.

    Ctrl-C ends training early and keeps what was learned; with a folder it is saved.

    >>> decoder = torch.nn.Linear(2, 5)
    >>> class Decoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.out = torch.nn.Linear(2, 5)
    ...     def forward(self, z):
    ...         return self.out(z[0])
    >>> import shortrun as sr
    >>> trained = sr.fit(sr.GaussianModel(Decoder(), [(2,)]), torch.randn(100, 5), iterations=3, quiet=True)
    >>> trained.sample(4).shape
    torch.Size([4, 5])
    """
    _check_kinds(model, config, folder, callback)
    if operator is not None:
        model = _observed(model, method if config is None else config.method, operator, data)
    if config is None:
        config = _config(model, method, minutes, iterations, seed, settings)
    elif settings or (minutes, iterations, seed) != (None, None, 0):
        config = config.changed(**settings, **_budget(minutes, iterations), **({"seed": seed} if seed else {}))
    place = None if folder is None else Path(folder)
    if place is None and resume:
        raise ValueError("resume needs the folder of a run")
    shared = processes(config.run.mixed_precision)
    writes = place is not None and shared.is_main_process
    if place is not None and writes:
        resume = resume and not has_not_begun(place)
    resume = bool(shared.total(torch.tensor(float(writes and resume), device=shared.device))) if place else False
    quiet = quiet or not shared.is_main_process
    progress = Progress(quiet)
    if shared.num_processes > 1:
        progress.log(f"{shared.num_processes} processes share the work")
    with contextlib.ExitStack() as stack:
        if place is not None and writes:
            stack.enter_context(claimed(place, resume))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(flushed_denormals())
        torch.manual_seed(config.run.seed)
        learner = learner_class(config.method)
        prepare = getattr(model, "prepare", None)
        examples = as_examples(data, name=config.data.data, prepare=prepare)
        held_out = None
        if validation is not None:
            held_out = as_examples(validation, name=config.data.data, split="test", prepare=prepare)
            if held_out.shape != examples.shape:
                raise ValueError(f"validation has examples of shape {held_out.shape}, data of {examples.shape}")
        for each in (examples, *([] if held_out is None else [held_out])):
            progress.log(each.describe())
        own = None
        if model is None:
            built = learner.build(config.network, examples.shape, config.run.sigma[0])
        else:
            own = name_of(getattr(model, "decoder", model))
            built = learner.adopt(model, config.network, examples.shape)
        loop = Loop(
            config, built, examples, held_out, folder=place, resume=resume, own_decoder=own, processes=shared,
            log=progress.log,
        )  # fmt: skip
        if place is not None and writes:
            config.save(place / CONFIG)
        shared.wait()
        if not resume:
            if model is None and config.run.start_at_mean:
                _start_at_mean(loop)
            loop.save()
        with _interruptible() as interrupted:
            _run(loop, progress, interrupted, callback)
            if place is not None or loop.iteration:
                loop.save()
            if loop.share >= 1 and not interrupted and config.run.prior != "normal":
                _fit_prior(loop, interrupted, quiet)
    if interrupted and place is not None:
        progress.log(f"{interrupted[0]}: saved at iteration {loop.iteration}. Continue with `shortrun resume {place}`")
    return _of_examples(snapshot(loop, *interrupted[:1]))


def _observed(model: Any, method: Method, operator: Any, data: Any) -> Observed:
    """The model of the measurements, checked against the first of them."""
    if method != "short-run":
        raise ValueError(f"method is {method}; only short-run learns from measurements")
    if model is None or not hasattr(model, "decode") or not hasattr(model, "sigma"):
        raise ValueError("to learn from measurements, give the model of the examples: sr.GaussianModel(decoder, ..)")
    observed = Observed(model, as_operator(operator), float(model.sigma))
    first = as_examples(data, prepare=observed.prepare).batch(slice(0, 1))
    visible = observed.operator.visible
    if visible is not None and visible.ndim == first.ndim and len(visible) > 1:
        raise ValueError("the operator hides other places of each image; expected one mask for all, or mask=")
    check_operator(model, observed.operator, first)
    return observed


def _of_examples(trained: Trained) -> Trained:
    """The model behind the operator, where it was learned from measurements."""
    if not isinstance(trained.model, Observed):
        return trained
    model = trained.model.model
    with torch.no_grad():
        shape = tuple(model.decode(model.sample_prior(1, torch.Generator().manual_seed(0))).shape[1:])
    description = replace(
        trained.description, shape=shape, own_decoder=name_of(getattr(model, "decoder", model)),
        likelihood=type(model).__name__,
    )  # fmt: skip
    found = Trained(model, description, trained.prior, trained.history)
    return found.train(trained.training)


def _check_kinds(model: Any, config: Any, folder: Any, callback: Any) -> None:
    """Of the arguments that are no settings; settings check themselves."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; expected a Config, as shortrun.training.presets makes")
    if folder is not None and not isinstance(folder, (str, Path)):
        raise TypeError(f"folder is a {type(folder).__name__}; expected a path")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is a {type(callback).__name__}; expected a function that takes the trained model")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module such as sr.GaussianModel(..)")
    lacking = [name for name in ("sample_prior", "log_prior", "log_likelihood") if not hasattr(model, name)]
    if model is not None and lacking:
        raise TypeError(
            f"model is a {type(model).__name__}, which lacks {', '.join(lacking)}. Wrap a decoder: "
            "sr.GaussianModel(decoder, latent_shapes=[(16,), (32,)])"
        )


class InterruptError(KeyboardInterrupt):
    """Work was ended by a signal, after what was done had been saved; like Ctrl-C, no mistake to be caught."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        number = getattr(signal, name, None)
        self.exit_code = 130 if number is None else 128 + int(number)  # what a shell expects


def not_interrupted(trained: Trained) -> Trained:
    """The finished model; raises :class:`InterruptError` if its training was stopped."""
    if trained.info["stopped"]:
        raise InterruptError(trained.info["stopped_by"])
    return trained


def _start_at_mean(loop: Loop) -> None:
    """Let a new generator that can do so begin at the mean colour of what may be seen of the training images."""
    start_at = getattr(getattr(loop.model, "decoder", None), "start_at", None)
    if start_at is None:
        return
    mean = loop.examples.mean
    if loop.run.mask is not None:
        x, mask, _ = loop.some(MEAN_OF)
        assert mask is not None
        seen = mask.expand_as(x)
        mean = torch.where(seen, x, 0.0).sum((0, 2, 3)) / seen.sum((0, 2, 3)).clamp_min(1)
    start_at(mean.reshape(len(mean), -1, 1))


def snapshot(loop: Loop, stopped_by: str | None = None) -> Trained:
    """The model of a run as it is; it shares the parameters with the run."""
    description = loop.description()
    stopped = stopped_by is not None
    info = description.info | {"stopped": stopped, "stopped_by": stopped_by, "divergent": loop.divergent}
    trained = Trained(loop.model, replace(description, info=info), loop.prior, History(loop.history))
    return trained.eval() if loop.share >= 1 or stopped else trained


def _config(
    model: Any, method: Method, minutes: float | None, iterations: int | None, seed: int, settings: dict[str, Any]
) -> Config:
    """The settings of a run that is started from Python: the preset ``cpu``, with the budget asked for."""
    config = preset("cpu", "mnist", method).changed(data=GIVEN, seed=seed)
    if model is not None and method != "glow":
        name = name_of(getattr(model, "decoder", model))
        sizes = tuple(math.prod(shape) for shape in getattr(model, "latent_shapes", ()))
        config = config.changed(network={"kind": name, "latent_sizes": sizes or config.network.latent_sizes})
        if hasattr(model, "sigma") and "sigma" not in settings:  # its own noise, which stays as it is
            config = config.changed(sigma=(float(model.sigma),) * 2)
        if hasattr(config.settings, "cool_down") and "step_size" not in settings:
            config = config.changed(step_size=first_step(model))
    return config.changed(**_budget(minutes, iterations)).changed(**settings)


def first_step(model: Any) -> float:
    """A step size to start with: 0.02 for observation noise of 0.3, and in proportion to the variance of the noise.

    The curvature of the log joint is that of the likelihood, which is inverse to that variance. It is 0.1 at most, and
    0.1 without such noise: the curvature of the prior is one. Tuning takes over from there.
    """
    sigma = float(getattr(model, "sigma", math.inf))
    return min(0.02 * (sigma / 0.3) ** 2, 0.1)


def _budget(minutes: float | None, iterations: int | None) -> dict[str, Any]:
    """Settings of a budget; evaluations come evenly."""
    if minutes is None and iterations is None:
        return {}
    RunSettings(minutes=minutes, iterations=iterations)  # which checks them
    changes: dict[str, Any] = {"minutes": minutes, "iterations": iterations}
    if minutes is None and iterations is not None:
        changes |= {"evaluate_every": max(iterations // 10, 1), "checkpoint_every": max(iterations // 10, 1)}
        changes["warm_up"] = min(40, max(iterations // 5, 1))
    elif minutes is not None:
        changes |= {"evaluate_every": min(20.0, 6 * minutes), "checkpoint_every": min(30.0, 6 * minutes)}
    return changes


@contextmanager
def _interruptible() -> Iterator[list[str]]:
    """Ctrl-C, SIGTERM and SIGHUP are noted, and end the run at its next iteration; a second one ends it at once."""
    interrupted: list[str] = []
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield interrupted
        return

    def interrupt(number: int, frame: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(signal.Signals(number).name)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    handlers = {s: signal.getsignal(s) for s in (getattr(signal, name, None) for name in names) if s is not None}
    # What is ignored stays so: nohup does that to SIGHUP, and a shell to the SIGINT of what runs in the background.
    handlers = {s: handler for s, handler in handlers.items() if handler is not signal.SIG_IGN}
    try:
        for number in handlers:
            signal.signal(number, interrupt)
        yield interrupted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _fit_prior(loop: Loop, interrupted: list[str], quiet: bool) -> None:
    """Learn the law of the latents of a finished model, unless that has been done, and save it with the model."""
    run, model = loop.run, loop.model
    if loop.fitted_prior is not None or not hasattr(model, "log_prior") or not hasattr(model, "decode"):
        return
    batch = loop.some(run.prior_images)
    progress = Progress(quiet, what="prior")

    def report(share: float, text: str) -> None:
        progress.show(share, text)
        loop.agree(interrupted)
        if interrupted:
            raise _StopError

    trained = snapshot(loop)
    try:
        with progress, contextlib.suppress(_StopError):
            loop.fitted_prior = trained.fit_prior(batch.x, run.prior, mask=batch.mask, seed=run.seed, report=report)
    except ValueError as error:  # too few latents, or an extra that is not installed: the model is trained all the same
        progress.log(f"no prior was learned: {error}")
    prior = loop.fitted_prior
    if prior is not None:
        prior.info["iterations"] = loop.iteration
        progress.log(
            f"prior {prior.kind}: held-out latents have {prior.info['log_density']:.1f} nats, with N(0, I) "
            f"{prior.info['log_density_normal']:.1f}; {prior.info['seconds_in_all']:.0f} s"
        )
        if loop.folder is not None and loop.processes.is_main_process:
            write_prior(loop.folder / "model", prior)


class _StopError(Exception):
    """Ctrl-C while the prior is learned: the model keeps that of its last iterations."""


def _run(loop: Loop, progress: Progress, interrupted: list[str], callback: Callback | None) -> None:
    run = loop.run
    writer = None
    if run.tensorboard and loop.folder is not None and loop.processes.is_main_process:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(loop.folder / "tensorboard"))

    def clock() -> float:
        return float(loop.iteration) if run.minutes is None else loop.seconds

    def after(every: float) -> float:
        """The next multiple: a resumed run evaluates when one that was not interrupted does."""
        return (math.floor(clock() / every) + 1) * every

    next_evaluation, next_checkpoint = after(run.evaluate_every), after(run.checkpoint_every)
    began_at, began = loop.iteration, time.perf_counter()
    with progress:
        mark = loop.clock()
        while loop.share < 1 and not interrupted:
            info = loop.advance()
            now = loop.clock()
            loop.seconds, mark = loop.seconds + now - mark, now
            loop.agree(interrupted)
            passed = time.perf_counter() - began
            speed = (loop.iteration - began_at) / passed
            left = passed * (1 - loop.share) / max(loop.share, 1e-9) if loop.share < 1 else 0.0
            size = loop.state.dynamics
            progress.show(
                loop.share,
                f"{loop.iteration} it, {speed:.2f}/s, MSE {loop.mse:.4f}, s {size.step_size:.4g} (delta "
                f"{size.delta:.3g}), {loop.divergent} divergent, {left:.0f} s left",
            )
            if clock() >= next_evaluation or loop.share >= 1:
                next_evaluation = after(run.evaluate_every)
                begun = time.perf_counter()
                mse = loop.evaluate(pictures=True)
                values = {
                    "mse": mse,
                    "loss": info.loss,
                    "step_size": size.step_size,
                    "curvature": info.curvature if math.isfinite(info.curvature) else None,
                    "sigma": float(getattr(loop.model, "sigma", math.nan)),
                    "divergent": loop.divergent,
                    "latent_std": info.latent_std,
                    "tuning_share": loop.tuning_seconds / max(loop.seconds, 1e-9),
                    "updates": loop.updates,
                    "updates_per_second": (loop.updates - loop.config.updates_in(began_at)) / passed,
                    "evaluation_seconds": time.perf_counter() - begun,
                }
                # a method without reconstructions has no error, a likelihood without noise no sigma
                values = {k: v for k, v in values.items() if not (isinstance(v, float) and math.isnan(v))}
                loop.note(values)
                if writer is not None:
                    for key in ("mse", "loss", "sigma", "divergent"):
                        if key in values:
                            writer.add_scalar(key, values[key], loop.iteration)
                if callback is not None and callback(snapshot(loop)):
                    interrupted.append("the callback")
                mark = loop.clock()  # evaluation is not training time
            if clock() >= next_checkpoint:
                next_checkpoint = after(run.checkpoint_every)
                loop.save()
                mark = loop.clock()
