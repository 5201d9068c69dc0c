"""The tuners: what they return, what they refuse, and that finer tuning pays."""

import math
import threading

import pytest
import torch
from small_models import conv_data, conv_model, linear_problem

import shortrun as sr
from shortrun import Estimation
from shortrun.core.free_energy import free_energy_details


def test_the_curve_comes_with_the_choice(rng):
    exact, x = linear_problem()
    sizes = [0.002, 0.005, 0.01, 0.1]
    result = sr.tune_by_grid(exact.model(), x, sr.Langevin(25, 0.01), sizes, rng=rng)
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
def test_no_diverging_step_is_returned_silently(tuner, rng):
    exact, x = linear_problem()
    options = {"step_sizes": [1.0, 2.0]} if tuner is sr.tune_by_grid else {"iterations": 1}
    with pytest.raises(sr.StepSizeError, match=r"ruled out.*Try step sizes from .* to") as caught:
        tuner(exact.model(), x, sr.Langevin(25, 1.0), rng=rng, **options)
    # the proposal works
    low, high = (float(word.rstrip(".")) for word in str(caught.value).split()[-3::2])
    result = sr.tune_by_grid(exact.model(), x, sr.Langevin(25, 0.01), [low, (low * high) ** 0.5, high], rng=rng)
    assert not result.ruled_out.all()


def test_gradient_descent_comes_back_from_a_step_that_is_too_long(rng):
    exact, x = linear_problem()
    result = sr.tune_by_gradient(
        exact.model(), x, sr.Langevin(10, 0.2), how=Estimation(chains=4), iterations=12, rng=rng
    )
    assert result.ruled_out[0]
    assert result.dynamics.step_size * torch.linalg.eigvalsh(exact.precision).max() < 3


@pytest.mark.slow
def test_finer_tuning_reaches_a_lower_free_energy(rng):
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
            per,
            Estimation(chains=16),
            iterations=60,
            rng=rng,
        )
        reached[per] = float(exact.free_energy(x, result.dynamics).mean())
    assert reached["run"] < best_single + 0.1
    assert reached["step"] < best_single - 0.2
    assert reached["layer"] < reached["step"]


def test_tuning_by_gradient_on_a_nonlinear_generator(rng):
    model = conv_model()
    x = conv_data(model, 4)
    start = sr.Langevin(6, 0.002)
    result = sr.tune_by_gradient(model, x, start, "layer", Estimation(chains=4), iterations=15, rng=rng)
    assert torch.tensor(result.dynamics.profile).shape == (6, 2)
    first, last = result.free_energy[-2:]  # the start and the result, on the same noise
    assert last < first - 1


@pytest.mark.parametrize("estimator", ["exact", "endpoint"])
def test_tuning_one_factor_by_gradient_keeps_the_form_of_a_schedule(estimator, rng):
    model = conv_model()
    x = conv_data(model, 4)
    start = sr.Langevin(6, [0.002, 0.002, 0.002, 0.002, 0.001, 0.0005])
    how = Estimation(estimator=estimator, chains=4)
    result = sr.tune_by_gradient(model, x, start, how=how, iterations=15, rng=rng)
    assert result.dynamics.profile == start.profile
    factors = result.dynamics.table(2)[:, 0] / start.table(2)[:, 0]
    torch.testing.assert_close(factors, factors[:1].expand(6))
    assert factors[0] > 1.5  # steps far too short for what they can do
    first, last = result.free_energy[-2:]
    assert last < first - 1


def test_tuning_shares_its_random_numbers_between_candidates(rng):
    model = conv_model()
    x = conv_data(model, 2)
    result = sr.tune_by_grid(model, x, sr.Langevin(5, 0.01), [0.01, 0.01], rng=rng)
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
            Estimation(estimator=estimator),
            rng=torch.Generator().manual_seed(0),
        ).best
        for estimator in ("exact", "lanczos")
    ]
    assert choices[0] == choices[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy": "joint"}, "entropy is 'joint'; accepted: conditional, averaged, marginal"),
        ({"estimator": "magic"}, "estimator is 'magic'; accepted: auto, exact, lanczos, endpoint"),
        ({"chains": 0}, "chains is 0"),
        ({"entropy": "averaged", "estimator": "lanczos"}, "needs estimator"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Estimation(**options)


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


class OwnPrior:
    """A model whose prior is not known to be standard normal."""

    def __init__(self, model):
        self.sample_prior, self.log_prior = model.sample_prior, model.log_prior
        self.log_likelihood = model.log_likelihood


@pytest.mark.parametrize(
    ("dimension", "own_prior", "sizes", "entropy", "expected"),
    [
        (64, False, 0.01, "marginal", "exact"),
        (64, True, [[0.01, 0.02]] * 2, "marginal", "exact"),
        (66, False, 0.01, "marginal", "endpoint"),
        (66, False, [0.01, 0.005], "conditional", "endpoint"),
        (66, False, [[0.01, 0.005]] * 2, "marginal", "lanczos"),
        (66, True, 0.01, "marginal", "lanczos"),
        (66, False, 0.01, "averaged", "exact"),
    ],
)
def test_the_automatic_estimator(dimension, own_prior, sizes, entropy, expected):
    exact, x = linear_problem(dimension=dimension)
    model, dynamics = exact.model(), sr.Langevin(2, sizes).scaled(0.01)
    model = OwnPrior(model) if own_prior else model

    def run(estimator):
        how = Estimation(entropy, estimator, chains=1, noises=2, probes=2)
        return free_energy_details(model, x[:2], dynamics, how, rng=torch.Generator().manual_seed(0)).entropy

    found = run("auto")
    assert torch.equal(found, run(expected))
    others = {"exact", "lanczos", "endpoint"} - {expected}
    if entropy == "averaged" or own_prior or expected == "lanczos":
        others &= {"exact"}  # the other ones cannot be had
    assert all(not torch.equal(found, run(other)) for other in others)


def test_the_automatic_estimator_is_one_for_all_iterates_of_a_tuning():
    """Two layers start with the same step size, for which the end point would do, and drift apart."""
    exact, x = linear_problem(dimension=66)
    dynamics = sr.Langevin(2, 1e-4)

    def tune(estimator):
        how = Estimation(estimator=estimator, chains=1, probes=1)
        rng = torch.Generator().manual_seed(0)
        return sr.tune_by_gradient(exact.model(), x[:2], dynamics, "layer", how, iterations=2, rng=rng)

    assert torch.equal(tune("auto").free_energy, tune("lanczos").free_energy)


def generators(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


def together(work):
    """``work(rank, gather)`` in two threads that gather from each other."""
    barrier, slots, results = threading.Barrier(2, timeout=60), [None, None], [None, None]

    def run(rank):
        def gather(tensor):
            slots[rank] = tensor
            barrier.wait()
            whole = torch.cat(slots)
            barrier.wait()
            return whole

        results[rank] = work(rank, gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def assert_same_curve(found, expected):
    assert found.best == expected.best
    for field in ("free_energy", "standard_error", "stability", "largest_stability", "divergent", "ruled_out"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field))
    for a, b in zip(found.candidates, expected.candidates, strict=True):
        torch.testing.assert_close(a.table(2), b.table(2))


@pytest.mark.parametrize("dimension", [1, 7])
def test_two_processes_with_half_of_the_examples_choose_what_one_chooses(dimension):
    """In one dimension the entropy is that of the mixture of last steps, in seven the estimate or its bounds."""
    model = conv_model() if dimension == 7 else sr.GaussianModel(lambda z: torch.sin(2 * z[0]), [(1,)], 0.5).double()
    x = conv_data(model, 4)
    chains = 8 if dimension == 7 else 64

    def tune(rows, gather=None):
        return sr.tune_by_grid(
            model, x[rows], sr.Langevin(5, 0.01), [0.005, 0.02, 0.08, 2.0], Estimation(chains=chains),
            rng=generators(4)[rows], gather=gather,
        )  # fmt: skip

    whole = tune(slice(None))
    assert whole.ruled_out.any()
    assert not whole.ruled_out.all()
    for half in together(lambda rank, gather: tune(slice(2 * rank, 2 * rank + 2), gather)):
        assert_same_curve(half, whole)
    alone = tune(slice(2))
    assert not torch.allclose(alone.free_energy, whole.free_energy)


@pytest.mark.parametrize("per", ["run", "step", "layer"])
def test_two_processes_tune_by_the_mean_of_their_gradients(per):
    """With the conditional entropy the objective has no bounds: its mean is the mean of those of both halves."""
    model = conv_model()
    x = conv_data(model, 4)

    def tune(rows, gather=None):
        how = Estimation("conditional", chains=2)
        return sr.tune_by_gradient(
            model, x[rows], sr.Langevin(3, 0.01), per, how, iterations=4, rng=generators(4)[rows], gather=gather
        )

    whole = tune(slice(None))
    for half in together(lambda rank, gather: tune(slice(2 * rank, 2 * rank + 2), gather)):
        assert_same_curve(half, whole)
    assert not math.isclose(tune(slice(2)).dynamics.step_size, whole.dynamics.step_size, rel_tol=1e-4)


def test_a_profile_belongs_to_all_candidates(rng):
    exact, x = linear_problem()
    start = sr.Langevin(4, 0.01, (1.0, 0.8, 0.5, 0.2), quiet_steps=1)
    result = sr.tune_by_grid(exact.model(), x, start, rng=rng)
    assert len(result.candidates) == 13
    assert {candidate.profile for candidate in result.candidates} == {start.profile}
    assert {candidate.quiet_steps for candidate in result.candidates} == {1}
    assert result.step_sizes == pytest.approx([0.01 * 2 ** (j / 2) for j in range(-6, 7)])
    assert result.dynamics == result.candidates[result.best]
