"""The generators: shapes, size of the published model, and the two coordinates."""

import pytest
import torch

import shortrun as sr
from shortrun.config import preset
from shortrun.generators import HierarchicalFeatures, LatentCoordinates, TopDownGenerator, build_model


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


def test_published_model_has_the_published_size():
    for data in ("svhn", "celeba"):
        config = preset("paper", data)
        model = build_model(config.model, (3, 32, 32), 0.3)
        assert model.latent_shapes == ((64,), (64,), (64,), (96,), (128,))
        count = sum(p.numel() for p in model.parameters())
        assert abs(count / 12.16e6 - 1) < 0.01
        block = model.decoder.blocks[0]
        assert (block.first.kernel_size, block.second.kernel_size) == ((5, 5), (3, 3))
        assert model.decoder.projections[0].shape == (4, 16, 16)


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


def test_latent_coordinates_can_be_inferred_and_tuned(generator):
    _, latent = small_models()
    x = torch.rand(3, 1, 12, 12).double() - 0.5
    z = sr.infer(latent, x, sr.Langevin(4, 1e-3), generator=generator)
    assert [layer.shape for layer in z] == [(3, 2), (3, 3), (3, 4)]
    energy = sr.free_energy(latent, x, sr.Langevin(4, 1e-3), samples=4, generator=generator)
    assert energy.isfinite().all()


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="30x28 cannot be reached"):
        TopDownGenerator([4], (1, 30, 28), base=7)
    with pytest.raises(ValueError, match="too small for the 5x5 heads"):
        TopDownGenerator([4, 4], (1, 8, 8), base=4)
    with pytest.raises(ValueError, match="latent_sizes"):
        TopDownGenerator([], (1, 8, 8))
