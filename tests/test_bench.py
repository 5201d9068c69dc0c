"""What the benchmark counts and compares."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from shortrun import GaussianModel
from shortrun.nets.build import GeneratorNetwork
from shortrun.studies.bench import Case, arithmetic, best_of, plain_update


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, z):
        return self.linear(z[0])


def test_arithmetic_of_a_linear_decoder_is_counted():
    model = GaussianModel(Affine(), [(5,)])
    multiplications = 2 * 5 * 7  # forward; as many again for the gradient of the latents
    assert arithmetic(model, torch.zeros(3, 7)) * 1e9 == 2 * multiplications


def generator_of(config):
    """The settings of the generator, without those of an encoder."""
    return {each.name: getattr(config.network, each.name) for each in fields(GeneratorNetwork)}


@pytest.mark.parametrize(("name", "share"), [("paper", (0.5, 0.6)), ("authors-script", (0.95, 1.05))])
def test_freezing_saves_arithmetic_where_weights_can_be_folded(name, share):
    """The network of the paper has projections and heads without a nonlinearity inside, that of the script has not."""
    case = Case(name, "svhn")
    model = case.learner(case.config(learn_last=1)).model
    frozen = model.frozen()
    x = case.images(1)
    low, high = share
    assert low < arithmetic(frozen, frozen.arrange(x)) / arithmetic(model, x) < high


def test_the_plain_loop_runs_the_network_of_the_script():
    case = Case("authors-script", "svhn")
    assert sum(p.numel() for p in case.learner(case.config()).model.parameters()) == 12_162_435
    assert generator_of(case.config("vae")) == generator_of(case.config())


def test_functions_are_timed_in_turn():
    calls = []
    seconds = best_of({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_the_vae_has_the_same_generator_and_batch():
    case = Case("smoke", "mnist")
    ours, vae = case.config(), case.config("vae")
    assert (generator_of(ours), ours.run.batch) == (generator_of(vae), vae.run.batch)
    for work in (plain_update(case), case.update(ours), case.update(vae)):
        work()
