"""The likelihoods of the core against torch.distributions and quadrature, and what fit makes of them."""

import math

import pytest
import torch
from torch import nn

import shortrun as sr
from shortrun.metrics.likelihood import annealed_importance
from shortrun.nets.build import ModelError
from shortrun.nets.encoders import GaussianAutoencoder

NAN = float("nan")
CLASSES = 4


class Decoder(nn.Module):
    """A small network from one layer of latents to numbers of any shape."""

    def __init__(self, *shape: int, latents: int = 2, width: int = 16) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(nn.Linear(latents, width), nn.Tanh(), nn.Linear(width, math.prod(shape)))

    def forward(self, z):
        return self.layers(z[0]).view(-1, *self.shape)


def bernoulli(*shape):
    torch.manual_seed(0)
    return sr.BernoulliModel(Decoder(*shape), [(2,)])


def categorical(*shape):
    torch.manual_seed(0)
    return sr.CategoricalModel(Decoder(CLASSES, *shape), [(2,)], CLASSES)


def observed(model, n, *shape, seed=1):
    """Values of the right kind, and latents."""
    rng = torch.Generator().manual_seed(seed)
    classes = CLASSES if isinstance(model, sr.CategoricalModel) else 2
    x = torch.randint(classes, (n, *shape), generator=rng).to(model.reference)
    return x, model.sample_prior(n, rng)


def by_distributions(model, x, z):
    """``log p(x_i | z)`` of each place."""
    logits = model.decoder(z)
    if isinstance(model, sr.BernoulliModel):
        return torch.distributions.Bernoulli(logits=logits).log_prob(x)
    return torch.distributions.Categorical(logits=logits.movedim(1, -1)).log_prob(x)


MASKS = {
    "none": lambda x: None,
    "each its own": lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.6,
    "one for all": lambda x: (torch.arange(x[0].numel()) % 3 > 0).view(1, *x.shape[1:]),
    "as numbers": lambda x: (torch.arange(x[0].numel()) % 3 > 0).view(1, *x.shape[1:]).float(),
    "nothing visible": lambda x: torch.zeros(x.shape, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)])
@pytest.mark.parametrize("build", [bernoulli, categorical])
def test_log_likelihood_is_that_of_torch_distributions(build, shape, mask):
    model = build(*shape).double()
    x, z = observed(model, 6, *shape)
    seen = MASKS[mask](x)
    expected = by_distributions(model, x, z)
    expected = expected if seen is None else expected * seen
    torch.testing.assert_close(model.log_likelihood(x, z, seen), expected.flatten(1).sum(1))


@pytest.mark.parametrize("filling", [NAN, math.inf, -7.0, 1e6])
@pytest.mark.parametrize("build", [bernoulli, categorical, lambda *shape: sr.GaussianModel(Decoder(*shape), [(2,)])])
def test_what_is_hidden_has_no_influence(build, filling):
    """Neither on the log-likelihood, nor on its gradients, nor on a chain."""
    model = build(3, 4)
    x, z = observed(model, 5, 3, 4)
    seen = MASKS["each its own"](x)
    found = []
    for values in (x, torch.where(seen, x, filling)):
        leaves = tuple(layer.clone().requires_grad_() for layer in z)
        value = model.log_likelihood(values, leaves, seen)
        gradients = torch.autograd.grad(value.sum(), [*leaves, *model.parameters()])
        end = sr.infer(model, values, sr.Langevin(5, 0.01), mask=seen, rng=torch.Generator().manual_seed(0))
        found.append([value, *gradients, *end])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_a_place_that_is_certain_stays_finite():
    """Logits of hundreds: the log-likelihood of what was certain is 0, of the opposite minus the logit."""
    binary = sr.BernoulliModel(lambda z: 400 * z[0], [(2,)])
    z = (torch.tensor([[1.0, -1.0]]),)
    assert binary.log_likelihood(torch.tensor([[1.0, 0.0]]), z).item() == 0.0
    assert binary.log_likelihood(torch.tensor([[0.0, 0.0]]), z).item() == -400.0
    several = sr.CategoricalModel(lambda z: torch.stack([400 * z[0], -400 * z[0]], 1), [(2,)], 2)
    assert several.log_likelihood(torch.tensor([[0.0, 1.0]]), z).item() == 0.0
    assert several.log_likelihood(torch.tensor([[1.0, 1.0]]), z).item() == -800.0


# --- data in, data out -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("build", [bernoulli, categorical])
def test_prepare_takes_numbers_of_any_type(build, dtype):
    model = build(3)
    x = torch.tensor([[0, 1, 1]]).to(dtype)
    prepared = model.prepare(x)
    assert prepared.dtype == torch.float32
    assert prepared.tolist() == [[0.0, 1.0, 1.0]]
    assert build(3).double().prepare(x).dtype == torch.float64


@pytest.mark.parametrize("wrong", [0.5, -1.0, 2.0, math.inf])
def test_prepare_refuses_what_is_not_binary(wrong):
    with pytest.raises(ValueError, match="zeros and ones"):
        bernoulli(3).prepare(torch.tensor([[0.0, 1.0, wrong]]))
    with pytest.raises(ValueError, match="zeros and ones"):
        bernoulli(3).prepare(torch.tensor([[0, 255, 255]], dtype=torch.uint8))


@pytest.mark.parametrize("wrong", [0.5, -1.0, 4.0, math.inf])
def test_prepare_refuses_what_is_no_class(wrong):
    with pytest.raises(ValueError, match="4 classes takes whole numbers 0 to 3"):
        categorical(3).prepare(torch.tensor([[0.0, 3.0, wrong]]))


@pytest.mark.parametrize("build", [bernoulli, categorical])
def test_prepare_keeps_what_may_be_hidden(build):
    """A mask comes later, so NaN is no error here; where it is visible, inference names it."""
    model = build(3)
    x = model.prepare(torch.tensor([[0.0, NAN, 1.0]]))
    assert x.isnan().tolist() == [[False, True, False]]
    seen = torch.tensor([[True, False, True]])
    assert sr.infer(model, x, sr.Langevin(2), mask=seen)[0].isfinite().all()
    with pytest.raises(ValueError, match="NaN or infinite among the visible"):
        sr.infer(model, x, sr.Langevin(2))


def test_decode_gives_probabilities_or_the_most_likely_class():
    model = bernoulli(3, 4)
    x, z = observed(model, 5, 3, 4)
    torch.testing.assert_close(model.decode(z), torch.distributions.Bernoulli(logits=model.decoder(z)).probs)
    model = categorical(3, 4)
    made = model.decode(z)
    assert (made.shape, made.dtype) == (x.shape, torch.float32)
    every = torch.stack([by_distributions(model, torch.full_like(x, k), z) for k in range(CLASSES)])
    torch.testing.assert_close(made, every.argmax(0).float())
    assert torch.equal(model.prepare(made), made)


def test_shapes_that_do_not_fit_are_named():
    x, z = observed(bernoulli(3), 5, 3)
    with pytest.raises(ValueError, match=r"returns shape \(5, 4\) but x has shape \(5, 3\)"):
        bernoulli(4).log_likelihood(x, z)
    with pytest.raises(ValueError, match=r"returns shape \(5, 4, 2\); expected \(5, 4, 3\), classes second"):
        categorical(2).log_likelihood(x, z)
    with pytest.raises(ValueError, match="expected two or more"):
        sr.CategoricalModel(Decoder(1, 3), [(2,)], 1)
    with pytest.raises(ValueError, match="latent_shapes"):
        sr.BernoulliModel(Decoder(3), [])


# --- inference ---------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([1.5, -0.7, 1.0, 0.4], dtype=torch.float64)
LINES = torch.tensor([[1.2, -0.5], [0.3, 0.8], [-1.0, 0.2], [0.4, -0.9]], dtype=torch.float64)


def one_latent(kind):
    """A model of one latent, and an observation whose posterior is far from the prior."""
    if kind == "bernoulli":
        model = sr.BernoulliModel(lambda z: z[0] * WEIGHTS + 0.3, [(1,)]).double()
        return model, torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    model = sr.CategoricalModel(lambda z: torch.sin(z[0])[:, :, None] + z[0][:, :, None] * LINES, [(1,)], 4).double()
    return model, torch.tensor([[0.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_chains_end_in_the_posterior(kind, masked):
    """Mean, variance and tail against quadrature, from a chain long enough to forget the prior."""
    model, x = one_latent(kind)
    mask = None
    if masked:
        mask = torch.ones_like(x, dtype=torch.bool)
        mask[:, -1] = False
        x = torch.where(mask, x, NAN)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    log_joint = model.log_prior((grid,)) + model.log_likelihood(x.expand(len(grid), -1), (grid,), mask)
    weight = torch.softmax(log_joint, 0)
    mean = float((weight * grid[:, 0]).sum())
    deviation = float((weight * (grid[:, 0] - mean) ** 2).sum()) ** 0.5
    assert abs(mean) > 0.3  # the prior would not pass
    many = x.expand(8000, -1)
    (z,), diagnostics = sr.infer_with_diagnostics(
        model, many, sr.Langevin(250, 0.02), mask=mask, rng=torch.Generator().manual_seed(0)
    )
    assert not diagnostics.divergent[-1].any()
    assert float(z.mean()) == pytest.approx(mean, abs=0.03)
    assert float(z.std()) == pytest.approx(deviation, rel=0.04)
    tail = float(weight[grid[:, 0] > mean + deviation].sum())
    assert float((z > mean + deviation).double().mean()) == pytest.approx(tail, abs=0.02)


@pytest.mark.parametrize("build", [bernoulli, categorical])
def test_the_step_size_can_be_tuned(build, rng):
    model = build(6)
    x, _ = observed(model, 8, 6)
    result = sr.tune_by_grid(model, x, sr.Langevin(10), [1e-3, 1e-2, 0.1], rng=rng)
    assert result.free_energy.isfinite().all()
    assert result.free_energy[0] > result.free_energy.min()  # ten steps of 0.001 hardly leave the prior


# --- learning ----------------------------------------------------------------------------------------


def structured(model, n, *shape):
    """Data with two hidden causes: drawn from the same kind of model with other, larger weights."""
    torch.manual_seed(7)
    classes = (CLASSES,) if isinstance(model, sr.CategoricalModel) else ()
    truth = Decoder(*classes, *shape)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        logits = 8 * truth((torch.randn(n, 2, generator=rng),))
        torch.manual_seed(11)
        if classes:
            return torch.distributions.Categorical(logits=logits.movedim(1, -1)).sample()
        return torch.distributions.Bernoulli(logits=logits).sample().bool()


def mean_log_density(model, x):
    return float(annealed_importance(model, x, torch.Generator().manual_seed(0), stages=20).mean())


@pytest.mark.parametrize("build", [bernoulli, categorical])
def test_fit_lowers_the_loss(build, tmp_path):
    """And raises log p(x) of held-out data above that of independent places with the right frequencies."""
    model = build(12)
    x = structured(model, 400, 12)
    seen, held_out = model.prepare(x[:300]), model.prepare(x[300:])
    before = mean_log_density(model, held_out)
    trained = sr.fit(
        model, x[:300], validation=x[300:], iterations=60, steps=15, step_size=0.1, batch=32, learning_rates=(1e-2,),
        quiet=True,
    )  # fmt: skip
    losses = [line["loss"] for line in trained.history.evaluations]
    assert sum(losses[-3:]) / 3 < losses[0] - 0.05
    assert trained.info["divergent"] == 0
    classes = getattr(model, "classes", 2)
    frequencies = torch.stack([(seen == k).float().mean(0) for k in range(classes)]).clamp_min(1e-3)
    independent = float(frequencies.log().gather(0, held_out.long()).sum(1).mean())
    after = mean_log_density(model, held_out)
    assert before < independent < after - 0.4
    made, guess = trained.reconstruct(x[300:]).round(), frequencies.argmax(0)
    assert float((made == held_out).float().mean()) > float((guess == held_out).float().mean()) + 0.05
    assert trained.sample(3).shape == (3, 12)
    trained.save(tmp_path / "saved")
    again = sr.load(tmp_path / "saved", decoder=Decoder(*model.decoder.shape))
    assert type(again.model) is type(model)
    torch.testing.assert_close(again.reconstruct(x[300:]), trained.reconstruct(x[300:]))


def test_fit_refuses_data_that_the_likelihood_does_not_take():
    with pytest.raises(ValueError, match="zeros and ones"):
        sr.fit(bernoulli(3), torch.rand(20, 3), iterations=1, quiet=True)
    with pytest.raises(ValueError, match="0 to 3"):
        sr.fit(categorical(3), torch.full((20, 3), 4), iterations=1, quiet=True)
    with pytest.raises(ModelError, match="vae needs a GaussianModel"):
        sr.fit(bernoulli(3), torch.ones(20, 3), method="vae", iterations=1, quiet=True)


def test_classes_that_are_nearly_all_the_same_are_no_collapse():
    """Reconstructions are then one class everywhere, and rightly so."""
    rng = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(200, 6, generator=rng) < 0.98, 3, 1)
    trained = sr.fit(categorical(6), x, iterations=20, steps=10, learning_rates=(1e-2,), quiet=True)
    assert trained.info["iterations"] == 20
    assert not [line for line in trained.history.lines if line.get("event") == "recovered"]


# --- a decoder of one's own with other methods ---------------------------------------------------------


def curve(n):
    """Points near a curve in five dimensions."""
    rng = torch.Generator().manual_seed(0)
    t = 2 * torch.rand(n, 1, generator=rng) - 1
    x = torch.cat([t, torch.sin(3 * t), torch.cos(2 * t), t**2, -t], 1)
    return x + 0.05 * torch.randn(x.shape, generator=rng)


def test_a_vae_around_a_decoder_of_ones_own_learns_vectors(tmp_path):
    x = curve(600)
    torch.manual_seed(0)
    model = sr.GaussianModel(Decoder(5), [(2,)], sigma=0.1)
    before = model.decoder.layers[0].weight.detach().clone()
    trained = sr.fit(
        model, x[:500], method="vae", validation=x[500:], iterations=150, learning_rates=(5e-3,), quiet=True
    )
    assert isinstance(trained.model, GaussianAutoencoder)
    assert trained.model.decoder is model.decoder  # trained in place
    assert not torch.equal(model.decoder.layers[0].weight, before)
    assert trained.model.sigma == pytest.approx(0.1)
    losses = [line["loss"] for line in trained.history.evaluations]
    assert losses[-1] < 0.5 * losses[0]
    variance = float(x[500:].var(0).mean())
    made = trained.reconstruct(x[500:])
    assert float((made - x[500:]).square().mean()) < 0.2 * variance
    by_chains = trained.reconstruct(x[500:], by="dynamics")
    assert float((by_chains - x[500:]).square().mean()) < 0.2 * variance
    found = trained.log_likelihood(x[500:520], stages=20)
    assert found["lower_bound"] < found["importance_weighted"] + 0.05
    trained.save(tmp_path / "saved")
    with pytest.raises(ModelError, match="test_models:Decoder"):
        sr.load(tmp_path / "saved")
    again = sr.load(tmp_path / "saved", decoder=Decoder(5))
    torch.testing.assert_close(again.reconstruct(x[500:]), made)


@pytest.mark.parametrize("method", ["short-run", "abp", "glo", "vae-iaf"])
def test_every_method_that_can_takes_a_decoder_of_ones_own(method):
    x = curve(100)
    torch.manual_seed(0)
    model = sr.GaussianModel(Decoder(5), [(2,)], sigma=0.2)
    trained = sr.fit(model, x, method=method, iterations=3, quiet=True)
    assert trained.model.decoder is model.decoder
    assert trained.reconstruct(x[:4]).shape == (4, 5)
    assert trained.sample(3).shape == (3, 5)


@pytest.mark.parametrize(("method", "message"), [("ladder-vae", "top-down generator"), ("glow", "takes no decoder")])
def test_methods_with_a_network_of_their_own_refuse_it(method, message):
    model = sr.GaussianModel(Decoder(5), [(2,)])
    with pytest.raises(ModelError, match=message):
        sr.fit(model, curve(20), method=method, iterations=1, quiet=True)


@pytest.mark.parametrize("method", ["short-run", "vae", "glow"])
def test_vectors_without_a_decoder_are_refused_with_advice(method):
    with pytest.raises(ModelError, match=r"the data have shape \(5,\)"):
        sr.fit(None, curve(20), method=method, iterations=1, quiet=True)
