"""Volume change on nonlinear generators: against autograd's Jacobian, finite differences, and each other."""

import math

import pytest
import torch
from small_models import conv_data, conv_model

import shortrun as sr
from shortrun.entropy import gradient_and_hessian, lanczos, run_chains
from shortrun.langevin import Target
from shortrun.tune import Estimation, free_energy_details, gaussian_cap


def whole_chain(target, table, noises):
    """The map z_0 -> z_K of the paper's Eq. 12 with the noise given, as one differentiable function."""

    def forward(flat):
        z = flat
        for sizes, eps in zip(table, noises, strict=True):
            s = sizes.repeat_interleave(torch.tensor(target.sizes))
            (drift,) = torch.autograd.grad(target.flat_log_joint(z).sum(), z, create_graph=True)
            z = z + s * drift + (2 * s).sqrt() * eps
        return z

    return forward


@pytest.mark.parametrize("per_layer", [False, True])
def test_product_of_step_determinants_is_the_determinant_of_the_whole_chain(per_layer):
    model = conv_model()
    x = conv_data(model, 1)
    steps = 6
    table = torch.full((steps, 2), 0.03, dtype=torch.float64)
    if per_layer:
        table = table * torch.linspace(0.5, 1.5, 2 * steps, dtype=torch.float64).view(steps, 2)
    seed = torch.Generator().manual_seed(5)
    target = Target(model, x, None, generator=seed)
    state = seed.get_state()
    run = run_chains(target, table, noise=True, generator=seed, marginal=False)
    seed.set_state(state)
    torch.randint(2**62, (), generator=seed)  # the draw that seeds the probes
    flat = target.flatten(target.start)
    noises = [target.noise(flat, seed) for _ in range(steps)]
    forward = whole_chain(target, table, noises)
    torch.testing.assert_close(forward(flat.requires_grad_()).detach(), run.z)
    jacobian = torch.autograd.functional.jacobian(forward, flat).reshape(7, 7)
    torch.testing.assert_close(run.log_volume[0], torch.linalg.slogdet(jacobian)[1])
    assert abs(run.log_volume[0]) > 1


def test_hessian_is_that_of_autograd():
    model = conv_model()
    target = Target(model, conv_data(model, 3), None, generator=torch.Generator().manual_seed(0))
    z = target.flatten(target.start)
    gradient, hessian = gradient_and_hessian(target.flat_log_joint, z)
    for i in range(3):

        def alone(flat, i=i):
            return target.flat_log_joint(torch.cat([z[:i], flat[None], z[i + 1 :]]))[i]

        torch.testing.assert_close(torch.autograd.functional.hessian(alone, z[i]), hessian[i])
        torch.testing.assert_close(torch.autograd.functional.jacobian(alone, z[i]), gradient[i])


def test_covariance_recursion_counts_every_noise(generator):
    """C_K = J_0 J_0^T + 2 s sum_k J_k J_k^T with J_k = d z_K / d z_k: each noise pushed through the rest."""
    model = conv_model()
    x = conv_data(model, 1)
    s, steps = 0.03, 5
    table = torch.full((steps, 2), s, dtype=torch.float64)
    target = Target(model, x, None, generator=generator)
    state = generator.get_state()
    run = run_chains(target, table, noise=True, generator=generator, marginal=True)
    generator.set_state(state)
    torch.randint(2**62, (), generator=generator)
    flat = target.flatten(target.start)
    noises = [target.noise(flat, generator) for _ in range(steps)]
    points = [flat]
    for k in range(steps):
        points.append(whole_chain(target, table[k : k + 1], noises[k : k + 1])(points[-1].requires_grad_()))
    covariance = 2 * s * torch.eye(7, dtype=torch.float64)
    for k in range(steps):
        rest = whole_chain(target, table[k:], noises[k:])
        jacobian = torch.autograd.functional.jacobian(rest, points[k].detach()).reshape(7, 7)
        covariance = covariance + (1 if k == 0 else 2 * s) * jacobian @ jacobian.T
    torch.testing.assert_close(run.log_volume[0], 0.5 * torch.linalg.slogdet(covariance)[1])


@pytest.mark.parametrize("entropy", ["conditional", "marginal"])
def test_lanczos_agrees_with_exact_within_its_own_error(entropy):
    model = conv_model()
    x = conv_data(model, 4)
    dynamics = sr.Langevin(8, 0.03)

    def run(estimator, probes=1):
        return free_energy_details(
            model,
            x,
            dynamics,
            Estimation(entropy, estimator, samples=2, probes=probes),
            generator=torch.Generator().manual_seed(0),
        )

    exact = run("exact")
    errors = {}
    for probes in (4, 256):
        estimate = run("lanczos", probes)
        deviation = (estimate.entropy - exact.entropy) / estimate.probe_error
        assert deviation.abs().max() < 4
        torch.testing.assert_close(estimate.energy, exact.energy)  # the same chains
        errors[probes] = (estimate.entropy - exact.entropy).square().mean().sqrt()
        stated = estimate.probe_error.mean()
        assert errors[probes] < 3 * stated
    assert errors[256] < 0.4 * errors[4]  # 1/8 in expectation
    assert torch.allclose(exact.stability, run("lanczos", 4).stability, rtol=0.05)


def test_lanczos_quadrature_is_exact_on_a_small_matrix():
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix = a @ a.T + torch.eye(6, dtype=torch.float64)
    identity = torch.eye(6, dtype=torch.float64)[:, None] * math.sqrt(6)
    krylov = lanczos(lambda v: v @ matrix, identity, 6)
    torch.testing.assert_close(krylov.trace(torch.log).mean(0)[0], torch.linalg.slogdet(matrix)[1])
    solved = krylov.apply(torch.reciprocal)[:, 0]
    torch.testing.assert_close(solved @ matrix, identity[:, 0])


def test_lanczos_survives_an_exhausted_krylov_space():
    """A matrix with one eigenvalue spans a space of one dimension."""
    start = torch.ones(1, 2, 5, dtype=torch.float64)
    krylov = lanczos(lambda v: 3 * v, start, 5)
    torch.testing.assert_close(krylov.trace(torch.abs), torch.full((1, 2), 15.0, dtype=torch.float64))


STEPS = 4


@pytest.mark.parametrize("entropy", ["conditional", "averaged", "marginal"])
@pytest.mark.parametrize("shape", [(1, 1), (STEPS, 1), (STEPS, 2)], ids=["run", "step", "layer"])
def test_gradients_agree_with_finite_differences(entropy, shape):
    model = conv_model()
    x = conv_data(model, 2)
    dynamics = sr.Langevin(STEPS, 0.03)
    base = 0.01 * torch.linspace(0.8, 1.2, math.prod(shape), dtype=torch.float64).view(shape)

    def value(sizes):
        return free_energy_details(
            model,
            x,
            dynamics,
            Estimation(entropy, samples=2, noises=2),
            generator=torch.Generator().manual_seed(0),
            table=sizes.expand(STEPS, 2),
        ).value.mean()

    sizes = base.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(sizes), sizes)
    h = 1e-6
    for index in range(base.numel()):
        shift = torch.zeros(base.numel(), dtype=torch.float64)
        shift[index] = h
        shift = shift.view(shape)
        difference = (value(base + shift) - value(base - shift)) / (2 * h)
        torch.testing.assert_close(gradient.flatten()[index], difference, rtol=1e-5, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("entropy", ["conditional", "marginal"])
def test_matrix_free_gradients_agree_with_exact_ones_on_average(entropy):
    model = conv_model()
    x = conv_data(model, 2)
    dynamics = sr.Langevin(STEPS, 0.03)

    def gradient(estimator, probes):
        table = torch.full((STEPS, 2), 0.03, dtype=torch.float64, requires_grad=True)
        details = free_energy_details(
            model,
            x,
            dynamics,
            Estimation(entropy, estimator, samples=2, probes=probes),
            generator=torch.Generator().manual_seed(0),
            table=table,
        )
        return torch.autograd.grad(details.value.mean(), table)[0]

    exact = gradient("exact", 1)
    few, many = (gradient("lanczos", probes) - exact for probes in (8, 512))
    assert many.norm() < 0.05 * exact.norm()
    assert many.norm() < 0.5 * few.norm()


@pytest.mark.parametrize("entropy", ["conditional", "marginal"])
def test_gradient_of_the_end_point_estimate_against_finite_differences(entropy):
    """The derivative of a trace is that of its estimate on average over probes: a few hundred of them are taken."""
    model = conv_model()
    x = conv_data(model, 2)
    dimension = sum(math.prod(shape) for shape in model.latent_shapes)
    base = torch.tensor([0.03, 0.02, 0.025, 0.01], dtype=torch.float64)
    dynamics = sr.Langevin(len(base), base)

    def value(sizes):
        return free_energy_details(
            model,
            x,
            dynamics,
            Estimation(entropy, "endpoint", samples=2, noises=2, probes=512, depth=dimension),
            generator=torch.Generator().manual_seed(0),
            table=sizes[:, None].expand(-1, 2),
        ).value.mean()

    sizes = base.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(sizes), sizes)
    h = 1e-6
    for k, shift in enumerate(h * torch.eye(len(base), dtype=torch.float64)):
        difference = (value(base + shift) - value(base - shift)) / (2 * h)
        torch.testing.assert_close(gradient[k], difference, rtol=0.04, atol=0.05)


def test_the_three_entropies_are_ordered():
    model = conv_model()
    x = conv_data(model, 3)

    def entropy(kind):
        how = Estimation(kind, samples=16, noises=8)
        return free_energy_details(
            model, x, sr.Langevin(10, 0.03), how, generator=torch.Generator().manual_seed(0)
        ).entropy

    averaged, conditional, marginal = entropy("averaged"), entropy("conditional"), entropy("marginal")
    assert (averaged < conditional).all()
    assert (conditional < marginal).all()


def test_averaged_over_one_noise_is_conditional():
    model = conv_model()
    x = conv_data(model, 3)
    values = [
        sr.free_energy(
            model,
            x,
            sr.Langevin(5, 0.03),
            entropy=kind,
            noises=1,
            samples=4,
            generator=torch.Generator().manual_seed(0),
        )
        for kind in ("averaged", "conditional")
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("chains", [8, 200])
def test_cap_is_the_entropy_of_a_gaussian_and_above_that_of_others(chains):
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    z = torch.randn(400, chains, 3, generator=generator, dtype=torch.float64) * scales
    expected = torch.distributions.Normal(0.0, scales).entropy().sum()
    cap, error = gaussian_cap(z)
    assert abs(cap.mean() - expected) < 4 * error / 20
    assert 0.8 < cap.std() / error < 1.2
    uniform = torch.rand(400, chains, 3, generator=generator, dtype=torch.float64)  # entropy 0
    assert gaussian_cap(uniform)[0].mean() > 0.3
