"""Learning: the equation, unattended running, resuming to the bit, several processes, being killed."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import shortrun as sr
from shortrun import data, tasks
from shortrun.cli import main
from shortrun.config import ModelConfig, TrainConfig, preset
from shortrun.generators import ModelError
from shortrun.learners import METHODS, ShortRun, short_run
from shortrun.learners.base import Batch
from shortrun.parallel import accelerator
from shortrun.runs import RunError, from_pretrained, list_checkpoints
from shortrun.train import Loop, schedule, train

SMOKE = preset("smoke", "embedded")


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def assert_same_weights(first, second, **tolerance):
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], **tolerance)


def batch_of(x, mask=None):
    return Batch(x, mask, torch.arange(len(x)))


def small_learner(**changes):
    torch.manual_seed(0)
    config = replace(SMOKE, tune="off", step_size=0.01, cool_down=0, steps=3, batch=4, warm_up=0, **changes)
    decoder = torch.nn.Linear(2, 6)
    model = sr.GaussianModel(lambda z: torch.tanh(decoder(z[0])).view(-1, 1, 2, 3), [(2,)], 0.3)
    model.inner = decoder
    return ShortRun(model, config, Accelerator()), config


def test_samples_are_as_wide_as_the_latents_were_in_training(tmp_path):
    learner, _ = small_learner()
    learner._follow_spread([4.0])
    assert learner.spread == (2.0,)
    learner._follow_spread([4.0 + 10 * 0.5])
    assert learner.spread[0] ** 2 == pytest.approx(4.5)

    train(SMOKE, tmp_path / "run", quiet=True)
    trained = from_pretrained(tmp_path / "run")
    assert len(trained.spread) == 2
    trained.spread = (3.0, 1.0)
    wide = trained.sample_latents(5, torch.Generator().manual_seed(0))
    narrow = trained.model.sample_prior(5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide, (3 * narrow[0], narrow[1]))
    images = tasks.sample(trained, 5, torch.Generator().manual_seed(0))
    trained.spread = ()
    assert not torch.allclose(tasks.sample(trained, 5, torch.Generator().manual_seed(0)), images)

    train(replace(SMOKE, fit_spread=False), tmp_path / "plain", quiet=True)
    assert from_pretrained(tmp_path / "plain").spread == ()


def test_the_spread_is_that_of_the_latents_that_are_inferred(tmp_path):
    """Measured a second time, with the finished model and the public functions."""
    train(
        replace(SMOKE, iterations=120, batch=32, learning_rates=(1e-3,), warm_up=20, evaluate_every=100, tune="guard"),
        tmp_path,
        quiet=True,
    )
    trained = from_pretrained(tmp_path)
    x = data.load("embedded", "train").batch(slice(0, 300))
    z = tasks.reconstruct(trained, x, torch.Generator().manual_seed(0)).z
    for width, layer in zip(trained.spread, z, strict=True):
        assert width == pytest.approx(float(layer.square().mean().sqrt()), rel=0.1)


def test_fitted_latents_have_the_mean_and_covariance_of_the_inferred_ones(tmp_path):
    train(SMOKE, tmp_path, quiet=True)
    trained = from_pretrained(tmp_path)
    x = data.load("embedded", "train").batch(slice(0, 200))
    inferred = tasks.reconstruct(trained, x, torch.Generator().manual_seed(0)).z
    wanted = torch.cat([layer.flatten(1) for layer in inferred], 1).double().numpy()

    count = 100_000
    drawn = tasks.fitted_latents(trained, x, count, torch.Generator().manual_seed(0))
    assert [layer.shape[1:] for layer in drawn] == [layer.shape[1:] for layer in inferred]
    found = torch.cat([layer.flatten(1) for layer in drawn], 1).double().numpy()
    covariance, variances = np.cov(wanted.T), wanted.var(0, ddof=1)
    assert (abs(found.mean(0) - wanted.mean(0)) / np.sqrt(variances / count)).max() < 5
    error = np.sqrt((variances[:, None] * variances + covariance**2) / count)  # of an estimated covariance
    assert (abs(np.cov(found.T) - covariance) / error).max() < 5
    across = covariance[: inferred[0][0].numel(), inferred[0][0].numel() :]
    assert abs(across / error[: len(across), len(across) :]).max() > 10  # layers depend on each other, which is kept

    size = wanted.shape[1]
    with pytest.raises(ValueError, match=f"a Gaussian over {size} latents cannot be fitted to {size} images"):
        tasks.fitted_latents(trained, x[:size], 3, torch.Generator())


@pytest.mark.parametrize("changes", [{"warm_up": 0}, {"warm_up": 3}, {"warm_up": 3, "learn_last_later": 2}])
def test_updates_and_iterations_are_counted_alike(changes):
    config = replace(SMOKE, steps=9, learn_last=5, **changes)
    total = 0
    for iteration in range(12):
        assert config.updates_in(iteration) == total
        along = config.updates_along(iteration)
        assert along == (2 if "learn_last_later" in changes and iteration >= 3 else 5)
        for updates in range(total + 1, total + along + 1):
            assert config.iterations_for(updates) == iteration + 1
        total += along


def test_fewer_updates_along_the_chain_after_the_warm_up(tmp_path):
    config = replace(SMOKE, iterations=5, learn_last=3, learn_last_later=1, warm_up=2, evaluate_every=5)
    loop = Loop(config, tmp_path / "run", False, lambda text: None)
    loop.save()
    made = []
    step = loop.learner.optimiser.step
    loop.learner.optimiser.step = lambda *args, **kwargs: made.append(loop.iteration) or step(*args, **kwargs)
    while loop.share < 1:
        loop.advance()
    assert [made.count(iteration) for iteration in range(5)] == [3, 3, 1, 1, 1]
    assert loop.updates == len(made) == 9


@pytest.mark.parametrize("learn_last", [1, 3])
def test_updates_are_gradient_steps_on_the_log_joint(learn_last):
    """Written a second time with the public `infer` and plain autograd; m = 1 is the paper's Eq. 21."""
    learner, config = small_learner(learn_last=learn_last)
    other, _ = small_learner(learn_last=learn_last)
    x = torch.rand(4, 1, 2, 3) * 2 - 1
    learner.update(batch_of(x), 0.0, torch.Generator().manual_seed(3))

    generator = torch.Generator().manual_seed(3)
    z = other.model.sample_prior(4, generator)
    optimiser = torch.optim.Adam(other.model.parameters(), lr=config.learning_rates[0], betas=config.betas)
    for k in range(config.steps + 1):
        here = z
        if k < config.steps:  # one step of the dynamics with the parameters before their update
            z = sr.infer(other.model, x, sr.Langevin(1, 0.01), start=z, generator=generator)
        if k > config.steps - learn_last:
            loss = -(other.model.log_prior(here) + other.model.log_likelihood(x, here)).mean()
            loss = loss * 0.3**2 / 6
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_divergent_chains_do_not_touch_the_parameters():
    learner, _ = small_learner(learn_last=2)
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.dynamics = sr.Langevin(3, 1e9)
    update = learner.update(batch_of(torch.rand(4, 1, 2, 3)), 0.0, torch.Generator().manual_seed(0))
    assert update.divergent == 4
    for a, b in zip(learner.model.parameters(), before, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("leaving", "leave_at"), [(1, 3), (2, 3), (2, 1)])
def test_an_iteration_that_many_chains_leave_is_undone(leaving, leave_at, begun, monkeypatch):
    """More than a quarter of the chains: then parameters and optimiser are as before. The step is shorter if they left
    before the first update (at point 1), the learning rate lower if they left because of the updates."""
    learner, _ = small_learner(learn_last=3)
    learner.config = replace(learner.config, tune="guard")
    x, generator = torch.rand(4, 1, 2, 3), torch.Generator().manual_seed(0)
    if begun:
        learner.update(batch_of(x), 0.0, generator)
    before = [tensor.detach().clone() for tensor in learner.weights()]
    assert len(before) == (8 if begun else 2)  # weight and bias; of each two moments and a count of steps
    points = []

    def leave(log_joint, start, dimension):
        points.append(log_joint)
        return (torch.arange(4) < leaving) & (len(points) == leave_at + 1)

    monkeypatch.setattr(short_run, "is_divergent", leave)
    assert learner.update(batch_of(x), 0.0, generator).divergent == leaving
    after = learner.weights()
    undone = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert undone == (leaving == 2)
    early = leave_at == 1
    assert learner.dynamics.step_size == pytest.approx(0.009 if leaving == 2 and early else 0.01)
    assert learner.caution == (0.5 if leaving == 2 and not early else 1)
    monkeypatch.undo()
    kept = [p.detach().clone() for p in learner.parameters]
    learner.update(batch_of(x), 0.0, generator)
    assert not torch.equal(learner.parameters[0], kept[0])  # and it goes on learning


def test_the_guard_lowers_the_step_and_raises_it_again():
    learner, _ = small_learner()
    learner.config = replace(learner.config, tune="grid")
    x = torch.rand(4, 1, 2, 3)
    z = learner.model.sample_prior(4)
    learner.target_size = 0.1

    def follow(size, rising=True):
        learner.dynamics = sr.Langevin(3, size)
        learner._follow_curvature(x, None, z, torch.Generator().manual_seed(0), rising)
        return learner.dynamics.step_size

    assert follow(50.0) < 50.0
    assert 1e-4 < follow(1e-4) <= 1.5e-4 * (1 + 1e-9)
    assert follow(50.0, rising=False) < 50.0
    assert follow(1e-4, rising=False) == 1e-4
    with torch.no_grad():
        learner.model.inner.weight.mul_(10)
    assert follow(0.1) < 0.1


def test_tuning_finds_its_way_back_from_a_step_that_is_far_too_long():
    learner, _ = small_learner()
    learner.config = replace(learner.config, tune="grid")
    learner.dynamics = sr.Langevin(3, 100.0)
    learner.tune(batch_of(torch.rand(12, 1, 2, 3)), torch.Generator().manual_seed(0))
    assert learner.dynamics.step_size < 3


@pytest.mark.parametrize("per", ["run", "layer"])
def test_tuning_by_gradient_within_training(tmp_path, per):
    config = replace(SMOKE, tune="gradient", tune_per=per, iterations=4)
    train(config, tmp_path / "run", quiet=True)
    size = torch.tensor(from_pretrained(tmp_path / "run").dynamics.step_size)
    assert size.ndim == {"run": 1, "layer": 2}[per]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line.get("event") == "tuned"] == [3]
    if per == "run":  # one factor for all steps: those of the cool-down stay half as long
        assert float(size[-1] / size[0]) == pytest.approx(0.5)


def test_learning_lowers_the_error(tmp_path):
    config = replace(SMOKE, iterations=60, batch=16, steps=8, learn_last=6, evaluate_every=60, warm_up=5)
    outcome = train(config, tmp_path / "run", quiet=True)
    assert outcome.mse < 0.3  # an untrained generator has 0.9, the mean image 0.27, all black 0.41
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("event") == "tuned" for line in lines)
    assert list((tmp_path / "run" / "pictures").glob("*.png"))


def test_mixed_precision_keeps_latents_in_single(tmp_path):
    seen = []
    original = ShortRun.keep
    ShortRun.keep = lambda self, batch, z: seen.extend(layer.dtype for layer in z)
    try:
        exact = train(replace(SMOKE, iterations=2), tmp_path / "single", quiet=True)
        mixed = train(replace(SMOKE, iterations=2, mixed_precision="bf16"), tmp_path / "mixed", quiet=True)
    finally:
        ShortRun.keep = original
    assert set(seen) == {torch.float32}
    assert mixed.mse == pytest.approx(exact.mse, rel=0.05)
    assert mixed.mse != exact.mse  # else nothing ran in bfloat16
    assert {value.dtype for value in weights(tmp_path / "mixed").values()} == {torch.float32}


def test_learning_from_incomplete_images(tmp_path):
    outcome = train(replace(SMOKE, mask="random:0.5"), tmp_path / "run", quiet=True)
    assert math.isfinite(outcome.mse)


def test_resume_continues_to_the_bit(tmp_path):
    whole = replace(SMOKE, iterations=8)
    train(whole, tmp_path / "whole", quiet=True)
    stopped = tmp_path / "stopped"
    with StopAfter(4):
        outcome = train(whole, stopped, quiet=True)
    assert outcome.stopped
    assert outcome.iteration == 4
    train(TrainConfig.load(stopped / "config.yaml"), stopped, resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", stopped, rtol=0, atol=0)
    assert from_pretrained(tmp_path / "whole").dynamics == from_pretrained(stopped).dynamics


class StopAfter:
    """Sends SIGINT to this process after so many iterations, as Ctrl-C would."""

    def __init__(self, iterations):
        self.iterations = iterations

    def __enter__(self):
        self.original = Loop.advance
        stop = self

        def advance(loop):
            update = stop.original(loop)
            if loop.iteration == stop.iterations:
                os.kill(os.getpid(), signal.SIGINT)
            return update

        Loop.advance = advance

    def __exit__(self, *_):
        Loop.advance = self.original


def test_a_run_folder_is_not_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    with pytest.raises(RunError, match=r"not empty.*shortrun resume"):
        train(SMOKE, tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "precious.txt").read_text() == "mine"
    with pytest.raises(RunError, match="no config"):
        train(SMOKE, tmp_path / "other", resume=True, quiet=True)


def test_a_model_that_diverges_goes_back_to_the_last_checkpoint(tmp_path):
    original = Loop.advance
    spoiled = []

    def advance(loop):
        if loop.iteration == 5 and not spoiled:
            spoiled.append(True)
            with torch.no_grad():
                next(iter(loop.model.parameters())).fill_(math.nan)
        return original(loop)

    Loop.advance = advance
    try:
        outcome = train(replace(SMOKE, tune="off", step_size=0.001), tmp_path / "run", quiet=True)
    finally:
        Loop.advance = original
    assert outcome.iteration == 6
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    assert "recovered" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("noise", "warned"), [(0.0, False), (2.0, True)])
def test_a_run_that_learns_nothing_is_noticed(tmp_path, monkeypatch, noise, warned):
    said = []
    loop = Loop(SMOKE, tmp_path, False, said.append)
    loop.iteration = SMOKE.warm_up + 1
    monkeypatch.setattr(loop.learner, "reconstruct", lambda x, sources: x + noise * torch.randn(x.shape))
    loop.evaluate(pictures=False)
    assert any("no better than the 0." in text for text in said) == warned


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    train(SMOKE, tmp_path / "run", quiet=True)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    outcome = train(replace(SMOKE, iterations=8), tmp_path / "run", resume=True, quiet=True)
    assert outcome.iteration == 8


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


# Not compiled, as so many iterations would be: that alone can take a minute on a busy machine.
ENDLESS = ("--iterations", "100000", "--checkpoint-every", "2", "--compile", "off")


def launch(folder, *words, launcher=(), command=("train", "--preset", "smoke")):
    line = [sys.executable, *launcher, "-m", "shortrun.cli", *command, "--out", str(folder), *words]
    with folder.with_suffix(".log").open("wb") as output:
        return subprocess.Popen(line, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)


def output_of(folder):
    return folder.with_suffix(".log").read_text()


def wait_for_checkpoint(folder, number, process):
    for _ in range(1200):
        if len(list(folder.glob("checkpoints/checkpoint-*[1-9]*.safetensors"))) >= number:
            return
        assert process.poll() is None, output_of(folder)
        time.sleep(0.05)
    raise AssertionError("no checkpoint appeared")


def test_kill_loses_at_most_one_checkpoint_interval(tmp_path):
    process = launch(tmp_path / "run", *ENDLESS)
    wait_for_checkpoint(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    reached = max(json.loads(line)["iteration"] for line in lines)
    saved = int(list_checkpoints(tmp_path / "run" / "checkpoints")[-1].stem.split("-")[1])
    assert saved >= reached - 2
    config = replace(TrainConfig.load(tmp_path / "run" / "config.yaml"), iterations=saved + 2)
    outcome = train(config, tmp_path / "run", resume=True, quiet=True)
    assert outcome.iteration == saved + 2


def test_sigterm_saves_and_ends_cleanly(tmp_path):
    process = launch(tmp_path / "run", *ENDLESS)
    wait_for_checkpoint(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, output_of(tmp_path / "run")
    assert "shortrun resume" in output_of(tmp_path / "run")
    assert from_pretrained(tmp_path / "run").info["iterations"] > 0


TWO_PROCESSES = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29731")


def test_two_processes_make_the_update_of_one(tmp_path):
    """Two gloo processes with half the batch each, against one with all of it."""
    words = ["--iterations", "3", "--batch", "8"]
    alone = launch(tmp_path / "one", *words)
    assert alone.wait(timeout=120) == 0, output_of(tmp_path / "one")
    both = launch(tmp_path / "two", *words, launcher=TWO_PROCESSES)
    assert both.wait(timeout=180) == 0, output_of(tmp_path / "two")
    assert_same_weights(tmp_path / "one", tmp_path / "two", rtol=1e-3, atol=2e-5)
    one, two = from_pretrained(tmp_path / "one"), from_pretrained(tmp_path / "two")
    assert (one.info["processes"], two.info["processes"]) == (1, 2)
    assert one.dynamics.step_size == pytest.approx(two.dynamics.step_size, rel=1e-3)


def test_two_processes_share_the_evaluation(tmp_path):
    train(replace(SMOKE, iterations=1), tmp_path / "run", quiet=True)
    command = ("evaluate", str(tmp_path / "run"), "--images", "300")  # two chunks, one for each process
    for name, launcher in (("one", ()), ("two", TWO_PROCESSES)):
        process = launch(tmp_path / name, launcher=launcher, command=command)
        assert process.wait(timeout=180) == 0, output_of(tmp_path / name)
    first, second = (json.loads((tmp_path / name / "evaluate.json").read_text()) for name in ("one", "two"))
    assert first["mse"] == pytest.approx(second["mse"], rel=1e-6)
    assert first["images"] == second["images"] == 300
    assert output_of(tmp_path / "two").count('"mse"') == 1


def test_schedules():
    paper = preset("paper", "svhn")
    rates = [schedule(paper, 1, share)[0] for share in (0.1, 0.5, 0.9)]
    assert rates == [1e-4, 5e-5, 1e-5]
    # sigma falls evenly from the fifth epoch of the script (400 updates each) to the end, where the text has 0.15
    begin = 5 * 400 / 300_000
    assert [schedule(paper, 1, share)[1] for share in (0.0, begin)] == [0.25, 0.25]
    assert schedule(paper, 1, (1 + begin) / 2)[1] == pytest.approx(0.20)
    assert schedule(paper, 1, 1.0)[1] == pytest.approx(0.15)
    assert (paper.iterations, paper.steps, paper.learn_last) == (300_000, 25, 1)
    cpu = preset("cpu", "mnist")
    assert schedule(cpu, 0, 0.0)[0] == pytest.approx(cpu.learning_rates[0] / cpu.warm_up)
    assert schedule(cpu, 0, 0.35)[1] == pytest.approx((0.3 * 0.22) ** 0.5)  # geometric


def test_the_preset_of_the_authors_script_is_their_script():
    """train_celeba_five_layers.py: its facts, one by one."""
    script = preset("authors-script", "celeba")
    assert (script.steps, script.step_size, script.tune) == (25, pytest.approx(0.05**2 / 2), "off")
    assert (script.seed, script.batch, script.betas[0], script.iterations) == (2, 100, 0.5, 601 * 400)
    assert (script.train_images, script.order, script.crop, script.loss) == (
        40_000,
        "epochs",
        "whole",
        "sum-of-squares",
    )
    assert (script.cool_down, script.learn_last, script.step_control) == (0, 1, "tuned")
    for epoch, rate in {0: 8e-5, 49: 8e-5, 50: 4e-5, 99: 4e-5, 100: 2e-5, 299: 2e-5, 300: 1e-5, 600: 1e-5}.items():
        for iteration in (400 * epoch, 400 * epoch + 399):
            assert schedule(script, iteration, iteration / script.iterations) == (pytest.approx(rate), 0.15)


def test_the_preset_of_the_paper_tunes_as_its_algorithm_says():
    paper = preset("paper", "celeba")
    assert paper.tune_deltas == tuple(pytest.approx(i / 100) for i in range(1, 16))
    assert (paper.entropy, paper.estimator, paper.step_control) == ("conditional", "exact", "tuned")
    assert (paper.crop, paper.loss, paper.cool_down, paper.fit_spread) == ("whole", "log-joint", 0, False)


def test_epochs_show_each_image_once(tmp_path):
    config = replace(SMOKE, order="epochs", batch=8, train_images=20, iterations=10)
    loop = Loop(config, tmp_path, False, lambda text: None)
    assert len(loop.train_images) == 20
    seen = []
    for iteration in range(10):
        loop.iteration = iteration
        seen += loop.next_batch().indices.tolist()
    epochs = [seen[20 * i : 20 * i + 20] for i in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = Loop(config, tmp_path, False, lambda text: None)
    again.iteration = 7  # whatever came before: a resumed run goes on alike
    assert again.next_batch().indices.tolist() == seen[56:64]


def one_step(loss, **changes):
    """Parameters before and after one update by plain SGD with rate 1, the loss at z_K, and sigma."""
    learner, _ = small_learner(learn_last=1, loss=loss, **changes)
    learner.optimiser = torch.optim.SGD(learner.parameters, lr=1.0)
    x = torch.rand(4, 1, 2, 3) * 2 - 1
    before = [p.detach().clone() for p in learner.parameters]
    other, _ = small_learner(learn_last=1, loss=loss, **changes)
    z = sr.infer(other.model, x, sr.Langevin(3, 0.01), generator=torch.Generator().manual_seed(3))
    learner.update(batch_of(x), 0.0, torch.Generator().manual_seed(3))
    return before, learner.parameters, other.model, x, z


def test_the_loss_of_the_script_is_the_sum_of_squares():
    before, after, model, x, z = one_step("sum-of-squares", step_control="tuned")
    gradients = torch.autograd.grad((x - model.decoder(z)).square().sum(), list(model.inner.parameters()))
    for a, b, gradient in zip(before, after, gradients, strict=True):
        torch.testing.assert_close(b, a - gradient)


def test_the_loss_of_the_paper_is_the_mean_log_joint():
    before, after, model, x, z = one_step("log-joint", step_control="tuned")
    mean = (model.log_prior(z) + model.log_likelihood(x, z)).mean()
    for a, b, gradient in zip(before, after, torch.autograd.grad(mean, list(model.inner.parameters())), strict=True):
        torch.testing.assert_close(b, a + gradient)


@pytest.mark.parametrize("tune", ["grid", "gradient"])
def test_algorithm_1_uses_the_minimiser_until_the_next_tuning(tmp_path, tune, monkeypatch):
    """Nothing but the tuner changes the step, not even where a guard would."""
    monkeypatch.setattr(short_run, "GRADIENT_STEPS_TUNED", 4)
    deltas = (0.02, 0.05, 0.2, 0.5)
    config = replace(
        SMOKE, tune=tune, tune_every=3, tune_deltas=deltas, step_control="tuned", entropy="conditional",
        estimator="exact", iterations=8, cool_down=0, learn_last=1, evaluate_every=1, tune_images=2, tune_chains=1,
        step_size=0.05**2 / 2,
    )  # fmt: skip
    train(config, tmp_path, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tuned = {line["iteration"]: line for line in lines if line.get("event") == "tuned"}
    assert list(tuned) == [3, 6]
    size = config.step_size
    for line in lines:
        if line.get("event") == "tuned":
            energies = line["free_energy"]
            if tune == "grid":
                assert line["step_sizes"] == [pytest.approx(delta**2 / 2) for delta in deltas]
                assert not any(line["ruled_out"])
                size = line["step_sizes"][energies.index(min(energies))]
            else:
                size = line["chosen"]
        assert line["step_size"] == pytest.approx(size)


def test_divergence_of_a_step_that_is_as_tuned_ends_the_run_with_advice(tmp_path):
    config = replace(SMOKE, tune="off", step_control="tuned", step_size=50.0, cool_down=0)
    with pytest.raises(sr.DivergenceError, match=r"s = 50 .delta = 10.*--step-size may help.*last checkpoint is kept"):
        train(config, tmp_path / "run", quiet=True)
    assert list_checkpoints(tmp_path / "run" / "checkpoints")
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    with pytest.raises(SystemExit):
        main(["resume", str(tmp_path / "run")])


def test_tuning_that_fails_changes_nothing(tmp_path, monkeypatch):
    learner, _ = small_learner()
    learner.config = replace(learner.config, tune="grid")
    learner.last_tuning = {"chosen": 0.01}

    def refuse(*args, **kwargs):
        raise sr.StepSizeError("none is safe")

    monkeypatch.setattr(short_run, "tune_by_grid", refuse)
    said = []
    learner.say = said.append
    learner.tune(batch_of(torch.rand(12, 1, 2, 3)), torch.Generator().manual_seed(0))
    assert learner.dynamics.step_size == 0.01
    assert learner.last_tuning is None  # so that the log does not show the last choice as a new one
    assert "stays as it is" in said[0]


def test_tuners_and_training_measure_the_same_steepness(monkeypatch):
    """s * lambda of the shipped model at its own step: on the curve of a tuner, and as the guard of training has it."""
    trained = from_pretrained("mnist-small")
    x = data.load("embedded", "test").batch(slice(0, 32))
    found = {}
    for estimator in ("lanczos", "endpoint"):
        curve = sr.tune_by_grid(
            trained.model, x[:6], trained.dynamics, [trained.dynamics.step_size], estimator=estimator, samples=2,
            entropy="conditional", probes=1, guard=sr.Guard(limit=math.inf), generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        found[estimator] = float(curve.stability[0])
    monkeypatch.setattr(short_run, "FIRST_PACE", (0.0, math.inf))  # lead the step to the limit at once
    learner = ShortRun(trained.model, replace(SMOKE, batch=32, tune="guard"), Accelerator())
    learner.dynamics, learner.target_size = trained.dynamics, math.inf
    z = sr.infer(trained.model, x, trained.dynamics, generator=torch.Generator().manual_seed(1))
    before = learner.dynamics.longest
    learner._follow_curvature(x, None, z, torch.Generator().manual_seed(0))
    found["training"] = sr.Guard().limit * before / learner.dynamics.longest
    assert found["training"] == pytest.approx(found["endpoint"], rel=0.4)  # other images and chains
    assert found["lanczos"] == pytest.approx(found["endpoint"], rel=0.02)  # the same ones
    assert sr.Guard() == short_run.GUARD


def test_configuration_survives_its_file(tmp_path):
    config = replace(preset("paper", "celeba"), model=ModelConfig(kind="hierarchical", latent_sizes=(3, 4)))
    config.save(tmp_path / "config.yaml")
    assert TrainConfig.load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"learn_last": 99}, "learn_last is 99"),
        ({"learn_last_later": 99}, "learn_last_later is 99"),
        ({"learn_last_later": 0}, "learn_last_later is 0"),
        ({"iterations": None, "minutes": None}, "never end"),
        ({"sigma": (0.3, 0.0)}, "must be positive"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"iterations": 0}, "iterations is 0"),
        ({"kl_warm_up": -1.0}, "kl_warm_up must lie"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMOKE, **changes)


class OwnDecoder(torch.nn.Module):
    latent_shapes = ((5,),)

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 784)

    def forward(self, z):
        return torch.tanh(self.linear(z[0])).view(-1, 1, 28, 28)


def test_a_generator_of_your_own_by_import_path(tmp_path):
    model = ModelConfig(kind="test_train:OwnDecoder")
    train(replace(SMOKE, model=model), tmp_path / "run", quiet=True)
    assert isinstance(from_pretrained(tmp_path / "run").model.decoder, torch.nn.Module)
    for kind, message in (("nosuch.module:X", "cannot import"), ("strange", "accepted: top-down")):
        with pytest.raises(ModelError, match=message):
            train(replace(SMOKE, model=ModelConfig(kind=kind)), tmp_path / "other", quiet=True)


@pytest.mark.parametrize(
    "model", [ModelConfig("hierarchical", (4, 4, 4), 8, 7), ModelConfig("top-down", (4, 8), 8, 7, None, "latent")]
)
def test_other_generators_and_coordinates_train(tmp_path, model):
    config = replace(SMOKE, model=model, iterations=2)
    if model.coordinates == "latent":
        config = replace(config, tune="off", step_size=1e-3)
    assert math.isfinite(train(config, tmp_path / "run", quiet=True).mse)


def test_an_update_is_that_of_plain_adam_whatever_the_memory_layout():
    torch.manual_seed(0)
    config = preset("smoke", "embedded")
    model = METHODS["short-run"].build(config.model, (1, 28, 28), 0.3).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    learner = METHODS["short-run"](model, config, accelerator())
    adam = torch.optim.Adam(reference.parameters(), lr=config.learning_rates[0], betas=config.betas, foreach=False)
    for _ in range(3):
        gradients = tuple(torch.randn(p.shape) for p in reference.parameters())
        learner.descend(torch.tensor(1.0), torch.tensor(2), gradients, 3.0)
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = 1.5 * gradient
        adam.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
