"""The generators: shapes, size of the published model, and the two coordinates."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import shortrun as sr
from shortrun.nets.build import build_model
from shortrun.nets.generators import Block, HierarchicalFeatures, LatentCoordinates, TopDownGenerator
from shortrun.training.config import network_of
from shortrun.training.presets import preset


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 48, 32)])
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("kind", [TopDownGenerator, HierarchicalFeatures])
def test_any_number_of_layers_and_any_size_that_divides(image, layers, kind):
    generator = kind([3 + i for i in range(layers)], image, channels=4)
    z = tuple(torch.randn(2, *shape) for shape in generator.latent_shapes)
    images = generator(z)
    assert images.shape == (2, *image)
    assert images.abs().max() < 1
    changed = list(z)
    for i in range(layers):  # every layer reaches the image
        changed[i] = z[i] + 1
        assert not torch.equal(generator(tuple(changed)), images)


def parameters(name, latent_sizes=None):
    config = preset(name, "celeba").network
    config = replace(config, latent_sizes=latent_sizes or config.latent_sizes)
    return sum(p.numel() for p in build_model(config, (3, 32, 32), 0.3).parameters())


def test_the_network_of_the_authors_script_has_its_size():
    """Their train_celeba_five_layers.py builds 12,162,435 parameters; here they are counted layer by layer as well."""
    latents, maps, inner = (64, 64, 64, 96, 128), 64, 16 * 16
    projections = sum(z * 4 * inner + 4 * inner + 4 * maps * 25 for z in latents)  # no bias in the second part
    blocks = (len(latents) + 1) * ((maps * 25 + 1) * maps + (maps * 9 + 1) * maps)
    heads = 2 * sum((maps * 25 + 1) * z + (z * 12 * 12 + 1) * z for z in latents[1:])
    image = maps * 3 * 16 + 3
    assert projections + blocks + heads + image == 12_162_435
    assert parameters("authors-script") == 12_162_435


def test_the_network_of_the_paper_is_that_of_its_table():
    """No block after the last skip sum, one per layer; biases in both parts of a projection."""
    latents, maps, inner = (32, 64, 128), 64, 16 * 16
    projections = sum((z + 1) * 4 * inner + (4 * 25 * maps) + maps for z in latents)
    blocks = len(latents) * ((maps * 25 + 1) * maps + (maps * 9 + 1) * maps)
    heads = 2 * sum((maps * 25 + 1) * z + (z * 12 * 12 + 1) * z for z in latents[1:])
    assert parameters("paper", latents) == projections + blocks + heads + maps * 3 * 16 + 3


@pytest.mark.parametrize("name", ["paper", "authors-script"])
def test_published_networks_written_a_second_time(name):
    """By the equations of the appendix (paper) and the order of operations of the public script, from the weights."""
    config = replace(preset(name, "celeba").network, latent_sizes=(3, 4, 5), channels=8)
    torch.manual_seed(0)
    decoder = build_model(config, (3, 32, 32), 0.3).double().decoder
    w = decoder.state_dict()
    between = F.gelu if name == "authors-script" else (lambda maps: maps)

    def conv(key, maps, padding):
        return F.conv2d(maps, w[f"{key}.weight"], w[f"{key}.bias"], padding=padding)

    def linear(key, features):
        return F.linear(features, w[f"{key}.weight"], w[f"{key}.bias"])

    def project(i, z):
        maps = between(linear(f"projections.{i}.linear", z)).view(-1, 4, 16, 16)
        bias = w.get(f"projections.{i}.spread.bias")
        assert (bias is None) == (name == "authors-script")
        return between(F.conv_transpose2d(maps, w[f"projections.{i}.spread.weight"], bias, padding=2))

    def block(key, maps):
        return F.gelu(conv(f"{key}.second", F.gelu(conv(f"{key}.first", maps, 2)), 1)) + maps

    def head(key, maps):
        assert len(w[f"{key}.conv.weight"]) == len(w[f"{key}.linear.weight"])  # as wide as the latent is large
        return linear(f"{key}.linear", between(conv(f"{key}.conv", maps, 0)).flatten(1))

    z = tuple(torch.randn(2, size, dtype=torch.float64) for size in (3, 4, 5))
    hidden = block("blocks.0", project(0, z[0]))
    for i in (1, 2):
        log_variance = (F.softplus(head(f"variances.{i - 1}", hidden)) + 1e-8).clamp(0, 10)
        latent = head(f"means.{i - 1}", hidden) + torch.exp(log_variance / 2) * z[i]
        hidden = block(f"blocks.{i}", project(i, latent)) + hidden
    if name == "authors-script":
        hidden = block("last_block", hidden)
    expected = torch.tanh(F.conv_transpose2d(hidden, w["to_image.layers.0.weight"], w["to_image.layers.0.bias"], 2, 1))
    torch.testing.assert_close(decoder(z), expected)
    assert sum(key.startswith("last_block") for key in w) == (4 if name == "authors-script" else 0)


def test_models_saved_before_there_was_a_choice_keep_their_network():
    old = {"kind": "top-down", "latent_sizes": [3, 4], "channels": 8, "base": 7, "head_channels": None}
    decoder = build_model(network_of("short-run", old), (1, 28, 28), 0.3).decoder
    assert isinstance(decoder.last_block, Block)
    assert not decoder.activated
    assert decoder.means[0].conv.out_channels == 8


def test_the_table_of_the_appendix():
    """L = 3 with latents 32, 64, 128: hidden maps of 64 x 16 x 16, image 3 x 32 x 32."""
    generator = TopDownGenerator([32, 64, 128], (3, 32, 32))
    shapes = []
    for block in generator.blocks:
        block.register_forward_hook(lambda module, given, out: shapes.append(tuple(out.shape)))
    z = tuple(torch.zeros(2, size) for size in (32, 64, 128))
    assert generator(z).shape == (2, 3, 32, 32)
    assert shapes == [(2, 64, 16, 16)] * 3


def small_models():
    torch.manual_seed(0)
    generator = TopDownGenerator([2, 3, 4], (1, 12, 12), channels=4).double()
    return sr.GaussianModel(generator, generator.latent_shapes, 0.3), LatentCoordinates(generator, 0.3)


def test_noise_and_latent_coordinates_are_one_joint_distribution():
    noise, latent = small_models()
    eps = noise.sample_prior(5, torch.Generator().manual_seed(0))
    z = noise.decoder.to_latents(eps)
    x = torch.rand(5, 1, 12, 12).double()
    torch.testing.assert_close(latent.log_likelihood(x, z), noise.log_likelihood(x, eps))
    torch.testing.assert_close(latent.decoder(z), noise.decoder(eps))
    # change of variables, its Jacobian by autograd
    for i in range(5):

        def flat(e, i=i):
            parts = tuple(part[None] for part in e.split([2, 3, 4]))
            return torch.cat(noise.decoder.to_latents(parts), 1)[0]

        one = torch.cat([layer[i] for layer in eps])
        volume = torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, one))[1]
        torch.testing.assert_close(latent.log_prior(z)[i], noise.log_prior(eps)[i] - volume)


def test_latent_coordinates_can_be_inferred_and_tuned(rng):
    _, latent = small_models()
    x = torch.rand(3, 1, 12, 12).double() - 0.5
    z = sr.infer(latent, x, sr.Langevin(4, 1e-3), rng=rng)
    assert [layer.shape for layer in z] == [(3, 2), (3, 3), (3, 4)]
    energy = sr.free_energy(latent, x, sr.Langevin(4, 1e-3), sr.Estimation(chains=4), rng=rng)
    assert energy.isfinite().all()


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="30x28 cannot be reached"):
        TopDownGenerator([4], (1, 30, 28), base=7)
    with pytest.raises(ValueError, match="too small for the 5x5 heads"):
        TopDownGenerator([4, 4], (1, 8, 8), base=4)
    with pytest.raises(ValueError, match="latent_sizes"):
        TopDownGenerator([], (1, 8, 8))
