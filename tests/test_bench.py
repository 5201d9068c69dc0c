"""What the benchmark counts and compares."""

import torch
from torch import nn

from shortrun import GaussianModel
from shortrun.bench import Case, arithmetic, best_of, plain_update


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


def test_freezing_saves_two_fifths_of_the_published_arithmetic():
    case = Case("paper", "svhn")
    model = case.learner(case.config(learn_last=1), print).model
    frozen = model.frozen()
    x = case.images(1)
    assert arithmetic(frozen, frozen.arrange(x)) < 0.6 * arithmetic(model, x)


def test_functions_are_timed_in_turn():
    calls = []
    seconds = best_of({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_the_vae_has_the_same_generator_and_batch():
    case = Case("smoke", "mnist")
    ours, vae = case.config(), case.config("vae")
    assert (ours.model, ours.batch) == (vae.model, vae.batch)
    for work in (plain_update(case), case.update(ours), case.update(vae)):
        work()
