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

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMOKE, open_loop, train

import shortrun as sr
from shortrun import data
from shortrun.cli import main
from shortrun.fitting import snapshot
from shortrun.learners import Moment, learner_class
from shortrun.learners.adapt import Rules
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.moments import averaged_moments
from shortrun.learners.short_run import GRADIENT_STEPS, ShortRun
from shortrun.nets.build import ModelError
from shortrun.training.checkpoints import list_checkpoints
from shortrun.training.config import Config
from shortrun.training.loop import MAX_RECOVERIES
from shortrun.training.model_folder import RunError
from shortrun.training.presets import preset
from shortrun.training.schedules import learning_rate, sigma


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def assert_same_weights(first, second, **tolerance):
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], **tolerance)


class SmallDecoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 6)

    def forward(self, z):
        return torch.tanh(self.inner(z[0])).view(-1, 1, 2, 3)


def small_learner(rules=None, kind=ShortRun, **changes):
    """A learner of tiny images with its first state; K = 3 steps of 0.01."""
    torch.manual_seed(0)
    settings = replace(ShortRunSettings(3, 0.01, cool_down=0, momentum=0.0, tune="off", learn_last=3), **changes)
    model = sr.GaussianModel(SmallDecoder(), [(2,)], 0.3)
    learner = kind(model, settings=settings, rules=rules or Rules())
    return learner, learner.init(seed=0)


def with_rng(state, seed):
    return replace(state, rng=torch.Generator().manual_seed(seed), tuning_rng=torch.Generator().manual_seed(seed))


def test_moments_of_the_latents_are_averaged_first_and_then_forget():
    seen = torch.tensor([[1.0], [4.0], [7.0], [0.0], [8.0], [2.0]], dtype=torch.float64)
    moments = None
    for value in seen[:4]:
        moments = averaged_moments(moments, value, value[:, None] * value, memory=0.75)
    assert float(moments.mean) == pytest.approx(float(seen[:4].mean()))
    assert float(moments.covariance()) == pytest.approx(float(seen[:4].var(correction=0)))
    for value in seen[4:]:
        moments = averaged_moments(moments, value, value[:, None] * value, memory=0.75)
    expected = 0.75 * (0.75 * 3.0 + 0.25 * 8.0) + 0.25 * 2.0
    assert float(moments.mean) == pytest.approx(expected)


@pytest.mark.slow
def test_the_prior_of_a_run_that_goes_on_has_the_moments_of_the_inferred_latents(tmp_path):
    """Measured a second time with the public functions, on a model that hardly changes."""
    changes = {
        "sigma": (0.3, 0.3),
        "iterations": 160,
        "batch": 32,
        "learning_rates": (1e-9,),
        "warm_up": 0,
        "evaluate_every": 1000,
    }
    loop = open_loop(SMOKE.changed(tune="off", **changes), tmp_path)
    while loop.iteration < 150:
        loop.advance()
    assert loop.prior.kind == "gaussian"
    trained = snapshot(loop)
    x = data.load("embedded", "train").batch(slice(0, 2000))
    z = torch.cat([layer.flatten(1) for layer in trained.infer(x)], 1)
    covariance = loop.prior.factor @ loop.prior.factor.T
    assert torch.allclose(covariance.diagonal().sqrt(), z.std(0), rtol=0.08)
    assert torch.allclose(loop.prior.mean, z.mean(0), atol=0.1)
    apart = (covariance - torch.cov(z.T)).abs().max()
    assert float(apart) < 0.15


@pytest.mark.parametrize("changes", [{"warm_up": 0}, {"warm_up": 3}, {"warm_up": 3, "learn_last_later": 2}])
def test_updates_and_iterations_are_counted_alike(changes):
    config = SMOKE.changed(steps=9, learn_last=5, **changes)
    total = 0
    for iteration in range(12):
        assert config.updates_in(iteration) == total
        along = config.updates_along(iteration)
        assert along == (2 if "learn_last_later" in changes and iteration >= 3 else 5)
        for updates in range(total + 1, total + along + 1):
            assert config.iterations_for(updates) == iteration + 1
        total += along


def test_without_a_number_most_points_of_the_chain_give_an_update():
    assert [ShortRunSettings(k, cool_down=0).updates_along(0, 0) for k in (1, 2, 10, 25, 50)] == [1, 1, 7, 18, 36]


def test_chains_begin_and_end_with_shorter_steps():
    assert ShortRunSettings().dynamics().profile == sr.cool_down(25, 6, first=3)
    assert ShortRunSettings(25, speed_up=0, cool_down=0).dynamics().profile == ()
    assert preset("paper", "svhn").settings.dynamics().profile == ()  # as published


def test_fewer_updates_along_the_chain_after_the_warm_up():
    loop = open_loop(SMOKE.changed(iterations=5, learn_last=3, learn_last_later=1, warm_up=2, evaluate_every=5))
    loop.save()
    made = []
    loop.state.optimiser.register_step_post_hook(lambda *_: made.append(loop.iteration))
    while loop.share < 1:
        loop.advance()
    assert [made.count(iteration) for iteration in range(5)] == [3, 3, 1, 1, 1]
    assert loop.updates == len(made) == 9


@pytest.mark.parametrize("learn_last", [1, 3])
def test_updates_are_gradient_steps_on_the_log_joint(learn_last):
    """Written a second time with the public `infer` and plain autograd; m = 1 is the paper's Eq. 21."""
    learner, state = small_learner(learn_last=learn_last)
    other, _ = small_learner(learn_last=learn_last)
    x = torch.rand(4, 1, 2, 3) * 2 - 1
    learner.update(with_rng(state, 3), x)

    rng = torch.Generator().manual_seed(3)
    z = other.model.sample_prior(4, rng)
    optimiser = torch.optim.Adam(other.model.parameters(), lr=learner.learning_rate, betas=learner.betas)
    for k in range(4):
        here = z
        if k < 3:  # one step of the dynamics with the parameters before their update
            z = sr.infer(other.model, x, sr.Langevin(1, 0.01), start=z, rng=rng)
        if k > 3 - learn_last:
            loss = -(other.model.log_prior(here) + other.model.log_likelihood(x, here)).mean()
            loss = loss * 0.3**2 / 6
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_divergent_chains_do_not_touch_the_parameters():
    learner, state = small_learner(rules=Rules(weight=0.0), learn_last=2)
    before = [p.detach().clone() for p in learner.model.parameters()]
    state, info = learner.update(replace(state, dynamics=sr.Langevin(3, 1e9)), torch.rand(4, 1, 2, 3))
    assert info.divergent == 4
    for a, b in zip(learner.model.parameters(), before, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)


class Diverging(torch.nn.Module):
    """A model whose first ``count`` chains have a hopeless log joint at one evaluation, and only there."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.count, self.at, self.calls = model, 0, -1, 0
        self.sigma, self.latent_shapes = model.sigma, model.latent_shapes
        self.sample_prior, self.log_prior = model.sample_prior, model.log_prior

    def log_likelihood(self, x, z, mask=None):
        value = self.inner.log_likelihood(x, z, mask)
        hopeless = (torch.arange(len(x)) < self.count) & (self.calls == self.at)
        self.calls += 1
        return value - 1e6 * hopeless


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("diverging", "at"), [(2, 3), (3, 3), (3, 1)])
def test_an_iteration_that_drives_most_chains_away_is_undone(diverging, at, begun):
    """Then parameters and optimiser are as before, and the learning rate is halved. If they diverged before the first
    update (at point 1), the step was too long and becomes shorter."""
    torch.manual_seed(0)
    model = Diverging(sr.GaussianModel(SmallDecoder(), [(2,)], 0.3))
    learner = ShortRun(model, settings=ShortRunSettings(3, 0.01, cool_down=0, momentum=0.0, tune="grid", learn_last=3))
    state = learner.init(seed=0)
    x = torch.rand(4, 1, 2, 3)
    if begun:
        state, _ = learner.update(state, x)
    before, iteration = [tensor.detach().clone() for tensor in learner.weights(state.optimiser)], state.iteration
    assert len(before) == (8 if begun else 2)  # weight and bias; of each two moments and a count of steps
    model.count, model.at, model.calls = diverging, at, 0
    state, info = learner.update(state, x)
    assert info.divergent == diverging
    after = learner.weights(state.optimiser)
    same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    most, early = diverging == 3, at == 1
    undone = most and not early
    assert same == undone
    assert info.kept == (not undone)
    assert state.iteration == iteration + (not undone)
    assert state.control.caution == (0.5 if undone else 1)
    assert state.dynamics.step_size == pytest.approx(0.01 / 1.03 if most and early else 0.01)
    model.count = 0
    kept = [p.detach().clone() for p in learner.parameters]
    state, _ = learner.update(state, x)
    assert not torch.equal(learner.parameters[0], kept[0])  # and it goes on learning
    assert state.control.caution == pytest.approx(0.515 if undone else 1)  # with a rate that recovers


def test_tuning_finds_its_way_back_from_a_step_that_is_far_too_long():
    learner, state = small_learner(tune="grid")
    state = learner.tune(replace(state, dynamics=sr.Langevin(3, 100.0)), torch.rand(12, 1, 2, 3))
    assert max(state.tuning["step_sizes"]) < 3  # what was found safe; the step is led there
    assert state.dynamics.step_size == pytest.approx(100 / 1.03)


@pytest.mark.parametrize("per", ["run", "layer"])
@pytest.mark.slow
def test_tuning_by_gradient_within_training(tmp_path, per):
    train(SMOKE.changed(tune="gradient", tune_per=per, iterations=4), tmp_path / "run")
    profile = torch.tensor(sr.load(tmp_path / "run").dynamics.profile)
    assert profile.ndim == {"run": 1, "layer": 2}[per]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line.get("event") == "tuned"] == [3]
    if per == "run":  # one factor for all steps: those of the cool-down stay half as long
        assert float(profile[-1] / profile[0]) == pytest.approx(0.5)


@pytest.mark.slow
def test_learning_lowers_the_error(tmp_path):
    config = SMOKE.changed(iterations=60, batch=16, steps=8, learn_last=6, evaluate_every=60, warm_up=5)
    trained = train(config, tmp_path / "run")
    assert trained.info["mse"] < 0.3  # an untrained generator has 0.9, the mean image 0.27, all black 0.41
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("event") == "tuned" for line in lines)
    assert list((tmp_path / "run" / "pictures").glob("*.png"))


def test_mixed_precision_keeps_latents_in_single(tmp_path):
    seen = []

    class Watching(ShortRun):
        def keep(self, state, batch, z):
            seen.extend(layer.dtype for layer in z)

    found = {}
    for precision in ("no", "bf16"):
        loop = open_loop(SMOKE.changed(iterations=2, mixed_precision=precision))
        loop.learner.__class__ = Watching
        for _ in range(2):
            loop.advance()
        found[precision] = loop.evaluate()
        assert {value.dtype for value in loop.model.state_dict().values()} == {torch.float32}
    assert set(seen) == {torch.float32}
    assert found["bf16"] == pytest.approx(found["no"], rel=0.05)
    assert found["bf16"] != found["no"]  # else nothing ran in bfloat16
    with pytest.raises(ValueError, match="mixed_precision is 'fp16'; accepted: no, bf16"):
        SMOKE.changed(mixed_precision="fp16")


def test_learning_from_incomplete_images(tmp_path):
    assert math.isfinite(train(SMOKE.changed(mask="random:0.5"), tmp_path / "run").info["mse"])


def interrupt_at(iteration):
    """A callback that does what Ctrl-C does."""

    def callback(trained):
        if trained.info["iterations"] == iteration:
            os.kill(os.getpid(), signal.SIGINT)

    return callback


def test_resume_continues_to_the_bit(tmp_path):
    whole = SMOKE.changed(iterations=8)
    train(whole, tmp_path / "whole")
    stopped = tmp_path / "stopped"
    trained = train(whole.changed(evaluate_every=1), stopped, callback=interrupt_at(4))
    assert trained.info["stopped"]
    assert trained.info["iterations"] == 4
    train(Config.load(stopped / "config.yaml"), stopped, resume=True)
    assert_same_weights(tmp_path / "whole", stopped, rtol=0, atol=0)
    assert sr.load(tmp_path / "whole").dynamics == sr.load(stopped).dynamics


def test_a_run_folder_is_not_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    with pytest.raises(RunError, match=r"not empty.*shortrun resume"):
        train(SMOKE, tmp_path / "run")
    assert (tmp_path / "run" / "precious.txt").read_text() == "mine"
    with pytest.raises(RunError, match="no config"):
        train(SMOKE, tmp_path / "other", resume=True)


def spoil(loop):
    with torch.no_grad():
        next(iter(loop.model.parameters())).fill_(math.nan)


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_model_that_diverges_goes_back_to_the_last_checkpoint(tmp_path, with_folder):
    folder = tmp_path / "run" if with_folder else None
    loop = open_loop(SMOKE.changed(tune="off", step_size=0.001), folder)
    loop.save()
    for _ in range(2):
        loop.advance()
    loop.save()
    loop.advance()
    spoil(loop)
    while loop.recoveries == 0:
        loop.advance()
    assert loop.iteration == 2
    assert all(value.isfinite().all() for value in loop.model.state_dict().values())
    assert [line["event"] for line in loop.history] == ["undone"] * 7 + ["recovered"]
    assert loop.state.control.caution == 0.5
    assert not with_folder or "recovered" in (folder / "metrics.jsonl").read_text()
    loop.advance()
    assert loop.iteration == 3


def test_a_run_that_keeps_diverging_gives_up():
    loop = open_loop(SMOKE.changed(tune="off", step_size=0.001))
    loop.save()

    def until_something_happens():
        spoil(loop)
        before = loop.recoveries
        while loop.recoveries == before:
            loop.advance()

    for i in range(MAX_RECOVERIES):
        until_something_happens()
        assert loop.state.control.caution == 0.5 ** (i + 1)
    with pytest.raises(RunError, match=f"had to be undone.*gave up after {MAX_RECOVERIES} returns"):
        until_something_happens()


def test_a_generator_that_collapses_is_taken_back():
    """All outputs saturated at one image: noticed at the next evaluation."""
    loop = open_loop(SMOKE)
    loop.save()
    before = {key: value.clone() for key, value in loop.model.state_dict().items()}
    loop.advance()
    with torch.no_grad():
        loop.model.decoder.to_image.layers[-1].bias.fill_(-50.0)
    loop.evaluate()
    assert loop.history[-1]["reason"].startswith("the generator collapsed")
    assert loop.iteration == 0
    assert all(torch.equal(value, before[key]) for key, value in loop.model.state_dict().items())


@pytest.mark.parametrize(("noise", "warned"), [(0.0, False), (2.0, True)])
def test_a_run_that_learns_nothing_is_noticed(noise, warned):
    said = []

    class Pretending(ShortRun):
        def reconstruct(self, state, x, rng):
            return x + noise * torch.randn(x.shape)

    loop = open_loop(SMOKE, log=said.append)
    loop.learner.__class__ = Pretending
    loop.state = replace(loop.state, iteration=SMOKE.run.warm_up + 1)
    loop.evaluate()
    assert any("no better than the 0." in text for text in said) == warned


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    train(SMOKE, tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    assert train(SMOKE.changed(iterations=8), tmp_path / "run", resume=True).info["iterations"] == 8


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


@pytest.mark.slow
def test_kill_loses_at_most_one_checkpoint_interval(tmp_path):
    process = launch(tmp_path / "run", *ENDLESS)
    wait_for_checkpoint(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    reached = max(json.loads(line)["iteration"] for line in lines)
    saved = int(list_checkpoints(tmp_path / "run" / "checkpoints")[-1].stem.split("-")[1])
    assert saved >= reached - 2
    config = Config.load(tmp_path / "run" / "config.yaml").changed(iterations=saved + 2)
    assert train(config, tmp_path / "run", resume=True).info["iterations"] == saved + 2


@pytest.mark.slow
def test_sigterm_saves_and_ends_cleanly(tmp_path):
    process = launch(tmp_path / "run", *ENDLESS)
    wait_for_checkpoint(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM, output_of(tmp_path / "run")
    assert "shortrun resume" in output_of(tmp_path / "run")
    assert sr.load(tmp_path / "run").info["iterations"] > 0


TWO_PROCESSES = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29731")


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(tmp_path):
    """Two gloo processes with half the batch each, against one with all of it."""
    words = ["--iterations", "3", "--batch", "8"]
    alone = launch(tmp_path / "one", *words)
    assert alone.wait(timeout=120) == 0, output_of(tmp_path / "one")
    both = launch(tmp_path / "two", *words, launcher=TWO_PROCESSES)
    assert both.wait(timeout=180) == 0, output_of(tmp_path / "two")
    assert_same_weights(tmp_path / "one", tmp_path / "two", rtol=1e-3, atol=2e-5)
    one, two = sr.load(tmp_path / "one"), sr.load(tmp_path / "two")
    assert (one.info["processes"], two.info["processes"]) == (1, 2)
    assert "2 processes share the work" in output_of(tmp_path / "two")
    assert one.dynamics.step_size == pytest.approx(two.dynamics.step_size, rel=1e-3)


@pytest.mark.slow
def test_two_processes_share_the_evaluation(tmp_path):
    train(SMOKE.changed(iterations=1), tmp_path / "run")
    command = ("evaluate", str(tmp_path / "run"), "--images", "300")  # two chunks, one for each process
    for name, launcher in (("one", ()), ("two", TWO_PROCESSES)):
        process = launch(tmp_path / name, launcher=launcher, command=command)
        assert process.wait(timeout=180) == 0, output_of(tmp_path / name)
    first, second = (json.loads((tmp_path / name / "evaluate.json").read_text()) for name in ("one", "two"))
    assert first["mse"] == pytest.approx(second["mse"], rel=1e-6)
    assert first["images"] == second["images"] == 300
    assert output_of(tmp_path / "two").count('"mse"') == 1


def test_schedules():
    paper = preset("paper", "svhn").run
    assert [learning_rate(paper, 1, share) for share in (0.1, 0.5, 0.9)] == [1e-4, 5e-5, 1e-5]
    # sigma falls evenly from the fifth epoch of the script (400 updates each) to the end, where the text has 0.15
    begin = 5 * 400 / 300_000
    assert [sigma(paper, share) for share in (0.0, begin)] == [0.25, 0.25]
    assert sigma(paper, (1 + begin) / 2) == pytest.approx(0.20)
    assert sigma(paper, 1.0) == pytest.approx(0.15)
    settings = preset("paper", "svhn").settings
    assert (paper.iterations, settings.steps, settings.learn_last) == (300_000, 25, 1)
    cpu = preset("cpu", "mnist").run
    assert learning_rate(cpu, 0, 0.0) == pytest.approx(cpu.learning_rates[0] / cpu.warm_up)
    assert sigma(cpu, 0.35) == pytest.approx((0.3 * 0.22) ** 0.5)  # geometric


def test_the_preset_of_the_authors_script_is_their_script():
    """train_celeba_five_layers.py: its facts, one by one."""
    script = preset("authors-script", "celeba")
    run, settings = script.run, script.settings
    assert (settings.steps, settings.step_size, settings.tune) == (25, pytest.approx(0.05**2 / 2), "off")
    assert (run.seed, run.batch, run.betas[0], run.iterations) == (2, 100, 0.5, 601 * 400)
    assert (script.data.train_images, run.order, script.data.crop, settings.loss) == (
        40_000,
        "epochs",
        "whole",
        "sum-of-squares",
    )
    assert (settings.cool_down, settings.learn_last, settings.step_control) == (0, 1, "tuned")
    for epoch, rate in {0: 8e-5, 49: 8e-5, 50: 4e-5, 99: 4e-5, 100: 2e-5, 299: 2e-5, 300: 1e-5, 600: 1e-5}.items():
        for iteration in (400 * epoch, 400 * epoch + 399):
            share = iteration / run.iterations
            assert (learning_rate(run, iteration, share), sigma(run, share)) == (pytest.approx(rate), 0.15)


def test_the_preset_of_the_paper_tunes_as_its_algorithm_says():
    paper = preset("paper", "celeba")
    settings = paper.settings
    assert settings.tune_deltas == tuple(pytest.approx(i / 100) for i in range(1, 16))
    assert (settings.entropy, settings.estimator, settings.step_control) == ("conditional", "exact", "tuned")
    assert (paper.data.crop, settings.loss, settings.cool_down) == ("whole", "log-joint", 0)
    assert paper.run.prior == "normal"


def test_epochs_show_each_image_once():
    config = SMOKE.changed(order="epochs", batch=8, train_images=20, iterations=10)
    loop = open_loop(config)
    assert len(loop.examples) == 20

    def batch_at(loop, iteration):
        loop.state = replace(loop.state, iteration=iteration)
        return loop.next_batch().indices.tolist()

    seen = [index for iteration in range(10) for index in batch_at(loop, iteration)]
    epochs = [seen[20 * i : 20 * i + 20] for i in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batch_at(open_loop(config), 7) == seen[56:64]  # whatever came before: a resumed run goes on alike


class PlainDescent(ShortRun):
    """With SGD of rate 1 instead of Adam."""

    def make_optimiser(self):
        return torch.optim.SGD(self.parameters, lr=1.0)


def one_step(loss, **changes):
    """Parameters before and after one update by plain SGD with rate 1, the loss at z_K, and sigma."""
    learner, state = small_learner(kind=PlainDescent, learn_last=1, loss=loss, **changes)
    x = torch.rand(4, 1, 2, 3) * 2 - 1
    before = [p.detach().clone() for p in learner.parameters]
    other, _ = small_learner(learn_last=1, loss=loss, **changes)
    z = sr.infer(other.model, x, sr.Langevin(3, 0.01), rng=torch.Generator().manual_seed(3))
    learner.update(with_rng(state, 3), x, Moment(learning_rate=1.0))
    return before, learner.parameters, other.model, x, z


def test_the_loss_of_the_script_is_the_sum_of_squares():
    before, after, model, x, z = one_step("sum-of-squares", step_control="tuned")
    gradients = torch.autograd.grad((x - model.decoder(z)).square().sum(), list(model.parameters()))
    for a, b, gradient in zip(before, after, gradients, strict=True):
        torch.testing.assert_close(b, a - gradient)


def test_the_loss_of_the_paper_is_the_mean_log_joint():
    before, after, model, x, z = one_step("log-joint", step_control="tuned")
    mean = (model.log_prior(z) + model.log_likelihood(x, z)).mean()
    for a, b, gradient in zip(before, after, torch.autograd.grad(mean, list(model.parameters())), strict=True):
        torch.testing.assert_close(b, a + gradient)


@pytest.mark.parametrize("tune", ["grid", "gradient"])
@pytest.mark.slow
def test_algorithm_1_uses_the_minimiser_until_the_next_tuning(tune, monkeypatch):
    """Nothing but the tuner changes the step, not even where a guard would."""
    deltas = (0.02, 0.05, 0.2, 0.5)
    config = SMOKE.changed(
        tune=tune, tune_every=3, tune_deltas=deltas, step_control="tuned", entropy="conditional",
        estimator="exact", iterations=8, cool_down=0, learn_last=1, evaluate_every=1, tune_images=2, tune_chains=1,
        step_size=0.05**2 / 2,
    )  # fmt: skip
    loop = open_loop(config)
    monkeypatch.setitem(GRADIENT_STEPS, "tuned", 4)
    loop.save()
    size = config.settings.step_size
    tuned = []
    for iteration in range(8):
        loop.advance()
        for line in loop.history[len(tuned) :]:
            tuned.append(line["iteration"])
            assert line["event"] == "tuned"
            energies = line["free_energy"]
            if tune == "grid":
                assert line["step_sizes"] == [pytest.approx(delta**2 / 2) for delta in deltas]
                assert not any(line["ruled_out"])
                size = line["step_sizes"][energies.index(min(energies))]
            else:
                size = line["chosen"]
            assert line["step_size"] == pytest.approx(size)
        assert loop.state.dynamics.step_size == pytest.approx(size), iteration
    assert tuned == [3, 6]


def test_divergence_of_a_step_that_is_as_tuned_ends_the_run_with_advice(tmp_path):
    config = SMOKE.changed(tune="off", step_control="tuned", step_size=50.0, cool_down=0)
    with pytest.raises(sr.DivergenceError, match=r"s = 50 .delta = 10.*--step-size may help.*last checkpoint is kept"):
        train(config, tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "checkpoints")
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    with pytest.raises(SystemExit):
        main(["resume", str(tmp_path / "run")])


def test_tuning_that_fails_changes_nothing():
    class Refusing(ShortRun):
        def search(self, *args, **kwargs):
            raise sr.StepSizeError("none is safe")

    learner, state = small_learner(kind=Refusing, tune="grid")
    said = []
    learner.log = said.append
    state = learner.tune(replace(state, tuning={"chosen": 0.01}), torch.rand(12, 1, 2, 3))
    assert state.dynamics.step_size == 0.01
    assert state.tuning is None  # so that the log does not show the last choice as a new one
    assert "stays as it is" in said[0]


def test_an_update_tunes_by_itself_when_it_is_time():
    learner, state = small_learner(tune="grid", tune_every=2)
    tuned_at = []
    for _ in range(5):
        state, info = learner.update(state, torch.rand(6, 1, 2, 3))
        tuned_at.append(state.tuned_at)
        assert info.step_size == state.dynamics.step_size
    assert tuned_at == [-1, -1, 2, 2, 4]
    assert set(state.tuning) == {"chosen", "step_sizes", "free_energy", "stability", "ruled_out"}


@pytest.mark.slow
def test_tuners_measure_the_same_steepness():
    """s * lambda of the shipped model at its own step, by two estimators."""
    trained = sr.load("mnist-small")
    x = data.load("embedded", "test").batch(slice(0, 6))
    found = []
    for estimator in ("lanczos", "endpoint"):
        how = sr.Estimation("conditional", estimator, chains=2, probes=1)
        rng = torch.Generator().manual_seed(0)
        sizes = [trained.dynamics.step_size]
        guard = sr.Guard(limit=math.inf)
        curve = sr.tune_by_grid(trained.model, x, trained.dynamics, sizes, how, guard=guard, rng=rng)
        found.append(float(curve.stability[0]))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_configuration_survives_its_file(tmp_path):
    config = preset("paper", "celeba").changed(network={"kind": "hierarchical", "latent_sizes": (3, 4)})
    config.save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml") == config
    for method in ("abp", "glo", "vae", "vae-iaf", "ladder-vae", "glow"):
        config = preset("paper", "svhn", method)
        config.save(tmp_path / "config.yaml")
        assert Config.load(tmp_path / "config.yaml") == config


def test_settings_go_where_they_belong():
    config = SMOKE.changed(data="mnist", batch=4, steps=7, network={"channels": 4})
    assert (config.data.data, config.run.batch, config.settings.steps) == ("mnist", 4, 7)
    assert config.network.channels == 4
    with pytest.raises(ValueError, match=r"short-run has no setting 'stepsize'; did you mean step_size"):
        SMOKE.changed(stepsize=0.1)
    with pytest.raises(ValueError, match="short-run has no setting 'network width'"):
        SMOKE.changed(network={"width": 3})
    with pytest.raises(ValueError, match="vae has no setting 'learn_last'"):
        preset("smoke", "embedded", "vae").changed(learn_last=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"learn_last": 99}, "learn_last is 99"),
        ({"speed_up": 99}, "speed_up is 99"),
        ({"learn_last_later": 99}, "learn_last_later is 99"),
        ({"learn_last_later": 0}, "learn_last_later is 0"),
        ({"iterations": None, "minutes": None}, "never end"),
        ({"sigma": (0.3, 0.0)}, "sigma is [(]0.3, 0.0[)]"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SMOKE.changed(**changes)
    with pytest.raises(ValueError, match=r"kl_warm_up is -1\.0"):
        preset("smoke", "embedded", "vae").changed(kl_warm_up=-1.0)


class OwnDecoder(torch.nn.Module):
    latent_shapes = ((5,),)

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 784)

    def forward(self, z):
        return torch.tanh(self.linear(z[0])).view(-1, 1, 28, 28)


def test_a_generator_of_your_own_by_import_path(tmp_path):
    main(["train", "--preset", "smoke", "--model.kind", "test_train:OwnDecoder", "--out", str(tmp_path / "run")])
    again = sr.load(tmp_path / "run", decoder=OwnDecoder())
    assert isinstance(again.model.decoder, OwnDecoder)
    with pytest.raises(ModelError, match="decoder of its own, test_train:OwnDecoder"):
        sr.load(tmp_path / "run")
    config = Config.load(tmp_path / "run" / "config.yaml").changed(iterations=7)
    model = sr.GaussianModel(OwnDecoder(), OwnDecoder.latent_shapes)
    resumed = sr.fit(model, config.data.load("train"), config=config, folder=tmp_path / "run", resume=True, quiet=True)
    assert resumed.info["iterations"] == 7
    with pytest.raises(ModelError, match="accepted: top-down"):
        train(SMOKE.changed(network={"kind": "strange"}), tmp_path / "other")


@pytest.mark.parametrize(
    "network",
    [
        {"kind": "hierarchical", "latent_sizes": (4, 4, 4), "channels": 8, "base": 7},
        {"latent_sizes": (4, 8), "channels": 8, "base": 7, "coordinates": "latent"},
    ],
)
def test_other_generators_and_coordinates_train(tmp_path, network):
    config = SMOKE.changed(network=network, iterations=2)
    if config.network.coordinates == "latent":
        config = config.changed(tune="off", step_size=1e-3)
    assert math.isfinite(train(config, tmp_path / "run").info["mse"])


def test_an_update_is_that_of_plain_adam_whatever_the_memory_layout():
    torch.manual_seed(0)
    config = preset("smoke", "embedded")
    model = learner_class("short-run").build(config.network, (1, 28, 28), 0.3).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    learner = ShortRun(model, settings=config.settings)
    optimiser = learner.init().optimiser
    adam = torch.optim.Adam(reference.parameters(), lr=learner.learning_rate, betas=learner.betas, foreach=False)
    for _ in range(3):
        gradients = tuple(torch.randn(p.shape) for p in reference.parameters())
        learner.descend(optimiser, torch.tensor(1.0), torch.tensor(2), gradients, 3.0)
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = 1.5 * gradient
        adam.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
