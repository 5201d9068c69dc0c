"""The methods of comparison, each against something independent of its code."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import shortrun as sr
from shortrun import compare, data, langevin, tasks
from shortrun import config as settings
from shortrun.cli import main
from shortrun.config import ModelConfig, preset, to_plain
from shortrun.generators import ModelError, TopDownGenerator
from shortrun.learners import ABP, GLO, METHODS, VAE, Glow, VAEWithIAF
from shortrun.learners import glo as glo_module
from shortrun.learners import glow as glow_module
from shortrun.learners import vae as vae_module
from shortrun.learners.base import Batch, NotPossibleError
from shortrun.learners.glo import CodeModel, principal_codes
from shortrun.learners.ladder_vae import LadderAutoencoder
from shortrun.learners.vae import Autoencoder, Encoded, GaussianAutoencoder, gaussian_kl, gaussian_log_density
from shortrun.learners.vae_iaf import FlowAutoencoder
from shortrun.likelihood import annealed_importance, bits_per_dimension, importance_weighted
from shortrun.runs import Pretrained, from_pretrained, save_pretrained
from shortrun.train import schedule, train

BASELINES = [name for name in METHODS if name != "short-run"]
IMAGE = (1, 8, 8)


class Linear(nn.Module):
    """``x = W z + b`` as an image."""

    def __init__(self, sizes=(3,)):
        super().__init__()
        self.latent_shapes = tuple((size,) for size in sizes)
        self.linear = nn.Linear(sum(sizes), math.prod(IMAGE))

    def forward(self, z):
        return self.linear(torch.cat(z, 1)).view(-1, *IMAGE)


def exact_log_density(decoder, sigma, x):
    """``log N(x; b, W W^T + sigma^2 I)`` by torch.distributions."""
    weight, bias = decoder.linear.weight.double(), decoder.linear.bias.double()
    covariance = weight @ weight.T + sigma**2 * torch.eye(len(bias), dtype=torch.float64)
    return torch.distributions.MultivariateNormal(bias, covariance).log_prob(x.flatten(1).double())


def linear_problem(sizes=(3,), n=6):
    torch.manual_seed(0)
    decoder = Linear(sizes).requires_grad_(False)
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    generator = torch.Generator().manual_seed(1)
    x = decoder(model.sample_prior(n, generator)) + 0.3 * torch.randn(n, *IMAGE, generator=generator)
    return decoder, x, generator


# --- every method ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BASELINES)
def test_every_method_trains_resumes_to_the_bit_and_is_used_from_the_command_line(tmp_path, method, capsys):
    # schedules follow the share of the run, which a later limit changes; so they are held fixed here
    config = replace(
        preset("smoke", "embedded", method), iterations=4, checkpoint_every=2, evaluate_every=4, evaluate_images=2,
        decay=False, warm_up=0, kl_warm_up=0.0, sigma=(0.3, 0.3),
    )  # fmt: skip
    train(config, tmp_path / "a", quiet=True)
    train(replace(config, iterations=2), tmp_path / "b", quiet=True)
    train(config, tmp_path / "b", resume=True, quiet=True)
    one, two = from_pretrained(tmp_path / "a").model.state_dict(), from_pretrained(tmp_path / "b").model.state_dict()
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
    config = replace(preset("smoke", "embedded", method), warm_up=0, learning_rates=(3e-3,), batch=16)
    images = data.load("embedded")
    learner_class = METHODS[method]
    model = learner_class.build(config.model, images.shape, 0.3)
    learner = learner_class(model, config, Accelerator(), images)
    batch = Batch(images.batch(slice(0, 16)), None, torch.arange(16))
    generator = torch.Generator().manual_seed(0)
    losses = [learner.update(batch, 1.0, generator).loss for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("method", ["glo", "vae-iaf"])
def test_one_layer_methods_refuse_several(method):
    with pytest.raises(ModelError, match="one layer of latents"):
        METHODS[method].build(ModelConfig(latent_sizes=(4, 4), channels=4), (1, 28, 28), 0.3)
    with pytest.raises(ModelError, match="top-down generator"):
        METHODS["ladder-vae"].build(ModelConfig(kind="hierarchical", channels=4, base=7), (1, 28, 28), 0.3)


# --- VAE, Ladder-VAE, IAF --------------------------------------------------------------------------


def fit(model, x, steps=800, rate=1e-2):
    """Maximise the ELBO over the encoder alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
        eps = model.sample_prior(len(x), generator)
        encoded = model.encode(x, eps)
        loss = (encoded.kl - model.log_likelihood(x, encoded.z)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def bound(model, x, draws=1500):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        values = []
        for _ in range(draws):
            encoded = model.encode(x, model.sample_prior(len(x), generator))
            values.append(model.log_likelihood(x, encoded.z) - encoded.kl)
    return torch.stack(values).double().mean(0)


def orthogonal(decoder):
    """Columns of W orthogonal: the exact posterior is then diagonal, so that the bound can be tight."""
    q, _ = torch.linalg.qr(decoder.linear.weight)
    decoder.linear.weight.copy_(q * torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.parametrize("kind", ["vae", "iaf"])
def test_elbo_stays_below_the_exact_likelihood_and_approaches_it(kind):
    decoder, x, _ = linear_problem()
    orthogonal(decoder)
    exact = exact_log_density(decoder, 0.3, x)
    torch.manual_seed(1)
    if kind == "vae":
        model = GaussianAutoencoder(decoder, IMAGE, 4, 0.3)
    else:
        model = FlowAutoencoder(decoder, IMAGE, 4, 2, 8, 0.3)
    before = bound(model, x)
    assert (before < exact).all()
    fit(model, x)
    after = bound(model, x)
    assert (after < exact + 0.15).all()  # Monte Carlo error of the draws
    assert after.mean() > exact.mean() - 0.25
    assert before.mean() < exact.mean() - 5


class LinearTopDown(nn.Module):
    """A two-layer linear-Gaussian generator with the interface of the top-down one."""

    def __init__(self):
        super().__init__()
        self.latent_shapes = ((2,), (3,))
        self.mean = nn.Linear(2, 3)
        self.log_variance = nn.Parameter(torch.tensor([0.0, 0.5, -0.5]))
        self.top, self.low = nn.Linear(2, 64), nn.Linear(3, 64)

    def descend(self, top, choose):
        mean = self.mean(top)
        low = choose(1, mean, self.log_variance.expand_as(mean))
        return (self.top(top) + self.low(low)).view(-1, *IMAGE), (top, low)

    def forward(self, z):
        return self.descend(z[0], lambda i, mean, log_variance: mean + torch.exp(0.5 * log_variance) * z[i])[0]


def test_ladder_elbo_on_a_linear_gaussian_hierarchy():
    torch.manual_seed(0)
    decoder = LinearTopDown().requires_grad_(False)
    model = LadderAutoencoder(decoder, IMAGE, 4, 0.3)
    generator = torch.Generator().manual_seed(1)
    x = decoder(model.sample_prior(6, generator)) + 0.3 * torch.randn(6, *IMAGE, generator=generator)
    # the exact density: x is linear in the five noises, its matrix by autograd
    flat = torch.autograd.functional.jacobian(
        lambda e: decoder((e[None, :2], e[None, 2:])).flatten(), torch.zeros(5)
    ).double()
    centre = decoder((torch.zeros(1, 2), torch.zeros(1, 3))).flatten().double()
    covariance = flat @ flat.T + 0.09 * torch.eye(64, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(centre, covariance).log_prob(x.flatten(1).double())
    before = bound(model, x)
    fit(model, x)
    after = bound(model, x)
    assert (before < exact).all()
    assert (after < exact + 0.15).all()
    assert after.mean() > exact.mean() - 1.5  # the factorised posterior leaves a gap
    assert before.mean() < exact.mean() - 5


def test_ladder_combines_by_precision_and_reports_its_own_density():
    """log q of the draw, against the closed forms of the equations written a second time, in latent coordinates."""
    torch.manual_seed(0)
    generator = TopDownGenerator([2, 3, 4], (1, 12, 12), channels=4)
    model = LadderAutoencoder(generator, (1, 12, 12), 4, 0.3).double()
    x = torch.rand(5, 1, 12, 12).double()
    eps = model.sample_prior(5, torch.Generator().manual_seed(0))
    encoded = model.encode(x, eps)
    z = generator.to_latents(encoded.z)
    log_q = torch.zeros(5).double()
    kl = torch.zeros(5).double()
    conditionals = []

    def choose(i, mean, log_variance):
        conditionals.append((mean, log_variance.exp().sqrt()))
        return z[i]

    generator.descend(z[0], choose)
    for i, (mean, log_sd) in enumerate(model.estimates(x)):
        q, p = torch.distributions.Normal(mean, log_sd.exp()), torch.distributions.Normal(0.0, 1.0)
        log_volume = 0.0
        if i > 0:
            prior_mean, prior_sd = conditionals[i - 1]
            weights = log_sd.exp() ** -2, prior_sd**-2
            combined = (mean * weights[0] + prior_mean * weights[1]) / (weights[0] + weights[1])
            q = torch.distributions.Normal(combined, (weights[0] + weights[1]) ** -0.5)
            p = torch.distributions.Normal(prior_mean, prior_sd)
            log_volume = prior_sd.log().sum(1)
        log_q = log_q + q.log_prob(z[i]).sum(1) + log_volume
        kl = kl + torch.distributions.kl_divergence(q, p).sum(1)
    torch.testing.assert_close(encoded.log_q, log_q)
    torch.testing.assert_close(encoded.kl, kl)


def test_ladder_with_one_layer_is_a_vae():
    torch.manual_seed(0)
    generator = TopDownGenerator([3], (1, 8, 8), channels=4)
    ladder = LadderAutoencoder(generator, IMAGE, 4, 0.3)
    plain = GaussianAutoencoder(generator, IMAGE, 4, 0.3)
    plain.trunk, plain.head = ladder.trunk, ladder.heads[0]
    x, eps = torch.rand(4, *IMAGE), ladder.sample_prior(4)
    for a, b in zip(ladder.encode(x, eps), plain.encode(x, eps), strict=True):
        torch.testing.assert_close(a, b)


def normed_ladder():
    """A Ladder-VAE with batch normalisation that has seen a few batches, in the mode for learning, and images."""
    torch.manual_seed(0)
    config = preset("smoke", "embedded", "ladder-vae")
    images = data.load("embedded")
    model = METHODS["ladder-vae"].build(config.model, images.shape, 0.3)
    learner = METHODS["ladder-vae"](model, config, Accelerator(), images)
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        rows = torch.arange(8 * i, 8 * i + 8)
        learner.update(Batch(images.batch(rows), None, rows), 1.0, generator)
    return learner, images.batch(slice(0, 6))


def test_the_upward_pass_of_the_ladder_is_normalised_over_the_batch():
    """Its equations a second time: statistics of the batch when learning, running averages of them in use."""
    learner, x = normed_ladder()
    model = learner.model
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.decoder.modules())
    assert len(norms) == len(model.trunk.layers) + len(model.ups)

    def estimates(statistics):
        def block(conv, norm, maps):
            maps = conv(maps)
            mean, variance = statistics(norm, maps)
            maps = (maps - mean.view(1, -1, 1, 1)) / (variance.view(1, -1, 1, 1) + 1e-5).sqrt()
            return nn.functional.gelu(norm.weight.view(1, -1, 1, 1) * maps + norm.bias.view(1, -1, 1, 1))

        maps = x
        for conv, norm in zip(model.trunk.layers, norms, strict=False):
            maps = block(conv, norm, maps)
        low = model.heads[1](maps.flatten(1))
        maps = maps + block(model.ups[0], norms[-1], maps)
        return model.heads[0](maps.flatten(1)), low

    batch = estimates(lambda norm, maps: (maps.mean((0, 2, 3)), maps.var((0, 2, 3), unbiased=False)))
    before = norms[0].running_mean.clone()
    first = model.trunk.layers[0](x).mean((0, 2, 3))
    for expected, found in zip(batch, model.estimates(x), strict=True):
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norms[0].running_mean, 0.9 * before + 0.1 * first)
    model.eval()
    running = estimates(lambda norm, maps: (norm.running_mean, norm.running_var))
    for expected, found in zip(running, model.estimates(x), strict=True):
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-4)


def test_inference_during_training_neither_depends_on_the_batch_nor_changes_the_model():
    learner, x = normed_ladder()
    model, method = learner.model, METHODS["ladder-vae"]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    mask = torch.ones(1, 1, 28, 28, dtype=torch.bool)
    mask[..., 14:] = False
    hidden = mask.expand(6, -1, -1, -1)

    def sources(count):
        return [torch.Generator().manual_seed(i) for i in range(count)]

    ways = {
        "infer": lambda x: method.infer(model, x, learner.dynamics, None, sources(len(x))).z[0],
        "draw": lambda x: method.draw(model, x, learner.dynamics, None, sources(len(x))).z[0],
        "inpaint": lambda x: method.draw(model, x, learner.dynamics, hidden[: len(x)], sources(len(x))).z[0],
        "reconstruct": lambda x: learner.reconstruct(x, sources(len(x))),
        "bound": lambda x: method.lower_bound(model, x, learner.dynamics, sources(len(x))),
    }
    for name, way in ways.items():
        torch.testing.assert_close(
            way(x)[:2], way(x[:2]), atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert all(module.training for module in model.modules()), name
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_the_trial_of_a_compiled_step_is_not_counted_by_running_statistics():
    norm = nn.BatchNorm2d(2)
    again = nn.BatchNorm2d(2)
    step = vae_module.first_without_traces(norm, list(norm.buffers()))
    x = torch.rand(4, 2, 3, 3)
    step(x)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    step(x)
    again(x)
    torch.testing.assert_close(norm.running_mean, again.running_mean)
    assert int(norm.num_batches_tracked) == 1


def test_batch_normalisation_over_two_processes_is_that_of_one(tmp_path):
    """Two gloo processes with 5 and 4 images, against one with all 9: weights and running statistics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29743"]
    words = ["train", "--preset", "smoke", "--method", "ladder-vae", "--iterations", "3", "--batch", "9"]
    for name, start in (("one", []), ("two", launcher)):
        line = [sys.executable, *start, "-m", "shortrun.cli", *words, "--out", str(tmp_path / name)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    one, two = (from_pretrained(tmp_path / name).model.state_dict() for name in ("one", "two"))
    assert "trunk.norms.0.running_var" in one
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=3e-4 if "running" not in key else 3e-5, rtol=1e-3)


@pytest.mark.parametrize("gate", ["sigmoid", "affine"])
def test_iaf_density_is_that_of_the_change_of_variables_by_autograd(gate):
    """The whole map from noise to latents: its Jacobian by autograd, and its inverse."""
    torch.manual_seed(0)
    model = FlowAutoencoder(Linear((4,)), IMAGE, 4, 3, 8, 0.3, gate).double()
    for parameter in model.flows.parameters():
        parameter.data.mul_(3.0)
    x, eps = torch.rand(1, *IMAGE).double(), torch.randn(1, 4).double()
    encoded = model.encode(x, (eps,))
    jacobian = torch.autograd.functional.jacobian(lambda e: model.encode(x, (e[None],)).z[0][0], eps[0])
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum(1) - torch.linalg.slogdet(jacobian)[1]
    torch.testing.assert_close(encoded.log_q, expected)
    torch.testing.assert_close(model.log_density(encoded.z[0], x), expected)


def test_the_gate_of_iaf_is_that_of_its_paper():
    """``sigmoid(s) z + (1 - sigmoid(s)) m``, from what the masked network says, and near the identity at the start."""
    torch.manual_seed(0)
    model = VAEWithIAF.build(preset("smoke", "embedded", "vae-iaf").model, (1, 28, 28), 0.3)
    flow = model.flows[0]
    z, context = torch.randn(5, 8), torch.randn(5, 8)
    m, s = flow.hyper(torch.cat([z, context], 1)).unflatten(1, (8, 2)).unbind(2)
    kept = 1 / (1 + torch.exp(-(s + 2)))
    torch.testing.assert_close(flow(context)(z), kept * z + (1 - kept) * m)
    assert 0.8 < float(kept.detach().mean()) < 0.95


@pytest.mark.parametrize("gate", ["sigmoid", "affine"])
def test_iaf_density_integrates_to_one_and_is_that_of_its_draws(gate):
    torch.manual_seed(3)
    model = FlowAutoencoder(Linear((2,)), IMAGE, 4, 3, 8, 0.3, gate).double()
    for parameter in model.flows.parameters():
        parameter.data.mul_(2.0)  # far from a Gaussian
    x = torch.rand(1, *IMAGE).double()
    with torch.no_grad():
        draws = torch.cat([model.encode(x, model.sample_prior(1)).z[0] for _ in range(500)])
        low, high = draws.min(0).values, draws.max(0).values
        margin = 1.5 * (high - low)
        edges = zip(low - margin, high + margin, strict=True)
        axes = [torch.linspace(float(a), float(b), 300).double() for a, b in edges]
        grid = torch.cartesian_prod(*axes)
        density = model.log_density(grid, x.expand(len(grid), -1, -1, -1)).exp()
        cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
        assert float(density.sum() * cell) == pytest.approx(1.0, abs=0.01)
        encoded = model.encode(x, model.sample_prior(1))
        torch.testing.assert_close(encoded.log_q, model.log_density(encoded.z[0], x))
        torch.testing.assert_close(encoded.kl, encoded.log_q - model.log_prior(encoded.z))


def test_gaussian_formulas_against_torch_distributions():
    mean, log_sd, z = torch.randn(3, 4, 5).double()
    q = torch.distributions.Normal(mean, log_sd.exp())
    torch.testing.assert_close(gaussian_log_density(z, mean, log_sd), q.log_prob(z).sum(1))
    prior = torch.distributions.Normal(torch.zeros(4, 5).double(), 1.0)
    torch.testing.assert_close(gaussian_kl(mean, log_sd), torch.distributions.kl_divergence(q, prior).sum(1))


def test_draws_of_an_encoder_spread_around_its_centre_as_it_says():
    torch.manual_seed(0)
    model = VAE.build(ModelConfig(latent_sizes=(4,), channels=4, encoder_channels=4), (1, 28, 28), 0.3)
    x = torch.rand(1, 1, 28, 28) * 2 - 1
    mean, log_sd = model.posterior(x)
    z = VAE.draw(model, x.expand(4000, -1, -1, -1), sr.Langevin(), generator=torch.Generator().manual_seed(0)).z[0]
    torch.testing.assert_close(z.mean(0), mean[0], atol=0.08, rtol=0)
    torch.testing.assert_close(z.std(0), log_sd[0].exp(), atol=0, rtol=0.08)
    torch.testing.assert_close(VAE.infer(model, x, sr.Langevin()).z[0], mean)


def test_hidden_pixels_do_not_reach_the_encoder():
    torch.manual_seed(0)
    model = VAE.build(ModelConfig(latent_sizes=(4,), channels=4, encoder_channels=4), (1, 28, 28), 0.3)
    x = torch.rand(2, 1, 28, 28)
    mask = torch.ones(2, 1, 28, 28, dtype=torch.bool)
    mask[:, :, 14:] = False
    spoiled = torch.where(mask, x, torch.tensor(9.0))
    results = [
        VAE.infer(model, images, sr.Langevin(), mask, torch.Generator().manual_seed(0)).z[0] for images in (x, spoiled)
    ]
    assert torch.equal(*results)


# --- ABP, GLO, Glow --------------------------------------------------------------------------------


def test_persistent_chains_sample_the_known_posterior():
    decoder, x, generator = linear_problem(n=2)
    images = data.Images(torch.zeros(2, *IMAGE, dtype=torch.uint8), "none", "train")
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    config = replace(preset("smoke", "embedded", "abp"), tune="off", steps=10, step_size=0.004, batch=2, learn_last=1)
    dummy = nn.Parameter(torch.zeros(1))
    model.register_parameter("dummy", dummy)
    model.decoder.forward = lambda z: Linear.forward(decoder, z) + 0 * dummy
    learner = ABP(model, config, Accelerator(), images)
    batch = Batch(x, None, torch.tensor([0, 1]))
    draws = []
    for i in range(1500):
        learner.update(batch, 0.0, generator)
        if i >= 50:
            draws.append(learner.chains[0].clone())
    draws = torch.stack(draws).double()
    weight, bias = decoder.linear.weight.double(), decoder.linear.bias.double()
    precision = torch.eye(3, dtype=torch.float64) + weight.T @ weight / 0.09
    covariance = torch.linalg.inv(precision)
    mean = (x.flatten(1).double() - bias) @ weight @ covariance / 0.09
    torch.testing.assert_close(draws.mean(0), mean, atol=0.07, rtol=0)
    for i in range(2):
        torch.testing.assert_close(torch.cov(draws[:, i].T), covariance, atol=0.02, rtol=0.25)


def test_the_centre_of_abp_comes_from_a_chain_as_long_as_its_draw(monkeypatch):
    """Against the exact posterior mean: the centre is nearer to it than the draw, after as many steps."""
    decoder, x, generator = linear_problem(n=200)
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    dynamics = sr.Langevin(steps=10, step_size=0.004)
    description = {"method": "abp", "image": IMAGE, "model": to_plain(ModelConfig()), "info": {}}
    trained = Pretrained(model, dynamics, description)
    weight, bias = decoder.linear.weight, decoder.linear.bias
    covariance = torch.linalg.inv(torch.eye(3) + weight.T @ weight / 0.09)
    mean = (x.flatten(1) - bias) @ weight @ covariance / 0.09
    steps = []
    plain_step = langevin.step
    monkeypatch.setattr(langevin, "step", lambda *words: steps.append(words[4]) or plain_step(*words))
    errors, taken = [], []
    for quiet in (0, 10):
        found = tasks.reconstruct(trained, x, generator, quiet_steps=quiet)
        errors.append(float((found.z[0] - mean).square().sum(1).mean()))
        taken.append(list(steps))
        steps.clear()
    assert taken == [[True] * 50, [True] * 40 + [False] * 10]  # each step is one gradient; true where it has noise
    precision = torch.linalg.eigvalsh(covariance).reciprocal()
    stationary = 1 / (precision * (1 - 0.004 * precision / 2))  # variances of the chain, a little above the posterior's
    assert errors[0] == pytest.approx(float(stationary.sum()), rel=0.15)
    assert errors[1] < 0.5 * errors[0]
    with pytest.raises(ValueError, match="expected 0 to 10"):
        tasks.reconstruct(trained, x, generator, quiet_steps=11)


def test_resume_restores_persistent_chains(tmp_path):
    config = replace(preset("smoke", "embedded", "abp"), iterations=2)
    train(config, tmp_path / "run", quiet=True)
    from shortrun.train import Loop

    again = Loop(config, tmp_path / "run", True, lambda text: None)
    visited = (again.learner.chains[0] != fresh_chains(config)).any(1)
    assert 2 <= visited.sum() <= 16  # two batches of eight, drawn with replacement


def fresh_chains(config):
    model = METHODS["abp"].build(config.model, (1, 28, 28), 0.3)
    return model.sample_prior(4500, torch.Generator().manual_seed(config.seed))[0]


def test_glo_codes_stay_on_the_ball_and_their_gaussian_is_fitted():
    torch.manual_seed(0)
    config = replace(preset("smoke", "embedded", "glo"), code_rate=50.0)
    images = data.load("embedded")
    model = GLO.build(config.model, images.shape, 0.3)
    learner = GLO(model, config, Accelerator(), images)
    start = learner.codes.clone()
    torch.testing.assert_close(start.norm(dim=1), torch.ones(4500))
    # principal components: uncorrelated before they are scaled, so nearly so afterwards; and the first varies most
    correlation = torch.corrcoef(start.T).abs()
    assert correlation.fill_diagonal_(0).max() < 0.35
    assert start.std(0).argmax() == 0
    generator = torch.Generator().manual_seed(0)
    for i in range(10):
        rows = torch.arange(16 * i, 16 * i + 16)
        learner.update(Batch(images.batch(rows), None, rows), 0.5, generator)
    assert learner.codes.norm(dim=1).max() <= 1 + 1e-5
    assert not torch.equal(learner.codes[:160], start[:160])
    assert torch.equal(learner.codes[160:], start[160:])
    learner.prepare(Batch(images.batch(rows), None, rows), generator)
    gaussian = torch.distributions.MultivariateNormal(learner.codes.mean(0), torch.cov(learner.codes.T))
    z = learner.codes[:5]
    torch.testing.assert_close(model.log_prior((z,)), gaussian.log_prob(z), rtol=1e-3, atol=1e-2)


def test_glo_draws_from_the_law_whose_density_it_states():
    """Moments of the draws, against those of ``log_prior`` by quadrature on a grid."""
    model = CodeModel(Linear((2,)), 0.3).double()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(500, 2, generator=generator) @ torch.tensor([[0.5, 0.3], [0.0, 0.4]])
    model.fit(torch.tensor([0.6, 0.3]) + codes)
    axis = torch.linspace(-5, 5, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    weight = model.log_prior((grid,)).exp() * (axis[1] - axis[0]) ** 2
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-6)
    draws = model.sample_prior(40_000, generator)[0]
    for moment in (
        lambda z: z[:, 0], lambda z: z[:, 1], lambda z: z[:, 0] ** 2, lambda z: z[:, 1] ** 2, lambda z: z.prod(1),
        lambda z: (z.norm(dim=1) > 1).double(), lambda z: (z.norm(dim=1) > 1.5).double(),
    ):  # fmt: skip
        assert float(moment(draws).mean()) == pytest.approx(float((moment(grid) * weight).sum()), abs=0.015)


@pytest.mark.parametrize(("count", "side"), [(6000, 5), (20, 6)])
def test_glo_codes_start_at_the_principal_components_of_all_images(count, side):
    """More images than pixels, and fewer; against numpy's SVD of all of them in double precision."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.randn(count, 8, generator=generator) @ torch.randn(8, side**2, generator=generator)
    pixels = (128 + 20 * smooth + torch.randn(count, side**2, generator=generator)).clamp(0, 255).to(torch.uint8)
    pixels[5000:] = 255 - pixels[5000:] // 3  # images beyond the first thousands matter
    images = data.Images(pixels.view(count, 1, side, side), "none", "train")
    codes = principal_codes(images, 3, generator)
    centred = pixels.double().numpy() / 127.5 - 1
    centred = centred - centred.mean(0)
    expected = torch.from_numpy(centred @ np.linalg.svd(centred, full_matrices=False)[2][:3].T)
    expected = expected / expected.norm(dim=1, keepdim=True)
    sign = (expected * codes).sum(0).sign()
    torch.testing.assert_close(codes.double() * sign, expected, atol=2e-3, rtol=0)


def test_glo_learns_and_resumes_by_plain_gradient_descent(tmp_path):
    config = replace(
        preset("smoke", "embedded", "glo"), optimiser="sgd", learning_rates=(0.5,), iterations=4, checkpoint_every=2,
        evaluate_every=4, evaluate_images=2, decay=False, warm_up=0, sigma=(0.3, 0.3),
    )  # fmt: skip
    images = data.load("embedded")
    model = GLO.build(config.model, images.shape, 0.3)
    learner = GLO(model, config, Accelerator(), images)
    rows = torch.arange(8)
    codes = learner.codes[rows].requires_grad_()
    x = images.batch(rows)
    error = (x - model.decoder((codes,))).square().mean()  # the loss of the batch, as the published code takes it
    code_gradient, *gradients = torch.autograd.grad(error, [codes, *learner.parameters])
    wanted = [p.detach() - 0.5 * g for p, g in zip(learner.parameters, gradients, strict=True)]
    moved = codes.detach() - config.code_rate * len(rows) * code_gradient
    learner.update(Batch(x, None, rows), 0.0, torch.Generator().manual_seed(0))
    for parameter, value in zip(learner.parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    torch.testing.assert_close(learner.codes[rows], moved / moved.norm(dim=1, keepdim=True).clamp_min(1))
    train(config, tmp_path / "a", quiet=True)
    train(replace(config, iterations=2), tmp_path / "b", quiet=True)
    train(config, tmp_path / "b", resume=True, quiet=True)
    one, two = (from_pretrained(tmp_path / name).model.state_dict() for name in "ab")
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_glo_finds_the_code_of_an_image_it_can_make():
    decoder, _, generator = linear_problem()
    model = CodeModel(decoder, 0.3)
    wanted = torch.tensor([[0.3, -0.5, 0.2], [0.9, 0.1, 0.0]])
    z, _ = GLO.infer(model, decoder((wanted,)), sr.Langevin(), None, generator)
    torch.testing.assert_close(z[0], wanted, atol=0.02, rtol=0)
    outside, _ = GLO.infer(model, decoder((3 * wanted,)), sr.Langevin(), None, generator)
    torch.testing.assert_close(outside[0].norm(dim=1), torch.ones(2), atol=1e-3, rtol=0)


@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_glow_inverts_and_its_determinant_is_that_of_autograd(additive, published):
    torch.manual_seed(0)
    config = ModelConfig(levels=2, depth=2, width=6, additive=additive, published_glow=published)
    model = Glow.build(config, (1, 4, 4), 0.3).double()
    for parameter in model.parameters():  # away from the identity
        parameter.data.add_(0.1 * torch.randn(parameter.shape).double())
    x = torch.rand(3, 1, 4, 4).double() * 2 - 1
    z, log_det = model.flow.inverse_and_log_det(x)
    noise = tuple((part - b.loc) / b.log_scale.exp() for part, b in zip(z, model.flow.q0, strict=True))
    torch.testing.assert_close(model.decode(noise), x)

    def flat(one):
        return torch.cat([part.flatten() for part in model.flow.inverse_and_log_det(one.view(1, 1, 4, 4))[0]])

    base = [torch.distributions.Normal(b.loc, b.log_scale.exp()) for b in model.flow.q0]
    for i in range(3):
        expected = torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, x[i].flatten()))[1]
        torch.testing.assert_close(log_det[i], expected)
        density = sum(d.log_prob(part[i : i + 1]).sum() for d, part in zip(base, z, strict=True)) + expected
        torch.testing.assert_close(model.log_density(x[i : i + 1])[0], density)


def small_glow():
    """Away from its start, where all that is zero hides mistakes."""
    torch.manual_seed(0)
    model = Glow.build(ModelConfig(levels=2, depth=2, width=6), (1, 4, 4), 0.3).double()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape).double())
    return model


def test_glow_has_a_conditional_prior_at_its_split_and_a_standard_normal_top():
    """Density and samples against the equations with torch.distributions, from the maps before and after the split."""
    model = small_glow()
    x = torch.rand(3, 1, 4, 4).double() * 2 - 1
    prior = next(module for name, module in model.named_modules() if name.endswith("prior"))

    def given(stays):
        convolved = torch.nn.functional.conv2d(stays, prior.weight, prior.bias, padding=1)
        mean, log_sd = (convolved * torch.exp(3 * prior.log_scale)).chunk(2, 1)
        return torch.distributions.Normal(mean, log_sd.exp())

    def halves(one):
        for flow in reversed(model.flow.flows[1]):
            one, _ = flow.inverse(one)
        return one.chunk(2, 1)

    def top(stays):
        for flow in reversed(model.flow.flows[0]):
            stays, _ = flow.inverse(stays)
        return stays

    def flat(one):
        stays, leaves = halves(one.view(1, 1, 4, 4))
        return torch.cat([top(stays).flatten(), leaves.flatten()])

    standard = torch.distributions.Normal(0.0, 1.0)
    for i in range(3):
        stays, leaves = halves(x[i : i + 1])
        expected = standard.log_prob(top(stays)).sum() + given(stays).log_prob(leaves).sum()
        expected = expected + torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, x[i].flatten()))[1]
        torch.testing.assert_close(model.log_density(x[i : i + 1])[0], expected)
    assert given(halves(x)[0]).mean.std(0).max() > 0.01  # it does depend on the half that stays
    noise = tuple(torch.randn(1, *shape).double() for shape in model.latent_shapes)
    many = (noise[0].expand(4000, -1, -1, -1), torch.randn(4000, *model.latent_shapes[1]).double())
    stays, leaves = halves(model.decode(many))
    law = given(stays[:1])
    torch.testing.assert_close(leaves.mean(0), law.mean[0], atol=0.06, rtol=0)
    torch.testing.assert_close(leaves.std(0), law.stddev[0], atol=0, rtol=0.06)


def test_glow_normalises_activations_inside_its_couplings_with_the_first_images():
    images = data.load("embedded")
    config = preset("smoke", "embedded", "glow")
    torch.manual_seed(0)
    model = Glow.build(config.model, images.shape, 0.3)
    inputs = []
    for module in model.modules():
        if isinstance(module, nn.LeakyReLU):
            module.register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    Glow(model, config, Accelerator(), images)
    assert len(inputs) == 2 * config.model.levels * config.model.depth
    for values in inputs:
        torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(values.shape[1]), atol=1e-3, rtol=0)
        torch.testing.assert_close(values.std((0, 2, 3)), torch.ones(values.shape[1]), atol=1e-3, rtol=0)
    inputs.clear()
    with torch.no_grad():
        model.log_density(images.batch(slice(0, 3)))
    assert max(float(values.mean((0, 2, 3)).abs().max()) for values in inputs) > 0.01  # set once, then kept
    last = [module.weight for module in model.modules() if isinstance(module, glow_module.ZeroConv)]
    assert len(last) == 2 * 2 + 1  # one for each step, and one for the split
    assert not any(bool(weight.any()) for weight in last)  # couplings start as the identity, the prior as N(0, I)


def test_glow_is_saved_whole(tmp_path):
    model = small_glow().float()
    config = ModelConfig(levels=2, depth=2, width=6)
    save_pretrained(model, tmp_path, method="glow", config=config, image=(1, 4, 4), dynamics=sr.Langevin())
    x = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(from_pretrained(tmp_path).model.log_density(x), model.log_density(x))


OLDER = {"glow": ("published_glow",), "ladder-vae": ("batch_norm",), "vae-iaf": ("gate",)}


@pytest.mark.parametrize("method", OLDER)
def test_models_saved_before_a_setting_existed_load_as_they_were(tmp_path, method):
    torch.manual_seed(0)
    config = preset("smoke", "embedded", method).model
    before = replace(config, **{name: settings.BEFORE[name] for name in OLDER[method]})
    model = METHODS[method].build(before, (1, 28, 28), 0.3)
    save_pretrained(model, tmp_path, method=method, config=before, image=(1, 28, 28), dynamics=sr.Langevin())
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    for name in OLDER[method]:
        del written["model"][name]
    path.write_text(json.dumps(written))
    again = from_pretrained(tmp_path)
    assert again.config == before != config
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[key])


def test_glow_frames_images_that_do_not_divide_and_refuses_masks():
    images = data.load("embedded")
    config = preset("smoke", "embedded", "glow")
    model = Glow.build(replace(config.model, levels=3), images.shape, 0.3)
    assert model.frame == (4, 4)
    learner = Glow(model, config, Accelerator(), images)
    assert Glow.sample(model, 2, torch.Generator().manual_seed(0)).shape == (2, 1, 28, 28)
    x = images.batch(slice(0, 4))
    with pytest.raises(NotPossibleError, match="whole images"):
        learner.update(Batch(x, torch.ones(4, 1, 28, 28, dtype=torch.bool), torch.arange(4)), 0.0, torch.Generator())
    with pytest.raises(NotPossibleError, match="measure nothing"):
        Glow.infer(model, x, sr.Langevin())


# --- log p(x) --------------------------------------------------------------------------------------


def test_annealed_importance_sampling_finds_the_exact_likelihood():
    decoder, x, generator = linear_problem((3, 4))
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    exact = exact_log_density(decoder, 0.3, x)
    estimate = annealed_importance(model, x, generator, stages=150, chains=32)
    torch.testing.assert_close(estimate, exact, atol=1.0, rtol=0)
    assert float((estimate - exact).mean()) == pytest.approx(0, abs=0.4)
    crude = annealed_importance(model, x, generator, stages=3, chains=1)
    assert (crude < exact).all()  # a bound that is loose with few stages


class Prior(Autoencoder):
    """Draws from the prior, so that weights are plain likelihoods."""

    def encode(self, x, eps):
        return Encoded(eps, self.log_prior(eps), torch.zeros(len(x)))


def test_importance_weights_approach_the_exact_likelihood_from_below():
    decoder, x, generator = linear_problem((1,))
    decoder.linear.weight.mul_(0.3)
    model = Prior(decoder, decoder.latent_shapes, 0.3)
    exact = exact_log_density(decoder, 0.3, x)
    few = torch.stack([importance_weighted(model, x, model.encode, generator, 1) for _ in range(200)]).mean(0)
    many = importance_weighted(model, x, model.encode, generator, 20_000)
    assert (few < exact).all()
    torch.testing.assert_close(many.double(), exact, atol=0.15, rtol=0)


def test_minus_the_conditional_free_energy_is_a_bound_only_where_the_map_does_not_fold():
    """Below the exact log p(x) of a linear model; above that by quadrature where long steps fold ``x = sin(4 z)``."""
    decoder, x, generator = linear_problem()
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    linear = -sr.free_energy(model, x, sr.Langevin(25, 0.005), entropy="conditional", generator=generator)
    assert (linear < exact_log_density(decoder, 0.3, x) + 0.5).all()
    folding = sr.GaussianModel(lambda z: torch.sin(4 * z[0]), [(1,)], 0.5).double()
    grid = torch.linspace(-9, 9, 9001, dtype=torch.float64)[:, None]
    one = torch.zeros(1, 1, dtype=torch.float64)
    joint = folding.log_prior((grid,)) + folding.log_likelihood(one.expand_as(grid), (grid,))
    exact = float(torch.logsumexp(joint, 0)) + math.log(18 / 9000)
    folded = sr.free_energy(folding, one, sr.Langevin(10, 0.4), entropy="conditional", samples=500, generator=generator)
    assert float(-folded) > exact + 5
    for method in ("short-run", "abp"):
        with pytest.raises(NotPossibleError, match="folds"):
            METHODS[method].lower_bound(model, x, sr.Langevin(25, 0.01), generator)


def test_what_is_reported_of_the_likelihood():
    """Against the exact likelihood of a linear model: the encoder's estimates in their order, and AIS for all."""
    decoder, x, generator = linear_problem(n=24)
    exact = exact_log_density(decoder, 0.3, x)
    torch.manual_seed(1)
    encoder = GaussianAutoencoder(decoder, IMAGE, 4, 0.3)
    fit(encoder, x, steps=300)
    dynamics = sr.Langevin(20, 0.01)
    found = {}
    for name, model in (("vae", encoder), ("short-run", sr.GaussianModel(decoder, decoder.latent_shapes, 0.3))):
        description = {"method": name, "image": IMAGE, "model": to_plain(ModelConfig()), "info": {}}
        found[name] = tasks.log_likelihood(Pretrained(model, dynamics, description), x, generator, stages=100)
        assert found[name]["annealed"] == pytest.approx(float(exact.mean()), abs=0.5)
        assert found[name]["annealed_error"] == pytest.approx(float(exact.std()) / 24**0.5, rel=0.1)
        bits = float(bits_per_dimension(exact, 64).mean())
        assert found[name]["annealed_bits"] == pytest.approx(bits, abs=0.5 / 64 / math.log(2))
        in_bits = found[name]["annealed_error"] / 64 / math.log(2)
        assert found[name]["annealed_bits_error"] == pytest.approx(in_bits)
    assert not any("bound" in key or "importance" in key for key in found["short-run"])
    vae = found["vae"]
    assert vae["lower_bound"] < vae["importance_weighted"] - 0.05
    assert vae["importance_weighted"] < float(exact.mean()) + 0.2
    shown = {name: compare.markdown([{"method": name, **values}]) for name, values in found.items()}
    assert f"{vae['importance_weighted_bits']:.2f} ± {vae['importance_weighted_bits_error']:.2f}" in shown["vae"]
    assert "± " in shown["short-run"]
    assert " - | - | " in shown["short-run"]


def test_bits_per_dimension_of_a_uniform_density():
    """Uniform over [-1 - 1/255, 1 + 1/255], which is 256 grey levels wide, costs 8 bits."""
    log_p = -10 * math.log(2 * 256 / 255)
    assert float(bits_per_dimension(torch.tensor([log_p]), 10)) == pytest.approx(8.0)


def test_published_settings():
    presets = {method: preset("paper", "svhn", method) for method in METHODS}
    for method, config in presets.items():
        assert config.iterations == 300_000
        if method != "glow":
            METHODS[method].build(config.model, (3, 32, 32), 0.3)
    abp = presets["abp"]
    assert (abp.steps, abp.step_size, abp.sigma) == (40, pytest.approx(0.3**2 / 2), (0.3, 0.3))
    assert all(presets[name].model.latent_sizes == (128,) for name in ("abp", "glo", "vae", "vae-iaf"))
    assert presets["ladder-vae"].model.latent_sizes == presets["short-run"].model.latent_sizes
    assert presets["ladder-vae"].kl_warm_up > 0
    glo = presets["glo"]
    assert (glo.optimiser, glo.learning_rates, glo.code_rate * glo.batch, glo.decay) == ("sgd", (1.0,), 10.0, False)
    assert glo_module.PCA_IMAGES == 24_576
    glow = presets["glow"].model
    assert (glow.levels, glow.depth, glow.width, glow.additive) == (3, 16, 512, True)
    glow = presets["glow"]
    assert (glow.batch, glow.learning_rates, glow.decay) == (64, (1e-3,), False)
    # the official code: rate * min(1, images seen / (10 epochs * 50,000))
    for iteration in (0, 999, 7811, 7812, 50_000):
        expected = 1e-3 * min(1.0, 64 * (iteration + 1) / 500_000)
        assert schedule(glow, iteration, 0.1)[0] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ValueError, match="authors' script has no vae"):
        preset("authors-script", "svhn", "vae")
