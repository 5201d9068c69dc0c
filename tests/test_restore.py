"""Images from measurements: operators against other libraries, posteriors against closed forms, errors at the door."""

import json
import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from linear_images import linear_trained
from scipy.integrate import quad

import shortrun as sr
from shortrun import data
from shortrun.cli import main
from shortrun.cli.restore import shown
from shortrun.core.latents import flatten
from shortrun.inverse import (
    Blur,
    Clip,
    Compose,
    Downsample,
    Function,
    Grey,
    Identity,
    Mask,
    Observed,
    Posterior,
    Project,
    Quantise,
    as_operator,
    parse_operator,
)
from shortrun.inverse.model import noise_through
from shortrun.inverse.operators import log_ndtr_between
from shortrun.metrics.chains import effective_sample_size, r_hat
from shortrun.priors import GaussianPrior
from shortrun.priors.starts import LinearisedMixture


def images(count=3, colours=3, side=8, seed=0):
    return torch.rand(count, colours, side, side, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture
def digits():
    """With a Gaussian as its prior, whose starts are made in no time."""
    trained = sr.load("mnist-small")
    trained.prior = GaussianPrior.of(trained.prior.mean, trained.prior.factor @ trained.prior.factor.T)
    return trained


def matrix_of(operator, shape):
    """A linear operator as a matrix, from what it does to each pixel."""
    size = math.prod(shape)
    zero = operator(torch.zeros(1, *shape)).flatten(1)
    return (operator(torch.eye(size).view(size, *shape)).flatten(1) - zero).T


# --- operators ----------------------------------------------------------------------------------------


def test_downsampling_takes_means_of_squares():
    x = images()
    expected = x.numpy().reshape(3, 3, 4, 2, 4, 2).mean((3, 5))
    np.testing.assert_allclose(Downsample(2)(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kernel", [Blur.gaussian(1.2), Blur.motion(5, 30), Blur(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))]
)
def test_blur_is_the_convolution_of_scipy(kernel):
    x = images(1, 2)
    flipped = kernel.kernel.flip(0, 1).numpy()  # scipy.ndimage centres even kernels one place later
    origin = [-(1 - size % 2) for size in kernel.kernel.shape]
    found = kernel(x)[0]
    for colour in range(2):
        expected = scipy.ndimage.correlate(x[0, colour].numpy(), flipped, mode="nearest", origin=origin)
        np.testing.assert_allclose(found[colour], expected, atol=1e-5)


def test_kernels_of_blur():
    width = Blur.gaussian(1.5).kernel
    place = torch.arange(width.shape[0]) - width.shape[0] // 2
    assert abs(float((width.sum(0) * place**2).sum()) - 1.5**2) < 0.05
    flat, upright = Blur.motion(5, 0).kernel, Blur.motion(5, 90).kernel
    assert torch.allclose(flat, upright.T, atol=1e-6)
    assert float(flat.sum()) == pytest.approx(1)
    assert int((flat > 1e-4).sum()) == 5


def test_grey_projection_and_composition():
    x = images()
    red, green, blue = x.unbind(1)
    assert torch.allclose(Grey()(x)[:, 0], 0.299 * red + 0.587 * green + 0.114 * blue)
    project = Project(2000, seed=3)
    lengths = project(x).square().mean(1) / x.flatten(1).square().mean(1)  # projections keep the scale of pixels
    assert torch.allclose(lengths, torch.ones(3), atol=0.15)
    assert torch.equal(project(x), Project(2000, seed=3)(x))
    both = Compose(Grey(), Downsample(4), Mask(torch.tensor([[True, False]])))
    assert torch.equal(both(x)[..., 0], Downsample(4)(Grey()(x))[..., 0])
    assert not both(x)[..., 1].any()


def test_quantised_pixels_have_the_probability_of_their_part():
    """Sums to one over levels; each is an integral of the normal density, computed by scipy."""
    for bits in (1, 2, 4):
        operator, sigma = Quantise(bits), torch.tensor(0.2, dtype=torch.float64)
        levels = (torch.arange(2**bits, dtype=torch.float64) + 0.5) * 2 / 2**bits - 1
        for pixel in (-0.9, 0.03, 2.5):
            seen = torch.full((len(levels), 1), pixel, dtype=torch.float64)
            logs = operator.log_likelihood(levels[:, None], seen, sigma, None)
            assert float(logs.exp().sum()) == pytest.approx(1)
            ends = [-np.inf, *(levels[:-1] + levels[1:]).numpy() / 2, np.inf]
            expected = np.diff(scipy.stats.norm.cdf(ends, pixel, 0.2))
            np.testing.assert_allclose(logs.exp(), expected, atol=1e-12)
    x = images()
    assert set(Quantise(1)(x).unique().tolist()) == {-0.5, 0.5}
    assert float((Quantise(8)(x) - x).abs().max()) <= 1 / 256 + 1e-6


def test_clipped_pixels_have_a_density_within_and_mass_at_the_limits():
    operator, sigma = Clip(-0.5, 0.4), torch.tensor(0.3, dtype=torch.float64)

    def density(y, pixel):
        seen = torch.tensor([[pixel]], dtype=torch.float64)
        return float(operator.log_likelihood(torch.tensor([[y]], dtype=torch.float64), seen, sigma, None).exp())

    for pixel in (-0.7, 0.0, 0.39):
        within = quad(density, -0.4999999, 0.3999999, args=(pixel,))[0]
        assert within + density(-0.5, pixel) + density(0.4, pixel) == pytest.approx(1, abs=1e-5)


def test_probabilities_between_are_right_in_both_tails():
    low = torch.tensor([-40.0, -1.0, 8.0, 30.0, -0.1], dtype=torch.float64)
    high = torch.tensor([-38.0, 2.0, 9.0, 31.0, 50.0], dtype=torch.float64)
    reference = scipy.stats.norm.logsf(low[2:4]) + np.log1p(
        -np.exp(scipy.stats.norm.logsf(high[2:4]) - scipy.stats.norm.logsf(low[2:4]))
    )
    found = log_ndtr_between(low, high)
    np.testing.assert_allclose(found[2:4], reference, rtol=1e-9)
    assert float(found[1]) == pytest.approx(math.log(scipy.stats.norm.cdf(2) - scipy.stats.norm.cdf(-1)))
    assert float(found[0]) == pytest.approx(scipy.stats.norm.logcdf(-38), rel=1e-6)
    leaf = torch.tensor([0.1, 30.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_ndtr_between(leaf - 0.5, leaf + 0.5).sum(), leaf)
    assert slope.isfinite().all()


def test_operators_by_name():
    x = images()
    both = parse_operator("blur:1+downsample:2", x)
    assert torch.equal(both(x), Downsample(2)(Blur.gaussian(1.0)(x)))
    assert torch.equal(parse_operator("mask:lower-half", x)(x)[..., 4:, :], torch.zeros(3, 3, 4, 8))
    for text in ("sharpen", "downsample:3", "downsample", "grey:2", "mask:everything", "blur:-1", "quantise:9", ""):
        with pytest.raises(ValueError, match=r"operator is .*accepted: denoise"):
            parse_operator(text, x)


# --- the model of a measurement ----------------------------------------------------------------------


def test_what_an_operator_lets_pass_of_the_noise():
    trained, _, _ = linear_trained()
    z = trained.model.sample_prior(1)
    whole, part = Mask(torch.ones(8, 8)), Project(200)
    for operator, expected in ((Identity(), 0.3), (whole, 0.3), (part, 0.3), (Downsample(2), 0.15)):
        found = noise_through(trained.model, operator, z, torch.Generator().manual_seed(0))
        assert found == pytest.approx(expected, rel=0.1)


def test_freezing_leaves_the_log_joint_of_a_measurement_as_it_is(digits):
    observed = Observed(digits.model, Downsample(4), 0.1)
    z = observed.sample_prior(2, torch.Generator().manual_seed(0))
    y = torch.zeros(2, 1, 7, 7)
    frozen = observed.frozen()
    assert torch.allclose(frozen.log_likelihood(y, z), observed.log_likelihood(y, z), rtol=1e-4)
    assert frozen.sigma is observed.sigma


OPERATORS = [Downsample(2), Blur.gaussian(1.0), Project(20), Compose(Blur.gaussian(0.8), Downsample(4))]


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_posteriors_of_linear_images_are_those_of_the_closed_form(operator):
    """y = A x + noise is a linear-Gaussian model with A W: the best answer is the mean of its posterior, and draws have
    the mean and the spread of its short run distribution, which is the posterior to within a few per cent."""
    trained, exact, x = linear_trained(steps=300)
    a = matrix_of(operator, trained.shape)
    sigma = 0.2
    y = operator(x) + sigma * torch.randn(operator(x).shape, generator=torch.Generator().manual_seed(2))
    problem = sr.LinearGaussian(a @ exact.weight, sigma, a @ exact.bias)
    best = trained.restore(y, operator, sigma)
    expected = (problem.posterior(y.flatten(1)).mean @ exact.weight.T + exact.bias).view_as(x)
    assert torch.allclose(best, expected, atol=0.02)
    posterior = trained.posterior(y, operator, sigma, draws=400)
    law = problem.short_run(y.flatten(1), sr.Langevin(posterior.steps, posterior.step_size))
    wide, exactly = (
        (exact.weight @ each.covariance @ exact.weight.T).diagonal().sqrt().view(trained.shape)
        for each in (law, problem.posterior(y.flatten(1)))
    )
    assert float(((posterior.mean - expected) / wide).abs().max()) < 5 / math.sqrt(400)
    ratio = posterior.std.mean(0) / wide
    assert float(ratio.mean()) == pytest.approx(1, abs=0.03)
    assert float((wide / exactly).mean()) == pytest.approx(1, abs=0.12)


def test_intervals_of_a_linear_gaussian_model_cover_what_they_should():
    """z from the prior, x and y from the model: 90 % intervals hold 90 % of the pixels, 50 % ones half of them."""
    trained, exact, _ = linear_trained(steps=200)
    rng = torch.Generator().manual_seed(3)
    z = trained.model.sample_prior(100, rng)
    clean = trained.decode(z)
    operator, sigma = Downsample(4), 0.2
    y = operator(clean) + sigma * torch.randn(100, 1, 2, 2, generator=rng)
    posterior = trained.posterior(y, operator, sigma, draws=100)
    for level in (0.5, 0.9):
        low, high = posterior.interval(level)
        covered = ((clean >= low) & (clean <= high)).float().mean()
        assert float(covered) == pytest.approx(level, abs=0.05)
    assert exact.weight.shape[1] == 3


def test_starts_through_an_operator_are_posterior_draws_of_linear_images():
    trained, exact, x = linear_trained()
    operator, sigma = Downsample(2), 0.25
    prior = GaussianPrior(3)
    guide = LinearisedMixture(trained.decode, prior, [(3,)], 0.3, torch.Generator().manual_seed(0))
    seen = guide.through(operator.smooth, trained.shape, sigma)
    y = operator(x)
    draws = seen.draw(y, torch.ones_like(y, dtype=torch.bool), 4000, torch.Generator().manual_seed(1))
    z = torch.stack([flatten(each) for each in draws])
    a = matrix_of(operator, trained.shape)
    known = sr.LinearGaussian(a @ exact.weight, sigma, a @ exact.bias).posterior(y.flatten(1))
    # The maps are fitted with a ridge to a few draws, so they are a few per cent short.
    assert torch.allclose(z.mean(0), known.mean, atol=0.02, rtol=0.1)
    assert torch.allclose(torch.cov(z[:, 0].T), known.covariance, atol=0.03)


def test_the_step_follows_the_curvature_of_the_operator():
    """Little noise makes the posterior narrow; the step is chosen once for an operator and its noise."""
    trained, _, x = linear_trained(steps=25, step_size=0.01)
    operator = Downsample(2)
    steps = {sigma: trained.posterior(operator(x), operator, sigma, draws=2).step_size for sigma in (0.5, 0.1, 0.02)}
    assert steps[0.5] > 3 * steps[0.1] > 9 * steps[0.02]
    assert trained.posterior(operator(x) + 1, operator, 0.1, draws=2).step_size == steps[0.1]
    assert len(trained._tuned[operator]) == 3


def test_each_image_may_have_holes_of_its_own():
    """Beside noise, which the likelihood of the model does not know: each answer is that of the image by itself."""
    trained, exact, x = linear_trained(steps=200)
    mask = sr.make_mask("random:0.5", x, torch.Generator().manual_seed(0))
    assert not torch.equal(mask[0], mask[1])
    best = trained.restore(x, Mask(mask), 0.4)
    for i in range(len(x)):
        rows = mask[i].flatten()
        problem = sr.LinearGaussian(exact.weight[rows], 0.4, exact.bias[rows])
        mean = problem.posterior(x[i].flatten()[None, rows]).mean
        assert torch.allclose(best[i].flatten(), (mean @ exact.weight.T + exact.bias)[0], atol=0.02)
    assert trained.restore(x, Compose(Blur.gaussian(1.0), Mask(mask)), 0.4).shape == x.shape


def test_any_function_is_an_operator():
    trained, _, x = linear_trained(steps=50)

    def columns(x):
        return x.mean(2)

    found = [trained.restore(columns(x), each, 0.1, seed=1) for each in (columns, Function(columns))]
    assert torch.equal(*found)
    assert trained._as_operator(columns) is trained._as_operator(columns)
    with pytest.raises(TypeError, match="operator is a str; expected a function"):
        as_operator("downsample:2")


def test_images_are_better_with_a_measurement_than_without(digits):
    """Half of the resolution says much about a digit; what hidden pixels hold says nothing."""
    x = data.load("embedded", "test").array[:8].float() / 127.5 - 1
    y = Downsample(4)(x)
    found = digits.restore(y, Downsample(4), steps=25)
    mean_image = data.load("embedded", "train").mean
    assert float((found - x).square().mean()) < 0.5 * float((mean_image - x).square().mean())
    mask = sr.make_mask("random:0.4", x)
    spoiled = torch.where(mask, x, torch.nan)
    assert torch.equal(digits.restore(x, Mask(mask), steps=5), digits.restore(spoiled, Mask(mask), steps=5))
    assert digits.restore(y, Downsample(4), draws=3, steps=5).shape == (3, 8, 1, 28, 28)


def test_longer_chains_say_how_well_they_mixed():
    trained, _, x = linear_trained(steps=50, step_size=0.01)
    y = Downsample(2)(x)
    short, long = (trained.posterior(y, Downsample(2), 0.3, draws=8, steps=steps) for steps in (50, 400))
    assert short.r_hat is None
    assert long.r_hat.shape == long.effective_draws.shape == (6,)
    assert float(long.r_hat.max()) < 1.1 < 20 < float(long.effective_draws.min())
    assert not long.divergent.any()


def test_what_follows_from_draws():
    draws = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 2, 1, 3)
    posterior = Posterior(draws, (draws,), 0.1, 25, torch.zeros(2), torch.zeros(2), sigma=0.5)
    assert torch.equal(posterior.mean, torch.full((2, 1, 3), 2.0))
    assert torch.equal(posterior.quantile(0.25), torch.full((2, 1, 3), 1.0))
    assert [end[0, 0, 0].item() for end in posterior.interval(0.5)] == pytest.approx([0.5, 3.5])
    assert [end[0, 0, 0].item() for end in posterior.interval(0.9)] == [0, 4]  # as wide as draws can tell
    assert posterior.probability(lambda x: x.mean((1, 2)) > 2.5).tolist() == [pytest.approx(0.4)] * 2
    spread = posterior.with_noise().images - draws
    assert float(spread.std()) == pytest.approx(0.5, abs=0.15)
    with pytest.raises(ValueError, match="one true or false for each"):
        posterior.probability(lambda x: x > 0)
    with pytest.raises(ValueError, match=r"level is 1\.5"):
        posterior.interval(1.5)


@pytest.mark.parametrize("count", [20, 64])
def test_intervals_hold_one_more_draw_as_often_as_they_say(count):
    """Quantiles of the draws themselves would hold 0.9 (n - 1) / (n + 1): 0.81 with 20 draws."""
    values = torch.randn(count + 1, 20_000, generator=torch.Generator().manual_seed(0))
    posterior = Posterior(values[1:], (), 0.1, 25, torch.zeros(1), torch.zeros(1))
    for level in (0.5, 0.9):
        low, high = posterior.interval(level)
        held = ((values[0] >= low) & (values[0] <= high)).double().mean()
        assert float(held) == pytest.approx(level, abs=0.01)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_effective_sample_size_of_an_autoregression(rho):
    """x_t = rho x_{t-1} + noise has an effective share of (1 - rho) / (1 + rho)."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(8, 5000, generator=rng, dtype=torch.float64)
    chains = [noise[:, 0] / math.sqrt(1 - rho**2)]
    for t in range(1, 5000):
        chains.append(rho * chains[-1] + noise[:, t])
    traces = torch.stack(chains, 1)
    share = float(effective_sample_size(traces)) / traces.numel()
    assert share == pytest.approx((1 - rho) / (1 + rho), rel=0.15)
    assert float(r_hat(traces)) == pytest.approx(1, abs=0.01)
    apart = traces + torch.arange(8.0)[:, None] * traces.std()
    assert float(r_hat(apart)) > 1.5
    assert float(effective_sample_size(apart)) < 30
    drifting = traces + torch.linspace(0, 5, 5000) * traces.std()  # each chain the same way: halves tell
    assert float(r_hat(drifting)) > 1.3


# --- errors ------------------------------------------------------------------------------------------


def rounded(x):
    return x.round()


def detached(x):
    return x.detach() * 2


@pytest.mark.parametrize(
    ("operator", "change", "options", "message"),
    [
        (Downsample(2), lambda y: y, {"sigma": 0.0}, "sigma is 0.0; expected a positive number"),
        (Downsample(2), lambda y: y, {"sigma": math.nan}, "sigma is nan"),
        (Downsample(2), lambda y: y * math.nan, {}, "y has values that are NaN or infinite"),
        (Downsample(2), lambda y: y[..., :3], {}, r"y has shape \(6, 1, 4, 3\); of images .*\(n, 1, 4, 4\)"),
        (Downsample(2), lambda y: y[:0], {}, "at least one measurement"),
        (Downsample(2), lambda y: y, {"draws": 0}, "draws is 0; expected one or more"),
        (Downsample(2), lambda y: y, {"steps": 0}, "steps is 0; expected one or more"),
        (rounded, lambda y: y, {}, r"Function\(rounded\) cannot be differentiated"),
        (detached, lambda y: y, {}, "cannot be differentiated"),
        (Grey(), lambda y: y, {}, "images have 1 colours; expected three"),
        (Mask(torch.zeros(8, 8)), lambda y: y, {}, "the mask hides everything"),
        (Mask(torch.ones(5, 5)), lambda y: y, {}, "does not broadcast"),
        (lambda x: x.sum(), lambda y: y, {}, "expected a tensor with a row for each"),
    ],
)
def test_bad_measurements_are_named(operator, change, options, message):
    trained, _, x = linear_trained(steps=5)
    y = change(Downsample(2)(x) if isinstance(operator, Downsample) else x)
    with pytest.raises(ValueError, match=message):
        trained.restore(y, operator, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Downsample(1), "factor is 1"),
        (lambda: Downsample(3)(images()), "do not divide into squares of 3x3"),
        (lambda: Blur(torch.zeros(3, 3)), "whose sum is not zero"),
        (lambda: Blur.gaussian(0), "the width of a blur is 0"),
        (lambda: Blur.motion(0.5), "the length of a motion is 0.5"),
        (lambda: Project(0), "count is 0"),
        (lambda: Clip(1, 0), "low is 1 and high 0"),
        (lambda: Quantise(9), "bits is 9"),
        (lambda: Compose(), "nothing to compose"),
        (lambda: Compose(Quantise(2), Downsample(2)), r"Quantise\(2\) can only be the last"),
        (lambda: Grey()(torch.zeros(2, 5)), r"takes images \(n, colours, height, width\)"),
    ],
)
def test_bad_operators_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_model_without_noise_of_its_own_needs_a_sigma():
    decoder = torch.nn.Linear(2, 5)
    model = sr.BernoulliModel(lambda z: decoder(z[0]), [(2,)])
    trained, _, _ = linear_trained()
    trained.model = model
    with pytest.raises(ValueError, match="needs a sigma"):
        trained.noise_of(Identity())


def test_a_learned_prior_takes_part(digits):
    """Through the guide and the drift: images differ from those with N(0, I), and fit the measurement as well."""
    x = data.load("embedded", "test").array[:4].float() / 127.5 - 1
    operator = Downsample(4)
    y = operator(x)
    with_it, without = (digits.restore(y, operator, steps=25, with_prior=each) for each in (True, False))
    assert not torch.equal(with_it, without)
    assert float((operator(with_it) - y).square().mean()) < 0.05


# --- learning from measurements ----------------------------------------------------------------------


class Painter(torch.nn.Module):
    """Two causes to smooth images of 8x8."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(3, 24), torch.nn.Linear(24, 16)

    def forward(self, z):
        small = self.out(torch.relu(self.hidden(z[0]))).view(-1, 1, 4, 4)
        return torch.tanh(torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear"))


def waves(count=200):
    """Smooth images in [-1, 1] with two causes."""
    rng = torch.Generator().manual_seed(0)
    causes = torch.rand(count, 2, generator=rng) * 3
    place = torch.linspace(0, 3, 8)
    return torch.sin(causes[:, :1, None] + place[:, None] + causes[:, 1:, None] * place / 2)[:, None]


def painter(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return sr.GaussianModel(Painter(), [(3,)], sigma=0.2)


@pytest.mark.parametrize("operator", [Downsample(2), Compose(Blur.gaussian(1.0), Mask(torch.arange(8) % 2 == 0))])
def test_images_are_learned_from_measurements_alone(operator):
    """No image is ever seen, yet whole held-out images are reconstructed far better than by the mean image."""
    x = waves()
    trained = sr.fit(painter(), operator(x[:150]), operator=operator, iterations=150, batch=32, steps=10, quiet=True)
    assert trained.shape == (1, 8, 8)
    assert not isinstance(trained.model, Observed)
    guess = (x[:150].mean(0) - x[150:]).square().mean()
    assert (trained.reconstruct(x[150:], by="centre") - x[150:]).square().mean() < 0.35 * guess
    assert trained.sample(4).shape == (4, 1, 8, 8)
    assert trained.restore(operator(x[150:]), operator).shape == (50, 1, 8, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "vae"}, "only short-run learns from measurements"),
        ({"operator": Downsample(4)}, r"makes measurements of shape \(n, 1, 2, 2\)"),
        ({"operator": rounded}, "y has shape"),
        ({"operator": Mask(torch.ones(200, 1, 8, 8))}, "hides other places of each image|y has shape"),
    ],
)
def test_measurements_that_cannot_be_learned_from_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sr.fit(painter(), Downsample(2)(waves()), iterations=1, quiet=True, **{"operator": Downsample(2)} | options)


# --- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "grey"), [("downsample:4", 0), ("project:5", 784), ("mask:lower-half", 392)])
def test_measurements_are_shown_as_they_are(operator, grey):
    """Once measured, enlarged if need be; grey where there is nothing to show."""
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)) / 2 + 0.25
    measure = parse_operator(operator, x, torch.Generator().manual_seed(0))
    y = measure(x)
    picture = shown(y, measure, x)
    assert picture.shape == x.shape
    assert int((picture[0] == 0).sum()) == grey
    if operator == "downsample:4":
        torch.testing.assert_close(picture[..., ::4, ::4], y)


def test_the_command_restores_and_draws(tmp_path, capsys):
    words = ["restore", "mnist-small", "--data", "embedded", "--images", "4", "--steps", "5", "--draws", "2", "--out"]
    for operator in ("downsample:4", "mask:lower-half", "project:20"):
        main([*words, str(tmp_path / "clean"), "--operator", operator, "--no-infer-with-prior"])
    main([*words, str(tmp_path), "--operator", "blur:1+downsample:2", "--noise", "0.1", "--no-infer-with-prior"])
    found = json.loads((tmp_path / "restore.json").read_text())
    assert found["operator"] == "blur:1+downsample:2"
    assert 3 < found["psnr"] < found["psnr_of_mean"] + 5
    assert found["sigma"] > 0.1
    assert (tmp_path / "restored.png").is_file()
    for words_more, message in (
        (["--operator", "sharpen"], "operator is 'sharpen'"),
        (["--noise", "-1"], "noise is -1.0"),
        (["--draws", "1"], "not one draw"),
        (["--operator", "grey"], "expected three"),
    ):
        with pytest.raises(SystemExit):
            main([*words, str(tmp_path), *words_more])
        assert message in capsys.readouterr().err
