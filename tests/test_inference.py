"""More tries for chains that got lost."""

import torch

import shortrun as sr
from shortrun.core.inference import infer_and_mend
from shortrun.priors import GaussianPrior, WithPrior


class Uneven(torch.nn.Module):
    """``x = slope z`` with a slope that depends on the side of the origin: one step cannot suit both."""

    def forward(self, z):
        return z[0] * torch.where(z[0] > 0, 30.0, 15.0)


def model_and_images():
    model = sr.GaussianModel(Uneven(), [(1,)], 0.3)
    return model, torch.tensor([[-1.0], [15.0], [-0.5], [25.0]])


def rngs(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


def test_chains_that_diverge_are_run_again_with_half_the_step():
    model, x = model_and_images()
    dynamics = sr.Langevin(40, 1.5 * 2 * 0.3**2 / 30**2)  # s * lambda is 3 on the steep side, 1.5 with half the step
    plain = sr.infer(model, x, dynamics, rng=rngs(4))
    found = infer_and_mend(model, x, dynamics, rng=rngs(4))
    assert found.mended.tolist() == [False, True, False, True]
    assert not found.divergent.any()
    errors = (model.decode(found.z) - x).abs()[:, 0]
    assert (errors[found.mended] < 5 * 0.3).all()
    kept = ~found.mended
    assert torch.equal(found.z[0][kept], plain[0][kept])


def test_what_is_still_lost_has_a_third_try():
    model, x = model_and_images()
    # s * lambda on the steep side is 6, 3 with half the step, 1.5 with a quarter.
    found = infer_and_mend(model, x, sr.Langevin(40, 3.0 * 2 * 0.3**2 / 30**2), rng=rngs(4))
    assert found.mended[[1, 3]].all()
    assert not found.divergent.any()
    assert ((model.decode(found.z) - x).abs()[:, 0] < 5 * 0.3).all()


def test_what_is_mended_does_not_depend_on_the_batch():
    model, x = model_and_images()
    dynamics = sr.Langevin(40, 3 * 0.3**2 / 30**2)
    together = infer_and_mend(model, x, dynamics, rng=rngs(4))
    alone = infer_and_mend(model, x[1:2], dynamics, rng=rngs(4)[1:2])
    torch.testing.assert_close(alone.z[0], together.z[0][1:2])


def test_a_chain_that_explains_nothing_is_lost_though_it_never_fell_below_its_best():
    """It has hardly moved: ten steps of a millionth. Nothing diverges, so the log joint alone would not tell."""
    model = sr.GaussianModel(lambda z: z[0] @ torch.ones(1, 50), [(1,)], 0.3)
    x = torch.cat([torch.full((1, 50), 6.0), 0.3 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))])
    start = (torch.zeros(2, 1),)
    for used in (model, WithPrior(model, GaussianPrior.of(torch.zeros(1), torch.eye(1)))):
        found = infer_and_mend(used, x, sr.Langevin(10, 1e-6), start=start, rng=torch.Generator().manual_seed(0))
        plain, diagnostics = sr.infer_with_diagnostics(used, x, sr.Langevin(10, 1e-6), start=start)
        assert not diagnostics.divergent[-1].any()
        floor = model.lowest_log_likelihood(x)
        assert (model.log_likelihood(x, plain) < floor).tolist() == [True, False]
        assert not found.mended[1]


def test_the_lowest_log_likelihood_is_that_of_the_largest_plausible_residual():
    """Ten standard deviations of chi-squared: no draw of the noise is beyond, and with a mask visible pixels count."""
    model = sr.GaussianModel(lambda z: torch.zeros(len(z[0]), 200), [(1,)], 0.3)
    x = 0.3 * torch.randn(2000, 200, generator=torch.Generator().manual_seed(0))
    z = (torch.zeros(2000, 1),)
    n, mask = 200, torch.arange(200) < 60
    assert (model.log_likelihood(x, z) > model.lowest_log_likelihood(x)).all()
    edge = x[:1] * ((n + 10 * (2 * n) ** 0.5) ** 0.5 * 0.3 / x[:1].norm())
    for factor, explained in ((0.999, True), (1.001, False)):
        low = model.lowest_log_likelihood(edge)
        assert bool(model.log_likelihood(factor * edge, (z[0][:1],)) >= low) is explained
    seen = mask.expand_as(x)
    assert (model.log_likelihood(x, z, seen) > model.lowest_log_likelihood(x, mask)).all()
    assert float(model.lowest_log_likelihood(x, mask)[0]) > float(model.lowest_log_likelihood(x)[0]) - 1e3


def test_models_without_observation_noise_are_mended_where_they_diverge_alone():
    model = sr.BernoulliModel(lambda z: z[0], [(2,)])
    found = infer_and_mend(model, torch.ones(3, 2), sr.Langevin(5, 0.1), rng=torch.Generator().manual_seed(0))
    assert not found.mended.any()


def test_a_model_that_explains_nothing_is_not_run_twice():
    """Most of a batch is unexplained: that is no matter of chains, and inference is the plain dynamics."""
    model = sr.GaussianModel(lambda z: 0 * z[0] @ torch.ones(1, 50), [(1,)], 0.3)
    x = torch.full((10, 50), 6.0)
    plain = sr.infer(model, x, sr.Langevin(3, 0.1), rng=torch.Generator().manual_seed(0))
    found = infer_and_mend(model, x, sr.Langevin(3, 0.1), rng=torch.Generator().manual_seed(0))
    assert torch.equal(found.z[0], plain[0])
    assert not found.mended.any()
