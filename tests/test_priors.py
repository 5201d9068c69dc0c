"""Learned priors: densities against quadrature and torch.distributions, draws against densities, files, and use."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from small_runs import SMOKE, train
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import shortrun as sr
from shortrun import data
from shortrun.cli import main
from shortrun.core.latents import flatten
from shortrun.core.model import sample_from
from shortrun.fitting import _fit_prior, _interruptible
from shortrun.learners import learner_class
from shortrun.metrics.likelihood import annealed_importance
from shortrun.priors import GaussianPrior, WithPrior, fit_prior, prior_class
from shortrun.priors.base import are_typical, shrunk_covariance
from shortrun.priors.energy import EnergyPrior
from shortrun.priors.starts import TEMPERATURE, LinearisedMixture
from shortrun.training.loop import Loop
from shortrun.training.model_folder import read_prior, write_prior
from shortrun.training.presets import preset

KINDS = ("gaussian", "mixture", "flow", "energy")
CENTRES = torch.tensor([[0.0, 3.0], [2.6, -1.5], [-2.6, -1.5]])


def known_mixture(dtype=torch.float32):
    """Three clusters of unlike weight and shape, far from the origin and each other."""
    factors = torch.tensor([[[0.8, 0.0], [0.3, 0.5]], [[0.5, 0.0], [-0.2, 0.7]], [[0.4, 0.0], [0.0, 0.4]]])
    clusters = MultivariateNormal((CENTRES + 5).to(dtype), scale_tril=factors.to(dtype))
    return MixtureSameFamily(Categorical(torch.tensor([0.5, 0.3, 0.2], dtype=dtype)), clusters)


def draws(count=3000, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return known_mixture().sample((count,))


def random_prior(kind, size):
    """With parameters that mean nothing in particular, in double precision."""
    torch.manual_seed(1)
    prior = prior_class(kind)(size, **({"components": 3} if kind == "mixture" else {})).double()
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter += 0.04 * torch.randn_like(parameter)  # smooth, so that a grid can integrate it
    prior.mean.copy_(torch.randn(size))
    prior.factor.copy_(torch.linalg.cholesky(torch.cov(torch.randn(size, 5 * size + 5)).reshape(size, size)))
    if kind == "mixture":
        prior.weights.copy_(torch.tensor([0.2, 0.5, 0.3]))
        prior.centres.copy_(torch.randn(3, size))
        prior.factors.copy_(torch.eye(size) * torch.tensor([0.5, 0.8, 1.2])[:, None, None])
        if size > 1:
            prior.factors[:, -1, 0] = 0.4
    if kind == "energy":
        prior.normalise(torch.Generator().manual_seed(0))
    return prior


@pytest.mark.parametrize("kind", KINDS)
def test_densities_integrate_to_one_on_a_line(kind):
    prior = random_prior(kind, 1)

    width, count = float(prior.factor[0, 0]), 20_001
    z = float(prior.mean[0]) + width * torch.linspace(-12, 12, count, dtype=torch.float64)
    with torch.no_grad():
        total = float(torch.trapezoid(prior.log_density(z[:, None]).exp(), z))
    # the normalising constant of the energy is itself estimated
    assert total == pytest.approx(1, abs=0.02 if kind == "energy" else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_densities_integrate_to_one_in_the_plane_and_draws_follow_them(kind):
    prior = random_prior(kind, 2)
    line = torch.linspace(-8, 8, 401, dtype=torch.float64)
    y = torch.cartesian_prod(line, line)
    z = prior.mean + y @ prior.factor.T  # a grid of equal cells, sheared
    with torch.no_grad():
        mass = prior.log_density(z).exp() * (line[1] - line[0]) ** 2 * prior.factor.diagonal().prod()
    assert float(mass.sum()) == pytest.approx(1, abs=0.03 if kind == "energy" else 2e-4)
    mass = mass / mass.sum()
    count = 4000
    drawn = prior.sample(count, torch.Generator().manual_seed(0))
    for statistic in (
        lambda z: z[:, 0], lambda z: z[:, 1], lambda z: z[:, 0] * z[:, 1], lambda z: z[:, 0] ** 2,
        lambda z: (z[:, 1] > 0).double(), lambda z: torch.cos(z.sum(1)),
    ):  # fmt: skip
        wanted = float((statistic(z) * mass).sum())
        found = statistic(drawn)
        # chains of the energy have steps of finite length, so their law is a little wider
        slack = 0.02 * float(found.abs().mean()) if kind == "energy" else 0.0
        assert abs(float(found.mean()) - wanted) < 4.5 * float(found.std()) / math.sqrt(count) + slack


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_finite_differences(kind):
    prior = random_prior(kind, 3).requires_grad_(False)
    z = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(prior.log_density, z, eps=1e-6, atol=1e-5)


def test_a_mixture_has_the_density_of_torch_distributions():
    prior = random_prior("mixture", 3)
    clusters = MultivariateNormal(prior.mean + prior.centres @ prior.factor.T, scale_tril=prior.factor @ prior.factors)
    expected = MixtureSameFamily(Categorical(prior.weights), clusters)
    z = 2 * torch.randn(50, 3, dtype=torch.float64)
    torch.testing.assert_close(prior.log_density(z), expected.log_prob(z))


@pytest.mark.parametrize("count", [8, 40, 3000])
def test_the_covariance_is_that_of_ledoit_and_wolf(count):
    z = torch.randn(count, 10, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 3, 10)
    expected = LedoitWolf().fit(z.double().numpy()).covariance_
    np.testing.assert_allclose(shrunk_covariance(z).numpy(), expected, rtol=1e-6, atol=1e-7)


def test_a_mixture_that_is_fitted_to_a_known_one_finds_it():
    prior, law = fit_prior(draws(6000), "mixture"), known_mixture()
    assert prior.components == 3
    centres = prior.mean + prior.centres @ prior.factor.T
    order = torch.cdist(CENTRES + 5, centres).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert torch.allclose(centres[order], CENTRES + 5, atol=0.06)
    assert torch.allclose(prior.weights[order], law.mixture_distribution.probs, atol=0.02)
    factors = (prior.factor @ prior.factors)[order]
    found, wanted = factors @ factors.mT, law.component_distribution.covariance_matrix
    assert torch.allclose(found, wanted, atol=0.06)
    unseen = draws(4000, seed=1)
    gap = law.log_prob(unseen) - prior.log_density(unseen)
    assert abs(float(gap.mean())) < 0.02


def test_latents_of_chains_that_went_astray_do_not_count():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 30, generator=rng)
    astray = z.clone()
    astray[:40] *= torch.linspace(4, 40, 40)[:, None]
    assert are_typical(z).all()
    assert are_typical(draws()).all()  # clusters are not outliers
    prior = fit_prior(astray, "gaussian")
    assert prior.info["outliers"] == 40
    torch.testing.assert_close(prior.factor, torch.eye(30), atol=0.12, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["energy", "flow"])
def test_networks_recover_a_known_density(kind):
    torch.manual_seed(0)
    prior = EnergyPrior(2, width=64) if kind == "energy" else prior_class("flow")(2, transforms=3, width=64)
    prior.fit(draws(4000), draws(500, seed=1), torch.Generator().manual_seed(0))
    line = torch.linspace(-1, 11, 241)
    z = torch.cartesian_prod(line, line)
    law = known_mixture()
    with torch.no_grad():
        gap = law.log_prob(z) - prior.log_density(z)
    divergence = float((law.log_prob(z).exp() * gap).sum() * (line[1] - line[0]) ** 2)
    gaussian = fit_prior(draws(4000), "gaussian")
    apart = float((law.log_prob(draws(4000, seed=2)) - gaussian.log_density(draws(4000, seed=2))).mean())
    assert apart > 1.2  # what there was to learn
    assert divergence < 0.15


def test_few_latents_are_enough_for_a_gaussian_and_a_mixture_of_one():
    z = torch.randn(25, 40, generator=torch.Generator().manual_seed(0))
    for kind in ("gaussian", "mixture"):
        prior = fit_prior(z, kind)
        assert prior.sample(5, torch.Generator().manual_seed(0)).isfinite().all()
        assert prior.log_density(z).isfinite().all()


@pytest.mark.parametrize(
    ("z", "kind", "message"),
    [
        (torch.zeros(5, 2), "gaussian", r"latents have shape \(5, 2\); expected \(n, d\) with n at least 20"),
        (torch.full((50, 2), math.nan), "gaussian", "NaN or infinite"),
        (torch.zeros(50, 2), "uniform", "prior is 'uniform'; accepted: normal, gaussian, mixture, flow, energy"),
    ],
)
def test_bad_latents_are_refused(z, kind, message):
    with pytest.raises(ValueError, match=message):
        fit_prior(z, kind)


def test_one_generator_per_example_makes_a_draw_independent_of_its_batch():
    for kind in KINDS:
        prior = random_prior(kind, 2)
        seeds = [torch.Generator().manual_seed(i) for i in range(4)]
        together = prior.sample(4, seeds)
        alone = prior.sample(1, [torch.Generator().manual_seed(2)])
        torch.testing.assert_close(together[2:3], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_keeps_every_bit(kind, tmp_path):
    prior = random_prior(kind, 3).float()
    prior.info = {"latents": 7}
    write_prior(tmp_path, prior)
    again = read_prior(tmp_path)
    assert (again.kind, again.info) == (kind, {"latents": 7})
    z = torch.randn(5, 3)
    assert torch.equal(again.log_density(z), prior.log_density(z))
    first, second = (each.sample(5, torch.Generator().manual_seed(0)) for each in (prior, again))
    assert torch.equal(first, second)


# --- models with a learned prior -----------------------------------------------------------------------


def linear_model(sigma=0.5):
    """x = W z + sigma eps with z ~ N(m, R): log p(x) in closed form."""
    torch.manual_seed(0)  # of the examples that tests draw from the evidence
    weights = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = sr.GaussianModel(lambda z: z[0] @ weights, [(2,)], sigma).double()
    factor = torch.tensor([[1.5, 0.0], [0.7, 0.4]], dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
    prior = GaussianPrior.of(mean, factor @ factor.T).double()
    prior.mean.copy_(mean)
    prior.factor.copy_(factor)
    covariance = weights.T @ factor @ factor.T @ weights + sigma**2 * torch.eye(4, dtype=torch.float64)
    evidence = MultivariateNormal(mean @ weights, covariance)
    return WithPrior(model, prior), evidence


def test_likelihoods_are_those_of_the_learned_prior():
    model, evidence = linear_model()
    x = evidence.sample((5,))
    found = annealed_importance(model, x, torch.Generator().manual_seed(0), stages=200, chains=64)
    torch.testing.assert_close(found, evidence.log_prob(x), atol=0.2, rtol=0)


def test_the_entropies_start_from_the_covariance_of_the_learned_prior():
    """With no step at all q is the prior, and the free energy E_p[-log p(x | z)] in closed form."""
    model, evidence = linear_model()
    x = evidence.sample((3,))
    mean, factor = model.prior.mean, model.prior.factor
    weights = model.model.decoder((torch.eye(2, dtype=torch.float64),))
    expected = -model.log_likelihood(x, (mean.expand(3, 2),)) + 0.5 * (factor.T @ weights).square().sum() / 0.25
    how = sr.Estimation(estimator="exact", chains=4000)
    found = sr.free_energy(model, x, sr.Langevin(1, 1e-9), how, rng=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
    # long and slow: q is the posterior, and the free energy minus the evidence
    converged = sr.free_energy(
        model, x, sr.Langevin(300, 0.01), sr.Estimation(estimator="exact", chains=200),
        rng=torch.Generator().manual_seed(0),
    )  # fmt: skip
    torch.testing.assert_close(converged, -evidence.log_prob(x), atol=0.1, rtol=0)


def test_a_frozen_model_with_a_learned_prior_infers_alike():
    trained = sr.load("mnist-small")
    size = sum(shape[0] for shape in trained.model.latent_shapes)
    prior = GaussianPrior.of(torch.zeros(size), torch.diag(torch.linspace(0.5, 2, size)))
    model = WithPrior(trained.model, prior)
    x = trained.prepare(data.load("embedded", "test").batch(slice(0, 4)))
    frozen = model.frozen()
    z = model.sample_prior(4, torch.Generator().manual_seed(0))
    wanted = model.log_prior(z) + model.log_likelihood(x, z)
    found = frozen.log_prior(z) + frozen.log_likelihood(frozen.arrange(x), z)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("learning", [True, False])
def test_a_model_keeps_its_mode_when_it_is_drawn_from_with_a_learned_prior(learning):
    model = sr.GaussianModel(torch.nn.Sequential(Top(), torch.nn.BatchNorm1d(3)), [(2,)]).train(learning)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    joint = WithPrior(model, GaussianPrior.of(torch.zeros(2), torch.eye(2)))
    assert sample_from(joint, 5, torch.Generator().manual_seed(0)).shape == (5, 3)
    assert all(module.training is learning for module in model.modules())
    for name, tensor in model.state_dict().items():  # batch normalisation has learned nothing
        assert torch.equal(tensor, before[name])
    assert (hasattr(joint, "sigma"), hasattr(joint, "prepare")) == (True, True)
    assert not hasattr(WithPrior(sr.LinearGaussian(torch.ones(2, 3), 0.5), joint.prior), "prepare")


class Top(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

    def forward(self, z):
        return super().forward(z[0])


# --- starts for hidden pixels --------------------------------------------------------------------------


def test_starts_of_a_linear_model_are_draws_from_its_posterior():
    model, evidence = linear_model()
    x = evidence.sample((2,))
    mask = torch.tensor([[True, False, True, True]])
    rng = torch.Generator().manual_seed(0)
    guide = LinearisedMixture(model.decode, model.prior, model.latent_shapes, 0.5, rng)
    guide.maps, guide.base, guide.variances = exact_maps(model)  # without the ridge of the regression
    count = 20_000
    drawn = torch.stack([z[0] for z in guide.draw(torch.where(mask, x, 1e9), mask, count, rng)])
    weights = model.model.decoder((torch.eye(2, dtype=torch.float64),))[:, mask[0]]
    prior = torch.linalg.inv(model.prior.factor @ model.prior.factor.T)
    covariance = torch.linalg.inv(prior + weights @ weights.T / 0.25)
    wanted = (prior @ model.prior.mean + x[:, mask[0]] @ weights.T / 0.25) @ covariance
    deviation = covariance.diagonal().sqrt()
    assert ((drawn.mean(0) - wanted) / deviation * math.sqrt(count)).abs().max() < 4.5
    for i in range(2):
        torch.testing.assert_close(drawn[:, i].T.cov(), covariance, rtol=0.05, atol=0.01)


def exact_maps(model):
    weights = model.model.decoder((torch.eye(2, dtype=torch.float64),))
    base, maps = model.prior.mean @ weights, model.prior.factor.T @ weights
    return maps[None], base[None], torch.zeros(1, 4, dtype=torch.float64)


def test_the_regression_finds_the_map_of_a_linear_decoder():
    model, _ = linear_model()
    guide = LinearisedMixture(model.decode, model.prior, model.latent_shapes, 0.5, torch.Generator().manual_seed(0))
    guide_maps, guide_base, _ = exact_maps(model)
    torch.testing.assert_close(guide.maps, guide_maps, rtol=0.3, atol=0.15)  # ten draws, and a ridge
    torch.testing.assert_close(guide.base, guide_base, rtol=0.3, atol=0.15)


def test_components_are_chosen_by_their_tempered_evidence_and_spread_evenly():
    prior = random_prior("mixture", 2)
    weights = torch.tensor([[1.0, 0.5, -1.0], [0.3, -2.0, 0.4]], dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    guide = LinearisedMixture(lambda z: z[0] @ weights, prior, [(2,)], 0.5, rng)
    guide.base, guide.maps = guide.centres @ weights, guide.factors.mT @ weights
    guide.variances.zero_()
    x = torch.tensor([[0.2, -0.1, 0.4]], dtype=torch.float64)
    covariance = guide.maps.mT @ guide.maps + 0.25 * torch.eye(3, dtype=torch.float64)
    evidence = MultivariateNormal(guide.base, covariance).log_prob(x)
    wanted = torch.softmax(prior.weights.log() + evidence / TEMPERATURE, 0)
    marked = guide.centres.clone()
    guide.centres, guide.factors = marked, torch.zeros_like(guide.factors)  # so that a start shows its component
    count = 50
    drawn = torch.stack([z[0] for z in guide.draw(x, torch.ones_like(x).bool(), count, rng)])[:, 0]
    found = torch.stack([(drawn == centre).all(1).sum() for centre in marked])
    assert int(found.sum()) == count
    assert (found - count * wanted).abs().max() <= 1.0 + 1e-9  # systematic: never more than one off


def test_inpainting_with_a_learned_prior_sees_no_hidden_pixel_and_can_be_turned_off(run):
    trained = sr.load(run)
    x = trained.prepare(data.load("embedded", "test").batch(slice(0, 5)))
    mask = sr.make_mask("lower-half", x)
    spoiled = torch.where(mask.expand_as(x), x, 0.9)
    first, second = (trained.inpaint(each, mask, 3, keep_known=False) for each in (x, spoiled))
    assert torch.equal(first, second)
    plain = trained.inpaint(x, mask, 3, with_prior=False)
    trained.prior = None
    assert torch.equal(trained.inpaint(x, mask, 3), plain)
    assert not torch.equal(first, plain)
    random = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5  # unlike masks
    assert sr.load(run).inpaint(x, random, 2).isfinite().all()


# --- training and use ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prior") / "run"
    train(SMOKE, folder)
    return folder


def test_with_normal_nothing_changes_to_the_bit(run, tmp_path):
    train(SMOKE.changed(prior="normal"), tmp_path / "plain")
    plain, learned = sr.load(tmp_path / "plain"), sr.load(run)
    assert plain.prior is None
    assert learned.prior.kind == "mixture"
    assert not (tmp_path / "plain" / "model" / "prior.safetensors").exists()
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, learned.model.state_dict()[name])
    assert torch.equal(plain.sample(3), learned.sample(3, prior="normal"))
    assert torch.equal(plain.sample(3, prior="normal"), plain.sample(3))
    assert not torch.equal(learned.sample(3), learned.sample(3, prior="normal"))
    x = data.load("embedded", "test").batch(slice(0, 3))
    assert torch.equal(plain.reconstruct(x), learned.reconstruct(x))
    assert not torch.equal(learned.reconstruct(x), learned.reconstruct(x, with_prior=True))
    assert torch.equal(plain.reconstruct(x), plain.reconstruct(x, with_prior=True))


def test_the_prior_is_that_of_the_latents_of_training_images(run):
    trained = sr.load(run)
    seen = data.load("embedded", "train")
    z = flatten(trained.infer(seen.batch(seen.some(600))))
    prior = trained.fit_prior(seen.batch(seen.some(600)), "gaussian", seed=1)
    assert trained.prior is prior
    drawn = flatten(trained.sample_latents(20_000, torch.Generator().manual_seed(0)))
    assert ((drawn.mean(0) - z.mean(0)).abs() < 0.2 * z.std(0).clamp_min(1)).all()
    assert torch.allclose(drawn.std(0), z.std(0), rtol=0.2)
    assert prior.info["examples"] == 600
    assert 580 < prior.info["latents"] <= 600  # chains that diverged do not count
    assert prior.info["log_density"] > prior.info["log_density_normal"]
    assert prior.info["largest_variance"] < 1.5
    assert trained.fit_prior(seen.batch(slice(0, 5)), "normal") is None
    assert trained.prior is None
    with pytest.raises(ValueError, match="accepted: learned, normal"):
        trained.sample(3, prior="mixture")


def test_hidden_pixels_do_not_reach_the_prior(run):
    trained = sr.load(run)
    x = trained.prepare(data.load("embedded", "train").batch(slice(0, 60)))
    mask = sr.make_mask("lower-half", x)
    hidden = torch.where(mask.expand_as(x), x, 0.7)
    first = trained.fit_prior(x, "gaussian", mask=mask)
    second = trained.fit_prior(hidden, "gaussian", mask=mask)
    assert torch.equal(first.factor, second.factor)


def test_a_masked_run_fits_its_prior_to_what_it_may_see(tmp_path):
    images = data.load("embedded", "train").batch(slice(0, 40))
    spoiled = images.clone()
    spoiled[:, :, 14:] = 0.3
    config = SMOKE.changed(mask="lower-half", prior="gaussian", prior_images=40)
    first, second = (sr.fit(None, x, config=config, quiet=True) for x in (images, spoiled))
    assert torch.equal(first.prior.factor, second.prior.factor)


def test_resuming_a_finished_run_keeps_its_prior_and_more_training_replaces_it(run, tmp_path):
    folder = tmp_path / "run"
    trained = train(SMOKE, folder)
    before = (folder / "model" / "prior.safetensors").read_bytes()
    train(SMOKE, folder, resume=True)
    assert (folder / "model" / "prior.safetensors").read_bytes() == before
    train(SMOKE.changed(iterations=8), folder, resume=True)
    again = sr.load(folder)
    assert again.prior.info["iterations"] == 8
    assert not torch.equal(again.prior.factor, trained.prior.factor)


def test_interrupted_while_it_learns_the_prior_a_model_keeps_that_of_its_last_iterations(tmp_path):
    class Signalling(Loop):
        def some(self, count):
            os.kill(os.getpid(), signal.SIGINT)
            return super().some(count)

    examples = data.load("embedded", "train")
    model = learner_class("short-run").build(SMOKE.network, examples.shape, 0.3)
    loop = Signalling(SMOKE, model, examples, folder=tmp_path)
    while loop.share < 1:
        loop.advance()
    loop.save()
    with _interruptible() as interrupted:
        _fit_prior(loop, interrupted, quiet=True)
    assert interrupted == ["SIGINT"]
    assert sr.load(tmp_path).prior.kind == "gaussian"


def test_too_few_examples_for_a_prior_do_not_spoil_the_training(tmp_path):
    config = SMOKE.changed(iterations=4)
    trained = sr.fit(None, data.load("embedded", "train").batch(slice(0, 12)), config=config, quiet=True)
    assert trained.prior.kind == "gaussian"  # that of the last iterations
    assert trained.sample(2).isfinite().all()


def test_the_command_saves_what_it_learns_and_shows_it(run, tmp_path, capsys):
    folder, out = tmp_path / "mine", tmp_path / "out"
    main(["prior", str(run), "--kind", "gaussian", "--images", "80", "--save", str(folder), "--out", str(out)])
    values = json.loads((out / "prior.json").read_text())
    assert (values["kind"], values["latents"]) == ("gaussian", 80)
    assert (out / "prior.png").is_file()
    assert sr.load(folder).prior.kind == "gaussian"
    assert sr.load(run).prior.kind == "mixture"
    main(["prior", str(folder), "--kind", "normal", "--images", "5", "--out", str(out)])
    assert sr.load(folder).prior is None


def test_a_prior_that_cannot_be_read_is_named(run, tmp_path):
    sr.load(run).save(tmp_path / "model")
    path = tmp_path / "model" / "prior.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"prior.safetensors cannot be read"):
        sr.load(tmp_path / "model")
    write_prior(tmp_path / "model", random_prior("gaussian", 3))
    with pytest.raises(ValueError, match="a prior of 3 latents; the model has others"):
        sr.load(tmp_path / "model")


def test_every_method_with_latents_gets_a_prior(tmp_path):
    for method in ("abp", "glo", "vae", "vae-iaf", "ladder-vae"):
        trained = train(preset("smoke", "embedded", method).changed(prior_images=40, prior="gaussian"))
        assert trained.prior.kind == "gaussian", method
        assert trained.sample(2).shape == (2, 1, 28, 28)
    glow = train(preset("smoke", "embedded", "glow"))
    assert glow.prior is None
    with pytest.raises(ValueError, match="glow has no latents"):
        glow.fit_prior(torch.zeros(30, 1, 28, 28), "gaussian")
