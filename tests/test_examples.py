"""Every script of examples/ runs at tiny size, and the belief net is the model that it says it is."""

import math
from pathlib import Path

import pytest
import torch
from scripts import load_script

import shortrun as sr

FOLDER = Path(__file__).parents[1] / "examples"
TINY = {
    "belief_net": (["--minutes", "0.005", "--images", "2", "--stages", "3"], "belief_net.png"),
    "front_picture": (["--models", "mnist-small", "svhn-small", "--columns", "2", "--steps", "3"], "front.png"),
    "restore": (
        ["--tasks", "resolution", "one-bit", "--images", "2", "--draws", "2", "--steps", "3"],
        "restore-one-bit.png",
    ),
    "tune_step_size": (["--chains", "4"], "step_size.png"),
}


def script(name):
    return load_script(FOLDER / f"{name}.py")


def test_every_script_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_script_runs(tmp_path, capsys, name):
    words, picture = TINY[name]
    script(name).main([*words, "--out", str(tmp_path)])
    assert capsys.readouterr().out
    assert (tmp_path / picture).is_file()


def test_the_belief_net_is_its_graph():
    """The joint density of noises and pixels, against that of latents and pixels with torch.distributions."""
    torch.manual_seed(0)
    net = script("belief_net").BeliefNet((2, 3, 4)).double()
    for scale in net.log_scales:
        scale.data.uniform_(-1.0, 0.5)
    model = sr.BernoulliModel(net, [(2,), (3,), (4,)])
    noises = model.sample_prior(5, torch.Generator().manual_seed(1))
    x = (torch.rand(5, 1, 14, 14) > 0.5).double()
    z = net.latents(noises)
    normal = torch.distributions.Normal
    expected = normal(0.0, 1.0).log_prob(z[0]).sum(1)
    for i, log_scale in enumerate(net.log_scales):
        link, causes = net.links[i], torch.tanh(torch.cat(z[: i + 1], 1))
        mean = causes @ link.weight.T + link.bias
        change_of_volume = log_scale.sum()
        expected = expected + normal(mean, log_scale.exp()).log_prob(z[i + 1]).sum(1) + change_of_volume
    logits = torch.tanh(torch.cat(z, 1)) @ net.links[-1].weight.T + net.links[-1].bias
    expected = expected + torch.distributions.Bernoulli(logits=logits).log_prob(x.flatten(1)).sum(1)
    torch.testing.assert_close(model.log_prior(noises) + model.log_likelihood(x, noises), expected)


def test_short_run_inference_explains_what_the_belief_net_made():
    """Digits of the net itself: the inferred latents explain them nearly as well as those they were made of."""
    torch.manual_seed(0)
    net = script("belief_net").BeliefNet((4, 8, 16))
    with torch.no_grad():
        net.links[-1].weight.mul_(8)
    model = sr.BernoulliModel(net, [(4,), (8,), (16,)])
    rng = torch.Generator().manual_seed(0)
    made_of = model.sample_prior(50, rng)
    with torch.no_grad():
        x = torch.bernoulli(model.decode(made_of), generator=rng)
        prior = float(model.log_likelihood(x, model.sample_prior(50, rng)).mean())
        truth = float(model.log_likelihood(x, made_of).mean())
    best = sr.tune_by_grid(model, x[:4], sr.Langevin(25, 0.02), rng=rng)
    found = float(model.log_likelihood(x, sr.infer(model, x, best.dynamics, rng=rng)).detach().mean())
    assert math.isfinite(found)
    assert found > truth - 0.15 * (truth - prior)


def test_independent_pixels_are_the_mean_of_their_entropies():
    """Of the training digits themselves, log p is minus the sum of binary entropies, but for two counts more."""
    x = (torch.rand(4000, 1, 14, 14, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    found = script("belief_net").independent_pixels(x, x)
    p = x.mean(0).double()
    expected = float((p * p.log() + (1 - p) * (1 - p).log()).sum())
    assert found == pytest.approx(expected, rel=1e-4)
