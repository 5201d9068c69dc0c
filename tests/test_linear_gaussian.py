"""Estimates against the closed forms of a linear-Gaussian model, and those against a second derivation."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import linear_problem
from torch.distributions import MultivariateNormal, kl_divergence

import shortrun as sr
from shortrun.core.free_energy import Estimation, free_energy_details
from shortrun.core.tune import default_grid

SETTINGS = [
    sr.Langevin(25, 0.008),
    sr.Langevin(25, 0.008, noise=False),
    sr.Langevin(3, [0.01, 0.006, 0.002]),
    sr.Langevin(3, [[0.01, 0.003], [0.004, 0.006], [0.002, 0.001]]),
    sr.Langevin(6, [0.01, 0.008, 0.006, 0.004, 0.003, 0.002], quiet_steps=2),
    sr.Langevin(25, 0.008, momentum=0.6),
    sr.Langevin(4, [0.01, 0.008, 0.006, 0.004], momentum=0.3, quiet_steps=1),
]


def test_posterior_and_evidence_by_conditioning_the_joint_gaussian():
    exact, x = linear_problem()
    d, size = exact.weight.shape[1], exact.weight.shape[0]
    # joint covariance of (z, x)
    top = torch.cat([torch.eye(d).double(), exact.weight.T], 1)
    evidence = exact.weight @ exact.weight.T + exact.sigma**2 * torch.eye(size).double()
    joint = torch.cat([top, torch.cat([exact.weight, evidence], 1)])
    gain = joint[:d, d:] @ torch.linalg.inv(joint[d:, d:])
    posterior = exact.posterior(x)
    torch.testing.assert_close(posterior.mean, (x - exact.bias) @ gain.T)
    torch.testing.assert_close(posterior.covariance, joint[:d, :d] - gain @ joint[d:, :d])
    torch.testing.assert_close(exact.log_evidence(x), MultivariateNormal(exact.bias, joint[d:, d:]).log_prob(x))


@pytest.mark.parametrize("dynamics", [s for s in SETTINGS if s.noise])
def test_kl_and_entropy_are_those_of_torch_distributions(dynamics):
    exact, x = linear_problem()
    law, posterior = exact.short_run(x, dynamics), exact.posterior(x)
    q = MultivariateNormal(law.mean, law.covariance)
    p = MultivariateNormal(posterior.mean, posterior.covariance)
    torch.testing.assert_close(exact.kl(x, dynamics), kl_divergence(q, p))
    torch.testing.assert_close(law.entropy().expand(len(x)), q.entropy())


@pytest.mark.parametrize("dynamics", [SETTINGS[0], SETTINGS[3]])
def test_steps_without_noise_at_the_end(dynamics, rng):
    """z_K = A_K ... A_{k+1} z_k + drift: the mean is that of the whole chain, the covariance that of the first k steps
    carried on by the others."""
    exact, x = linear_problem()
    count, quiet = 20_000, 2
    many = x[:1].expand(count, -1)
    quiet_dynamics = replace(dynamics, quiet_steps=quiet)
    z, diagnostics = sr.infer_with_diagnostics(exact.model(), many, quiet_dynamics, rng=rng)
    found = torch.cat(z, 1)
    noisy = sr.Langevin(dynamics.steps - quiet, dynamics.table(2)[:-quiet])
    covariance = exact.short_run(x[:1], noisy).covariance
    for matrix, _ in exact._step_matrices(dynamics)[-quiet:]:
        covariance = matrix @ covariance @ matrix.T
    variances = covariance.diagonal()
    mean = exact.short_run(x[:1], dynamics).mean[0]
    assert ((found.mean(0) - mean) / (variances / count).sqrt()).abs().max() < 4.5
    spread = ((variances[:, None] * variances + covariance**2) / count).sqrt()
    assert ((found.T.cov() - covariance) / spread).abs().max() < 4.5
    assert not diagnostics.divergent[-1].any()
    torch.testing.assert_close(exact.short_run(x[:1], quiet_dynamics).covariance, covariance)


@pytest.mark.parametrize("dynamics", SETTINGS)
def test_mean_and_covariance_of_chains(dynamics, rng):
    exact, x = linear_problem()
    count = 40_000
    many = x[:1].expand(count, -1)
    z = torch.cat(sr.infer(exact.model(), many, dynamics, rng=rng), 1)
    law = exact.short_run(x[:1], dynamics)
    variances = law.covariance.diagonal()
    deviation = (z.mean(0) - law.mean[0]) / (variances / count).sqrt()
    assert deviation.abs().max() < 4.5
    # the sample covariance of Gaussians has variance (C_ii C_jj + C_ij^2) / n
    spread = ((variances[:, None] * variances + law.covariance**2) / count).sqrt()
    assert ((z.T.cov() - law.covariance) / spread).abs().max() < 4.5


@pytest.mark.parametrize("dynamics", SETTINGS)
@pytest.mark.parametrize("entropy", ["marginal", "conditional"])
def test_entropy_to_float64_accuracy(dynamics, entropy, rng):
    exact, x = linear_problem()
    details = free_energy_details(exact.model(), x, dynamics, Estimation(entropy), rng=rng)
    if entropy == "marginal":
        expected = exact.short_run(x, dynamics).entropy()
    else:
        expected = exact.conditional_entropy(dynamics)
    torch.testing.assert_close(details.entropy, expected.expand(len(x)), rtol=1e-10, atol=1e-10)
    if not dynamics.noise:  # then the three are one
        torch.testing.assert_close(expected, exact.short_run(x, dynamics).entropy())


@pytest.mark.parametrize("dynamics", SETTINGS)
def test_free_energy_within_its_standard_error(dynamics, rng):
    exact, x = linear_problem()
    details = free_energy_details(exact.model(), x, dynamics, Estimation(chains=2000), rng=rng)
    deviation = (details.value - exact.free_energy(x, dynamics)) / details.standard_error
    assert deviation.abs().max() < 4
    assert deviation.square().mean().sqrt() > 0.1  # and the standard error is no exaggeration


def test_free_energy_plus_log_evidence_is_the_kl(rng):
    exact, x = linear_problem()
    dynamics = sr.Langevin(25, 0.008)
    value = sr.free_energy(exact.model(), x, dynamics, Estimation(chains=2000), rng=rng)
    kl = (value + exact.log_evidence(x)).mean()
    assert abs(kl - exact.kl(x, dynamics).mean()) < 0.1
    assert kl > 0


@pytest.mark.parametrize("layer", [0, 1])
def test_gradient_in_the_step_size_within_its_standard_error(layer, rng):
    exact, x = linear_problem()
    dynamics = sr.Langevin(10, 0.006)
    h = 1e-5

    def closed_form(shift):
        sizes = [0.006, 0.006]
        sizes[layer] += shift
        return exact.free_energy(x, sr.Langevin(10, [sizes] * 10)).mean()

    expected = (closed_form(h) - closed_form(-h)) / (2 * h)
    estimates = []
    for _ in range(12):
        table = torch.full((10, 2), 0.006, dtype=torch.float64, requires_grad=True)
        details = free_energy_details(exact.model(), x, dynamics, Estimation(chains=64), rng=rng, table=table)
        (gradient,) = torch.autograd.grad(details.value.mean(), table)
        estimates.append(gradient[:, layer].sum())
    values = torch.stack(estimates)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - expected) < 4 * error
    assert error < 0.2 * abs(expected)


def test_grid_chooses_what_the_closed_form_chooses_and_conditional_does_not(rng):
    exact, x = linear_problem()
    start = sr.Langevin(25, 0.004)
    grid = [s for s in default_grid(start) if s * torch.linalg.eigvalsh(exact.precision).max() < 2]
    truth = torch.stack([exact.kl(x, sr.Langevin(25, s)).mean() for s in grid])
    marginal = sr.tune_by_grid(exact.model(), x, start, grid, Estimation(chains=64), rng=rng)
    assert marginal.best == int(truth.argmin())
    conditional = sr.tune_by_grid(exact.model(), x, start, grid, Estimation("conditional", chains=64), rng=rng)
    assert conditional.best < marginal.best
    assert truth[conditional.best] > 1.5 * truth.min()


def test_many_small_steps_reach_the_posterior_with_a_bias_linear_in_the_step():
    """The stationary covariance of z' = z - s P z + sqrt(2 s) eps is P^-1 (I - s P / 2)^-1."""
    exact, x = linear_problem()
    posterior = exact.posterior(x)
    biases = []
    for s in (0.004, 0.002, 0.001):
        law = exact.short_run(x, sr.Langevin(6000, s))
        torch.testing.assert_close(law.mean, posterior.mean, atol=1e-3, rtol=1e-3)
        biases.append((law.covariance - posterior.covariance).norm())
    assert 1.9 < biases[0] / biases[1] < 2.3
    assert 1.9 < biases[1] / biases[2] < 2.2


def test_chains_of_many_small_steps_have_the_posterior_covariance(rng):
    """The same with chains instead of algebra, in a nonlinear-free two-dimensional model."""
    weight = torch.tensor([[1.0, 0.5], [0.0, 0.8]], dtype=torch.float64)
    exact = sr.LinearGaussian(weight, 0.5)
    x = torch.tensor([[0.7, -0.4]], dtype=torch.float64).expand(20_000, 2)
    (z,) = sr.infer(exact.model(), x, sr.Langevin(600, 0.005), rng=rng)
    posterior = exact.posterior(x[:1])
    torch.testing.assert_close(z.T.cov(), posterior.covariance, atol=0.01, rtol=0.04)
    torch.testing.assert_close(z.mean(0), posterior.mean[0], atol=0.01, rtol=0.02)


@pytest.mark.parametrize("entropy", ["marginal", "conditional"])
def test_endpoint_estimator_is_exact_for_constant_curvature(entropy, rng):
    """One Hessian for the whole chain is no approximation here; the error is that of the probes alone."""
    exact, x = linear_problem()
    dynamics = sr.Langevin(6, [0.01, 0.008, 0.006, 0.004, 0.003, 0.002])
    how = Estimation(entropy, "endpoint", chains=4, probes=256)
    details = free_energy_details(exact.model(), x, dynamics, how, rng=rng)
    if entropy == "marginal":
        expected = exact.short_run(x, dynamics).entropy()
    else:
        expected = exact.conditional_entropy(dynamics)
    assert ((details.entropy - expected).abs() < 4 * details.probe_error).all()
    assert (details.probe_error < 0.2).all()
    top = 0.01 * torch.linalg.eigvalsh(exact.precision).max()
    torch.testing.assert_close(details.stability, top.expand_as(details.stability), rtol=1e-3, atol=0)


def test_endpoint_estimator_refuses_what_it_cannot_do():
    exact, x = linear_problem()
    with pytest.raises(ValueError, match="one step size for all layers"):
        sr.free_energy(exact.model(), x, sr.Langevin(2, [[0.01, 0.02]] * 2), Estimation(estimator="endpoint"))


@pytest.mark.parametrize("estimator", ["exact", "lanczos", "endpoint"])
@pytest.mark.parametrize("entropy", ["marginal", "conditional"])
def test_quiet_steps_add_no_variance(entropy, estimator, rng):
    """Noise enters the covariance at noisy steps alone; and no Gaussian of the last step bounds the entropy."""
    exact, x = linear_problem()
    dynamics = sr.Langevin(6, [0.01, 0.008, 0.006, 0.004, 0.003, 0.002], quiet_steps=3)
    how = Estimation(entropy, estimator, chains=4, probes=128)
    details = free_energy_details(exact.model(), x, dynamics, how, rng=rng)
    marginal = exact.short_run(x, dynamics).entropy()
    expected = marginal if entropy == "marginal" else exact.conditional_entropy(dynamics)
    assert ((details.entropy - expected).abs() < 4 * details.probe_error + 1e-9).all()
    assert (details.probe_error < 0.3).all()
    noisy = exact.short_run(x, replace(dynamics, quiet_steps=0)).entropy()
    assert noisy > marginal + 2  # the error of counting all noise
    assert details.mixture.bound.isinf().all()


@pytest.mark.parametrize("estimator", ["exact", "lanczos", "endpoint"])
def test_gradients_with_quiet_steps(estimator):
    """The derivative of the closed form of the entropy, in each step size."""
    exact, x = linear_problem()
    dynamics = sr.Langevin(4, [0.01, 0.008, 0.006, 0.004], quiet_steps=2)
    base = dynamics.table(1)[:, 0].clone().requires_grad_()
    how = Estimation(estimator=estimator, chains=2, probes=256)
    details = free_energy_details(
        exact.model(), x, dynamics, how, rng=torch.Generator().manual_seed(0), table=base[:, None].expand(-1, 2)
    )
    (found,) = torch.autograd.grad(details.entropy.mean(), base)
    h = 1e-6
    for k, shift in enumerate(h * torch.eye(4, dtype=torch.float64)):
        higher, lower = (
            exact.short_run(x, sr.Langevin(4, (base + sign * shift).detach(), quiet_steps=2)).entropy()
            for sign in (1, -1)
        )
        tolerance = 1e-4 if estimator == "exact" else 0.1
        torch.testing.assert_close(found[k], (higher - lower) / (2 * h), rtol=tolerance, atol=1e-3)


def test_quiet_steps_without_any_noise_are_the_noiseless_dynamics():
    exact, x = linear_problem()
    quiet, silent = sr.Langevin(4, 0.008, quiet_steps=4), sr.Langevin(4, 0.008, noise=False)
    torch.testing.assert_close(exact.free_energy(x, quiet), exact.free_energy(x, silent))
    values = [sr.free_energy(exact.model(), x, d, rng=torch.Generator().manual_seed(0)) for d in (quiet, silent)]
    assert torch.equal(*values)
