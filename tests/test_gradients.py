"""The fast ways to a gradient against the plain one."""

import contextlib
import shutil

import pytest
import torch
from small_models import conv_model
from torch import nn

from shortrun import GaussianModel, Langevin, fit, infer
from shortrun.core.chain import gradient
from shortrun.core.latents import dimensions
from shortrun.core.target import Target
from shortrun.learners.gradients import Evaluator, Joint, checked, distance, learning_point
from shortrun.nets.build import GeneratorNetwork, build_model
from shortrun.nets.generators import TopDownGenerator
from shortrun.training.presets import preset

GENERATORS = {
    "one layer": ([5], (1, 28, 28), {"channels": 4, "base": 7}),
    "three layers": ([3, 4, 6], (3, 32, 32), {"channels": 4, "base": 8}),
    "one doubling": ([3, 4], (1, 28, 20), {"channels": 6, "head_channels": 3}),
    "last block": ([3, 4], (3, 16, 16), {"channels": 4, "last_block": True}),
    "authors' script": ([3, 4], (3, 16, 16), {"channels": 4, "last_block": True, "activated": True}),
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def build(name, channels_last=False):
    torch.manual_seed(0)
    sizes, image, options = GENERATORS[name]
    generator = TopDownGenerator(sizes, image, **options).double()
    if channels_last:
        generator.to(memory_format=torch.channels_last)
    return GaussianModel(generator, generator.latent_shapes, 0.3)


class Unfreezable(nn.Module):
    """The same model without the offer to be frozen."""

    def __init__(self, model):
        super().__init__()
        self.sample_prior, self.log_prior, self.log_likelihood = (
            model.sample_prior,
            model.log_prior,
            model.log_likelihood,
        )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_frozen_generator_is_the_same_function(name, channels_last):
    model = build(name, channels_last)
    z = model.sample_prior(3, torch.Generator().manual_seed(1))
    x = torch.rand(3, *GENERATORS[name][1], dtype=torch.float64)
    frozen = model.frozen()
    with torch.no_grad():
        torch.testing.assert_close(frozen.decoder(z), frozen.arrange(model.decoder(z)), rtol=0, atol=1e-13)
    joint, frozen_joint = Joint(model, contextlib.nullcontext), Joint(frozen, contextlib.nullcontext)
    plain = gradient(lambda leaves: joint(leaves, x, None), z)
    fast = gradient(lambda leaves: frozen_joint(leaves, frozen.arrange(x), None), z)
    assert distance(fast, plain) < 1e-6  # the log joint is reported in float32
    assert distance(fast.drift, plain.drift) < 1e-12


def test_refreshing_takes_over_new_parameters_in_place():
    model = build("three layers")
    z = model.sample_prior(2, torch.Generator().manual_seed(1))
    frozen = model.frozen()
    places = {name: value.data_ptr() for name, value in frozen.named_buffers()}
    with torch.no_grad():
        before = model.decoder(z)
        for parameter in model.parameters():
            parameter.mul_(1.3)
        assert not torch.allclose(before, model.decoder(z), atol=1e-3)
        frozen.refresh()
        torch.testing.assert_close(frozen.decoder(z), frozen.arrange(model.decoder(z)), rtol=0, atol=1e-12)
        model.sigma.fill_(0.1)
    assert frozen.sigma is model.sigma
    assert places == {name: value.data_ptr() for name, value in frozen.named_buffers()}


def test_a_model_with_a_likelihood_of_its_own_is_not_frozen():
    class Laplace(GaussianModel):
        def log_likelihood(self, x, z, mask=None):
            return -(x - self.decoder(z)).abs().flatten(1).sum(1)

    decoder = build("one layer").decoder
    assert GaussianModel(decoder, decoder.latent_shapes).frozen() is not None
    assert Laplace(decoder, decoder.latent_shapes).frozen() is None


@pytest.mark.parametrize("masked", [False, True])
def test_inference_on_the_frozen_model_gives_the_same_chains(masked):
    model = build("three layers")
    x = torch.rand(20, 3, 32, 32, dtype=torch.float64) * 2 - 1
    mask = None
    if masked:
        mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        mask[..., 5:20, 9:] = False
        x = torch.where(mask, x, torch.nan)
    dynamics = Langevin(steps=10, step_size=0.01)
    assert Target(model, x, mask, evaluations=10).model is not model
    few = Target(model, x[:1], mask, evaluations=10).model
    assert type(few.decoder) is TopDownGenerator  # so little work is not worth folding
    fast = infer(model, x, dynamics, mask=mask, rng=torch.Generator().manual_seed(0))
    plain = infer(Unfreezable(model), x, dynamics, mask=mask, rng=torch.Generator().manual_seed(0))
    assert distance(fast, plain) < 1e-10


def evaluator(model, compiled, log=print):
    dimension = dimensions(model.latent_shapes)
    return Evaluator(model, list(model.parameters()), contextlib.nullcontext, 100, dimension, compiled, 1e-3, log)


def test_unused_chains_do_not_touch_the_parameters():
    model = build("three layers")
    x = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    z = model.sample_prior(4, torch.Generator().manual_seed(0))
    used = torch.tensor([True, False, True, True])
    points = evaluator(model, compiled=False)
    points.begin(x, None)
    some = points.learning_point(z, used)
    joint = Joint(model, contextlib.nullcontext)
    alone = learning_point(joint, points.parameters, tuple(layer[used] for layer in z), x[used], None)
    assert distance(some.gradients, alone.gradients) < 1e-6
    assert distance(some.drift, points.point(z).drift) < 1e-10


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("own", [False, True])
def test_compiled_gradients_agree_with_autograd(own):
    """For the generator of this package, and for a module of one's own, a part of which has two names."""
    torch.manual_seed(0)
    model = build_model(GeneratorNetwork(latent_sizes=(3, 4), channels=4, base=7), (1, 28, 28), 0.3)
    if own:
        model = conv_model().float()
        model.decoder.again = model.decoder.mix
        assert not hasattr(model.decoder, "frozen")
    shape = model.decode(model.sample_prior(6)).shape
    x = torch.rand(shape) * 2 - 1
    mask = torch.rand(shape) < 0.5
    lines = []
    plain, fast = evaluator(model, compiled=False), evaluator(model, compiled=True, log=lines.append)
    everything = torch.ones(6, dtype=torch.bool)
    for seed in range(3):
        z = model.sample_prior(6, torch.Generator().manual_seed(seed))
        for points in (plain, fast):
            points.begin(x, mask)
        assert distance(fast.point(z), plain.point(z)) < 1e-5
        assert distance(fast.learning_point(z, everything), plain.learning_point(z, everything)) < 1e-5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))  # compiled code has to see new parameters
    assert [line.split(" in ")[0] for line in lines] == ["Langevin step: compiled", "learning step: compiled"]


def test_without_a_compiler_the_work_goes_on_with_one_line():
    lines = []

    def broken(x):
        raise RuntimeError("backend raised:\nno compiler found\nand a long story")

    double = checked("step", broken, lambda x: 2 * x, 1e-3, lines.append)
    assert [double(torch.tensor(3.0)).item() for _ in range(2)] == [6.0, 6.0]
    assert lines == ["step: not compiled (no compiler found); going on without, slower"]


def test_wrong_compiled_code_is_not_used():
    lines = []
    double = checked("step", lambda x: 2.1 * x, lambda x: 2 * x, 1e-3, lines.append)
    assert [double(torch.tensor(3.0)).item() for _ in range(2)] == [6.0, 6.0]
    assert len(lines) == 1
    assert "wrong by 0.05" in lines[0]


@pytest.mark.slow
@needs_compiler
def test_a_compiled_vae_learns_the_same(tmp_path):
    config = preset("smoke", "embedded", "vae").changed(iterations=4)
    train, test = (config.data.load(split) for split in ("train", "test"))
    plain, fast = (
        fit(None, train, validation=test, config=config.changed(compile=way), folder=tmp_path / way, quiet=True)
        for way in ("off", "on")
    )
    assert fast.info["mse"] == pytest.approx(plain.info["mse"], rel=1e-3)
