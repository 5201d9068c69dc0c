"""VAE and Ladder-VAE: their bounds, densities and batch normalisation, against equations written a second time."""

import os
import subprocess
import sys

import pytest
import torch
from linear_images import IMAGE, Linear, bound, exact_log_density, fit_encoder, linear_problem
from torch import nn

import shortrun as sr
from shortrun import data
from shortrun.learners import VAE, Batch, LadderVAE, Moment
from shortrun.learners.vae import first_without_traces
from shortrun.nets.encoders import GaussianAutoencoder, gaussian_kl, gaussian_log_density
from shortrun.nets.generators import TopDownGenerator
from shortrun.nets.iaf import FlowAutoencoder
from shortrun.nets.ladder import LadderAutoencoder
from shortrun.training.presets import preset

SMALL = VAE.Network(latent_sizes=(4,), channels=4, encoder_channels=4)


def orthogonal(decoder: Linear) -> None:
    """Columns of W orthogonal: the exact posterior is then diagonal, so that the bound can be tight."""
    q, _ = torch.linalg.qr(decoder.linear.weight)
    decoder.linear.weight.copy_(q * torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vae", "iaf"])
def test_elbo_stays_below_the_exact_likelihood_and_approaches_it(kind):
    decoder, x, _ = linear_problem()
    orthogonal(decoder)
    exact = exact_log_density(decoder, 0.3, x)
    torch.manual_seed(1)
    if kind == "vae":
        model = GaussianAutoencoder(decoder, decoder.latent_shapes, IMAGE, 4, 0.3)
    else:
        model = FlowAutoencoder(decoder, decoder.latent_shapes, IMAGE, 4, 2, 8, 0.3)
    before = bound(model, x)
    assert (before < exact).all()
    fit_encoder(model, x)
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


@pytest.mark.slow
def test_ladder_elbo_on_a_linear_gaussian_hierarchy():
    torch.manual_seed(0)
    decoder = LinearTopDown().requires_grad_(False)
    model = LadderAutoencoder(decoder, IMAGE, 4, 0.3)
    rng = torch.Generator().manual_seed(1)
    x = decoder(model.sample_prior(6, rng)) + 0.3 * torch.randn(6, *IMAGE, generator=rng)
    # the exact density: x is linear in the five noises, its matrix by autograd
    matrix = torch.autograd.functional.jacobian(
        lambda e: decoder((e[None, :2], e[None, 2:])).flatten(), torch.zeros(5)
    ).double()
    centre = decoder((torch.zeros(1, 2), torch.zeros(1, 3))).flatten().double()
    covariance = matrix @ matrix.T + 0.09 * torch.eye(64, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(centre, covariance).log_prob(x.flatten(1).double())
    before = bound(model, x)
    fit_encoder(model, x)
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
    plain = GaussianAutoencoder(generator, generator.latent_shapes, IMAGE, 4, 0.3)
    plain.trunk, plain.head = ladder.trunk, ladder.heads[0]
    x, eps = torch.rand(4, *IMAGE), ladder.sample_prior(4)
    for a, b in zip(ladder.encode(x, eps), plain.encode(x, eps), strict=True):
        torch.testing.assert_close(a, b)


def normed_ladder():
    """A Ladder-VAE with batch normalisation that has seen a few batches, in the mode for learning, and images."""
    torch.manual_seed(0)
    config = preset("smoke", "embedded", "ladder-vae")
    images = data.load("embedded")
    model = LadderVAE.build(config.network, images.shape, 0.3)
    learner = LadderVAE(model, learning_rate=config.run.learning_rates[0], settings=config.settings)
    state = learner.init(0, images)
    for i in range(3):
        rows = torch.arange(8 * i, 8 * i + 8)
        state, _ = learner.update(state, Batch(images.batch(rows), None, rows), Moment(share=1.0))
    return learner, state, images.batch(slice(0, 6))


def test_the_upward_pass_of_the_ladder_is_normalised_over_the_batch():
    """Its equations a second time: statistics of the batch when learning, running averages of them in use."""
    learner, _, x = normed_ladder()
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
    learner, state, x = normed_ladder()
    model, dynamics = learner.model, state.dynamics
    before = {key: value.clone() for key, value in model.state_dict().items()}
    mask = torch.ones(1, 1, 28, 28, dtype=torch.bool)
    mask[..., 14:] = False
    hidden = mask.expand(6, -1, -1, -1)

    def sources(count):
        return [torch.Generator().manual_seed(i) for i in range(count)]

    ways = {
        "infer": lambda x: model.infer(x, dynamics, rng=sources(len(x))).z[0],
        "draw": lambda x: model.draw(x, dynamics, rng=sources(len(x))).z[0],
        "inpaint": lambda x: model.draw(x, dynamics, mask=hidden[: len(x)], rng=sources(len(x))).z[0],
        "reconstruct": lambda x: learner.reconstruct(state, x, sources(len(x))),
        "bound": lambda x: model.lower_bound(x, sources(len(x))),
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
    step = first_without_traces(norm, list(norm.buffers()))
    x = torch.rand(4, 2, 3, 3)
    step(x)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    step(x)
    again(x)
    torch.testing.assert_close(norm.running_mean, again.running_mean)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.slow
def test_batch_normalisation_over_two_processes_is_that_of_one(tmp_path):
    """Two gloo processes with 5 and 4 images, against one with all 9: weights and running statistics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = ["train", "--preset", "smoke", "--method", "ladder-vae", "--iterations", "3", "--batch", "9"]
    for name, start in (("one", []), ("two", launcher)):
        line = [sys.executable, *start, "-m", "shortrun.cli", *words, "--out", str(tmp_path / name)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    one, two = (sr.load(tmp_path / name).model.state_dict() for name in ("one", "two"))
    assert "trunk.norms.0.running_var" in one
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=3e-4 if "running" not in key else 3e-5, rtol=1e-3)


def test_gaussian_formulas_against_torch_distributions():
    mean, log_sd, z = torch.randn(3, 4, 5).double()
    q = torch.distributions.Normal(mean, log_sd.exp())
    torch.testing.assert_close(gaussian_log_density(z, mean, log_sd), q.log_prob(z).sum(1))
    prior = torch.distributions.Normal(torch.zeros(4, 5).double(), 1.0)
    torch.testing.assert_close(gaussian_kl(mean, log_sd), torch.distributions.kl_divergence(q, prior).sum(1))


def test_draws_of_an_encoder_spread_around_its_centre_as_it_says():
    torch.manual_seed(0)
    model = VAE.build(SMALL, (1, 28, 28), 0.3)
    x = torch.rand(1, 1, 28, 28) * 2 - 1
    mean, log_sd = model.posterior(x)
    z = model.draw(x.expand(4000, -1, -1, -1), sr.Langevin(), rng=torch.Generator().manual_seed(0)).z[0]
    torch.testing.assert_close(z.mean(0), mean[0], atol=0.08, rtol=0)
    torch.testing.assert_close(z.std(0), log_sd[0].exp(), atol=0, rtol=0.08)
    torch.testing.assert_close(model.infer(x, sr.Langevin()).z[0], mean)


def test_hidden_pixels_do_not_reach_the_encoder():
    torch.manual_seed(0)
    model = VAE.build(SMALL, (1, 28, 28), 0.3)
    x = torch.rand(2, 1, 28, 28)
    mask = torch.ones(2, 1, 28, 28, dtype=torch.bool)
    mask[:, :, 14:] = False
    spoiled = torch.where(mask, x, torch.tensor(9.0))
    results = [
        model.infer(images, sr.Langevin(), mask=mask, rng=torch.Generator().manual_seed(0)).z[0]
        for images in (x, spoiled)
    ]
    assert torch.equal(*results)
