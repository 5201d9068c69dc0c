"""The methods of comparison, each against something independent of its code."""

import json
import math
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
import torch
from linear_images import IMAGE, Linear, linear_problem
from torch import nn

import shortrun as sr
from shortrun import data
from shortrun.cli import main
from shortrun.learners import ABP, GLO, Batch, Method, Moment, learner_class
from shortrun.learners.abp import ABPSettings, visits
from shortrun.learners.glo import PCA_IMAGES, GLOSettings, principal_codes
from shortrun.nets.build import ModelError
from shortrun.nets.codes import CodeModel
from shortrun.training import schedules
from shortrun.training.config import BEFORE
from shortrun.training.loop import Loop
from shortrun.training.model_folder import Description, write_model
from shortrun.training.presets import preset

METHODS = get_args(Method)
BASELINES = [name for name in METHODS if name != "short-run"]


def train(config, folder, **options):
    train_set, test_set = (config.data.load(split) for split in ("train", "test"))
    return sr.fit(None, train_set, validation=test_set, config=config, folder=folder, quiet=True, **options)


# --- every method ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_every_method_trains_resumes_to_the_bit_and_is_used_from_the_command_line(tmp_path, method, capsys):
    # schedules follow the share of the run, which a later limit changes; so they are held fixed here
    config = preset("smoke", "embedded", method).changed(
        iterations=4, checkpoint_every=2, evaluate_every=4, evaluate_images=2, decay=False, warm_up=0, sigma=(0.3, 0.3),
    )  # fmt: skip
    if hasattr(config.settings, "kl_warm_up"):
        config = config.changed(kl_warm_up=0.0)
    train(config, tmp_path / "a")
    train(config.changed(iterations=2), tmp_path / "b")
    train(config, tmp_path / "b", resume=True)
    one, two = (sr.load(tmp_path / name).model.state_dict() for name in "ab")
    for key, value in one.items():
        assert torch.equal(value, two[key]), key
    main(["sample", str(tmp_path / "a"), "--images", "3", "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "samples.png").exists()
    words = ["evaluate", str(tmp_path / "a"), "--images", "4", "--out", str(tmp_path / "out")]
    if method == "glow":
        with pytest.raises(SystemExit):
            main(words)
        assert "measure nothing" in capsys.readouterr().err
        return
    main([*words, "--likelihood-images", "2", "--stages", "4"])
    numbers = json.loads((tmp_path / "out" / "evaluate.json").read_text())
    assert numbers["method"] == method
    assert math.isfinite(numbers["mse"])
    assert math.isfinite(numbers["annealed"])
    for by in ("method", "dynamics"):
        paint = ["inpaint", str(tmp_path / "a"), "--images", "2", "--fills", "2", "--by", by, "--out", str(tmp_path)]
        if (method, by) == ("glo", "dynamics"):
            with pytest.raises(SystemExit):
                main(paint)
            assert "normal prior" in capsys.readouterr().err
        else:
            main(paint)


@pytest.mark.parametrize("method", BASELINES)
def test_every_method_learns(method):
    """The objective on one fixed batch falls when that batch is learned."""
    torch.manual_seed(0)
    config = preset("smoke", "embedded", method)
    images = data.load("embedded")
    kind = learner_class(method)
    model = kind.build(config.network, images.shape, 0.3)
    learner = kind(model, learning_rate=3e-3, betas=config.run.betas, settings=config.settings)
    state = learner.init(0, images)
    batch = Batch(images.batch(slice(0, 16)), None, torch.arange(16))
    losses = []
    for _ in range(60):
        state, info = learner.update(state, batch, Moment(share=1.0))
        losses.append(info.loss)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("method", ["glo", "vae-iaf"])
def test_one_layer_methods_refuse_several(method):
    kind, ladder = learner_class(method), learner_class("ladder-vae")
    with pytest.raises(ModelError, match="one layer of latents"):
        kind.build(kind.Network(latent_sizes=(4, 4), channels=4), (1, 28, 28), 0.3)
    with pytest.raises(ModelError, match="top-down generator"):
        ladder.build(ladder.Network(kind="hierarchical", channels=4, base=7), (1, 28, 28), 0.3)


OLDER = {"glow": ("published_glow",), "ladder-vae": ("batch_norm",), "vae-iaf": ("gate",)}


@pytest.mark.parametrize("method", OLDER)
def test_models_saved_before_a_setting_existed_load_as_they_were(tmp_path, method):
    torch.manual_seed(0)
    network = preset("smoke", "embedded", method).network
    before = replace(network, **{name: BEFORE[name] for name in OLDER[method]})
    model = learner_class(method).build(before, (1, 28, 28), 0.3)
    write_model(tmp_path, model, Description(method, before, (1, 28, 28), sr.Langevin()))
    # the description as version 0.1 wrote it, with the network settings of all methods but these
    values = {}
    for network_of_method in [learner_class(name).Network() for name in METHODS] + [before]:
        values |= asdict(network_of_method)
    written = {
        "method": method, "model": {key: value for key, value in values.items() if key not in OLDER[method]},
        "image": [1, 28, 28], "sigma": 0.3, "dynamics": {"steps": 25, "step_size": 0.01, "noise": True}, "spread": [],
        "info": {},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = sr.load(tmp_path)
    assert again.network == before != network
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[key])


def test_published_settings():
    presets = {method: preset("paper", "svhn", method) for method in METHODS}
    for method, config in presets.items():
        assert config.run.iterations == 300_000
        if method != "glow":
            learner_class(method).build(config.network, (3, 32, 32), 0.3)
    abp = presets["abp"]
    settings = abp.settings
    assert (settings.steps, settings.step_size, abp.run.sigma) == (40, pytest.approx(0.3**2 / 2), (0.3, 0.3))
    assert all(presets[name].network.latent_sizes == (128,) for name in ("abp", "glo", "vae", "vae-iaf"))
    assert presets["ladder-vae"].network.latent_sizes == presets["short-run"].network.latent_sizes
    assert presets["ladder-vae"].settings.kl_warm_up > 0
    glo = presets["glo"]
    assert (glo.settings.optimiser, glo.run.learning_rates, glo.run.decay) == ("sgd", (1.0,), False)
    assert glo.settings.code_rate * glo.run.batch == 10.0
    assert PCA_IMAGES == 24_576
    glow = presets["glow"].network
    assert (glow.levels, glow.depth, glow.width, glow.additive) == (3, 16, 512, True)
    run = presets["glow"].run
    assert (run.batch, run.learning_rates, run.decay) == (64, (1e-3,), False)
    # the official code: rate * min(1, images seen / (10 epochs * 50,000))
    for iteration in (0, 999, 7811, 7812, 50_000):
        expected = 1e-3 * min(1.0, 64 * (iteration + 1) / 500_000)
        assert schedules.learning_rate(run, iteration, 0.1) == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ValueError, match="authors' script has no vae"):
        preset("authors-script", "svhn", "vae")


# --- ABP -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_persistent_chains_sample_the_known_posterior():
    decoder, x, _ = linear_problem(n=2)
    images = data.Images(torch.zeros(2, *IMAGE, dtype=torch.uint8), "none", "train")
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    dummy = nn.Parameter(torch.zeros(1))
    model.register_parameter("dummy", dummy)
    model.decoder.forward = lambda z: Linear.forward(decoder, z) + 0 * dummy
    learner = ABP(model, settings=ABPSettings(tune="off", steps=10, step_size=0.004, learn_last=1))
    state = learner.init(0, images)
    batch = Batch(x, None, torch.tensor([0, 1]))
    draws = []
    for i in range(1500):
        state, _ = learner.update(state, batch, Moment(share=0.0))
        if i >= 50:
            draws.append(state.memory["chains.0"].clone())
    draws = torch.stack(draws).double()
    weight, bias = decoder.linear.weight.double(), decoder.linear.bias.double()
    precision = torch.eye(3, dtype=torch.float64) + weight.T @ weight / 0.09
    covariance = torch.linalg.inv(precision)
    mean = (x.flatten(1).double() - bias) @ weight @ covariance / 0.09
    torch.testing.assert_close(draws.mean(0), mean, atol=0.07, rtol=0)
    for i in range(2):
        torch.testing.assert_close(torch.cov(draws[:, i].T), covariance, atol=0.02, rtol=0.25)


class Traced(sr.GaussianModel):
    """Remembers the points at which its log joint is asked for."""

    def log_prior(self, z):
        self.points = [*getattr(self, "points", []), z[0].detach()]
        return super().log_prior(z)


def test_the_centre_of_abp_comes_from_a_chain_as_long_as_its_draw():
    """Against the exact posterior mean: the centre is nearer to it than the draw, after as many steps."""
    decoder, x, rng = linear_problem(n=200)
    model = Traced(decoder, decoder.latent_shapes, 0.3)
    step = 0.004
    dynamics = visits(sr.Langevin(steps=10, step_size=step))
    trained = sr.Trained(model, Description("abp", ABP.Network(), IMAGE, dynamics))
    weight, bias = decoder.linear.weight, decoder.linear.bias
    covariance = torch.linalg.inv(torch.eye(3) + weight.T @ weight / 0.09)
    mean = (x.flatten(1) - bias) @ weight @ covariance / 0.09
    errors, taken = [], []
    for quiet in (0, 10):
        model.points = []
        found = trained.reconstruction(x, quiet_steps=quiet, rng=rng)
        errors.append(float((found.z[0] - mean).square().sum(1).mean()))
        points = model.points[:-1]  # the last one is a look at the end: does it explain the image?
        drifts = [(mean - z) @ torch.linalg.inv(covariance) for z in points]
        moved = zip(points, drifts, points[1:], strict=False)
        noises = [(after - before - step * drift) / (2 * step) ** 0.5 for before, drift, after in moved]
        taken.append([float(noise.std()) for noise in noises])
    # each step is one gradient, with noise or without
    assert taken[0] == pytest.approx([1.0] * 50, abs=0.15)
    assert taken[1] == pytest.approx([1.0] * 40 + [0.0] * 10, abs=0.15)
    assert max(taken[1][40:]) < 1e-3
    precision = torch.linalg.eigvalsh(covariance).reciprocal()
    stationary = 1 / (precision * (1 - step * precision / 2))  # variances of the chain, a little above the posterior's
    assert errors[0] == pytest.approx(float(stationary.sum()), rel=0.15)
    assert errors[1] < 0.5 * errors[0]
    with pytest.raises(ValueError, match="expected 0 to 50"):
        trained.reconstruct(x, rng=rng, quiet_steps=51)


def test_a_model_of_version_0_1_has_the_dynamics_of_one_visit_in_its_file(tmp_path):
    network = preset("smoke", "embedded", "abp").network
    model = ABP.build(network, (1, 28, 28), 0.3)
    one = sr.Langevin(7, 0.02)
    write_model(tmp_path, model, Description("abp", network, (1, 28, 28), visits(one)))
    assert sr.load(tmp_path).dynamics == sr.Langevin(35, 0.02)
    written = {
        "method": "abp", "model": asdict(network), "image": [1, 28, 28], "sigma": 0.3, "spread": [1.5], "info": {},
        "dynamics": {"steps": 7, "step_size": 0.02, "noise": True},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = sr.load(tmp_path)
    assert again.dynamics == sr.Langevin(35, 0.02)
    drawn = again.sample_latents(4000, torch.Generator().manual_seed(0))[0]
    assert float(drawn.std()) == pytest.approx(1.5, rel=0.02)


def test_resume_restores_persistent_chains(tmp_path):
    config = preset("smoke", "embedded", "abp").changed(iterations=2)
    train(config, tmp_path / "run")
    model, images = ABP.build(config.network, (1, 28, 28), 0.3), config.data.load("train")
    again = Loop(config, model, images, folder=tmp_path / "run", resume=True)
    fresh = model.sample_prior(4500, torch.Generator().manual_seed(config.run.seed))[0]
    visited = (again.state.memory["chains.0"] != fresh).any(1)
    assert 2 <= visited.sum() <= 16  # two batches of eight, drawn with replacement


# --- GLO -----------------------------------------------------------------------------------------------


def test_glo_codes_stay_on_the_ball_and_their_gaussian_is_fitted(rng):
    torch.manual_seed(0)
    images = data.load("embedded")
    model = GLO.build(preset("smoke", "embedded", "glo").network, images.shape, 0.3)
    learner = GLO(model, settings=GLOSettings(code_rate=50.0))
    state = learner.init(0, images)
    start = state.memory["codes"].clone()
    torch.testing.assert_close(start.norm(dim=1), torch.ones(4500))
    # principal components: uncorrelated before they are scaled, so nearly so afterwards; and the first varies most
    correlation = torch.corrcoef(start.T).abs()
    assert correlation.fill_diagonal_(0).max() < 0.35
    assert start.std(0).argmax() == 0
    for i in range(10):
        rows = torch.arange(16 * i, 16 * i + 16)
        state, _ = learner.update(state, Batch(images.batch(rows), None, rows), Moment(share=0.5))
    codes = state.memory["codes"]
    assert codes.norm(dim=1).max() <= 1 + 1e-5
    assert not torch.equal(codes[:160], start[:160])
    assert torch.equal(codes[160:], start[160:])
    state = learner.ready(state, Batch(images.batch(rows), None, rows), rng)
    gaussian = torch.distributions.MultivariateNormal(codes.mean(0), torch.cov(codes.T))
    z = codes[:5]
    torch.testing.assert_close(model.log_prior((z,)), gaussian.log_prob(z), rtol=1e-3, atol=1e-2)


def test_glo_draws_from_the_law_whose_density_it_states():
    """Moments of the draws, against those of ``log_prior`` by quadrature on a grid."""
    model = CodeModel(Linear((2,)), [(2,)], 0.3).double()
    rng = torch.Generator().manual_seed(0)
    codes = torch.randn(500, 2, generator=rng) @ torch.tensor([[0.5, 0.3], [0.0, 0.4]])
    model.fit(torch.tensor([0.6, 0.3]) + codes)
    axis = torch.linspace(-5, 5, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    weight = model.log_prior((grid,)).exp() * (axis[1] - axis[0]) ** 2
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-6)
    draws = model.sample_prior(40_000, rng)[0]
    for moment in (
        lambda z: z[:, 0], lambda z: z[:, 1], lambda z: z[:, 0] ** 2, lambda z: z[:, 1] ** 2, lambda z: z.prod(1),
        lambda z: (z.norm(dim=1) > 1).double(), lambda z: (z.norm(dim=1) > 1.5).double(),
    ):  # fmt: skip
        assert float(moment(draws).mean()) == pytest.approx(float((moment(grid) * weight).sum()), abs=0.015)


@pytest.mark.parametrize(("count", "side"), [(6000, 5), (20, 6)])
def test_glo_codes_start_at_the_principal_components_of_all_images(count, side):
    """More images than pixels, and fewer; against numpy's SVD of all of them in double precision."""
    rng = torch.Generator().manual_seed(0)
    smooth = torch.randn(count, 8, generator=rng) @ torch.randn(8, side**2, generator=rng)
    pixels = (128 + 20 * smooth + torch.randn(count, side**2, generator=rng)).clamp(0, 255).to(torch.uint8)
    pixels[5000:] = 255 - pixels[5000:] // 3  # images beyond the first thousands matter
    images = data.Images(pixels.view(count, 1, side, side), "none", "train")
    codes = principal_codes(images, 3, rng)
    centred = pixels.double().numpy() / 127.5 - 1
    centred = centred - centred.mean(0)
    expected = torch.from_numpy(centred @ np.linalg.svd(centred, full_matrices=False)[2][:3].T)
    expected = expected / expected.norm(dim=1, keepdim=True)
    sign = (expected * codes).sum(0).sign()
    torch.testing.assert_close(codes.double() * sign, expected, atol=2e-3, rtol=0)


def test_glo_learns_and_resumes_by_plain_gradient_descent(tmp_path):
    config = preset("smoke", "embedded", "glo").changed(
        optimiser="sgd", learning_rates=(0.5,), iterations=4, checkpoint_every=2, evaluate_every=4, evaluate_images=2,
        decay=False, warm_up=0, sigma=(0.3, 0.3),
    )  # fmt: skip
    images = data.load("embedded")
    model = GLO.build(config.network, images.shape, 0.3)
    learner = GLO(model, learning_rate=0.5, settings=config.settings)
    state = learner.init(0, images)
    rows = torch.arange(8)
    codes = state.memory["codes"][rows].requires_grad_()
    x = images.batch(rows)
    error = (x - model.decoder((codes,))).square().mean()  # the loss of the batch, as the published code takes it
    code_gradient, *gradients = torch.autograd.grad(error, [codes, *learner.parameters])
    wanted = [p.detach() - 0.5 * g for p, g in zip(learner.parameters, gradients, strict=True)]
    moved = codes.detach() - config.settings.code_rate * len(rows) * code_gradient
    state, _ = learner.update(state, Batch(x, None, rows), Moment(share=0.0))
    for parameter, value in zip(learner.parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    torch.testing.assert_close(state.memory["codes"][rows], moved / moved.norm(dim=1, keepdim=True).clamp_min(1))
    train(config, tmp_path / "a")
    train(config.changed(iterations=2), tmp_path / "b")
    train(config, tmp_path / "b", resume=True)
    one, two = (sr.load(tmp_path / name).model.state_dict() for name in "ab")
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_glo_finds_the_code_of_an_image_it_can_make():
    decoder, _, rng = linear_problem()
    model = CodeModel(decoder, decoder.latent_shapes, 0.3)
    wanted = torch.tensor([[0.3, -0.5, 0.2], [0.9, 0.1, 0.0]])
    z, *_ = model.infer(decoder((wanted,)), sr.Langevin(), rng=rng)
    torch.testing.assert_close(z[0], wanted, atol=0.02, rtol=0)
    outside, *_ = model.infer(decoder((3 * wanted,)), sr.Langevin(), rng=rng)
    torch.testing.assert_close(outside[0].norm(dim=1), torch.ones(2), atol=1e-3, rtol=0)
