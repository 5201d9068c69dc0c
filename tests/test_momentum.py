"""Dynamics with momentum, against closed forms, autograd's full Jacobian and finite differences."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import conv_data, conv_model, linear_problem

import shortrun as sr
from shortrun.core.chain import Point, chain, move
from shortrun.core.entropy import run_chains
from shortrun.core.free_energy import Estimation, free_energy_details
from shortrun.core.target import Target

BETA = 0.6


def test_one_step_is_the_equation():
    z, before, drift, eps = (torch.randn(3, 2, generator=torch.Generator().manual_seed(i)) for i in range(4))
    (moved,) = move((z,), (drift,), [0.1], [eps], momentum=BETA, before=(before,))
    expected = z + 0.1 * drift + BETA * (z - before) + math.sqrt(2 * 0.1 * (1 - BETA)) * eps
    torch.testing.assert_close(moved, expected)


def test_long_chains_of_short_steps_end_in_the_posterior():
    """The noise is that which leaves the posterior as it is; the closed form of a linear model says so."""
    exact, x = linear_problem()
    law = exact.short_run(x, sr.Langevin(20_000, 0.0005, momentum=BETA))
    torch.testing.assert_close(law.covariance, exact.posterior(x).covariance, rtol=0.03, atol=1e-4)
    torch.testing.assert_close(law.mean, exact.posterior(x).mean)


def test_the_law_of_chains_is_the_closed_form(rng):
    exact, x = linear_problem()
    dynamics = sr.Langevin(12, 0.008, momentum=BETA)
    count = 40_000
    z = torch.cat(sr.infer(exact.model(), x[:1].expand(count, -1), dynamics, rng=rng), 1)
    law = exact.short_run(x[:1], dynamics)
    width = law.covariance.diag().sqrt()
    assert ((z.mean(0) - law.mean[0]) / width).abs().max() < 5 / math.sqrt(count)
    scale = width[:, None] * width
    assert ((torch.cov(z.T) - law.covariance) / scale).abs().max() < 7 / math.sqrt(count)


def test_stable_up_to_two_times_one_plus_momentum():
    exact, x = linear_problem()
    verge = 2 * (1 + BETA) / float(torch.linalg.eigvalsh(exact.precision)[-1])
    widths = [
        float(exact.short_run(x[:1], sr.Langevin(400, share * verge, momentum=BETA)).covariance.trace())
        for share in (0.98, 1.02)
    ]
    assert widths[0] < 100
    assert widths[1] > 1e4


def test_chains_that_are_put_elsewhere_start_there_at_rest():
    elsewhere = torch.tensor([[0.0], [5.0]])

    def visit(k, z):
        if k == 2:
            z = (torch.where(torch.tensor([[False], [True]]), elsewhere, z[0]),)
        return z, Point(torch.zeros(2), (torch.ones(2, 1),))

    path = [z[0] for _, z, _ in chain((torch.zeros(2, 1),), [[0.1]] * 4, visit, lambda k, layer: None, True, BETA)]
    torch.testing.assert_close(path[3][1], torch.tensor([5.1]))
    torch.testing.assert_close(path[3][0], path[2][0] + 0.1 + BETA * (path[2][0] - path[1][0]))


def whole_chain(target, table, noises):
    """z_0 to z_K with the graph of all steps."""

    def forward(flat):
        z, before = flat, flat
        for sizes, eps in zip(table, noises, strict=True):
            s = sizes.repeat_interleave(torch.tensor(target.sizes))
            (drift,) = torch.autograd.grad(target.flat_log_joint(z).sum(), z, create_graph=True)
            z, before = z + s * drift + BETA * (z - before) + (2 * (1 - BETA) * s).sqrt() * eps, z
        return z

    return forward


@pytest.mark.parametrize(("marginal", "estimator"), [(False, "exact"), (False, "lanczos"), (True, "exact"),
                                                     (True, "lanczos")])  # fmt: skip
def test_volume_is_that_of_the_full_jacobian(marginal, estimator):
    """Of the map from z_0, and for the marginal entropy from each noise too, all at once."""
    model = conv_model()
    x = conv_data(model, 1)
    steps = 5
    table = 0.03 * torch.linspace(0.5, 1.5, 2 * steps, dtype=torch.float64).view(steps, 2)
    rng = torch.Generator().manual_seed(5)
    target = Target(model, x, None, rng=rng)
    state = rng.get_state()
    options = {"probes": 200, "depth": 7} if estimator == "lanczos" else {}
    run = run_chains(target, table, [True] * steps, rng=rng, marginal=marginal, estimator=estimator, momentum=BETA,
                     **options)  # fmt: skip
    rng.set_state(state)
    torch.randint(2**62, (), generator=rng)  # the draw that seeds the probes
    flat = target.flatten(target.start)
    noises = [target.noise(flat, rng) for _ in range(steps)]
    torch.testing.assert_close(whole_chain(target, table, noises)(flat.requires_grad_()).detach(), run.z)

    def forward(flat, *given):
        return whole_chain(target, table, given)(flat)

    parts = torch.autograd.functional.jacobian(forward, (flat.detach(), *noises))
    parts = [part.reshape(7, 7) for part in (parts if marginal else parts[:1])]
    covariance = sum(part @ part.T for part in parts)
    expected = 0.5 * torch.linalg.slogdet(covariance)[1]
    # the probes of lanczos leave an error, which it states
    allowed = 1e-6 if estimator == "exact" else 4 * float(run.probe_variance.sqrt()) + 1e-6
    assert abs(float(run.log_volume[0] - expected)) < allowed
    assert abs(expected) > 1


@pytest.mark.parametrize("entropy", ["marginal", "conditional"])
@pytest.mark.parametrize("estimator", ["exact", "lanczos", "endpoint"])
def test_free_energy_against_the_closed_form(entropy, estimator):
    exact, x = linear_problem()
    dynamics = sr.Langevin(20, 0.008, momentum=BETA)
    how = Estimation(entropy, estimator, chains=64, probes=64, depth=12)
    details = free_energy_details(exact.model(), x, dynamics, how, rng=torch.Generator().manual_seed(0))
    expected = exact.short_run(x, dynamics).entropy() if entropy == "marginal" else exact.conditional_entropy(dynamics)
    torch.testing.assert_close(details.entropy.mean(), expected, atol=0.02, rtol=0)
    if entropy == "marginal":
        gap = (details.value - exact.free_energy(x, dynamics)).abs()
        assert (gap < 5 * details.standard_error + 0.05).all()


@pytest.mark.parametrize("estimator", ["exact", "endpoint", "lanczos"])
def test_gradient_in_the_steps_against_finite_differences(estimator):
    exact, x = linear_problem()
    model, dynamics = exact.model(), sr.Langevin(5, 0.008, momentum=BETA)
    how = Estimation("marginal", estimator, chains=4, probes=400 if estimator == "lanczos" else 40, depth=12)

    def value(table):
        rng = torch.Generator().manual_seed(3)
        return free_energy_details(model, x[:2], dynamics, how, rng=rng, table=table).value.mean()

    table = dynamics.table(2).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(table), table)
    h = 1e-6
    both = [float(value((table + sign * h).detach().requires_grad_()).detach()) for sign in (1, -1)]
    slope = (both[0] - both[1]) / (2 * h)
    assert float(gradient.sum()) == pytest.approx(slope, rel=0.02 if estimator == "lanczos" else 1e-4)


def test_momentum_brings_short_chains_nearer_to_the_posterior():
    """What it is for: at its own best step, the divergence is lower than the lowest one without."""
    exact, x = linear_problem()

    def lowest(momentum):
        sizes = [0.001 * 1.15**i for i in range(40)]
        values = [exact.kl(x, sr.Langevin(12, s, momentum=momentum)).mean() for s in sizes]
        return float(torch.stack(values).nan_to_num(nan=math.inf).min())

    assert lowest(0.5) < 0.8 * lowest(0.0)


def test_errors_name_the_momentum():
    for wrong in (1.0, -0.1, math.nan, "x", True):
        with pytest.raises(ValueError, match="momentum is"):
            sr.Langevin(5, 0.1, momentum=wrong)
    assert replace(sr.Langevin(5, 0.1), momentum=0.5).longer(8).momentum == 0.5
