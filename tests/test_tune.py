"""The tuners: what they return, what they refuse, and that finer tuning pays."""

import pytest
import torch
from small_models import conv_data, conv_model, linear_problem

import shortrun as sr


def test_the_curve_comes_with_the_choice(generator):
    exact, x = linear_problem()
    sizes = [0.002, 0.005, 0.01, 0.1]
    result = sr.tune_by_grid(exact.model(), x, sr.Langevin(25, 0.01), sizes, generator=generator)
    assert result.step_sizes == sizes
    assert result.dynamics == sr.Langevin(25, sizes[result.best])
    top = torch.linalg.eigvalsh(exact.precision).max()
    torch.testing.assert_close(result.largest_stability, top * torch.tensor(sizes).double(), rtol=1e-4, atol=0)
    assert result.ruled_out.tolist() == [False, False, False, True]
    assert result.divergent.tolist()[:3] == [0, 0, 0]
    assert result.divergent[3] == 5 * 8
    assert (result.standard_error[:3] > 0).all()
    for text in ("<- chosen", "ruled out", "delta"):
        assert text in str(result)


@pytest.mark.parametrize("tuner", [sr.tune_by_grid, sr.tune_by_gradient])
def test_no_diverging_step_is_returned_silently(tuner, generator):
    exact, x = linear_problem()
    options = {"step_sizes": [1.0, 2.0]} if tuner is sr.tune_by_grid else {"iterations": 1}
    with pytest.raises(sr.StepSizeError, match=r"ruled out.*Try step sizes from .* to") as caught:
        tuner(exact.model(), x, sr.Langevin(25, 1.0), generator=generator, **options)
    # the proposal works
    low, high = (float(word.rstrip(".")) for word in str(caught.value).split()[-3::2])
    result = sr.tune_by_grid(
        exact.model(), x, sr.Langevin(25, 0.01), [low, (low * high) ** 0.5, high], generator=generator
    )
    assert not result.ruled_out.all()


def test_gradient_descent_comes_back_from_a_step_that_is_too_long(generator):
    exact, x = linear_problem()
    result = sr.tune_by_gradient(exact.model(), x, sr.Langevin(10, 0.2), iterations=12, samples=4, generator=generator)
    assert result.ruled_out[0]
    assert result.dynamics.step_size * torch.linalg.eigvalsh(exact.precision).max() < 3


def test_finer_tuning_reaches_a_lower_free_energy(generator):
    """Judged by the closed form, with the best single step found by a fine search on it."""
    exact, x = linear_problem()
    steps = 10
    grid = torch.logspace(-3, -1.7, 60).tolist()
    best_single = min(float(exact.free_energy(x, sr.Langevin(steps, s)).mean()) for s in grid)
    reached = {}
    for per in ("run", "step", "layer"):
        result = sr.tune_by_gradient(
            exact.model(),
            x,
            sr.Langevin(steps, 0.008),
            per=per,
            iterations=60,
            samples=16,
            generator=generator,
        )
        reached[per] = float(exact.free_energy(x, result.dynamics).mean())
    assert reached["run"] < best_single + 0.1
    assert reached["step"] < best_single - 0.2
    assert reached["layer"] < reached["step"]


def test_tuning_by_gradient_on_a_nonlinear_generator(generator):
    model = conv_model()
    x = conv_data(model, 4)
    start = sr.Langevin(6, 0.002)
    result = sr.tune_by_gradient(model, x, start, per="layer", iterations=15, samples=4, generator=generator)
    size = torch.tensor(result.dynamics.step_size)
    assert size.shape == (6, 2)
    first, last = result.free_energy[-2:]  # the start and the result, on the same noise
    assert last < first - 1


@pytest.mark.parametrize("estimator", ["exact", "endpoint"])
def test_tuning_one_factor_by_gradient_keeps_the_form_of_a_schedule(estimator, generator):
    model = conv_model()
    x = conv_data(model, 4)
    start = sr.Langevin(6, [0.002, 0.002, 0.002, 0.002, 0.001, 0.0005])
    result = sr.tune_by_gradient(model, x, start, iterations=15, samples=4, estimator=estimator, generator=generator)
    factors = torch.tensor(result.dynamics.step_size) / torch.tensor(start.step_size)
    torch.testing.assert_close(factors, factors[:1].expand(6))
    assert factors[0] > 1.5  # steps far too short for what they can do
    first, last = result.free_energy[-2:]
    assert last < first - 1


def test_tuning_shares_its_random_numbers_between_candidates(generator):
    model = conv_model()
    x = conv_data(model, 2)
    result = sr.tune_by_grid(model, x, sr.Langevin(5, 0.01), [0.01, 0.01], generator=generator)
    assert result.free_energy[0] == result.free_energy[1]


def test_matrix_free_tuning_chooses_the_same_step():
    model = conv_model()
    x = conv_data(model, 4)
    grid = [0.002, 0.006, 0.02]
    choices = [
        sr.tune_by_grid(
            model,
            x,
            sr.Langevin(8, 0.01),
            grid,
            estimator=estimator,
            generator=torch.Generator().manual_seed(0),
        ).best
        for estimator in ("exact", "lanczos")
    ]
    assert choices[0] == choices[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy": "joint"}, "entropy is 'joint'; accepted: conditional, averaged, marginal"),
        ({"estimator": "magic"}, "estimator is 'magic'; accepted: exact, lanczos, endpoint"),
        ({"samples": 0}, "samples is 0"),
        ({"entropy": "averaged", "estimator": "lanczos"}, "needs estimator"),
    ],
)
def test_bad_settings_are_named(options, message):
    model = conv_model()
    x = conv_data(model, 1)
    for call in (sr.free_energy, sr.tune_by_grid, sr.tune_by_gradient):
        with pytest.raises(ValueError, match=message):
            call(model, x, sr.Langevin(2, 0.01), **options)


def test_bad_tuner_arguments_are_named():
    model = conv_model()
    x = conv_data(model, 1)
    with pytest.raises(ValueError, match="per is 'pixel'"):
        sr.tune_by_gradient(model, x, sr.Langevin(2, 0.01), per="pixel")
    with pytest.raises(ValueError, match="iterations is 0"):
        sr.tune_by_gradient(model, x, sr.Langevin(2, 0.01), iterations=0)
    with pytest.raises(ValueError, match="zero steps"):
        sr.tune_by_gradient(model, x, sr.Langevin(0, 0.01))
    with pytest.raises(ValueError, match="step_sizes is empty"):
        sr.tune_by_grid(model, x, sr.Langevin(2, 0.01), [])
