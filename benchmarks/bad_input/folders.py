"""Model folders and run folders whose files are broken, incomplete, hostile or of another model."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bad_input.case import CANARY, MODEL, Case

WRONG: tuple[Any, ...] = (None, "x", -1, 0, [], {}, 1e400, float("nan"), True)
EVIL = f"open({CANARY!r}, 'w')\n\nclass Thing:\n    def __init__(self, *a, **k):\n        open({CANARY!r}, 'w')\n"
Change = Callable[[Path], Any]


def _model(folder: Path) -> Path:
    """A copy of a shipped model."""
    from shortrun.loading import SHIPPED

    place = folder / "model"
    shutil.copytree(SHIPPED / MODEL, place)
    return place


def _with_description(change: Callable[[dict[str, Any]], Any]) -> Change:
    def make(folder: Path) -> None:
        path = _model(folder) / "config.json"
        values = json.loads(path.read_text())
        replaced = change(values)
        path.write_text(json.dumps(values if replaced is None else replaced))
        (folder / "evil.py").write_text(EVIL)

    return make


def _set(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


def _without(path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return change


# What may be missing or have such a value, and is then what it was before the setting existed, or not used.
HARMLESS: set[tuple[str, str]] = {
    ("sigma", "None"),
    ("classes", "None"),
    ("classes", "0"),
    ("own_decoder", "None"),
    ("likelihood", "'x'"),
    ("dynamics.noise", "True"),
    ("dynamics.quiet_steps", "0"),
    ("model.last_block", "True"),
    ("model.activated", "True"),
    ("model.base", "None"),
    ("model.head_channels", "None"),
    ("dynamics.profile", "None"),
    ("info", "{}"),
    ("latent_shapes", "[]"),
    ("latent_shapes", "{}"),
    ("dynamics.profile", "[]"),
}


def model_cases() -> Iterator[Case]:
    def case(name: str, change: Change, command: str = "sample", works: Any = None, **more: Any) -> Case:
        words = [command, "model", "--data", "embedded", "--images", "2", "--out", "out"]
        return Case("models", name, words, change, ("config.json", "model", "safetensors"), works, **more)

    keys: list[tuple[str, ...]] = [
        ("format",),
        ("method",),
        ("shape",),
        ("dynamics",),
        ("own_decoder",),
        ("likelihood",),
        ("latent_shapes",),
        ("sigma",),
        ("classes",),
        ("info",),
        ("model",),
        ("dynamics", "steps"),
        ("dynamics", "step_size"),
        ("dynamics", "profile"),
        ("dynamics", "noise"),
        ("dynamics", "quiet_steps"),
        ("model", "kind"),
        ("model", "latent_sizes"),
        ("model", "channels"),
        ("model", "base"),
        ("model", "head_channels"),
        ("model", "coordinates"),
        ("model", "last_block"),
        ("model", "activated"),
    ]
    for key in keys:
        label = ".".join(key)
        for wrong in WRONG:
            fine = (label, repr(wrong)) in HARMLESS
            yield case(
                f"{label} is {wrong!r}",
                _with_description(_set(key, wrong)),
                "evaluate",
                (lambda folder: None) if fine else None,
            )
    for key in keys[:3] + keys[3:4] + keys[10:13]:
        yield case(f"{'.'.join(key)} is missing", _with_description(_without(key)))
    for kind in ("evil:Thing", "os:abort", "sys:exit", "os:fork", "signal:pause", "evil", "builtins:open"):
        yield case(f"kind is {kind}", _with_description(_set(("model", "kind"), kind)))
        yield case(f"own decoder is {kind}", _with_description(_set(("own_decoder",), kind)))
    for place in ("folder:/etc", "npz:/dev/zero", "hf:someone/something", "zip:../x.zip", "folder:~"):
        change = _with_description(_set(("info", "data"), place))
        yield Case("models", f"its data are {place}", ["evaluate", "model", "--out", "out"], change, ("data",))
    yield case(
        "a thousand million steps", _with_description(_set(("dynamics", "steps"), 10**9)), "evaluate", seconds=15
    )
    yield case("a profile of other length", _with_description(_set(("dynamics", "profile"), [1.0])), "evaluate")
    yield case("steps of NaN", _with_description(_set(("dynamics", "step_size"), float("nan"))), "evaluate")
    yield case(
        "steps of size 1e30",
        _with_description(_set(("dynamics", "step_size"), 1e30)),
        "evaluate",
        works=lambda folder: None,
    )
    yield case("images of 100,000 x 100,000", _with_description(_set(("shape",), [1, 100_000, 100_000])), seconds=15)
    yield case("channels of a million", _with_description(_set(("model", "channels"), 10**6)), seconds=15)
    yield case("a latent of 1e12", _with_description(_set(("model", "latent_sizes"), [10**12])), seconds=15)
    yield case("another network", _with_description(_set(("model", "channels"), 8)))
    for name, content in {
        "empty": b"",
        "text": b"text",
        "a list": b"[]",
        "a number": b"3",
        "null": b"null",
        "bytes": b"\xff\xfe\x00",
        "cut off": b'{"format": 2, "method": ',
        "deep": b"[" * 100_000,
        "twice": b"{}{}",
    }.items():
        yield case(
            f"config.json is {name}", lambda f, content=content: (_model(f) / "config.json").write_bytes(content)
        )
        yield case(
            f"the weights are {name}", lambda f, content=content: (_model(f) / "model.safetensors").write_bytes(content)
        )
        yield case(
            f"the prior is {name}", lambda f, content=content: (_model(f) / "prior.safetensors").write_bytes(content)
        )
    yield case("no weights", lambda f: (_model(f) / "model.safetensors").unlink())
    yield case("no description", lambda f: (_model(f) / "config.json").unlink())
    yield case("weights cut off", lambda f: _cut(_model(f) / "model.safetensors"))
    yield case(
        "a header of 2^60 bytes", lambda f: (_model(f) / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    )
    yield case(
        "weights of NaN",
        lambda f: _change_weights(
            _model(f) / "model.safetensors", lambda t: {key: np.full_like(value, np.nan) for key, value in t.items()}
        ),
    )
    yield case("one weight of infinity", lambda f: _change_weights(_model(f) / "model.safetensors", _one_infinity))
    yield case(
        "a weight is missing",
        lambda f: _change_weights(_model(f) / "model.safetensors", lambda t: dict(list(t.items())[1:])),
    )
    yield case(
        "a weight too many",
        lambda f: _change_weights(_model(f) / "model.safetensors", lambda t: {**t, "more": np.zeros(3, np.float32)}),
    )
    yield case(
        "weights of other shapes",
        lambda f: _change_weights(
            _model(f) / "model.safetensors", lambda t: {key: value[..., None] for key, value in t.items()}
        ),
    )
    yield case(
        "a prior of NaN",
        lambda f: _change_weights(
            _model(f) / "prior.safetensors",
            lambda t: {
                key: np.full_like(value, np.nan) if value.dtype.kind == "f" else value for key, value in t.items()
            },
        ),
    )
    yield case("a prior of another kind", lambda f: _change_prior(_model(f), kind="flow"))
    yield case("a prior of no kind", lambda f: _change_prior(_model(f), kind="no-such"))
    yield case("a prior of other size", lambda f: _change_prior(_model(f), size=3))
    yield case("a prior of size 1e12", lambda f: _change_prior(_model(f), size=10**12), seconds=15)
    yield case("a folder for the weights", lambda f: _folder_instead(_model(f) / "model.safetensors"))
    yield case(
        "a pickle as weights",
        lambda f: (_model(f) / "model.safetensors").write_bytes(
            b"\x80\x04cbuiltins\nopen\n(X\x06\0\0\0canaryX\x01\0\0\0wtR."
        ),
    )
    yield case("the model is a file", lambda f: (f / "model").write_text("x"))
    yield case("no model at all", lambda f: None)


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _one_infinity(tensors: dict[str, Any]) -> dict[str, Any]:
    first = next(key for key, value in tensors.items() if value.ndim)
    tensors[first] = tensors[first].copy()
    tensors[first].flat[0] = np.inf
    return tensors


def _change_weights(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(path, "np") as file:
        metadata = file.metadata()
    save_file({k: np.ascontiguousarray(v) for k, v in change(load_file(path)).items()}, path, metadata)


def _change_prior(model: Path, **changes: Any) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = model / "prior.safetensors"
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["prior"]) | changes
    save_file(load_file(path), path, {"prior": json.dumps(about)})


# --- runs ----------------------------------------------------------------------------------------------

_RUN: list[Path] = []


def _run(folder: Path) -> Path:
    """A copy of a small run that was stopped after four of six iterations."""
    if not _RUN:
        from bad_input.runs import small_run

        _RUN.append(small_run(Path(tempfile.mkdtemp()) / "run"))
    return Path(shutil.copytree(_RUN[0], folder / "run"))


def _with_settings(change: Callable[[dict[str, Any]], Any]) -> Change:
    def make(folder: Path) -> None:
        path = _run(folder) / "config.yaml"
        values = yaml.safe_load(path.read_text())
        change(values)
        path.write_text(yaml.safe_dump(values))
        (folder / "evil.py").write_text(EVIL)

    return make


def run_cases() -> Iterator[Case]:
    def case(name: str, change: Change, works: Any = None, names: tuple[str, ...] = ("run", "config.yaml")) -> Case:
        return Case("runs", name, ["resume", "run"], change, names, works)

    def resumed(folder: Path) -> str | None:
        text = (folder / "run" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return None if lines[-1]["iteration"] == 6 else f"ended at iteration {lines[-1]['iteration']}"

    yield case("as it is", _run, resumed)
    numbers = (
        "batch",
        "iterations",
        "warm_up",
        "steps",
        "step_size",
        "evaluate_every",
        "checkpoint_every",
        "anneal",
        "tune_every",
        "prior_images",
        "evaluate_images",
        "sigma",
        "learning_rates",
        "betas",
    )
    for name in numbers:
        for wrong in ("x", -1, [], {}, float("nan"), [None]):
            yield case(f"{name} is {wrong!r}", _with_settings(_set((name,), wrong)))
    for name in ("method", "data", "order", "prior", "loss", "entropy", "estimator", "step_control", "tune", "model"):
        for wrong in ("no-such", 3, [], None):
            yield case(f"{name} is {wrong!r}", _with_settings(_set((name,), wrong)))
    yield case("another seed", _with_settings(_set(("seed",), 7)), names=("seed",))
    yield case("other data", _with_settings(_set(("data",), "scenes:20")))
    yield case("other latents", _with_settings(_set(("model", "latent_sizes"), [4, 9])))
    yield case("a decoder with code", _with_settings(_set(("model", "kind"), "evil:Thing")))
    yield case("an unknown setting", _with_settings(_set(("no_such",), 1)), names=("no_such",))
    for name, content in {
        "empty": b"",
        "text": b"text",
        "a list": b"- 1\n",
        "bytes": b"\xff\xfe\x00",
        "cut off": b"data: [",
        "an object": b"!!python/object/apply:os.system ['touch canary']\n",
        "tabs": b"\t\t- x",
    }.items():
        yield case(f"config.yaml is {name}", lambda f, content=content: (_run(f) / "config.yaml").write_bytes(content))
    yield case("no config.yaml", lambda f: (_run(f) / "config.yaml").unlink())
    yield case("no checkpoints", lambda f: shutil.rmtree(_run(f) / "checkpoints"), names=("checkpoint",))
    yield case(
        "a half line at the end of its metrics", lambda f: _append(_run(f) / "metrics.jsonl", b'{"iter'), resumed
    )
    yield case(
        "a line of its metrics is no JSON",
        lambda f: _append(_run(f) / "metrics.jsonl", b"text\n"),
        names=("metrics.jsonl",),
    )
    yield case(
        "leftover temporary files", lambda f: (_run(f) / "checkpoints" / ".x.123.tmp").write_bytes(b"x"), resumed
    )

    def newest(folder: Path) -> Path:
        return sorted((_run(folder) / "checkpoints").glob("checkpoint-*"))[-1]

    def all_of(change: Callable[[Path], Any]) -> Change:
        def make(folder: Path) -> None:
            for path in (_run(folder) / "checkpoints").glob("checkpoint-*"):
                change(path)

        return make

    def lacks(word: str) -> Callable[[Path], None]:
        return lambda path: _change_weights(path, lambda t: {k: v for k, v in t.items() if word not in k})

    def state(**changes: Any) -> Callable[[Path], None]:
        return lambda path: _change_state(path, changes)

    broken: dict[str, Callable[[Path], Any]] = {
        "empty": lambda path: path.write_bytes(b""),
        "text": lambda path: path.write_text("x"),
        "cut off": _cut,
        "without optimiser slots": lacks("exp_avg_sq"),
        "without a weight": lacks("model.decoder"),
        "without random states": lacks("generator."),
        "with weights of NaN": lambda path: _change_weights(
            path, lambda t: {k: np.full_like(v, np.nan) if v.dtype.kind == "f" else v for k, v in t.items()}
        ),
        "with a state of no numbers": state(seconds="x"),
        "without a state": state(learner=None),
        "with a negative time": state(seconds=-5.0),
        "with an iteration of text": state(iteration="x"),
        "a folder": _folder_instead,
    }
    for name, change in broken.items():
        yield case(f"the newest checkpoint is {name}", lambda f, change=change: change(newest(f)), resumed)
        yield case(f"all checkpoints are {name}", all_of(change), names=("checkpoint",))
    yield Case("runs", "train into a folder with a run", ["train", "--preset", "smoke", "--out", "run"], _run, ("run",))
    yield Case(
        "runs",
        "train into a file",
        ["train", "--preset", "smoke", "--out", "run"],
        lambda f: (f / "run").write_text("x"),
        ("run",),
    )
    yield Case("runs", "resume a file", ["resume", "run"], lambda f: (f / "run").write_text("x"), ("run",))
    yield Case("runs", "resume for no iterations", ["resume", "run", "--iterations", "0"], _run, ("iterations",))
    yield Case("runs", "resume for NaN minutes", ["resume", "run", "--minutes", "nan"], _run, ("minutes",))


def _append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


def _change_state(path: Path, changes: dict[str, Any]) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(path, "np") as file:
        state = json.loads(file.metadata()["state"]) | changes
    save_file(load_file(path), path, {"state": json.dumps(state)})


def folder_cases() -> Iterator[Case]:
    yield from model_cases()
    yield from run_cases()
