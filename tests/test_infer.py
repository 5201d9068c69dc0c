"""The dynamics itself: equation, invariances, errors."""

import json
import math
from dataclasses import replace

import pytest
import torch
from small_models import conv_data, conv_model
from torch import nn

import shortrun as sr
from shortrun.core.chain import Point, chain, move
from shortrun.core.free_energy import Estimation, free_energy_details
from shortrun.core.langevin import cool_down


def run(model, x, dynamics=None, seed=0, infer=sr.infer, **options):
    dynamics = dynamics or sr.Langevin(10, 0.01)
    return infer(model, x, dynamics, rng=torch.Generator().manual_seed(seed), **options)


def assert_same(first, second, **tolerance):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_one_step_is_the_equation_of_the_paper():
    """z + s R(z) + sqrt(2 s) eps, which the authors' script writes as delta^2/2 R(z) + delta eps."""
    model = conv_model()
    x = conv_data(model, 3)
    delta = 0.1
    dynamics = sr.Langevin.from_delta(delta, steps=1)
    assert dynamics.step_size == pytest.approx(delta**2 / 2)
    assert dynamics.delta == pytest.approx(delta)
    rng = torch.Generator().manual_seed(7)
    start = model.sample_prior(3, rng)
    moved = sr.infer(model, x, dynamics, start=start, rng=rng)
    rng.manual_seed(7)
    start = tuple(z.requires_grad_() for z in model.sample_prior(3, rng))
    loss = 0.5 * sum(z.square().sum() for z in start)
    loss = loss + 0.5 * (x - model.decoder(start)).square().sum() / model.sigma**2
    for z, gradient, new in zip(start, torch.autograd.grad(loss, start), moved, strict=True):
        eps = torch.randn(z.shape, generator=rng).double()
        torch.testing.assert_close(new, (z - delta**2 / 2 * gradient + delta * eps).detach())


def test_per_step_and_per_layer_sizes_scale_drift_and_noise_together():
    model = conv_model()
    x = conv_data(model, 2)
    number = run(model, x, sr.Langevin(3, 0.02))
    assert_same(number, run(model, x, sr.Langevin(3, [0.02] * 3)))
    assert_same(number, run(model, x, sr.Langevin(3, torch.full((3, 2), 0.02))))
    # a layer with a vanishing step stays at its start, noise included
    start = model.sample_prior(2, torch.Generator().manual_seed(0))
    z = run(model, x, sr.Langevin(3, [[0.02, 1e-30]] * 3), start=start)
    torch.testing.assert_close(z[1], start[1])
    assert (z[0] - start[0]).abs().min() > 1e-3


def test_a_schedule_is_its_longest_step_and_a_profile():
    per_step = sr.Langevin(3, [0.01, 0.02, 0.005])
    assert (per_step.step_size, per_step.profile) == (0.02, (0.5, 1.0, 0.25))
    per_layer = sr.Langevin(2, torch.tensor([[0.01, 0.04], [0.02, 0.01]], dtype=torch.float64))
    assert (per_layer.step_size, per_layer.profile) == (0.04, ((0.25, 1.0), (0.5, 0.25)))
    assert sr.Langevin(3, [0.02] * 3) == sr.Langevin(3, 0.02)
    assert sr.Langevin(3, 0.02, (2, 4, 1)) == per_step  # only ratios matter
    assert hash(per_step) == hash(sr.Langevin(3, 0.02, [0.5, 1.0, 0.25]))
    longer = per_step.scaled(3)
    assert (longer.step_size, longer.profile) == (pytest.approx(0.06), per_step.profile)
    assert replace(per_step, step_size=0.1).profile == per_step.profile


def test_the_table_of_step_sizes():
    expected = torch.tensor([[0.01, 0.01], [0.02, 0.02], [0.005, 0.005]], dtype=torch.float64)
    torch.testing.assert_close(sr.Langevin(3, [0.01, 0.02, 0.005]).table(2), expected)
    rows = [[0.01, 0.04], [0.02, 0.01]]
    torch.testing.assert_close(sr.Langevin(2, rows).table(2), torch.tensor(rows, dtype=torch.float64))
    torch.testing.assert_close(sr.Langevin(2, 0.03).table(3), torch.full((2, 3), 0.03, dtype=torch.float64))
    assert sr.Langevin(0, 0.03).table(2).shape == (0, 2)


@pytest.mark.parametrize(
    "dynamics",
    [
        sr.Langevin(),
        sr.Langevin(3, [0.01, 0.02, 0.005], noise=False),
        sr.Langevin(2, [[0.01, 0.04], [0.02, 0.01]], quiet_steps=1),
    ],
)
def test_settings_survive_json(dynamics):
    assert sr.Langevin.from_dict(json.loads(json.dumps(dynamics.as_dict()))) == dynamics


def test_settings_with_a_schedule_as_step_size_are_read():
    found = sr.Langevin.from_dict({"steps": 3, "step_size": [0.01, 0.02, 0.005], "noise": False})
    assert found == sr.Langevin(3, 0.02, (0.5, 1.0, 0.25), noise=False)
    assert sr.Langevin.from_dict({"steps": 3, "step_size": 0.02, "noise": True}) == sr.Langevin(3, 0.02)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profile": (1.0, 0.5)}, ValueError, "profile has 2 entries for 3 steps"),
        ({"profile": (1.0, 0.5, 0)}, ValueError, "profile contains 0"),
        ({"profile": True}, ValueError, "profile contains True"),
        ({"profile": (1.0, 0.5, 0.5), "step_size": [0.1] * 3}, ValueError, "give one of them"),
        ({"quiet_steps": -1}, ValueError, "quiet_steps is -1"),
        ({"quiet_steps": 4}, ValueError, "quiet_steps is 4"),
        ({"noise": (1.0, 0.5, 0.5)}, TypeError, "noise is"),
    ],
)
def test_bad_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        sr.Langevin(3, **options)


def test_cooling_down():
    assert cool_down(6, 3) == (1.0, 1.0, 1.0, 0.75, 0.5, 0.25)
    assert cool_down(6, 0) == ()
    assert cool_down(2, 1) == (1.0, 0.5)
    assert cool_down(6, 1, first=2) == (1 / 3, 2 / 3, 1.0, 1.0, 1.0, 0.5)
    assert cool_down(4, 3, first=3) == (0.25, 0.5, 0.5, 0.25)
    dynamics = sr.Langevin(6, 0.08, cool_down(6, 3))
    assert dynamics.table(1)[:, 0].tolist() == pytest.approx([0.08, 0.08, 0.08, 0.06, 0.04, 0.02])
    for steps, last in ((6, 6), (6, -1), (0, 1)):
        with pytest.raises(ValueError, match="cannot be shorter"):
            cool_down(steps, last)
        with pytest.raises(ValueError, match="cannot be shorter"):
            cool_down(steps, 0, first=last)


@pytest.mark.parametrize(
    ("profile", "steps", "expected"),
    [
        ((0.5, 1.0, 1.0, 0.5), 6, (0.5, 1.0, 1.0, 1.0, 1.0, 0.5)),
        ((0.5, 1.0, 1.0, 0.5), 3, (0.5, 1.0, 0.5)),
        ((0.5, 1.0, 1.0, 0.5), 2, (1.0, 0.5)),
        ((1.0, 0.5), 4, (1.0, 1.0, 1.0, 0.5)),
        ((1.0, 0.5), 1, ()),
        ((), 4, ()),
        (((0.5, 1.0), (0.2, 0.1)), 3, ((0.5, 1.0), (0.5, 1.0), (0.2, 0.1))),
    ],
)
def test_longer_and_shorter_chains_keep_their_beginning_and_end(profile, steps, expected):
    longer = sr.Langevin(len(profile) or 2, 0.1, profile).longer(steps)
    assert (longer.steps, longer.profile) == (steps, expected)


def test_quiet_steps_are_steps_without_noise_written_by_hand():
    model = conv_model()
    x = conv_data(model, 3)
    sizes = [0.02, 0.01, 0.015, 0.005]
    dynamics = sr.Langevin(4, sizes, quiet_steps=2)
    assert [dynamics.is_noisy(k) for k in range(4)] == [True, True, False, False]
    assert not any(replace(dynamics, noise=False).is_noisy(k) for k in range(4))
    rng = torch.Generator().manual_seed(0)
    z = model.sample_prior(3, rng)
    for k, s in enumerate(sizes):
        z = tuple(layer.detach().requires_grad_() for layer in z)
        gradients = torch.autograd.grad((model.log_prior(z) + model.log_likelihood(x, z)).sum(), z)
        eps = [torch.randn(layer.shape, generator=rng).double() if k < 2 else 0.0 for layer in z]
        z = tuple(a + s * b + math.sqrt(2 * s) * c for a, b, c in zip(z, gradients, eps, strict=True))
    z = tuple(layer.detach() for layer in z)
    assert_same(run(model, x, dynamics), z)
    found, diagnostics = run(model, x, dynamics, infer=sr.infer_with_diagnostics)
    assert_same(found, z)
    assert diagnostics.log_joint.shape == (5, 3)


def test_a_step_has_its_own_size_for_each_layer_and_can_be_differentiated():
    z = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
    drift = (torch.tensor([[10.0, 20.0]]), torch.tensor([[30.0]]))
    s = torch.tensor([0.5, 0.125], requires_grad=True)
    first, second = move(z, drift, [s, 0.02], [torch.tensor([[2.0, 4.0]]), None])
    torch.testing.assert_close(first, torch.tensor([[1 + 5 + 2, 2 + 2.5 + 2.0]]))
    torch.testing.assert_close(second, torch.tensor([[3.6]]))
    (slope,) = torch.autograd.grad(first.sum(), s)
    torch.testing.assert_close(slope, torch.tensor([10 + 2.0, 20 + 4 / 0.5]))  # R + eps / sqrt(2 s)


def test_a_chain_yields_all_its_points_and_goes_on_from_where_a_visit_puts_it():
    visited = []

    def visit(k, z):
        visited.append(k)
        if k == 2:
            z = (torch.zeros(1, 1),)
        return z, Point(-0.5 * z[0].square().sum(1), (-z[0],))

    def noise(k, layer):
        return torch.full_like(layer, 3.0) if k == 2 else None

    start = (torch.full((1, 1), 8.0),)
    sizes = [[0.5], [0.25], [0.02]]
    points = list(chain(start, sizes, visit, noise))
    assert [k for k, _, _ in points] == visited == [0, 1, 2, 3]
    # 8 -> 4 -> 3, taken to 0, then noise alone
    assert [float(z[0]) for _, z, _ in points] == pytest.approx([8.0, 4.0, 0.0, 0.6])
    assert [float(point.log_joint) for _, _, point in points] == pytest.approx([-32.0, -8.0, 0.0, -0.18])
    visited.clear()
    points = list(chain(start, sizes, visit, noise, evaluate_end=False))
    assert visited == [0, 1, 2]
    assert len(points) == 4
    assert float(points[-1][1][0]) == pytest.approx(0.6)
    assert points[-1][2] is None
    visited.clear()
    assert len(list(chain(start, [], visit, noise))) == 1 == len(visited)


def test_zero_steps_give_the_prior_sample():
    model = conv_model()
    start = model.sample_prior(4, torch.Generator().manual_seed(0))
    assert_same(run(model, conv_data(model, 4), sr.Langevin(0, 0.1)), start)


def test_zero_steps_have_the_free_energy_of_the_prior(rng):
    """E_p(z)[log p(z) - log p(x, z)] = -E_p(z) log p(x | z)."""
    model = conv_model()
    x = conv_data(model, 2)
    for entropy in ("marginal", "conditional"):
        details = free_energy_details(model, x, sr.Langevin(0, 0.1), Estimation(entropy, chains=4000), rng=rng)
        many = x.repeat_interleave(4000, 0)
        with torch.no_grad():
            expected = -model.log_likelihood(many, model.sample_prior(8000, rng)).view(2, -1)
        error = expected.std(1) / math.sqrt(4000) + details.standard_error
        assert ((details.value - expected.mean(1)).abs() < 4 * error).all()


def test_same_seed_same_bits_and_another_seed_other_bits():
    model = conv_model()
    x = conv_data(model, 3)
    assert_same(run(model, x), run(model, x), rtol=0, atol=0)
    assert not torch.equal(run(model, x)[0], run(model, x, seed=1)[0])


def generators(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


def test_one_by_one_is_batched_and_order_does_not_matter():
    model = conv_model()
    x = conv_data(model, 4)
    dynamics = sr.Langevin(10, 0.01)
    batched = sr.infer(model, x, dynamics, rng=generators(4))
    for i in range(4):
        alone = sr.infer(model, x[i : i + 1], dynamics, rng=[generators(4)[i]])
        assert_same(alone, [z[i : i + 1] for z in batched])
    order = [2, 0, 3, 1]
    shuffled = sr.infer(model, x[order], dynamics, rng=[generators(4)[i] for i in order])
    assert_same(shuffled, [z[order] for z in batched])


@pytest.mark.parametrize("entropy", ["marginal", "conditional"])
def test_free_energy_one_by_one_is_batched(entropy):
    model = conv_model()
    x = conv_data(model, 3)
    dynamics = sr.Langevin(5, 0.01)
    batched = sr.free_energy(model, x, dynamics, Estimation(entropy), rng=generators(3))
    for i in range(3):
        alone = sr.free_energy(model, x[i : i + 1], dynamics, Estimation(entropy), rng=[generators(3)[i]])
        torch.testing.assert_close(alone[0], batched[i])


def test_single_precision_follows_double_precision():
    model = conv_model()
    x = conv_data(model, 3)
    precise = run(model, x)
    energy = sr.free_energy(model, x, sr.Langevin(5, 0.01), rng=torch.Generator().manual_seed(0))
    model = model.float()
    assert_same([z.double() for z in run(model, x.float())], precise, rtol=1e-4, atol=1e-4)
    single = sr.free_energy(model, x.float(), sr.Langevin(5, 0.01), rng=torch.Generator().manual_seed(0))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), energy, rtol=1e-4, atol=1e-3)


def test_mask_of_ones_is_no_mask():
    model = conv_model()
    x = conv_data(model, 3)
    assert_same(run(model, x), run(model, x, mask=torch.ones(6, 6)))


def test_hidden_pixels_have_no_influence_at_all():
    model = conv_model()
    x = conv_data(model, 2)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[..., 3:, :] = False
    expected = run(model, x, mask=mask)
    for filling in (0.0, 1e6, math.nan):
        spoiled = x.masked_fill(~mask, filling)
        assert_same(run(model, spoiled, mask=mask), expected, rtol=0, atol=0)
        energy = sr.free_energy(model, spoiled, sr.Langevin(2, 0.01), mask=mask, rng=torch.Generator().manual_seed(0))
        assert energy.isfinite().all()
    x = x.requires_grad_()
    z = model.sample_prior(2, torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(model.log_likelihood(x, z, mask).sum(), x)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).all()


def test_masked_likelihood_is_the_likelihood_of_the_visible_pixels():
    model = conv_model()
    x = conv_data(model, 1)
    mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    z = model.sample_prior(1, torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal(model.decoder(z), model.sigma)
    expected = normal.log_prob(x)[mask].sum()
    torch.testing.assert_close(model.log_likelihood(x, z, mask)[0], expected)


def test_log_prior_is_that_of_torch_distributions():
    model = conv_model()
    z = model.sample_prior(3, torch.Generator().manual_seed(0))
    expected = sum(torch.distributions.Normal(0.0, 1.0).log_prob(layer).sum(1) for layer in z)
    torch.testing.assert_close(model.log_prior(z), expected)


def test_works_without_gradients_and_leaves_parameters_alone():
    model = conv_model()
    x = conv_data(model, 2)
    expected = run(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same(run(model, x.clone()), expected)
            sr.free_energy(model, x.clone(), sr.Langevin(2, 0.01))
    sr.tune_by_gradient(model, x, sr.Langevin(2, 0.01), how=Estimation(chains=2), iterations=1)
    assert all((p.grad == 3.0).all() and p.requires_grad for p in model.parameters())
    assert all(not z.requires_grad for z in expected)


def test_diagnostics_tell_what_happened():
    model = conv_model()
    x = conv_data(model, 3)
    z, diagnostics = run(model, x, infer=sr.infer_with_diagnostics)
    assert_same(z, run(model, x))
    assert diagnostics.log_joint.shape == diagnostics.gradient_norm.shape == (11, 3)
    final = model.log_prior(z) + model.log_likelihood(x, z)
    torch.testing.assert_close(diagnostics.log_joint[-1], final.detach())
    assert not diagnostics.divergent.any()


def test_divergent_chains_are_counted_and_those_that_are_not_finite_warned_of():
    weight = torch.eye(2, dtype=torch.float64) * 10
    model = sr.LinearGaussian(weight, 0.1).model()
    x = torch.ones(3, 2, dtype=torch.float64)
    _, diagnostics = run(model, x, sr.Langevin(20, 0.1), infer=sr.infer_with_diagnostics)  # finite: no warning
    assert diagnostics.divergent[-1].all()
    assert not diagnostics.divergent[0].any()
    for infer in (sr.infer, sr.infer_with_diagnostics):
        with pytest.warns(
            sr.DivergenceWarning, match=r"3 of 3 chains diverged with step size 0\.1; .*tune_by_grid"
        ) as caught:
            found = run(model, x, sr.Langevin(200, 0.1), infer=infer)
        assert len(caught) == 1
        assert caught[0].filename == __file__  # it points to the call
    assert found[1].divergent[-1].all()


def test_a_divergent_chain_does_not_touch_the_others():
    """One of three chains starts where a cubic force is too strong for the step; it stays in its row."""
    model = sr.GaussianModel(lambda z: z[0].square(), [(2,)], 0.5).double()
    x = torch.ones(3, 2, dtype=torch.float64)
    start = torch.tensor([[0.5, 1.0], [50.0, 1.0], [-1.0, 0.7]], dtype=torch.float64)
    with pytest.warns(sr.DivergenceWarning, match="1 of 3 chains"):
        z, found = run(model, x, sr.Langevin(20, 0.01), infer=sr.infer_with_diagnostics, start=(start,))
    assert z[0].isfinite().all(1).tolist() == [True, False, True]
    assert found.divergent[-1].tolist() == [False, True, False]


class TwoLayerLatentCoordinates:
    """z_1 = W z_2 + c + eps_1 and x = V z_1 + noise, seen in its latents instead of its noises."""

    def __init__(self, top, scale, out, sigma):
        self.top, self.scale, self.out, self.sigma = top, scale, out, sigma

    def sample_prior(self, n, rng=None):
        z2 = torch.randn(n, self.top.shape[1], generator=rng).double()
        eps = torch.randn(n, self.top.shape[0], generator=rng).double()
        return z2, z2 @ self.top.T + self.scale * eps

    def log_prior(self, z):
        z2, z1 = z
        normal = torch.distributions.Normal
        lower = normal(z2 @ self.top.T, self.scale).log_prob(z1).sum(1)
        return normal(0.0, 1.0).log_prob(z2).sum(1) + lower

    def log_likelihood(self, x, z, mask=None):
        return torch.distributions.Normal(z[1] @ self.out.T, self.sigma).log_prob(x).sum(1)


def two_coordinates():
    rng = torch.Generator().manual_seed(4)
    top = torch.randn(3, 2, generator=rng).double()
    scale = torch.tensor([0.5, 1.0, 1.5]).double()
    out = torch.randn(4, 3, generator=rng).double()
    latent = TwoLayerLatentCoordinates(top, scale, out, 0.5)
    weight = torch.cat([out @ top, out * scale], 1)
    return latent, sr.LinearGaussian(weight, 0.5, latent_shapes=[(2,), (3,)])


def test_noise_and_latent_coordinates_define_one_joint_distribution():
    latent, exact = two_coordinates()
    noise = exact.model()
    eps = noise.sample_prior(5, torch.Generator().manual_seed(0))
    z = (eps[0], eps[0] @ latent.top.T + latent.scale * eps[1])
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(latent.log_likelihood(x, z), noise.log_likelihood(x, eps))
    volume = latent.scale.log().sum()
    torch.testing.assert_close(latent.log_prior(z), noise.log_prior(eps) - volume)


def test_both_coordinates_reach_the_same_posterior_and_evidence(rng):
    latent, exact = two_coordinates()
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).double()
    posterior = exact.posterior(x)
    dynamics = sr.Langevin(400, 0.02)
    many = x.expand(4000, -1)
    z = sr.infer(latent, many, dynamics, rng=rng)
    to_latent = torch.cat(
        [
            torch.cat([torch.eye(2), torch.zeros(2, 3)], 1).double(),
            torch.cat([latent.top, torch.diag(latent.scale)], 1),
        ]
    )
    expected = to_latent @ posterior.covariance @ to_latent.T
    torch.testing.assert_close(torch.cat(z, 1).T.cov(), expected, atol=0.06, rtol=0.1)
    # Near the posterior the KL is small in either coordinates, so both free energies are -log p(x).
    for model in (latent, exact.model()):
        details = free_energy_details(model, x, sr.Langevin(200, 0.02), Estimation(chains=400), rng=rng)
        gap = details.value + exact.log_evidence(x)
        assert abs(gap) < 4 * details.standard_error + 0.15


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.numpy(), TypeError, "x is a ndarray"),
        (lambda x: (x * 100).to(torch.uint8), TypeError, "x has dtype torch.uint8.*127.5"),
        (lambda x: x.float(), TypeError, "torch.float64 on cpu but x is torch.float32"),
        (lambda x: x[0, 0, 0], ValueError, "x has shape"),
        (lambda x: x[:0], ValueError, "at least one example"),
        (lambda x: x[..., :5], ValueError, "decoder returns shape"),
        (lambda x: x.masked_fill(x > 0.1, math.nan), ValueError, "NaN or infinite"),
    ],
)
def test_bad_data_is_named(change, error, message):
    model = conv_model()
    with pytest.raises(error, match=message):
        run(model, change(conv_data(model, 2)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(2, 5)}, ValueError, "mask has shape"),
        ({"mask": torch.full((6, 6), 0.5)}, ValueError, "values other than 0 and 1"),
        ({"mask": [1]}, TypeError, "mask is a list"),
        ({"start": (torch.zeros(2, 3),)}, TypeError, "start: latent 0 is torch.float32"),
        ({"start": (torch.zeros(3, 3).double(),)}, ValueError, "start: latent 0 has shape"),
        ({"start": (torch.full((2, 3), math.inf).double(),)}, ValueError, "NaN or infinite"),
    ],
)
def test_bad_options_are_named(options, error, message):
    model = conv_model()
    with pytest.raises(error, match=message):
        run(model, conv_data(model, 2), **options)


def test_a_nan_in_the_log_joint_is_named():
    model = conv_model()
    x = conv_data(model, 2)
    with torch.no_grad():
        model.decoder.out.bias.fill_(math.nan)
    for call in (run, lambda m, x: sr.free_energy(m, x, sr.Langevin(2, 0.01))):
        with pytest.raises(ValueError, match=r"log joint is nan at the start for (2 of 2|16 of 16) chains"):
            call(model, x)


def test_a_log_density_of_the_wrong_shape_is_named():
    class Scalar(sr.GaussianModel):
        def log_prior(self, z):
            return super().log_prior(z).sum()[None, None]

    model = Scalar(lambda z: z[0], [(2,)])
    with pytest.raises(ValueError, match=r"shape \(1, 4\)"):
        run(model, torch.zeros(4, 2))


@pytest.mark.parametrize("steps", [-1, 2.5, "many", True])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match="steps is"):
        sr.Langevin(steps)


@pytest.mark.parametrize("size", [0, -1.0, math.nan, math.inf, "small", [0.1], [0.1, 0.2, [0.3]], [0.1, 0.2, 0]])
def test_bad_step_size(size):
    with pytest.raises(ValueError, match="step_size"):
        sr.Langevin(3, size)


def test_step_sizes_for_another_number_of_layers():
    model = conv_model()
    with pytest.raises(ValueError, match="3 numbers per step but the model has 2 layers"):
        run(model, conv_data(model, 1), sr.Langevin(2, [[0.1] * 3] * 2))


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        sr.Langevin(3).steps = 4


@pytest.mark.parametrize("shapes", [[], [(0,)]])
def test_bad_latent_shapes(shapes):
    with pytest.raises(ValueError, match="latent_shapes"):
        sr.GaussianModel(nn.Identity(), shapes)


@pytest.mark.parametrize("sigma", [0, -1, math.nan])
def test_bad_sigma(sigma):
    with pytest.raises(ValueError, match="sigma"):
        sr.GaussianModel(nn.Identity(), [(2,)], sigma)


def diagonal_model(curvatures):
    """Independent latents whose log joints have these curvatures, and data at their centre."""
    scales = (torch.tensor(curvatures, dtype=torch.float64) - 1).sqrt()
    exact = sr.LinearGaussian(torch.diag(scales), 1.0)
    return exact.model(), torch.zeros(1, len(scales), dtype=torch.float64)


@pytest.mark.parametrize("steepness", [0.5, 1.0, 1.8])
def test_chains_that_have_arrived_are_not_called_divergent(steepness, rng):
    """At s * lambda = 1.8 the steepest direction has ten times the variance of the posterior, and that is all."""
    model, zero = diagonal_model([400.0] + [40.0] * 59)
    dynamics = sr.Langevin(60, steepness / 400)
    _, found = sr.infer_with_diagnostics(model, zero.expand(2000, -1), dynamics, rng=rng)
    assert not found.divergent[20:].any()


def test_a_chain_that_loses_what_it_gained_is_divergent(rng):
    """Fifty directions gain ten thousand nats in the first steps; one, barely unstable, then loses some thousand."""
    model, zero = diagonal_model([400.0] * 50 + [2.03 * 400])
    dynamics = sr.Langevin(25, 1 / 400)
    _, found = sr.infer_with_diagnostics(model, zero.expand(500, -1), dynamics, rng=rng)
    lost = found.log_joint.max(0).values - found.log_joint[-1]
    limit = 51 + 10 * math.sqrt(51)
    assert torch.equal(found.divergent[-1], lost > limit)
    better_than_start = found.log_joint[-1] > found.log_joint[0]  # which says nothing
    assert int((found.divergent[-1] & better_than_start).sum()) > 200
    details = free_energy_details(model, zero, dynamics, Estimation(chains=500), rng=rng)
    assert 0.4 < details.divergent.double().mean() < 0.99


def test_a_quiet_end_brings_chains_back_that_were_off_their_way(rng):
    """Some overlong steps before the quiet ones: what counts is the end, next to the best point of the whole."""
    model, zero = diagonal_model([400.0] * 50)
    steps = [1 / 400] * 3 + [3 / 400] * 4
    _, before = sr.infer_with_diagnostics(model, zero.expand(100, -1), sr.Langevin(7, steps), rng=rng)
    assert before.divergent[-1].all()
    for last, expected in (([1 / 400] * 3, False), ([3 / 400] * 3, True)):
        dynamics = sr.Langevin(10, steps + last, quiet_steps=3)
        _, found = sr.infer_with_diagnostics(model, zero.expand(100, -1), dynamics, rng=rng)
        assert bool(found.divergent[-1].all()) == bool(found.divergent[-1].any()) == expected
