"""Volume change on nonlinear generators: against autograd's Jacobian, finite differences, and each other."""

import math

import pytest
import torch
from small_models import conv_data, conv_model

import shortrun as sr
from shortrun.core.derivatives import value_gradient_hessian
from shortrun.core.entropy import flat_sizes, run_chains, stability
from shortrun.core.free_energy import Estimation, free_energy_details, gaussian_cap, mixture_entropy
from shortrun.core.krylov import lanczos, log_trace
from shortrun.core.target import Target


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
    target = Target(model, x, None, rng=seed)
    state = seed.get_state()
    run = run_chains(target, table, [True] * steps, rng=seed, marginal=False)
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
    target = Target(model, conv_data(model, 3), None, rng=torch.Generator().manual_seed(0))
    z = target.flatten(target.start)
    value, gradient, hessian = value_gradient_hessian(target.flat_log_joint, z)
    torch.testing.assert_close(value, target.log_joint(target.start).detach())
    for i in range(3):

        def alone(flat, i=i):
            return target.flat_log_joint(torch.cat([z[:i], flat[None], z[i + 1 :]]))[i]

        torch.testing.assert_close(torch.autograd.functional.hessian(alone, z[i]), hessian[i])
        torch.testing.assert_close(torch.autograd.functional.jacobian(alone, z[i]), gradient[i])


def test_covariance_recursion_counts_every_noise(rng):
    """C_K = J_0 J_0^T + 2 s sum_k J_k J_k^T with J_k = d z_K / d z_k: each noise pushed through the rest."""
    model = conv_model()
    x = conv_data(model, 1)
    s, steps = 0.03, 5
    table = torch.full((steps, 2), s, dtype=torch.float64)
    target = Target(model, x, None, rng=rng)
    state = rng.get_state()
    run = run_chains(target, table, [True] * steps, rng=rng, marginal=True)
    rng.set_state(state)
    torch.randint(2**62, (), generator=rng)
    flat = target.flatten(target.start)
    noises = [target.noise(flat, rng) for _ in range(steps)]
    points = [flat]
    for k in range(steps):
        points.append(whole_chain(target, table[k : k + 1], noises[k : k + 1])(points[-1].requires_grad_()))
    covariance = 2 * s * torch.eye(7, dtype=torch.float64)
    for k in range(steps):
        rest = whole_chain(target, table[k:], noises[k:])
        jacobian = torch.autograd.functional.jacobian(rest, points[k].detach()).reshape(7, 7)
        covariance = covariance + (1 if k == 0 else 2 * s) * jacobian @ jacobian.T
    torch.testing.assert_close(run.log_volume[0], 0.5 * torch.linalg.slogdet(covariance)[1])


@pytest.mark.parametrize("entropy", ["conditional", pytest.param("marginal", marks=pytest.mark.slow)])
def test_lanczos_agrees_with_exact_within_its_own_error(entropy):
    model = conv_model()
    x = conv_data(model, 4)
    dynamics = sr.Langevin(8, 0.03)

    def run(estimator, probes=1):
        return free_energy_details(
            model,
            x,
            dynamics,
            Estimation(entropy, estimator, chains=2, probes=probes),
            rng=torch.Generator().manual_seed(0),
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


def wide_problem(spectrum, dimension=100):
    """A linear model with many more latents than a Krylov space has dimensions, and its largest curvature."""
    rng = torch.Generator().manual_seed(0)
    shape = (dimension + 20, dimension)
    left, scales, right = torch.linalg.svd(
        torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(dimension), full_matrices=False
    )
    if spectrum == "decaying":
        scales = 3 * torch.arange(1, dimension + 1, dtype=torch.float64) ** -0.7
    exact = sr.LinearGaussian(left * scales @ right, 0.4)
    x = torch.randn(6, shape[0], generator=rng, dtype=torch.float64)
    return exact.model(), x, float(torch.linalg.eigvalsh(exact.precision).max())


@pytest.mark.parametrize("steepness", [0.5, 1.0, 1.5, 1.9, 2.6, 3.0])
@pytest.mark.parametrize("spectrum", ["decaying", "random"])
@pytest.mark.parametrize("entropy", ["conditional", "marginal"])
def test_matrix_free_estimates_state_their_error_at_long_steps(entropy, spectrum, steepness):
    """Beyond s * lambda = 1, where log|1 + t| is singular within the spectrum; 100 latents, 12 Krylov steps."""
    model, x, curvature = wide_problem(spectrum)
    dynamics = sr.Langevin(15, steepness / curvature)

    def run(estimator):
        how = Estimation(entropy, estimator, chains=1, probes=8)
        return free_energy_details(model, x, dynamics, how, rng=torch.Generator().manual_seed(0))

    exact = run("exact")
    for estimator in ("lanczos", "endpoint"):  # the end point stands for the chain exactly: the model is linear
        found = run(estimator)
        assert ((found.entropy - exact.entropy).abs() / found.probe_error).max() < 5
        # and the error says something: except where an eigenvalue of A_k is 0 or those of C_K span all of float64
        if steepness not in (1.0, 3.0):
            assert found.probe_error.max() < (10 if entropy == "marginal" or estimator == "lanczos" else 80)


def test_a_trace_with_many_equal_eigenvalues():
    """A Krylov space finds one eigenvector of each; the others are left to the probes."""
    values = torch.tensor([0.3] * 20 + [0.9] * 15 + [1.7] * 5 + [2.5], dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(41, 41, generator=rng, dtype=torch.float64))[0]
    matrix = basis * values @ basis.T
    probes = torch.randn(401, 1, 41, generator=rng, dtype=torch.float64)
    found = log_trace(lambda v: v @ matrix, lambda t: (1 - t).abs().log(), probes[1:], probes[0], 0.5, 6)
    assert abs(found.value - (1 - values).abs().log().sum()) < 4 * found.variance.sqrt()
    assert found.variance.sqrt() < 1


def test_lanczos_quadrature_is_exact_on_a_small_matrix():
    rng = torch.Generator().manual_seed(2)
    a = torch.randn(6, 6, generator=rng, dtype=torch.float64)
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
            Estimation(entropy, chains=2, noises=2),
            rng=torch.Generator().manual_seed(0),
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


@pytest.mark.parametrize("entropy", ["conditional", pytest.param("marginal", marks=pytest.mark.slow)])
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
            Estimation(entropy, estimator, chains=2, probes=probes),
            rng=torch.Generator().manual_seed(0),
            table=table,
        )
        return torch.autograd.grad(details.value.mean(), table)[0]

    exact = gradient("exact", 1)
    few, many = (gradient("lanczos", probes) - exact for probes in (8, 512))
    assert many.norm() < 0.05 * exact.norm()
    assert many.norm() < 0.5 * few.norm()


@pytest.mark.parametrize("entropy", ["conditional", "marginal"])
@pytest.mark.slow
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
            Estimation(entropy, "endpoint", chains=2, noises=2, probes=512, depth=dimension),
            rng=torch.Generator().manual_seed(0),
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
        how = Estimation(kind, chains=16, noises=8)
        return free_energy_details(model, x, sr.Langevin(10, 0.03), how, rng=torch.Generator().manual_seed(0)).entropy

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
            Estimation(kind, noises=1, chains=4),
            rng=torch.Generator().manual_seed(0),
        )
        for kind in ("averaged", "conditional")
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("chains", [8, 200])
def test_cap_is_the_entropy_of_a_gaussian_and_above_that_of_others(chains):
    rng = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    z = torch.randn(400, chains, 3, generator=rng, dtype=torch.float64) * scales
    expected = torch.distributions.Normal(0.0, scales).entropy().sum()
    cap, error = gaussian_cap(z)
    assert abs(cap.mean() - expected) < 4 * error / 20
    assert 0.8 < cap.std() / error < 1.2
    uniform = torch.rand(400, chains, 3, generator=rng, dtype=torch.float64)  # entropy 0
    assert gaussian_cap(uniform)[0].mean() > 0.3


def gaussian_chains(examples, chains, dimension, curvature, s):
    """``z_K`` and its centre for chains that have arrived at the stationary law of a quadratic log joint."""
    rng = torch.Generator().manual_seed(0)
    shape = (examples, chains, dimension)
    variance = 2 * s / (1 - (1 - s * curvature) ** 2)
    before = math.sqrt(variance) * torch.randn(shape, generator=rng, dtype=torch.float64)
    centre = (1 - s * curvature) * before
    z = centre + math.sqrt(2 * s) * torch.randn(shape, generator=rng, dtype=torch.float64)
    entropy = 0.5 * dimension * math.log(2 * math.pi * math.e * variance)
    return z, centre, torch.full((dimension,), 2 * s, dtype=torch.float64), entropy


@pytest.mark.parametrize(("dimension", "chains"), [(1, 8), (2, 64), (8, 16), (40, 8)])
def test_the_mixture_of_last_steps_is_an_upper_bound_in_expectation(dimension, chains):
    z, centre, variances, entropy = gaussian_chains(3000, chains, dimension, 20.0, 0.02)
    bound = mixture_entropy(z, centre, variances).bound
    assert bound.mean() > entropy - 3 * bound.std() / math.sqrt(3000)
    # each chain's own last step is left out: with it, the average would be far below the entropy of many dimensions
    if dimension == 40:
        assert bound.mean() > entropy + 5


@pytest.mark.parametrize(("dimension", "chains", "tight"), [(1, 256, True), (2, 512, True), (40, 64, False)])
def test_the_mixture_knows_where_it_is_tight(dimension, chains, tight):
    z, centre, variances, entropy = gaussian_chains(200, chains, dimension, 20.0, 0.02)
    found = mixture_entropy(z, centre, variances)
    assert bool((found.slack < 0.1).all()) == tight
    if tight:
        error = 3 * found.estimate.std() / math.sqrt(200)
        assert abs(found.estimate.mean() - entropy) < error + 0.005


def test_the_mixture_sees_two_modes():
    """Half of the chains at -3, half at 3: log 2 more than one mode has, which no local linearisation can tell."""
    z, centre, variances, entropy = gaussian_chains(50, 400, 1, 20.0, 0.02)
    side = torch.where(torch.arange(400) % 3 == 0, -3.0, 3.0)[:, None]
    found = mixture_entropy(z + side, centre + side, variances)
    share = 134 / 400
    mixing = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert abs(found.estimate.mean() - entropy - mixing) < 0.03


def test_gradient_of_the_mixture_against_finite_differences():
    """The bound enters the objective of the tuner, so its derivative has to follow the step sizes."""
    model = sr.GaussianModel(lambda z: torch.sin(2 * z[0]), [(1,)], 0.5).double()
    x = torch.tensor([[0.4]], dtype=torch.float64)

    def value(s):
        how = Estimation(chains=500)
        details = free_energy_details(
            model, x, sr.Langevin(4, 0.05), how, rng=torch.Generator().manual_seed(0), table=s.expand(4, 1)
        )
        assert details.mixture.slack < 0.1
        return details.value.mean()

    s = torch.full((1, 1), 0.05, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(s), s)
    difference = (value(s.detach() + 1e-6) - value(s.detach() - 1e-6)) / 2e-6
    torch.testing.assert_close(slope[0, 0], difference, rtol=1e-5, atol=1e-5)


def test_stability_is_the_longest_step_times_the_curvature_at_the_end():
    """Against eigvalsh of the whole Hessian; the estimators, and so the guards, all measure this."""
    model = conv_model()
    x = conv_data(model, 3)
    table = torch.tensor([[0.03, 0.02], [0.02, 0.03], [0.01, 0.01]], dtype=torch.float64)
    found = {}
    for estimator in ("exact", "lanczos"):
        rng = torch.Generator().manual_seed(0)
        target = Target(model, x, None, rng=rng)
        run = run_chains(target, table, [True] * 3, rng=rng, estimator=estimator)
        found[estimator] = run.stability
        hessian = value_gradient_hessian(target.flat_log_joint, run.z)[2]
        root = torch.full((7,), 0.03, dtype=torch.float64).sqrt()  # the longest step of each layer
        expected = torch.linalg.eigvalsh(-root[:, None] * hessian * root)[:, -1]
        torch.testing.assert_close(run.stability, expected)
        probe = torch.ones_like(run.z)
        torch.testing.assert_close(stability(target, run.z, flat_sizes(target, table), probe), expected)
    torch.testing.assert_close(found["exact"], found["lanczos"])


def test_minus_the_conditional_free_energy_can_exceed_the_evidence():
    """One step with s * lambda = 1.9 on x = sin(3 z): everything by quadrature, and the package's estimate of it."""
    model = sr.GaussianModel(lambda z: torch.sin(3 * z[0]), [(1,)], 1.0).double()
    grid = torch.linspace(-9, 9, 20001, dtype=torch.float64)[:, None].requires_grad_()
    zero = torch.zeros(1, 1, dtype=torch.float64)
    log_joint = model.log_prior((grid,)) + model.log_likelihood(zero.expand_as(grid), (grid,))
    (slope,) = torch.autograd.grad(log_joint.sum(), grid, create_graph=True)
    (hessian,) = torch.autograd.grad(slope.sum(), grid)
    cell = 18 / 20000
    evidence = torch.logsumexp(log_joint, 0).detach() + math.log(cell)
    posterior = torch.exp(log_joint.detach() - evidence) * cell
    s = 1.9 / float(-(posterior[:, None] * hessian).sum())
    prior = torch.exp(model.log_prior((grid.detach(),))) * cell
    entropy = 0.5 * math.log(2 * math.pi * math.e) + (prior * (1 + s * hessian[:, 0]).abs().log()).sum()
    energy = torch.zeros((), dtype=torch.float64)
    noises = torch.linspace(-6, 6, 121, dtype=torch.float64)
    weights = torch.softmax(-0.5 * noises**2, 0)
    for eps, weight in zip(noises, weights, strict=True):
        moved = (grid + s * slope + math.sqrt(2 * s) * eps).detach()
        joint = model.log_prior((moved,)) + model.log_likelihood(zero.expand_as(moved), (moved,))
        energy = energy - weight * (prior * joint).sum()
    excess = float(entropy - energy - evidence)
    assert excess > 0.4  # nats above log p(x): no lower bound
    found = -sr.free_energy(
        model,
        zero,
        sr.Langevin(1, s),
        Estimation("conditional", chains=20_000),
        rng=torch.Generator().manual_seed(0),
    )
    assert abs(float(found - evidence) - excess) < 0.05


def tanh_model(sizes=(12, 20), outputs=40):
    """More latents than Krylov steps of the stability, in two layers, and data from it."""
    rng = torch.Generator().manual_seed(0)
    dimension = sum(sizes)
    inward = torch.randn(dimension, 24, generator=rng, dtype=torch.float64) / math.sqrt(dimension)
    outward = torch.randn(24, outputs, generator=rng, dtype=torch.float64) / math.sqrt(24)
    model = sr.GaussianModel(
        lambda z: torch.tanh(2 * torch.cat(z, 1) @ inward) @ outward, [(size,) for size in sizes], 0.3
    ).double()
    return model, model.decoder(model.sample_prior(4, rng))


def test_stability_of_a_nonlinear_model_with_more_latents_than_krylov_steps():
    """Against eigvalsh of autograd's own Hessian: never above, and hardly below."""
    model, x = tanh_model()
    rng = torch.Generator().manual_seed(0)
    target = Target(model, x, None, rng=rng)
    table = torch.tensor([[0.02, 0.002], [0.01, 0.004]], dtype=torch.float64)
    run = run_chains(target, table, [True, True], rng=rng, estimator="lanczos", probes=1)
    root = torch.tensor([0.02] * 12 + [0.004] * 20, dtype=torch.float64).sqrt()
    for i in range(len(x)):

        def log_joint(flat, i=i):
            z = flat[None].split([12, 20], 1)
            return (model.log_prior(z) + model.log_likelihood(x[i : i + 1], z))[0]

        hessian = torch.autograd.functional.hessian(log_joint, run.z[i])
        expected = torch.linalg.eigvalsh(-root[:, None] * hessian * root)[-1]
        assert 0.97 * expected < run.stability[i] < (1 + 1e-9) * expected
        assert expected > 0.05
