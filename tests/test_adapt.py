"""What lets learning last: the price of steepness, the step that is led, the start."""

import math

import pytest
import torch
from small_runs import SMOKE

import shortrun as sr
from shortrun.learners.adapt import Control, Rules, changed_direction, curvature_along, led_step, price, priced_rows
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.short_run import ShortRun
from shortrun.nets.generators import HierarchicalFeatures, TopDownGenerator
from shortrun.training.config import Config
from shortrun.training.presets import preset


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(2, 5)

    def forward(self, z):
        return torch.tanh(self.first(z[0]) + self.second(z[1]))


def two_layers(kind=sr.GaussianModel, **options):
    torch.manual_seed(0)
    return kind(TwoLayers().double(), [(3,), (2,)], **options)


def directions(n, seed=1):
    u = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return u / u.norm(dim=1, keepdim=True)


def hessian_of(model, x, z, i):
    """Of minus the log joint of example i, by autograd, shape (5, 5)."""

    def value(flat):
        parts = (flat[None, :3], flat[None, 3:])
        return -(model.log_prior(parts) + model.log_likelihood(x[i : i + 1], parts)).sum()

    return torch.autograd.functional.hessian(value, torch.cat([z[0][i], z[1][i]]))


# --- the curvature -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sr.GaussianModel, sr.BernoulliModel])
def test_the_curvature_is_that_of_the_hessian_at_what_the_model_makes(kind):
    model = two_layers(kind)
    z = model.sample_prior(4, torch.Generator().manual_seed(2))
    u, x = directions(4), torch.rand(4, 5, dtype=torch.float64)
    found = curvature_along(model, x, None, z, u, 1e-3).detach()
    made = model.decode(z).detach()
    for i in range(4):
        wanted = u[i] @ hessian_of(model, made, z, i) @ u[i]
        assert float(found[i]) == pytest.approx(float(wanted.detach()), rel=1e-4)


def test_for_gaussian_noise_it_is_the_slope_of_the_decoder():
    """``1 + |J u|^2 / sigma^2``, with the Jacobian of autograd."""
    model = two_layers(sigma=0.4)
    z, u = model.sample_prior(3, torch.Generator().manual_seed(2)), directions(3)
    _, slope = torch.func.jvp(lambda flat: model.decode((flat[:, :3], flat[:, 3:])), (torch.cat(z, 1),), (u,))
    wanted = 1 + slope.square().sum(1) / 0.4**2
    torch.testing.assert_close(curvature_along(model, torch.zeros(3, 5), None, z, u, 1e-3), wanted, rtol=1e-4, atol=0)


def test_hidden_pixels_have_no_slope():
    model = two_layers(sigma=0.4)
    z, u = model.sample_prior(3, torch.Generator().manual_seed(2)), directions(3)
    none, first = torch.zeros(3, 5, dtype=torch.bool), torch.arange(5) < 2
    x = torch.zeros(3, 5)
    torch.testing.assert_close(curvature_along(model, x, none, z, u, 1e-2), torch.ones(3, dtype=torch.float64))
    part = curvature_along(model, x, first[None], z, u, 1e-2)
    rest = curvature_along(model, x, ~first[None], z, u, 1e-2)
    torch.testing.assert_close(part + rest - 1, curvature_along(model, x, None, z, u, 1e-2))


def test_its_gradient_is_that_of_the_hessian_with_the_image_held_fixed():
    """With respect to a weight, by finite differences of the Hessian that autograd gives."""
    model = two_layers()
    z, u = model.sample_prior(2, torch.Generator().manual_seed(2)), directions(2)
    weight, made = model.decoder.first.weight, model.decode(z).detach()
    gradient = torch.autograd.grad(curvature_along(model, made, None, z, u, 1e-3).sum(), weight)[0]
    values = []
    for change in (1e-5, -1e-5):
        with torch.no_grad():
            weight[1, 2] += change
        values.append(sum(float((u[i] @ hessian_of(model, made, z, i) @ u[i]).detach()) for i in range(2)))
        with torch.no_grad():
            weight[1, 2] -= change
    assert float(gradient[1, 2]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3)


def test_the_direction_of_change_is_a_step_of_the_power_method():
    """On a quadratic the gradient changes by H times the move, so u^T H u is above that of the move itself."""
    rng = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=rng)
    h = root @ root.T
    a, b = torch.randn(6, 5, generator=rng), torch.randn(6, 5, generator=rng)
    u = changed_direction((-(b @ h)[:, :3], -(b @ h)[:, 3:]), (-(a @ h)[:, :3], -(a @ h)[:, 3:]))
    torch.testing.assert_close(u, torch.nn.functional.normalize((a - b) @ h, dim=1))
    move = torch.nn.functional.normalize(b - a, dim=1)
    assert ((u @ h * u).sum(1) >= (move @ h * move).sum(1)).all()
    assert changed_direction((torch.full((1, 2), math.nan),), (torch.zeros(1, 2),)).isfinite().all()


def test_steps_that_grow_do_not_overshoot_from_afar():
    """One direction with ``s lambda = 1.9``: a full first step ends 0.9 times as far on the other side."""
    model = sr.GaussianModel(lambda z: z[0] * 1.0, [(1,)], 0.1)  # lambda = 101, mode at 10 / 1.01
    x, start = torch.full((1, 1), 10.0), (torch.zeros(1, 1),)
    furthest = []
    for first in (0, 3):
        sizes = [1.9 / 101 * min(1, (k + 1) / (first + 1)) for k in range(7)]
        ends = [sr.infer(model, x, sr.Langevin(k, sizes[:k], noise=False), start=start)[0] for k in range(1, 8)]
        furthest.append(float(torch.cat(ends).max()) / (10 / 1.01))
    assert furthest == [pytest.approx(1.9), pytest.approx(1.0, abs=0.05)]


# --- the price -----------------------------------------------------------------------------------------


def test_the_price_is_zero_within_the_limit_and_w_at_e_times_it():
    rules = Rules(limit=2.0, weight=7.0)
    steepness = torch.tensor([0.1, 2.0, 2 * math.e, 2 * math.e**2])
    torch.testing.assert_close(price(rules, steepness), torch.tensor([0.0, 0.0, 7.0, 28.0]))


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 1), (8, 2), (64, 16)])
def test_a_share_of_the_batch_pays_and_at_least_one(count, expected):
    assert int(priced_rows(Rules(), count).sum()) == expected


class Linear(TwoLayers):
    def forward(self, z):
        return self.first(z[0]) + self.second(z[1])


def linear_learner(**rules):
    torch.manual_seed(0)
    settings = ShortRunSettings(4, 0.02, cool_down=1, momentum=0.0, tune="off", learn_last=2)
    model = sr.GaussianModel(Linear(), [(3,), (2,)])
    learner = ShortRun(model, settings=settings, learning_rate=1e-2, rules=Rules(**rules))
    return learner, learner.init(seed=0)


def test_the_price_keeps_the_generator_within_reach_of_the_step():
    """Data so wide that the likelihood asks for a slope of 6, which is a curvature of 400; the limit is at 25."""
    found = {}
    for weight in (0.0, 1000.0):
        learner, state = linear_learner(weight=weight, limit=0.5)
        rng, seen = torch.Generator().manual_seed(0), []
        for _ in range(300):
            state, _ = learner.update(state, 6 * torch.randn(32, 5, generator=rng))
            seen.append(0.02 * state.control.curvature)
        found[weight] = seen[200:]
    assert max(found[1000.0]) < 0.7
    assert min(found[0.0]) > 1.0


def test_images_that_pay_stand_for_all_of_them():
    """On a batch of one and the same image the gradient of the price does not depend on the share that pays."""
    found = []
    for share in (1.0, 0.25):
        learner, state = linear_learner(share=share)
        with torch.no_grad():
            learner.model.decoder.first.weight.mul_(10)
        z = tuple(layer.expand(8, -1) for layer in learner.model.sample_prior(1, torch.Generator().manual_seed(1)))
        u = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]).expand(8, -1)
        curvatures, gradients = learner.price_of_steepness(state, torch.zeros(8, 5), None, z, u, 8)
        assert len(curvatures) == 8 * share
        found.append(gradients[0])
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-2)


# --- the step and the learning rate --------------------------------------------------------------------


def test_a_tuned_step_is_approached_at_the_pace():
    rules, dynamics = Rules(), sr.Langevin(3, 0.02)
    assert led_step(rules, dynamics, dynamics.scaled(1.4)).step_size == pytest.approx(0.02 * rules.pace)
    assert led_step(rules, dynamics, dynamics.scaled(0.5)).step_size == pytest.approx(0.02 / rules.pace)
    assert led_step(rules, dynamics, dynamics.scaled(1.01)).step_size == pytest.approx(0.0202)
    slower = led_step(rules, dynamics, dynamics.scaled(1.4), rate_share=0.1)
    assert slower.step_size == pytest.approx(0.02 * rules.pace**0.1)
    profiled = sr.Langevin(3, 0.03, profile=(1.0, 0.5, 0.25))  # its shape is taken as tuned
    led = led_step(rules, dynamics, profiled)
    assert (led.step_size, led.profile) == (pytest.approx(0.0206), profiled.profile)


def test_the_learning_rate_is_halved_by_an_undone_iteration_and_recovers():
    control = Control().after(kept=False).after(kept=False)
    assert control.caution == 0.25
    for _ in range(100):
        control = control.after(kept=True)
    assert control.caution == 1.0
    assert Control(caution=0.5).after(kept=True).caution == pytest.approx(0.515)


def test_runs_with_former_rules_go_on_with_the_present_one(tmp_path):
    SMOKE.save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    for former in ("follow", "gain"):
        (tmp_path / "old.yaml").write_text(
            text.replace("step_control: bound", f"step_control: {former}").replace("tune: grid", "tune: guard")
        )
        settings = Config.load(tmp_path / "old.yaml").settings
        assert (settings.step_control, settings.tune) == ("bound", "off")


# --- the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TopDownGenerator, HierarchicalFeatures])
def test_generators_start_at_the_mean_colour(kind):
    torch.manual_seed(0)
    generator = kind([3, 4], image=(3, 16, 16), channels=8, base=8)
    mean = torch.tensor([-0.8, 0.1, 0.6])[:, None, None].expand(3, 16, 16)
    generator.start_at(mean)
    made = generator(tuple(torch.randn(50, *shape) for shape in generator.latent_shapes)).mean((0, 2, 3))
    torch.testing.assert_close(made, mean[:, 0, 0], atol=0.15, rtol=0)


def test_only_generators_that_are_built_for_a_run_start_there():
    """The presets of the paper do not, nor does a generator that the user brings, which may be trained."""
    x = torch.full((20, 1, 16, 16), 0.5)
    found = {}
    for name, changes in {"built": {}, "as published": {"start_at_mean": False}}.items():
        config = preset("smoke", "embedded").changed(iterations=1, learning_rates=(1e-12,), prior="normal", **changes)
        config = config.changed(network={"base": 8})
        trained = sr.fit(None, x, config=config, quiet=True)
        found[name] = float(trained.model.decoder.to_image.layers[-1].bias.detach())
    decoder = TopDownGenerator([3, 4], image=(1, 16, 16), channels=8, base=8)
    before = decoder.to_image.layers[-1].bias.detach().clone()
    sr.fit(sr.GaussianModel(decoder, decoder.latent_shapes), x, iterations=1, learning_rates=(1e-12,), quiet=True)
    torch.testing.assert_close(decoder.to_image.layers[-1].bias.detach(), before)
    assert found["built"] == pytest.approx(math.atanh(0.5), rel=1e-4)
    assert found["as published"] != found["built"]
    assert not preset("paper", "svhn").run.start_at_mean


class LaplaceNoise(torch.nn.Module):
    """A likelihood with a kink at zero residual, and a decoder to look at."""

    def decode(self, z):
        return z[0]

    def log_prior(self, z):
        return -0.5 * z[0].square().sum(1)

    def log_likelihood(self, x, z, mask=None):
        return torch.distributions.Laplace(z[0], 0.3).log_prob(x).sum(1)


def test_the_kink_of_a_likelihood_is_not_taken_for_steepness():
    """Away from its kink the curvature of Laplace noise is that of the prior alone, which is one."""
    z = (torch.zeros(3, 2, dtype=torch.float64),)
    u = torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(3, -1)
    found = curvature_along(LaplaceNoise(), torch.ones(3, 2, dtype=torch.float64), None, z, u, 0.1)
    torch.testing.assert_close(found, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=1e-6)
