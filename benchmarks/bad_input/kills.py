"""Runs that are killed at any moment, continued, and compared with runs that nobody disturbed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bad_input.case import begin, finish

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHORT_RUN = {"tune_every": 3, "steps": 4, "learn_last": 3}
MASKS = (None, "random:0.5")


def _kinds() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Method, settings and network: every combination of mask, tuner, generator and evaluation interval of short run
    inference, and every other method with and without a mask."""
    tuners = ({"tune": "grid"}, {"tune": "gradient", "tune_per": "layer"})
    for mask, tuner, kind, every in itertools.product(MASKS, tuners, ("top-down", "hierarchical"), (1.0, 3.0)):
        yield "short-run", {**SHORT_RUN, **tuner, "mask": mask, "evaluate_every": every}, {"kind": kind}
    yield (
        "short-run",
        {"step_control": "tuned", "tune": "off", "step_size": 1e-3, "learn_last": 1, "order": "epochs"},
        {},
    )
    yield "short-run", {**SHORT_RUN, "tune": "gradient", "tune_per": "step"}, {"coordinates": "latent"}
    for method, mask in itertools.product(("abp", "glo", "vae", "vae-iaf", "ladder-vae"), MASKS):
        yield method, {"mask": mask, "evaluate_every": 2.0}, {}
    yield "glow", {"evaluate_every": 3.0}, {}


KINDS = list(_kinds())
ITERATIONS = 10


def kills(count: int, seed: int = 0) -> dict[str, Any]:
    """Kill ``count`` runs; what became of them."""
    chance = random.Random(seed)
    _images()  # children have them
    result: dict[str, Any] = {"kills": 0, "to the bit": 0, "lost": 0, "iterations lost at most": 0, "signals": {}}
    with tempfile.TemporaryDirectory() as name:
        for index, (method, settings, network) in enumerate(KINDS):
            share = count // len(KINDS) + (index < count % len(KINDS))
            if not share:
                continue
            place = Path(name) / str(index)
            place.mkdir()
            begun = time.monotonic()
            if finish(_begin(place / "whole", method, settings, network)) != 0:
                raise RuntimeError(f"{method} with {settings} does not run: {_said(place / 'whole')}")
            seconds = time.monotonic() - begun
            for number in range(share):
                which = chance.choice(SIGNALS)
                run = place / f"{number}-{which.name}"
                problem, lost = _kill(run, place / "whole", method, settings, network, which, chance.random() * seconds)
                result["kills"] += 1
                result["signals"][which.name] = result["signals"].get(which.name, 0) + 1
                result["iterations lost at most"] = max(result["iterations lost at most"], lost)
                result["lost" if problem else "to the bit"] += 1
                if problem:
                    print(f"lost        {method} {settings} {network}, {which.name}: {problem}", flush=True)
    return result


def _kill(
    run: Path, whole: Path, method: str, settings: Any, network: Any, which: signal.Signals, after: float
) -> tuple[str | None, int]:
    """What went wrong, or None; and how many finished iterations the kill has cost."""
    child = _begin(run, method, settings, network)
    time.sleep(after)
    os.kill(child, which)
    code = finish(child)
    if which != signal.SIGKILL and code not in (0, 128 + which, -which):  # -: before it listened to signals
        return f"ended with {code}: {_said(run)}", 0
    saved = max((int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("checkpoint-*")), default=0)
    done = run.with_suffix(".done")
    lost = (int(done.read_text() or 0) if done.is_file() else 0) - saved
    if lost > 1:
        return f"lost {lost} iterations", lost
    again = _begin(run, method, settings, network, resume=(run / "config.yaml").is_file())
    if (code := finish(again)) != 0:
        return f"could not be continued ({code}): {_said(run)}", lost
    return _difference(run, whole), lost


def _begin(run: Path, method: str, settings: dict[str, Any], network: dict[str, Any], resume: bool = False) -> int:
    """A process that trains; its number."""
    return begin(lambda: _train(run, method, settings, network, resume), run.with_suffix(".err"))


def _train(run: Path, method: str, settings: dict[str, Any], network: dict[str, Any], resume: bool) -> int:
    import shortrun as sr
    from shortrun.fitting import InterruptError, not_interrupted
    from shortrun.training.presets import preset

    config = preset("smoke", method=method).changed(
        **{"iterations": ITERATIONS, "checkpoint_every": 1.0, "evaluate_every": 3.0, "prior_images": 40, **settings},
        network=network,
    )

    def note(trained: Any) -> None:
        run.with_suffix(".done").write_text(str(trained.info["iterations"]))

    images, test = _images()
    trained = sr.fit(None, images, validation=test, folder=run, config=config, resume=resume, quiet=True, callback=note)
    try:
        not_interrupted(trained)
    except InterruptError as interrupt:
        return interrupt.exit_code
    return 0


@functools.cache
def _images() -> tuple[Any, Any]:
    from shortrun.data import load

    return load("embedded", limit=60), load("embedded", "test", limit=12)


def _said(run: Path) -> str:
    with contextlib.suppress(OSError):
        return run.with_suffix(".err").read_text()[-600:]
    return ""


def _difference(run: Path, whole: Path) -> str | None:
    """What the finished run has other than the one that nobody disturbed."""
    for read in (_weights, _curve):
        if (found := read(run)) != read(whole):
            return f"other {read.__name__[1:]} than an undisturbed run"
    leftovers = [path.name for path in run.rglob(".*.tmp")]
    return f"left {leftovers}" if leftovers else None if found else "no weights"


def _weights(run: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {key: value.tobytes() for key, value in load_file(run / "model" / "model.safetensors").items()}


def _curve(run: Path) -> list[tuple[Any, ...]]:
    """Iteration, error and step of each evaluation: a resumed run shows each of them once."""
    from shortrun.files import read_lines

    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    return [(line["iteration"], line.get("mse"), line["step_size"]) for line in lines]
