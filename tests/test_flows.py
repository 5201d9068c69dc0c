"""Flows, in an encoder (IAF) and by themselves (Glow): inverses and determinants against autograd and quadrature."""

import sys

import pytest
import torch
from linear_images import IMAGE, Linear
from torch import nn

import shortrun as sr
from shortrun import data
from shortrun.core.model import NotPossibleError
from shortrun.learners import Batch, Glow, VAEWithIAF, learner_class
from shortrun.nets.build import ModelError
from shortrun.nets.glow import GlowNetwork, ZeroConv
from shortrun.nets.iaf import FlowAutoencoder
from shortrun.training.model_folder import Description, write_model
from shortrun.training.presets import preset


@pytest.mark.parametrize("gate", ["sigmoid", "affine"])
def test_iaf_density_is_that_of_the_change_of_variables_by_autograd(gate):
    """The whole map from noise to latents: its Jacobian by autograd, and its inverse."""
    torch.manual_seed(0)
    model = FlowAutoencoder(Linear((4,)), [(4,)], IMAGE, 4, 3, 8, 0.3, gate).double()
    for parameter in model.flows.parameters():
        parameter.data.mul_(3.0)
    x, eps = torch.rand(1, *IMAGE).double(), torch.randn(1, 4).double()
    encoded = model.encode(x, (eps,))
    jacobian = torch.autograd.functional.jacobian(lambda e: model.encode(x, (e[None],)).z[0][0], eps[0])
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum(1) - torch.linalg.slogdet(jacobian)[1]
    torch.testing.assert_close(encoded.log_q, expected)
    torch.testing.assert_close(model.log_density(encoded.z[0], x), expected)


def test_the_gate_of_iaf_is_that_of_its_paper():
    """``sigmoid(s) z + (1 - sigmoid(s)) m``, from what the masked network says, and near the identity at the start."""
    torch.manual_seed(0)
    model = VAEWithIAF.build(preset("smoke", "embedded", "vae-iaf").network, (1, 28, 28), 0.3)
    flow = model.flows[0]
    z, context = torch.randn(5, 8), torch.randn(5, 8)
    m, s = flow.hyper(torch.cat([z, context], 1)).unflatten(1, (8, 2)).unbind(2)
    kept = 1 / (1 + torch.exp(-(s + 2)))
    torch.testing.assert_close(flow(context)(z), kept * z + (1 - kept) * m)
    assert 0.8 < float(kept.detach().mean()) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["sigmoid", "affine"])
def test_iaf_density_integrates_to_one_and_is_that_of_its_draws(gate):
    torch.manual_seed(3)
    model = FlowAutoencoder(Linear((2,)), [(2,)], IMAGE, 4, 3, 8, 0.3, gate).double()
    for parameter in model.flows.parameters():
        parameter.data.mul_(2.0)  # far from a Gaussian
    x = torch.rand(1, *IMAGE).double()
    with torch.no_grad():
        draws = torch.cat([model.encode(x, model.sample_prior(1)).z[0] for _ in range(500)])
        low, high = draws.min(0).values, draws.max(0).values
        margin = 1.5 * (high - low)
        edges = zip(low - margin, high + margin, strict=True)
        axes = [torch.linspace(float(a), float(b), 300).double() for a, b in edges]
        grid = torch.cartesian_prod(*axes)
        density = model.log_density(grid, x.expand(len(grid), -1, -1, -1)).exp()
        cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
        assert float(density.sum() * cell) == pytest.approx(1.0, abs=0.01)
        encoded = model.encode(x, model.sample_prior(1))
        torch.testing.assert_close(encoded.log_q, model.log_density(encoded.z[0], x))
        torch.testing.assert_close(encoded.kl, encoded.log_q - model.log_prior(encoded.z))


@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_glow_inverts_and_its_determinant_is_that_of_autograd(additive, published):
    torch.manual_seed(0)
    network = GlowNetwork(levels=2, depth=2, width=6, additive=additive, published_glow=published)
    model = Glow.build(network, (1, 4, 4), 0.3).double()
    for parameter in model.parameters():  # away from the identity
        parameter.data.add_(0.1 * torch.randn(parameter.shape).double())
    x = torch.rand(3, 1, 4, 4).double() * 2 - 1
    z, log_det = model.flow.inverse_and_log_det(x)
    noise = tuple((part - b.loc) / b.log_scale.exp() for part, b in zip(z, model.flow.q0, strict=True))
    torch.testing.assert_close(model.decode(noise), x)
    torch.testing.assert_close(model.flow.forward_and_log_det(z)[1], -log_det)

    def flat(one):
        return torch.cat([part.flatten() for part in model.flow.inverse_and_log_det(one.view(1, 1, 4, 4))[0]])

    base = [torch.distributions.Normal(b.loc, b.log_scale.exp()) for b in model.flow.q0]
    for i in range(3):
        expected = torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, x[i].flatten()))[1]
        torch.testing.assert_close(log_det[i], expected)
        density = sum(d.log_prob(part[i : i + 1]).sum() for d, part in zip(base, z, strict=True)) + expected
        torch.testing.assert_close(model.log_density(x[i : i + 1])[0], density)


def small_glow():
    """Away from its start, where all that is zero hides mistakes."""
    torch.manual_seed(0)
    model = Glow.build(GlowNetwork(levels=2, depth=2, width=6), (1, 4, 4), 0.3).double()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape).double())
    return model


def test_glow_has_a_conditional_prior_at_its_split_and_a_standard_normal_top():
    """Density and samples against the equations with torch.distributions, from the maps before and after the split."""
    model = small_glow()
    x = torch.rand(3, 1, 4, 4).double() * 2 - 1
    prior = next(module for name, module in model.named_modules() if name.endswith("prior"))

    def given(stays):
        convolved = torch.nn.functional.conv2d(stays, prior.weight, prior.bias, padding=1)
        mean, log_sd = (convolved * torch.exp(3 * prior.log_scale)).chunk(2, 1)
        return torch.distributions.Normal(mean, log_sd.exp())

    def halves(one):
        for flow in reversed(model.flow.flows[1]):
            one, _ = flow.inverse(one)
        return one.chunk(2, 1)

    def top(stays):
        for flow in reversed(model.flow.flows[0]):
            stays, _ = flow.inverse(stays)
        return stays

    def flat(one):
        stays, leaves = halves(one.view(1, 1, 4, 4))
        return torch.cat([top(stays).flatten(), leaves.flatten()])

    standard = torch.distributions.Normal(0.0, 1.0)
    for i in range(3):
        stays, leaves = halves(x[i : i + 1])
        expected = standard.log_prob(top(stays)).sum() + given(stays).log_prob(leaves).sum()
        expected = expected + torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, x[i].flatten()))[1]
        torch.testing.assert_close(model.log_density(x[i : i + 1])[0], expected)
    assert given(halves(x)[0]).mean.std(0).max() > 0.01  # it does depend on the half that stays
    noise = tuple(torch.randn(1, *shape).double() for shape in model.latent_shapes)
    many = (noise[0].expand(4000, -1, -1, -1), torch.randn(4000, *model.latent_shapes[1]).double())
    stays, leaves = halves(model.decode(many))
    law = given(stays[:1])
    torch.testing.assert_close(leaves.mean(0), law.mean[0], atol=0.06, rtol=0)
    torch.testing.assert_close(leaves.std(0), law.stddev[0], atol=0, rtol=0.06)


def test_glow_normalises_activations_inside_its_couplings_with_the_first_images():
    images = data.load("embedded")
    config = preset("smoke", "embedded", "glow")
    torch.manual_seed(0)
    model = Glow.build(config.network, images.shape, 0.3)
    inputs = []
    for module in model.modules():
        if isinstance(module, nn.LeakyReLU):
            module.register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    Glow(model).init(0, images)
    assert len(inputs) == 2 * config.network.levels * config.network.depth
    for values in inputs:
        torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(values.shape[1]), atol=1e-3, rtol=0)
        torch.testing.assert_close(values.std((0, 2, 3)), torch.ones(values.shape[1]), atol=1e-3, rtol=0)
    inputs.clear()
    with torch.no_grad():
        model.log_density(images.batch(slice(0, 3)))
    assert max(float(values.mean((0, 2, 3)).abs().max()) for values in inputs) > 0.01  # set once, then kept
    last = [module.weight for module in model.modules() if isinstance(module, ZeroConv)]
    assert len(last) == 2 * 2 + 1  # one for each step, and one for the split
    assert not any(bool(weight.any()) for weight in last)  # couplings start as the identity, the prior as N(0, I)


def test_glow_is_saved_whole(tmp_path):
    model = small_glow().float()
    network = GlowNetwork(levels=2, depth=2, width=6)
    write_model(tmp_path, model, Description("glow", network, (1, 4, 4), sr.Langevin()))
    x = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(sr.load(tmp_path).model.log_density(x), model.log_density(x))


def test_glow_frames_images_that_do_not_divide_and_refuses_masks():
    images = data.load("embedded")
    config = preset("smoke", "embedded", "glow").changed(network={"levels": 3})
    model = Glow.build(config.network, images.shape, 0.3)
    assert model.frame == (4, 4)
    learner = Glow(model)
    state = learner.init(0, images)
    assert model.sample(2, torch.Generator().manual_seed(0)).shape == (2, 1, 28, 28)
    x = images.batch(slice(0, 4))
    with pytest.raises(NotPossibleError, match="whole images"):
        learner.update(state, Batch(x, torch.ones(4, 1, 28, 28, dtype=torch.bool), torch.arange(4)))
    for way in (model.infer, model.draw, model.infer_by_dynamics):
        with pytest.raises(NotPossibleError, match="measure nothing"):
            way(x, sr.Langevin())


# --- without the libraries ---------------------------------------------------------------------------


class Absent:
    """Finds no module of a library, as if it were not installed."""

    def __init__(self, library):
        self.library = library

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(("method", "library", "module"), [("vae-iaf", "zuko", "iaf"), ("glow", "normflows", "glow")])
def test_without_its_library_a_flow_names_the_extra_to_install(monkeypatch, method, library, module):
    ours = (f"shortrun.nets.{module}", f"shortrun.learners.{method.replace('-', '_')}")
    for name in [each for each in sys.modules if each.partition(".")[0] == library or each in ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(library), *sys.meta_path])
    with pytest.raises(ModelError, match=rf"^{method} needs {library}: pip install 'shortrun\[flows\]'$"):
        learner_class(method)
    with pytest.raises(ModelError, match=r"shortrun\[flows\]"):
        sr.fit(None, torch.zeros(8, 1, 28, 28), method=method, iterations=1, quiet=True)
    assert learner_class("vae").__name__ == "VAE"  # the others do without
