"""Weights channels-last: the same function in another order of memory, and only where a module can do with it."""

import pytest
import torch
from small_models import conv_data, conv_model
from torch import nn

from shortrun import GaussianModel, Langevin, fit, infer
from shortrun.core.latents import flatten
from shortrun.core.layout import in_channels_last, to_channels_last
from shortrun.core.target import Target

DYNAMICS = Langevin(steps=6, step_size=0.01, momentum=0.3)


def lies_channels_last(weight):
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def seeded(number=0):
    return torch.Generator().manual_seed(number)


class JustMethods:
    """No module, so that nothing is laid out."""

    def __init__(self, model):
        self.sample_prior, self.log_prior = model.sample_prior, model.log_prior
        self.log_likelihood = model.log_likelihood


class Rows(nn.Module):
    """It takes maps for rows, which fails if they lie channels-last."""

    def __init__(self):
        super().__init__()
        self.project, self.conv, self.out = nn.Linear(3, 36), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(36, 9)
        self.orders = []

    def forward(self, z):
        self.orders.append(lies_channels_last(self.conv.weight))
        maps = torch.relu(self.conv(self.project(z[0]).view(-1, 4, 3, 3)))
        return torch.tanh(self.out(maps.view(len(maps), -1))).view(-1, 1, 3, 3)


def rows_model():
    torch.manual_seed(0)
    return GaussianModel(Rows(), [(3,)], 0.4)


def test_inference_with_weights_laid_out_gives_the_same_chains():
    model = conv_model()
    x = conv_data(model, 5)
    mask = torch.rand(x.shape, generator=seeded(2)) < 0.7
    before = {name: (weight.data_ptr(), weight.stride()) for name, weight in model.named_parameters()}
    assert lies_channels_last(Target(model, x, mask, evaluations=6).model.decoder.mix.weight)
    fast = infer(model, x, DYNAMICS, mask=mask, rng=seeded())
    plain = infer(JustMethods(model), x, DYNAMICS, mask=mask, rng=seeded())
    torch.testing.assert_close(flatten(fast), flatten(plain), rtol=1e-10, atol=1e-12)
    assert before == {name: (weight.data_ptr(), weight.stride()) for name, weight in model.named_parameters()}


def test_all_but_the_weights_of_convolutions_is_shared():
    model = conv_model()
    twin = in_channels_last(model)
    assert type(twin) is type(model)
    other = dict(twin.named_parameters())
    laid_out = {name for name, weight in model.named_parameters() if other[name] is not weight}
    assert laid_out == {"decoder.mix.weight"}  # that of the last convolution has one colour: both orders are one
    assert all(torch.equal(weight, other[name]) for name, weight in model.named_parameters())
    assert twin.sigma is model.sigma
    assert in_channels_last(twin) is twin  # nothing is left to lay out


def test_a_module_that_is_used_twice_stays_one():
    conv = nn.Conv2d(4, 4, 3)
    twin = in_channels_last(nn.Sequential(conv, nn.Identity(), nn.Sequential(conv)))
    assert twin[0] is twin[2][0]
    assert twin[0] is not conv


def test_statistics_that_a_module_keeps_reach_it():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    in_channels_last(module)(torch.randn(5, 2, 6, 6, generator=seeded()) + 3)
    assert int(module[1].num_batches_tracked) == 1
    assert float(module[1].running_mean.abs().max()) > 0.01


def test_what_has_no_weights_of_convolutions_is_left_alone():
    dense = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 3))  # its weight is computed, no parameter
    for model in (dense, normed, JustMethods(conv_model())):
        assert in_channels_last(model) is model


def test_a_module_that_takes_maps_for_rows_is_inferred_in_the_usual_order():
    model = rows_model()
    x = torch.rand(4, 1, 3, 3, generator=seeded()) * 2 - 1
    with pytest.raises(RuntimeError, match="view"):  # or the test would test nothing
        in_channels_last(model).decoder(model.sample_prior(4, seeded()))
    model.decoder.orders.clear()
    found = infer(model, x, DYNAMICS, rng=seeded())
    assert model.decoder.orders == [True] + [False] * DYNAMICS.steps  # one attempt
    assert torch.equal(found[0], infer(JustMethods(model), x, DYNAMICS, rng=seeded())[0])


def test_what_is_wrong_with_a_module_is_said():
    model = conv_model()
    x = conv_data(model, 2)
    with pytest.raises(ValueError, match="the decoder returns shape"):
        infer(model, x[..., :-1], DYNAMICS)


def test_weights_are_laid_out_for_good_where_the_trial_runs():
    model = to_channels_last(conv_model(), lambda: None)
    assert lies_channels_last(model.decoder.mix.weight)
    model = rows_model()
    z = model.sample_prior(2, seeded())
    assert to_channels_last(model, lambda: model.decoder(z)) is model
    assert model.decoder.conv.weight.is_contiguous()
    assert model.decoder.orders == [True]


def test_a_module_that_takes_maps_for_rows_can_be_learned():
    model = rows_model()
    before = model.decoder.conv.weight.detach().clone()
    x = torch.rand(20, 1, 3, 3, generator=seeded()) * 2 - 1
    trained = fit(model, x, iterations=2, steps=3, prior="normal", quiet=True)
    assert trained.info["iterations"] == 2
    assert not torch.equal(before, trained.model.decoder.conv.weight)
