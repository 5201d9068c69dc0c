"""``fit``: any examples, any decoder, any method, with and without a folder; and the models that come out of it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from linear_images import linear_trained
from small_runs import SMOKE, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shortrun as sr
from shortrun import data, hub
from shortrun.nets.build import ModelError
from shortrun.progress import Progress
from shortrun.training.model_folder import RunError


class Decoder(nn.Module):
    """Two layers of latents to anything of a given shape."""

    def __init__(self, width=16, shape=(1, 6, 6)):
        super().__init__()
        self.shape = shape
        self.top, self.low = nn.Linear(2, width), nn.Linear(3, width)
        self.out = nn.Linear(width, int(np.prod(shape)))

    def forward(self, z):
        return torch.tanh(self.out(torch.relu(self.top(z[0]) + self.low(z[1])))).view(-1, *self.shape)


def own_model(shape=(1, 6, 6), seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return sr.GaussianModel(Decoder(shape=shape), latent_shapes=[(2,), (3,)])


def pictures(count=60, shape=(1, 6, 6)):
    """Smooth images in [-1, 1] with two causes."""
    rng = torch.Generator().manual_seed(0)
    causes = torch.rand(count, 2, generator=rng) * 6
    place = torch.linspace(0, 6, int(np.prod(shape)))
    return torch.sin(causes[:, :1] + place * causes[:, 1:] / 3).view(count, *shape)


QUICK = {"iterations": 12, "batch": 16, "steps": 8, "quiet": True, "tune_every": 5}


def weights(trained):
    return {key: value.clone() for key, value in trained.state_dict().items()}


class Idle(Decoder):
    """Waits more than it works."""

    def forward(self, z):
        time.sleep(0.01)
        return super().forward(z)


@pytest.mark.slow
def test_minutes_of_processor_time_do_not_pass_while_a_process_waits():
    def waited(clock):
        """Seconds of sleep at least, and of the budget."""
        model = sr.GaussianModel(Idle(), latent_shapes=[(2,), (3,)])
        trained = sr.fit(model, pictures(), minutes=0.005, clock=clock, batch=16, steps=8, prior="normal", quiet=True)
        return 0.01 * 8 * trained.info["iterations"], trained.info["seconds"]

    slept, seconds = waited("wall")
    assert slept < seconds
    slept, seconds = waited("processor")
    assert slept > seconds >= 0.3


# --- data -------------------------------------------------------------------------------------------


def test_the_error_falls_and_the_history_tells():
    x = pictures()
    trained = sr.fit(own_model(), x, validation=x[:20], iterations=150, batch=16, steps=8, quiet=True)
    errors = [line["mse"] for line in trained.history.evaluations]
    assert len(errors) == 10
    assert errors[-1] < 0.5 * float((x - x.mean(0)).square().mean())
    figure = trained.history.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["MSE", "step size s"]
    assert trained.info["held_out"]


@pytest.mark.parametrize(
    "form", ["tensor", "array", "double", "bytes", "dataset", "pairs", "examples"],
)  # fmt: skip
def test_examples_in_any_form_are_learned_alike(form):
    levels = ((pictures() + 1) * 127.5).round().to(torch.uint8)
    x = levels.float() / 127.5 - 1
    forms = {
        "tensor": x,
        "array": x.numpy(),
        "double": x.double().numpy(),
        "bytes": levels,
        "dataset": TensorDataset(x),
        "pairs": [(image, i) for i, image in enumerate(x)],
        "examples": data.Images(levels, "own", "train"),
    }
    given = forms[form]
    if form == "pairs":

        class Pairs:
            def __len__(self):
                return len(x)

            def __getitem__(self, i):
                return x[i], i

        given = Pairs()
    expected = weights(sr.fit(own_model(), x, **QUICK))
    found = weights(sr.fit(own_model(), given, **QUICK))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def test_a_data_loader_is_enough_and_methods_that_remember_examples_say_that_it_is_not():
    x = pictures()
    loader = DataLoader(TensorDataset(x), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(0))
    trained = sr.fit(own_model(), loader, **QUICK)
    assert trained.info["iterations"] == 12
    assert not trained.info["held_out"]
    with pytest.raises(ValueError, match="remembers something about each training example"):
        sr.fit(own_model(), loader, method="abp", iterations=2, quiet=True)


@pytest.mark.parametrize("shape", [(7,), (2, 9)])
def test_vectors_and_signals(shape, tmp_path):
    x = pictures(shape=shape)
    trained = sr.fit(own_model(shape), x, folder=tmp_path / "run", mask="random:0.7", **QUICK)
    assert trained.sample(3).shape == (3, *shape)
    mask = sr.make_mask("right-half", x[:4])
    fills = trained.inpaint(x[:4], mask, fills=2)
    assert fills.shape == (2, 4, *shape)
    seen = mask.expand_as(x[:4])
    assert torch.equal(fills[0][seen], x[:4][seen])
    assert sr.load(tmp_path / "run", decoder=Decoder(shape=shape)).reconstruct(x[:4]).shape == (4, *shape)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((own_model(), torch.zeros(0, 1, 6, 6)), ValueError, "empty"),
        ((own_model(), torch.full((5, 1, 6, 6), torch.nan)), ValueError, "NaN"),
        ((own_model(), torch.zeros(5, 1, 7, 7)), RunError, r"shape \(1, 6, 6\) but those of .* \(1, 7, 7\)"),
        ((own_model(), "mnist"), ValueError, "shortrun.data.load"),
        ((lambda z: z, torch.zeros(5, 3)), TypeError, "expected an nn.Module"),
        ((sr.GaussianModel(lambda z: z[0], [(3,)]), torch.zeros(5, 3)), ValueError, "no parameters to learn"),
        ((None, torch.zeros(5, 3)), ModelError, "Bring a decoder of your own"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        sr.fit(*arguments, iterations=2, folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gan"}, "method is 'gan'; accepted: short-run, abp"),
        ({"step": 4}, "no setting 'step'; did you mean steps"),
        ({"iterations": 0}, "iterations is 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"resume": True}, "resume needs the folder"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sr.fit(own_model(), pictures(), quiet=True, **options)


def test_few_steps_need_no_other_settings():
    trained = sr.fit(own_model(), pictures(), iterations=2, steps=5, quiet=True)
    assert (trained.dynamics.steps, trained.dynamics.profile[-1]) == (5, 0.5)
    assert sr.fit(own_model(), pictures(), iterations=2, steps=1, quiet=True).dynamics.profile == ()


def test_the_first_step_fits_the_noise():
    def first(sigma):
        model = own_model()
        model.sigma.fill_(sigma)
        return sr.fit(model, pictures(), iterations=1, steps=4, quiet=True).dynamics.step_size

    assert [first(sigma) for sigma in (0.3, 0.15, 5.0)] == pytest.approx([0.02, 0.005, 0.1])


@pytest.mark.parametrize("method", ["short-run", "abp", "vae"])
def test_double_precision(method):
    model = own_model().double()
    trained = sr.fit(model, pictures().double(), method=method, iterations=3, quiet=True)
    assert {value.dtype for value in trained.state_dict().values()} == {torch.float64}
    assert trained.reconstruct(pictures()[:3]).dtype == torch.float64


def test_what_a_method_cannot_do_with_a_decoder_is_a_sentence():
    flat, square = nn.Linear(6, 6), sr.GaussianModel(Decoder(), latent_shapes=[(2, 3)])
    for model, options, message in (
        (square, {"method": "glo"}, "codes of glo are vectors"),
        (own_model(), {"method": "glo"}, "one layer of latents"),
        (own_model(), {"method": "ladder-vae"}, "top-down generator"),
        (own_model(), {"method": "glow"}, "takes no decoder"),
        (sr.GaussianModel(lambda z: flat(z[0]), [(6,)]), {"method": "vae"}, "decoder that is an nn.Module"),
        (sr.BernoulliModel(Decoder(), [(2,), (3,)]), {"method": "vae"}, "BernoulliModel was given"),
        (sr.BernoulliModel(Decoder(), [(2,), (3,)]), {"loss": "sum-of-squares"}, "has no sigma"),
    ):
        with pytest.raises(ValueError, match=message):
            sr.fit(model, (pictures() > 0).float(), iterations=1, quiet=True, **options)


# --- runs -------------------------------------------------------------------------------------------


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sr.fit(own_model(), pictures(), **QUICK)
    assert not list(tmp_path.iterdir())


def test_a_seed_repeats_a_run_and_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = weights(sr.fit(own_model(), pictures(), seed=1, **QUICK))
    assert torch.equal(torch.rand(3), expected)
    again, other = (weights(sr.fit(own_model(), pictures(), seed=seed, **QUICK)) for seed in (1, 2))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not all(torch.equal(value, other[key]) for key, value in first.items())


def test_a_folder_makes_it_a_run_that_resumes_to_the_bit(tmp_path):
    options = QUICK | {"decay": False, "warm_up": 0, "evaluate_every": 4, "checkpoint_every": 4}
    whole = weights(sr.fit(own_model(), pictures(), folder=tmp_path / "whole", **options))
    stop = {"callback": lambda trained: trained.info["iterations"] == 8}
    stopped = sr.fit(own_model(), pictures(), folder=tmp_path / "run", **options, **stop)
    assert (stopped.info["stopped"], stopped.info["iterations"]) == (True, 8)
    with pytest.raises(RunError, match="not empty"):
        sr.fit(own_model(), pictures(), folder=tmp_path / "run", **options)
    again = sr.fit(own_model(seed=9), pictures(), folder=tmp_path / "run", resume=True, **options)
    assert again.info["iterations"] == 12
    assert all(torch.equal(value, whole[key]) for key, value in weights(again).items())
    assert [line["iteration"] for line in again.history.evaluations] == [4, 8, 12]
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {".lock", "config.yaml", "metrics.jsonl", "checkpoints", "pictures", "model"}


def test_ctrl_c_keeps_what_was_learned():
    seen = []

    def callback(trained):
        seen.append(trained.sample(2).shape)
        os.kill(os.getpid(), signal.SIGINT)

    trained = sr.fit(own_model(), pictures(), callback=callback, evaluate_every=3, **QUICK)
    assert trained.info["stopped"]
    assert trained.info["iterations"] == 3
    assert seen == [(2, 1, 6, 6)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_loop_of_ones_own_learns_as_fit_does():
    """The same images in the same order: then fit's loop adds nothing but schedules, which are held fixed."""
    x = pictures(16)
    dynamics = sr.Langevin(steps=8, step_size=0.02)
    learner = sr.ShortRun(own_model(), dynamics, learning_rate=2e-3)
    state = learner.init(seed=0)
    errors = []
    for _ in range(40):
        state, info = learner.update(state, x)
        assert info.divergent == 0
        errors.append(info.loss)
    assert errors[-1] < 0.5 * errors[0]
    assert state.iteration == 40
    assert info.step_size == state.dynamics.step_size
    assert info.curvature > 0
    for batch in DataLoader(TensorDataset(x), batch_size=8):  # which gives lists
        state, info = learner.update(state, batch)


OLD = Path(__file__).parent / "version_0_1_run"


def test_a_run_of_version_0_1_loads_and_resumes(tmp_path):
    """A folder that version 0.1.0 wrote after 4 of 6 iterations; it goes on with the rules of today."""
    import shutil

    from shortrun.training.config import Config

    shutil.copytree(OLD / "run", tmp_path / "run")
    trained = sr.load(tmp_path / "run")
    assert trained.info["iterations"] == 4
    assert trained.dynamics.profile[-1] == pytest.approx(0.5)
    config = Config.load(tmp_path / "run" / "config.yaml")
    again = train(config, tmp_path / "run", resume=True)
    assert again.info["iterations"] == 6
    assert config.settings.step_control == "bound"
    for key, value in again.model.state_dict().items():
        assert value.isfinite().all()
        assert key == "sigma" or not torch.equal(value, trained.model.state_dict()[key])


# --- what comes out ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return train(SMOKE, tmp_path_factory.mktemp("runs") / "smoke")


def test_a_trained_model_is_a_module(digits):
    x = data.load("embedded", "test").array[:3]
    expected = digits.reconstruct(x)
    state = digits.state_dict()
    assert any(key.startswith("model.decoder.") for key in state)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(digits.reconstruct(x), expected)
    assert digits.to("cpu") is digits
    assert digits.device == torch.device("cpu")
    other = sr.Trained(digits.model, digits.description, digits.prior)
    other.load_state_dict(state)
    assert "short-run" in repr(digits)
    assert not any(p.grad is not None for p in digits.parameters())


def test_saved_models_are_what_they_were(digits, tmp_path):
    digits.save(tmp_path / "saved")
    again = sr.load(tmp_path / "saved")
    assert again.dynamics == digits.dynamics
    for name, tensor in digits.prior.state_dict().items():
        assert torch.equal(again.prior.state_dict()[name], tensor)
    torch.testing.assert_close(again.sample(4, seed=3), digits.sample(4, seed=3))
    digits.save(tmp_path / "saved")  # over its own files, and no others
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="other things"):
        digits.save(tmp_path / "saved")


def test_a_decoder_of_ones_own_comes_from_the_caller(tmp_path):
    trained = sr.fit(own_model(), pictures(), **QUICK)
    trained.save(tmp_path / "own")
    again = sr.load(tmp_path / "own", decoder=Decoder())
    assert torch.equal(again.sample(3), trained.sample(3))
    with pytest.raises(ModelError, match=r"test_fit:Decoder.*--decoder"):
        sr.load(tmp_path / "own")
    with pytest.raises(RunError, match="cannot be read"):
        sr.load(tmp_path / "own", decoder=Decoder(width=7))
    with pytest.raises(ModelError, match="takes no decoder"):
        sr.load("mnist-small", decoder=Decoder())


class Skewed(nn.Module):
    """A model with the three methods of the protocol and no more: Laplace noise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def sample_prior(self, n, rng=None):
        return (torch.randn(n, 2, generator=rng),)

    def log_prior(self, z):
        return torch.distributions.Normal(0.0, 1.0).log_prob(z[0]).sum(1)

    def log_likelihood(self, x, z, mask=None):
        return torch.distributions.Laplace(z[0] @ self.weight.T, 0.3).log_prob(x).sum(1)


def test_a_model_of_ones_own_needs_three_methods(tmp_path):
    torch.manual_seed(0)
    model = Skewed()
    x = torch.randn(50, 2) @ torch.randn(2, 4)
    trained = sr.fit(model, x, folder=tmp_path / "run", iterations=40, batch=16, steps=8, tune="off", quiet=True)
    losses = [line["loss"] for line in trained.history.evaluations]
    assert losses[-1] < losses[0]
    assert trained.infer(x[:3])[0].shape == (3, 2)
    with pytest.raises(ValueError, match="no method decode"):
        trained.reconstruct(x[:3])
    again = sr.load(tmp_path / "run", model=Skewed())
    assert torch.equal(again.model.weight, model.weight)
    with pytest.raises(ModelError, match=r"load\(\.\., model=\.\.\)"):
        sr.load(tmp_path / "run", decoder=model)


class Shown(Skewed):
    """And with a fourth one, to look at."""

    def decode(self, z):
        return z[0] @ self.weight.T


def test_a_fourth_method_is_enough_to_look_at_it():
    torch.manual_seed(0)
    x = torch.randn(50, 2) @ torch.randn(2, 4)
    trained = sr.fit(Shown(), x, validation=x[:10], iterations=60, batch=16, steps=8, tune="off", quiet=True)
    errors = [line["mse"] for line in trained.history.evaluations]
    assert errors[-1] < errors[0]
    assert trained.sample(5).shape == (5, 4)
    assert trained.inpaint(x[:3], sr.make_mask("left-half", x[:3]), fills=2).shape == (2, 3, 4)


class Wide(nn.Module):
    """A prior of one's own, N(0, 4 I), a parameter that nothing uses, and draws that carry a graph."""

    def __init__(self):
        super().__init__()
        self.weight, self.width = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(3, 3)

    def sample_prior(self, n, rng=None):
        return (self.width * torch.randn(n, 2, generator=rng),)

    def log_prior(self, z):
        return torch.distributions.Normal(0.0, self.width).log_prob(z[0]).sum(1)

    def log_likelihood(self, x, z, mask=None):
        return torch.distributions.Normal(self.decode(z), 0.3).log_prob(x).sum(1)

    def decode(self, z):
        return z[0] @ self.weight.T


def test_a_prior_of_ones_own_is_learned_tuned_and_sampled_as_it_is():
    torch.manual_seed(0)
    x = torch.randn(60, 2) @ torch.randn(2, 4)
    unused = Wide()
    before = unused.unused.weight.clone()
    trained = sr.fit(unused, x, iterations=45, batch=16, steps=8, tune_every=20, quiet=True)
    assert torch.equal(unused.unused.weight, before)
    assert [line["iteration"] for line in trained.history.lines if line.get("event") == "tuned"] == [20, 40]
    drawn = trained.sample_latents(4000, torch.Generator().manual_seed(0), prior="normal")[0]
    assert float(drawn.std()) == pytest.approx(float(unused.width.detach()), rel=0.05)
    assert trained.tune(x[:3], [0.01, 0.02]).step_sizes == [0.01, 0.02]
    assert "annealed" in trained.log_likelihood(x[:2], stages=5)
    assert trained.sample(3).shape == (3, 4)


@pytest.mark.parametrize("x", [torch.zeros(2, 28, 28), torch.zeros(0, 1, 28, 28), np.zeros((2, 3, 32, 32))])
def test_examples_of_another_shape_are_named(digits, x):
    with pytest.raises(ValueError, match=r"the model takes \(n, 1, 28, 28\)"):
        digits.infer(x)


def test_bad_requests_are_named(digits):
    x = data.load("embedded", "test").array[:2]
    for call, message in (
        (lambda: digits.infer(x, by="magic"), "by is 'magic'; accepted: method, draw, centre, dynamics"),
        (lambda: digits.infer(x, quiet_steps=6), "expected 0 to 5"),
        (lambda: digits.sample(0), "0 samples"),
        (lambda: digits.inpaint(x, sr.make_mask("lower-half", x), fills=0), "fills is 0"),
        (lambda: digits.traverse(digits.infer(x), 2), "layer is 2"),
        (lambda: sr.load("no-such-model"), "neither a run folder"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_quiet_steps_end_near_the_centre():
    """More noise-free steps, less spread between seeds."""
    trained = sr.load("mnist-small")
    x = data.load("embedded", "test").array[:4]
    spread = []
    for quiet in (0, 5, 15):
        ends = torch.stack([trained.infer(x, quiet_steps=quiet, seed=seed)[0] for seed in range(6)])
        spread.append(float(ends.std(0).mean()))
    assert spread[0] > spread[1] > spread[2]


def test_the_centre_of_chains_is_the_mean_of_a_gaussian_posterior():
    """In a linear-Gaussian model, whose posterior mean is known; a draw is as far off as the posterior is wide."""
    trained, exact, x = linear_trained()
    mean = exact.posterior(x.flatten(1)).mean
    off = {by: float((trained.infer(x, by=by)[0] - mean).square().mean()) for by in ("draw", "centre")}
    assert off["centre"] < 1e-4 < off["draw"]


# --- hub --------------------------------------------------------------------------------------------


class FakeHub:
    """Keeps what is uploaded, as ``huggingface_hub.HfApi`` would send it."""

    def __init__(self):
        self.files, self.created = {}, []

    def create_repo(self, name, *, private, exist_ok):
        self.created.append((name, private, exist_ok))
        return f"https://hub.example/{name}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def test_publishing_sends_weights_description_card_and_pictures(digits, tmp_path):
    api = FakeHub()
    x = data.load("embedded", "test").array[:10]
    address = digits.push_to_hub("me/digits", command="shortrun train --out run", examples=x, private=True, api=api)
    assert address == "https://hub.example/me/digits"
    assert api.created == [("me/digits", True, True)]
    model = {"config.json", "model.safetensors", "prior.safetensors"}
    assert set(api.files) == model | {"README.md", "samples.png", "reconstructions.png"}
    card = api.files["README.md"].decode()
    for part in ("shortrun train --out run", "embedded", 'sr.load("me/digits")', f"{digits.info['mse']:.4f}"):
        assert part in card
    for name in hub.FILES:  # what is downloaded
        (tmp_path / name).write_bytes(api.files[name])
    torch.testing.assert_close(sr.Trained.from_pretrained(tmp_path).sample(2), digits.sample(2))


def test_the_real_hub_library_has_what_is_called():
    """Names and arguments, against the installed library; nothing is sent."""
    import inspect

    from huggingface_hub import HfApi, snapshot_download

    assert {"private", "exist_ok"} <= set(inspect.signature(HfApi.create_repo).parameters)
    assert {"repo_id", "folder_path", "commit_message"} <= set(inspect.signature(HfApi.upload_folder).parameters)
    assert "allow_patterns" in inspect.signature(snapshot_download).parameters


def test_without_the_hub_library_the_extra_is_named(digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RunError, match=r"shortrun\[hub\]"):
        digits.push_to_hub("me/digits")
    with pytest.raises(RunError, match=r"shortrun\[hub\]"):
        hub.download("me/digits")


def test_a_folder_that_names_code_runs_none_of_it(digits, tmp_path):
    """Descriptions of both formats that name a module which leaves a trace when it is imported."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "evil_module.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()\nclass Thing: pass\n")
    digits.save(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    description = json.loads(path.read_text())
    sys.path.insert(0, str(trap))
    try:
        for change in (
            {"own_decoder": "evil_module:Thing"},
            {"own_decoder": "evil_module:Thing", "likelihood": "evil_module:Thing"},
            {"model": description["model"] | {"kind": "evil_module:Thing"}},
            {"method": "evil_module:Thing"},
        ):
            path.write_text(json.dumps(description | change))
            with pytest.raises(ValueError, match="evil_module"):
                sr.load(tmp_path / "model")
            assert not (tmp_path / "trace").exists()
    finally:
        sys.path.remove(str(trap))


# --- progress ---------------------------------------------------------------------------------------


def test_progress_is_shown_in_a_terminal_and_not_when_quiet(capsys):
    sr.fit(own_model(), pictures(), **QUICK)
    assert capsys.readouterr() == ("", "")
    sr.fit(own_model(), pictures(), **QUICK | {"quiet": False})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "60 examples of 1x6x6" in shown.err
    assert "12 it" in shown.err  # the width of the terminal decides what else


def test_progress_in_a_notebook_without_widgets_is_one_line_that_changes():
    shown = []

    class Line:
        def update(self, bundle, raw):
            shown.append(bundle["text/plain"])

    with Progress(display=lambda bundle, raw, display_id: Line()) as progress:
        for share in (0.1, 0.2, 1.0):
            progress.show(share, "fine")
    assert shown == ["training 10 %: fine", "training 100 %: fine"]
