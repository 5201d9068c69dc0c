"""Beside the real deepinv: its physics as operators, our models as its reconstructors."""

import pytest
import torch
from linear_images import linear_trained
from torch.utils.data import DataLoader
from with_deepinv import import_deepinv

import shortrun as sr
from shortrun.inverse import Blur, FromDeepinv, as_operator
from shortrun.priors import GaussianPrior

deepinv = import_deepinv()

PHYSICS = {
    "inpainting": lambda: deepinv.physics.Inpainting((1, 8, 8), mask=torch.arange(64).view(1, 8, 8) % 3 > 0),
    "downsampling": lambda: deepinv.physics.Downsampling(img_size=(1, 8, 8), filter="bilinear", factor=2),
    "blur": lambda: deepinv.physics.Blur(filter=Blur.gaussian(1.0).kernel[None, None], padding="circular"),
}


@pytest.mark.parametrize("name", PHYSICS)
def test_physics_are_operators_on_images_from_0_to_1(name):
    trained, _, x = linear_trained(steps=100)
    physics = PHYSICS[name]()
    operator = as_operator(physics)
    assert isinstance(operator, FromDeepinv)
    y = physics.A((x + 1) / 2)
    assert torch.equal(operator(x), y)
    found = trained.restore(y, physics, sigma=0.02)
    truth = trained.decode(trained.infer(x, by="centre"))
    assert float((found - truth).square().mean()) < 0.1 * float(truth.var())


def test_a_trained_model_runs_in_the_trainer_of_deepinv():
    """Its figures for ours against those of the adjoint, which does nothing."""
    from shortrun.for_deepinv import ShortRunReconstructor

    digits = sr.load("mnist-small")
    digits.prior = GaussianPrior.of(digits.prior.mean, digits.prior.factor @ digits.prior.factor.T)
    x = (sr.data.load("embedded", "test").array[:4].float() / 255).clamp(0, 1)
    physics = deepinv.physics.Downsampling(img_size=(1, 28, 28), filter="bilinear", factor=4)
    model = ShortRunReconstructor(digits, draws=2, steps=25)
    loader = DataLoader([{"x": each} for each in x], batch_size=2)
    trainer = deepinv.Trainer(
        model=model, physics=physics, train_dataloader=None, eval_dataloader=None, online_measurements=True,
        verbose=False, show_progress_bar=False, metrics=deepinv.metric.PSNR(), device="cpu", optimizer=None, epochs=0,
        non_blocking_transfers=False,
    )  # fmt: skip
    found = trainer.test(loader, compare_no_learning=True)
    assert found["PSNR"] > found["PSNR no learning"] + 3
    assert model.operator(physics) is model.operator(physics)
    images = model(physics(x[:2]), physics)
    assert images.shape == (2, 1, 28, 28)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
