"""Gains of the latents: what they are, how they follow the generator, and that a run keeps them."""

import math
from dataclasses import replace

import pytest
import torch

import shortrun as sr
from shortrun.learners.chain_settings import ShortRunSettings
from shortrun.learners.gains import (
    GainRules,
    averaged_slopes,
    followed_gain,
    gain_matrices,
    led_aim,
    led_step,
    slopes_of,
)
from shortrun.learners.short_run import ShortRun
from shortrun.nets.generators import LatentCoordinates, TopDownGenerator


class TwoLayers(torch.nn.Module):
    """Five numbers from latents of three and two."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(2, 5)

    def forward(self, z):
        return torch.tanh(self.first(z[0]) + self.second(z[1]))


def two_layers():
    torch.manual_seed(0)
    return sr.GaussianModel(TwoLayers(), [(3,), (2,)], 0.3)


def random_gains(*sizes):
    rng = torch.Generator().manual_seed(5)
    return [torch.randn(n, n, generator=rng) for n in sizes]


# --- of a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sr.GaussianModel, sr.BernoulliModel])
def test_a_model_with_gains_is_one_whose_decoder_takes_the_product(kind):
    torch.manual_seed(0)
    decoder, gains = TwoLayers(), random_gains(3, 2)
    model = kind(decoder, [(3,), (2,)])
    other = kind(lambda z: decoder((z[0] @ gains[0].T, z[1] @ gains[1].T)), [(3,), (2,)])
    z, x = model.sample_prior(4, torch.Generator().manual_seed(1)), torch.ones(4, 5)
    assert not torch.allclose(model.decode(z), other.decode(z))
    model.set_gains(gains)
    torch.testing.assert_close(model.decode(z), other.decode(z))
    torch.testing.assert_close(model.log_likelihood(x, z), other.log_likelihood(x, z))
    torch.testing.assert_close(model.log_prior(z), other.log_prior(z))


def test_gains_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"gain 1 has shape \(3, 3\); expected \(2, 2\)"):
        two_layers().set_gains(random_gains(3, 3))


def test_gains_are_saved_with_the_model_and_there_are_none_if_it_had_none():
    model, copy = two_layers(), two_layers()
    copy.load_state_dict(model.state_dict())
    assert copy.gains == ()
    model.set_gains(random_gains(3, 2))
    copy.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(copy.gains, model.gains, strict=True))
    inside = torch.nn.ModuleDict({"a": two_layers()})  # with a prefix
    inside.load_state_dict({f"a.{key}": value for key, value in model.state_dict().items()})
    assert torch.equal(inside["a"].gains[1], model.gains[1])


def test_a_frozen_model_follows_the_gains():
    torch.manual_seed(0)
    decoder = TopDownGenerator([3, 2], image=(1, 16, 16), channels=4)
    model = sr.GaussianModel(decoder, decoder.latent_shapes)
    model.set_gains(random_gains(3, 2))
    frozen = model.frozen()
    z, x = model.sample_prior(4), torch.rand(4, 1, 16, 16)
    torch.testing.assert_close(frozen.log_likelihood(frozen.arrange(x), z), model.log_likelihood(x, z))
    model.set_gains([2 * gain for gain in model.gains])
    torch.testing.assert_close(frozen.log_likelihood(frozen.arrange(x), z), model.log_likelihood(x, z))


# --- how they follow -----------------------------------------------------------------------------------


def test_slopes_are_those_of_the_jacobian():
    model = two_layers()
    z = model.sample_prior(3, torch.Generator().manual_seed(1))

    def one(a, b):
        return model.decoder((a[None], b[None]))[0]

    jacobians = [torch.func.vmap(torch.func.jacrev(one, i))(*z) for i in (0, 1)]
    wanted = [(j.mT @ j)[:2].sum(0).detach() for j in jacobians]
    rng, count = torch.Generator().manual_seed(0), 6000
    used = torch.tensor([1.0, 1.0, 0.0])[:, None]  # the third example does not count
    found = [torch.zeros(3, 3), torch.zeros(2, 2)]
    for _ in range(count):
        parts = slopes_of(model.decoder, z, used * torch.randn(3, 5, generator=rng))
        found = [total + part / count for total, part in zip(found, parts, strict=True)]
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) < 0.06 * float(b.diagonal().max())


def test_slopes_are_averaged_first_and_then_forget():
    seen = [[torch.full((1, 1), value)] for value in (1.0, 4.0, 7.0)]
    slopes = [torch.zeros(1, 1)]
    for looks, found in enumerate(seen):
        slopes = averaged_slopes(slopes, found, looks)
    assert float(slopes[0]) == pytest.approx(4.0)
    assert float(averaged_slopes(slopes, seen[0], 10_000)[0]) == pytest.approx(0.95 * 4.0 + 0.05 * 1.0)


def test_with_power_one_all_directions_have_the_curvature_of_the_steepest():
    rng = torch.Generator().manual_seed(2)
    slopes = [(lambda a: a @ a.T)(torch.randn(n, n, generator=rng, dtype=torch.float64)) for n in (3, 2)]
    curvatures = [torch.eye(len(slope)) + slope / 0.3**2 for slope in slopes]
    largest = max(float(torch.linalg.eigvalsh(h)[-1]) for h in curvatures)
    for gain, h in zip(gain_matrices(GainRules(power=1.0), 0.5, slopes, 0.3), curvatures, strict=True):
        torch.testing.assert_close(gain @ h @ gain.T, 0.25 * largest * torch.eye(len(h), dtype=torch.float64))
    for gain in gain_matrices(GainRules(power=1e-12), 0.5, slopes, 0.3):
        torch.testing.assert_close(gain, 0.5 * torch.eye(len(gain), dtype=torch.float64))


@pytest.mark.parametrize(("slope", "aim"), [(0.01, 1.0), (1.0, 0.5), (3e4, 1.0)])
def test_the_gain_settles_where_the_curvature_has_its_value(slope, aim):
    """Curvature ``slope g^2``: the fixed point of ``slope g^2 = c g^-(2 (1 - p) / p)`` is ``g^2 = (c / slope)^p``."""
    rules, gain = GainRules(), 1.0
    for _ in range(2000):
        gain = followed_gain(rules, gain, slope * gain**2, aim)
    assert gain**2 == pytest.approx((aim * rules.curvature / slope) ** rules.power, rel=1e-6)


def test_the_gain_falls_faster_than_it_rises_and_ignores_what_is_not_a_number():
    rules = GainRules()
    assert followed_gain(rules, 2.0, 1e-9) == pytest.approx(2 * rules.pace)
    assert followed_gain(rules, 2.0, 1e9) == pytest.approx(2 / rules.pace**7)
    assert followed_gain(rules, 2.0, math.nan) == followed_gain(rules, 2.0, -1.0) == 2.0


def test_the_aim_settles_where_the_generator_does_not_drift():
    """A generator that becomes steeper below s * lambda = 0.8 of the set one, and flatter above it."""
    rules, aim, gain, slope = GainRules(), 1.0, 1.0, 120.0
    for _ in range(6000):
        gain = followed_gain(rules, gain, slope * gain**2, aim)
        aim = led_aim(rules, aim, gain)
        slope *= (0.8 * rules.curvature / (slope * gain**2)) ** 0.01
    assert slope * gain**2 == pytest.approx(0.8 * rules.curvature, rel=1e-3)
    assert (gain, aim) == (pytest.approx(1.0, rel=1e-3), pytest.approx(0.8, rel=1e-3))
    assert led_aim(rules, 1.5, 0.01) == 1.5
    assert led_aim(rules, 0.6, 100.0) == 0.6


def test_a_tuned_step_is_approached_at_the_pace():
    rules, dynamics = GainRules(), sr.Langevin(3, 0.02)
    assert led_step(rules, dynamics, dynamics.scaled(1.4)).step_size == pytest.approx(0.02 * rules.pace)
    assert led_step(rules, dynamics, dynamics.scaled(0.5)).step_size == pytest.approx(0.02 / rules.pace)
    assert led_step(rules, dynamics, dynamics.scaled(1.01)).step_size == pytest.approx(0.0202)


# --- in learning ---------------------------------------------------------------------------------------


def gain_learner(scale=1.0):
    """Of a decoder whose latents enter ``scale`` times as steeply."""
    model = two_layers()
    with torch.no_grad():
        for layer in (model.decoder.first, model.decoder.second):
            layer.weight *= scale
    settings = ShortRunSettings(4, 0.02, cool_down=1, tune="grid", learn_last=2, step_control="gain", tune_every=3)
    learner = ShortRun(model, settings=settings, learning_rate=1e-12, warm_up=10_000)
    return learner, learner.init(seed=0)


def test_a_steeper_decoder_gets_smaller_gains_and_its_chains_are_as_before():
    """With all of the slope taken up (p = 1), the decoder's scale does not matter to the chains."""
    x = torch.rand(16, 5)
    ends = []
    for scale in (1.0, 30.0):
        learner, state = gain_learner(scale)
        learner.gain_rules = replace(learner.gain_rules, power=1.0, curvature=20.0)
        learner.rules = replace(learner.rules, most_divergent=1.0)
        for _ in range(150):
            state, _ = learner.update(state, x)
        assert state.control.curvature == pytest.approx(20.0, rel=0.2)
        z = sr.infer(learner.model, x, sr.Langevin(30, 0.02), rng=torch.Generator().manual_seed(3))
        ends.append(learner.model.decode(z).detach())
    assert (ends[0] - ends[1]).abs().mean() < 0.25 * ends[0].std()
    gains = [float(learner.model.gains[0].norm()), float(gain_learner()[0].model.gains[0].norm())]
    assert gains[0] < gains[1] / 5


def test_a_model_that_cannot_have_gains_is_refused():
    model = LatentCoordinates(TopDownGenerator([3, 2], image=(1, 16, 16), channels=4))
    learner = ShortRun(model, settings=ShortRunSettings(2, 0.02, cool_down=0, step_control="gain"))
    with pytest.raises(ValueError, match=r"needs a decoder with N\(0, I\) latents; LatentCoordinates has none"):
        learner.init(seed=0)


def test_layers_that_are_too_large_for_a_matrix_are_refused():
    model = sr.GaussianModel(torch.nn.Sequential(torch.nn.Linear(3, 5)), [(1, 40, 40)])
    learner = ShortRun(model, settings=ShortRunSettings(2, 0.02, cool_down=0, step_control="gain"))
    with pytest.raises(ValueError, match="one of 1600 is too many, at most 1024"):
        learner.init(seed=0)


def test_chains_that_diverge_before_the_first_update_lower_the_gain():
    learner, state = gain_learner()
    before = [p.detach().clone() for p in learner.parameters]
    state = replace(state, iteration=20_000, slopes=tuple(torch.eye(n, dtype=torch.float64) for n in (3, 2)))
    state, kept = learner._judge(state, before, divergent=8, before_updates=8, count=16)
    assert not kept
    assert state.control.gain == pytest.approx(learner.gain_rules.fall)
    expected = gain_matrices(learner.gain_rules, state.control.gain, state.slopes, 0.3)
    torch.testing.assert_close(learner.model.gains[0], expected[0].float())
