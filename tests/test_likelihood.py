"""Estimates of log p(x), against exact ones of linear models and quadrature."""

import math

import pytest
import torch
from linear_images import IMAGE, exact_log_density, fit_encoder, linear_problem

import shortrun as sr
from shortrun.core.model import NotPossibleError
from shortrun.learners import learner_class
from shortrun.metrics.likelihood import annealed_importance, bits_per_dimension, importance_weighted
from shortrun.nets.encoders import Autoencoder, Encoded, GaussianAutoencoder
from shortrun.studies import compare
from shortrun.training.model_folder import Description


def test_annealed_importance_sampling_finds_the_exact_likelihood():
    decoder, x, rng = linear_problem((3, 4))
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    exact = exact_log_density(decoder, 0.3, x)
    estimate = annealed_importance(model, x, rng, stages=150, chains=32)
    torch.testing.assert_close(estimate, exact, atol=1.0, rtol=0)
    assert float((estimate - exact).mean()) == pytest.approx(0, abs=0.4)
    crude = annealed_importance(model, x, rng, stages=3, chains=1)
    assert (crude < exact).all()  # a bound that is loose with few stages


class Prior(Autoencoder):
    """Draws from the prior, so that weights are plain likelihoods."""

    def encode(self, x, eps):
        return Encoded(eps, self.log_prior(eps), torch.zeros(len(x)))


@pytest.mark.slow
def test_importance_weights_approach_the_exact_likelihood_from_below():
    decoder, x, rng = linear_problem((1,))
    decoder.linear.weight.mul_(0.3)
    model = Prior(decoder, decoder.latent_shapes, 0.3)
    exact = exact_log_density(decoder, 0.3, x)
    few = torch.stack([importance_weighted(model, x, model.encode, rng, 1) for _ in range(200)]).mean(0)
    many = importance_weighted(model, x, model.encode, rng, 20_000)
    assert (few < exact).all()
    torch.testing.assert_close(many.double(), exact, atol=0.15, rtol=0)


def test_minus_the_conditional_free_energy_is_a_bound_only_where_the_map_does_not_fold():
    """Below the exact log p(x) of a linear model; above that by quadrature where long steps fold ``x = sin(4 z)``."""
    decoder, x, rng = linear_problem()
    model = sr.GaussianModel(decoder, decoder.latent_shapes, 0.3)
    linear = -sr.free_energy(model, x, sr.Langevin(25, 0.005), sr.Estimation("conditional"), rng=rng)
    assert (linear < exact_log_density(decoder, 0.3, x) + 0.5).all()
    folding = sr.GaussianModel(lambda z: torch.sin(4 * z[0]), [(1,)], 0.5).double()
    grid = torch.linspace(-9, 9, 9001, dtype=torch.float64)[:, None]
    one = torch.zeros(1, 1, dtype=torch.float64)
    joint = folding.log_prior((grid,)) + folding.log_likelihood(one.expand_as(grid), (grid,))
    exact = float(torch.logsumexp(joint, 0)) + math.log(18 / 9000)
    folded = sr.free_energy(folding, one, sr.Langevin(10, 0.4), sr.Estimation("conditional", chains=500), rng=rng)
    assert float(-folded) > exact + 5
    for method in ("short-run", "abp"):
        with pytest.raises(NotPossibleError, match="folds"):
            learner_class(method).adopt(model, None, IMAGE).lower_bound(x, rng)


@pytest.mark.slow
def test_what_is_reported_of_the_likelihood():
    """Against the exact likelihood of a linear model: the encoder's estimates in their order, and AIS for all."""
    decoder, x, rng = linear_problem(n=24)
    exact = exact_log_density(decoder, 0.3, x)
    torch.manual_seed(1)
    encoder = GaussianAutoencoder(decoder, decoder.latent_shapes, IMAGE, 4, 0.3)
    fit_encoder(encoder, x, steps=300)
    dynamics = sr.Langevin(20, 0.01)
    found = {}
    for name, model in (("vae", encoder), ("short-run", sr.GaussianModel(decoder, decoder.latent_shapes, 0.3))):
        description = Description(name, learner_class(name).Network(), IMAGE, dynamics)
        found[name] = sr.Trained(model, description).log_likelihood(x, stages=100, rng=rng)
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
