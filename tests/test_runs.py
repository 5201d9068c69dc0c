"""Run folders: one process at a time, whatever a killed process leaves behind, and nothing lost on resume."""

import builtins
import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import SMOKE, open_loop, train

import shortrun as sr
from shortrun.cli import main
from shortrun.files import read_lines, write_atomically
from shortrun.fitting import InterruptError, not_interrupted
from shortrun.training.checkpoints import list_checkpoints
from shortrun.training.config import Config
from shortrun.training.model_folder import RunError
from shortrun.training.presets import preset
from shortrun.training.run_folder import MOST_PICTURES, claimed, thin

EVERY = SMOKE.changed(checkpoint_every=1.0, evaluate_every=2.0)


def stop_at(iteration, how=None):
    def callback(trained):
        if trained.info["iterations"] == iteration:
            if how is None:
                return True
            os.kill(os.getpid(), how)
        return False

    return callback


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped after four of six iterations."""
    train(EVERY, tmp_path / "run", callback=stop_at(4))
    return tmp_path / "run"


def resumed(folder):
    return train(Config.load(folder / "config.yaml"), folder, resume=True)


# --- one process at a time ---------------------------------------------------------------------------------


def test_two_processes_cannot_train_in_one_folder(stopped):
    holder = (
        "import sys, pathlib; from shortrun.training.run_folder import MOST_PICTURES, claimed, thin\n"
        "with claimed(pathlib.Path(sys.argv[1]), True): print('mine', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", holder, str(stopped)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(RunError, match="another process is training"):
            resumed(stopped)
        other.kill()  # the lock of a dead process is not in the way
    assert resumed(stopped).info["iterations"] == 6


def test_a_folder_that_nothing_was_written_to_is_removed_again(tmp_path):
    with pytest.raises(ValueError, match="mask is 'nowhere'"):
        train(SMOKE.changed(mask="nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"), claimed(tmp_path / "mine", False):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


# --- what a killed process leaves behind -------------------------------------------------------------------


def test_a_run_that_ended_before_its_first_checkpoint_can_be_started_again(tmp_path):
    for again in ("train", "resume"):
        folder = tmp_path / again
        folder.mkdir()
        (folder / ".lock").touch()
        EVERY.save(folder / "config.yaml")
        trained = train(EVERY, folder) if again == "train" else resumed(folder)
        assert trained.info["iterations"] == 6


def test_half_a_line_and_temporary_files_do_not_matter(stopped):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "ms')
    (stopped / "checkpoints" / ".checkpoint-00000005.safetensors.77.tmp").write_bytes(b"half")
    resumed(stopped)
    assert not list(stopped.rglob("*.tmp"))
    lines = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [2, 4, 6]


def test_what_was_noted_after_the_last_checkpoint_did_not_happen(stopped):
    for path in list_checkpoints(stopped / "checkpoints"):
        if int(path.stem.split("-")[1]) > 3:
            path.unlink()
    resumed(stopped)
    noted = [line["iteration"] for line in read_lines(stopped / "metrics.jsonl") if "loss" in line]
    assert noted == [2, 4, 6]


def without(word):
    return lambda tensors: {key: value for key, value in tensors.items() if word not in key}


def of_nan(tensors):
    return {key: value * math.nan if value.is_floating_point() else value for key, value in tensors.items()}


@pytest.mark.parametrize("change", [of_nan, without("exp_avg_sq"), without("generator."), without("decoder")])
def test_a_checkpoint_that_cannot_be_used_is_passed_over(stopped, change, tmp_path):
    whole = train(EVERY, tmp_path / "whole")
    newest = list_checkpoints(stopped / "checkpoints")[-1]
    from safetensors import safe_open

    with safe_open(newest, "pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(newest)), newest, metadata)
    again = resumed(stopped)
    assert again.info["iterations"] == 6
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for path in list_checkpoints(stopped / "checkpoints"):
        path.write_bytes(b"x")
    with pytest.raises(RunError, match=r"no checkpoint to resume from; checkpoint-.* cannot be used"):
        resumed(stopped)


@pytest.mark.parametrize("method", ["abp", "glo", "vae", "vae-iaf", "ladder-vae", "glow"])
def test_every_method_goes_on_to_the_bit(tmp_path, method):
    config = preset("smoke", method=method).changed(iterations=4, checkpoint_every=1.0, evaluate_every=2.0)
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "run", callback=stop_at(2))
    again = train(config, tmp_path / "run", resume=True)
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_that_is_resumed_where_tuning_is_due_goes_on_to_the_bit(tmp_path):
    """How far tuning may lead the step depends on the learning rate of the moment, which no optimiser remembers."""
    config = EVERY.changed(tune_every=3, warm_up=6)
    whole = train(config, tmp_path / "whole")
    train(config.changed(evaluate_every=1.0), tmp_path / "run", callback=stop_at(3))
    again = train(config, tmp_path / "run", resume=True)
    assert again.dynamics == whole.dynamics
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


# --- what a run is -----------------------------------------------------------------------------------------


def test_a_run_is_not_continued_as_another_one(stopped):
    config = Config.load(stopped / "config.yaml")
    for name, changed in {
        "seed": config.changed(seed=7),
        "train_images": config.changed(train_images=50), "model": config.changed(network={"coordinates": "latent"}),
    }.items():  # fmt: skip
        with pytest.raises(RunError, match=f"{name} is .*, but this run was started with"):
            train(changed, stopped, resume=True)
    assert resumed(stopped).info["iterations"] == 6


def test_another_budget_is_remembered(stopped, capsys):
    main(["resume", str(stopped), "--iterations", "8"])
    assert Config.load(stopped / "config.yaml").run.iterations == 8
    main(["resume", str(stopped)])
    assert "8 iterations" in capsys.readouterr().out


def test_masks_of_evaluations_do_not_change_what_is_learned(tmp_path):
    """Evaluating more often must not move the masks of training: then resuming is to the bit, whenever it evaluates."""
    found = []
    for every in (1.0, 6.0):
        trained = train(EVERY.changed(mask="random:0.5", evaluate_every=every), tmp_path / str(every))
        found.append(list(trained.model.parameters()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_pictures_do_not_become_too_many(tmp_path):
    for number in range(MOST_PICTURES):
        thin(tmp_path)
        (tmp_path / f"{number:08d}.png").touch()
    thin(tmp_path)
    left = sorted(int(path.stem) for path in tmp_path.iterdir())
    assert left == list(range(0, MOST_PICTURES, 2))


# --- signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_saves_and_ends_as_shells_expect(tmp_path, which, code):
    trained = train(EVERY, tmp_path / "run", callback=stop_at(2, getattr(signal, which)))
    assert trained.info["stopped_by"] == which
    with pytest.raises(InterruptError) as interrupt:
        not_interrupted(trained)
    assert interrupt.value.exit_code == code
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].stem.endswith("2")
    assert resumed(tmp_path / "run").info["iterations"] == 6


def test_the_command_line_exits_with_the_signal(tmp_path, monkeypatch):
    import shortrun.cli.train as command

    def interrupted(*arguments, callback=None, **options):
        return sr.fit(*arguments, callback=stop_at(2, signal.SIGTERM), **options)

    monkeypatch.setattr(command, "fit", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["train", "--preset", "smoke", "--evaluate-every", "2", "--out", str(tmp_path / "run")])
    assert end.value.code == 143


def test_what_is_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        trained = train(EVERY, tmp_path / "run", callback=stop_at(2, signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trained.info["iterations"] == 6


# --- a full disk -------------------------------------------------------------------------------------------


def full_disk(monkeypatch, folder, after):
    """Opening a file of this folder to write fails from the time number ``after`` on, as if no space were left."""
    usual, written = open, []

    def limited(file, mode="r", *arguments, **options):
        if any(letter in mode for letter in "wax+") and str(file).startswith(str(folder)):
            written.append(file)
            if len(written) > after:
                raise OSError(28, "No space left on device", str(file))
        return usual(file, mode, *arguments, **options)

    monkeypatch.setattr(builtins, "open", limited)
    monkeypatch.setattr(io, "open", limited)
    return written


def half_written(monkeypatch):
    """Bytes of a file reach the disk until half of them are there."""
    usual = os.fsync

    def fsync(number):
        os.ftruncate(number, os.fstat(number).st_size // 2)
        usual(number)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_write_loses_nothing(tmp_path, monkeypatch):
    """Checkpoints, settings, metrics, pictures, the model and its prior: whichever write is the first that fails."""
    whole = train(EVERY, tmp_path / "whole")
    failures = 0
    for after in range(200):
        folder = tmp_path / str(after)
        with monkeypatch.context() as patch:
            written = full_disk(patch, folder, after)
            try:
                train(EVERY, folder)
            except OSError:
                failures += 1
        if len(written) <= after:
            break
        assert not folder.exists() or not list(folder.rglob("*.tmp"))
        again = resumed(folder) if (folder / "config.yaml").is_file() else train(EVERY, folder)
        for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a, b)
    assert failures == after >= 20


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    for fail in (lambda patch: full_disk(patch, tmp_path, 0), half_written):
        with monkeypatch.context() as patch:
            fail(patch)
            with pytest.raises(OSError, match="No space"):
                write_atomically(path, b"new and longer")
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_numbers_that_json_has_not_are_null(tmp_path):
    loop = open_loop(SMOKE, tmp_path / "run")
    loop.state = replace(loop.state, control=loop.state.control._replace(curvature=math.nan))
    loop.note({"curvature": math.nan, "loss": math.inf})
    loop.save()

    def no_constants(name):
        raise AssertionError(name)

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=no_constants)
    json.loads((tmp_path / "run" / "model" / "config.json").read_text(), parse_constant=no_constants)
    assert open_loop(SMOKE, tmp_path / "run", resume=True).iteration == 0
