"""Train, measure and draw what is missing, several models at a time if wished, then write the report."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any, get_args

import torch

from shortrun import data
from shortrun.studies.reproduce import figures as drawing
from shortrun.studies.reproduce import models as learning
from shortrun.studies.reproduce.place import Place
from shortrun.studies.reproduce.published import FIGURES, Cell, Target, Training
from shortrun.studies.reproduce.report import write_report

DoModel = Callable[[Place, Training], str]
DoFigure = Callable[[Place, str], str]


def check_files(place: Place, models: Sequence[Training]) -> None:
    """Load what the models will need, so that missing files are noticed before anything is trained."""
    for training in {(t.data, t.size): t for t in models}.values():
        for split in get_args(data.Split):
            place.load(training, split)
    if any(place.wants_fid(training) for training in models):
        place.network()


def reproduce(
    target: Target,
    place: Place,
    only: str = "*",
    log: Callable[[str], None] = print,
    *,
    do_model: DoModel = learning.do_model,
    do_figure: DoFigure = drawing.do_figure,
    check: Callable[[Place, Sequence[Training]], None] = check_files,
) -> list[str]:
    """Train, measure and draw what is missing, then write the report. Returns what failed.

    ``do_model`` and ``do_figure`` work on one of them each; ``check`` looks for the files that they will need.
    """
    cells, figures = _chosen(target, place, only)
    if place.jobs < 1:
        raise ValueError(f"jobs is {place.jobs}; expected one or more")
    _check_budget(place)
    undrawn = [f for f in figures if not place.is_drawn(f)]
    wanted = {place.model(c.training) for c in cells} | {t for f in figures for t in place.models(f)}
    needed = [place.model(c.training) for c in cells if not place.is_measured(c.training)]
    models = list(dict.fromkeys(needed + [t for f in undrawn for t in place.models(f)]))
    models.sort(key=lambda t: -t.steps * (t.size or 32) ** 2)  # the longest first: no job is left alone with it
    if len(models) < len(wanted):
        log(f"{len(wanted) - len(models)} of {len(wanted)} models are measured in {place.out}; these stay as they are")
    check(place, models)
    place.out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    waiting = set(models)

    def draw_what_is_ready() -> None:
        """Each figure as soon as its models are done: if all is stopped then, their folders are not needed again."""
        for name in [name for name in undrawn if not waiting.intersection(place.models(name))]:
            undrawn.remove(name)
            missing = [t.name for t in place.models(name) if t.name in failed]
            outcome, error = ("", f"needs {', '.join(missing)}") if missing else _attempt(do_figure, place, name)
            log(f"{name}: {error or outcome}")
            if error:
                failed[name] = error
        write_report(place, failed)

    with contextlib.closing(_each(place, models, do_model)) as done:
        for i, (training, outcome, error) in enumerate(done, 1):
            log(f"model {i} of {len(models)}, {training.name}: {error or outcome}")
            waiting.discard(training)
            if error:
                failed[training.name] = error
            draw_what_is_ready()
    draw_what_is_ready()
    return [f"{name}: {error}" for name, error in failed.items()]


def _chosen(target: Target, place: Place, only: str) -> tuple[list[Cell], list[str]]:
    """The cells and figures of ``target`` that match the pattern ``only``."""
    of_target = [c for c in place.cells if target in ("all", c.target)]
    cells = [c for c in of_target if c.matches(only)]
    figures = [
        name
        for name, models in FIGURES.items()
        if target in ("all", name)
        and name not in place.scale.left_out
        and any(fnmatch.fnmatch(n, only) for n in (name, *(t.name for t in models)))
    ]
    if not cells and not figures:
        names = [c.name for c in of_target][:3] + [t.name for t in FIGURES.get(target, [])][:3]
        raise ValueError(f"--only {only!r} matches nothing in {target}; names look like {', '.join(names)}")
    return cells, figures


def _check_budget(place: Place) -> None:
    """Refuse to add to results that were measured with another budget."""
    for path in sorted((place.out / "models").glob("*.json")):
        try:
            budget = json.loads(path.read_text())["budget"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no result of `shortrun reproduce`; remove it, or name another --out") from None
        if budget != place.budget:
            raise ValueError(
                f"{path} was measured with {budget}, now it is {place.budget}; name another --out, and other --runs"
            )


def _attempt(work: Callable[[Place, Any], str], place: Place, item: Any) -> tuple[str, str]:
    """What came out, and what went wrong."""
    try:
        return work(place, item), ""
    except Exception as error:  # whatever it is, the others can go on
        return "", str(error) if str(error) else type(error).__name__


def begin_worker(threads: int) -> None:
    """Settings of a process that works on models; it stops when the one that started it is gone, and saves first."""
    torch.set_num_threads(threads)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _each(
    place: Place, models: Sequence[Training], do_model: DoModel
) -> Generator[tuple[Training, str, str], None, None]:
    """Each model with what came out and what went wrong; several at a time in processes of their own."""
    if place.jobs == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(place.threads)
        try:
            for training in models:
                yield training, *_attempt(do_model, place, training)
        finally:
            torch.set_num_threads(before)
        return
    waiting, quiet = iter(models), replace(place, quiet=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(place.jobs, context, begin_worker, (place.threads,)) as pool:
        # No more than can run are submitted: when stopped, those that have begun save, and the others do not begin.
        running = {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, place.jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                training = running.pop(future)
                running |= {pool.submit(_attempt, do_model, quiet, t): t for t in itertools.islice(waiting, 1)}
                yield training, *future.result()
