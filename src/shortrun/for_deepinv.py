"""A trained model as a ``deepinv.models.Reconstructor``, for deepinv's trainers, tests and comparisons.

    from shortrun.for_deepinv import ShortRunReconstructor
    deepinv.test(ShortRunReconstructor(shortrun.load("svhn-small")), loader, physics)

deepinv is an optional extra: ``pip install 'shortrun[deepinv]'``.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from deepinv.models import Reconstructor
from torch import Tensor

from shortrun.inverse.operators import FromDeepinv
from shortrun.trained import Trained


class ShortRunReconstructor(Reconstructor):
    """``x = model(y, physics)`` with images in [0, 1]: see :meth:`shortrun.Trained.restore`.

    Args:
        trained: what :func:`shortrun.fit` or :func:`shortrun.load` gives.
        sigma: standard deviation of ``y`` around ``A(g(z))``, in the units of ``y``; by default what the physics lets
            pass of the observation noise of the model.
        draws: None for the best single answer; else the mean of so many draws from the posterior, which has the lowest
            expected square error.
        options: further arguments of :meth:`shortrun.Trained.restore`, such as ``steps``.
    """

    def __init__(self, trained: Trained, sigma: float | None = None, draws: int | None = None, **options: Any) -> None:
        super().__init__()
        self.trained, self.sigma, self.draws, self.options = trained, sigma, draws, options
        self._operators: WeakKeyDictionary[Any, FromDeepinv] = WeakKeyDictionary()

    def operator(self, physics: Any) -> FromDeepinv:
        """The operator of a physics, the same each time: its step size is tuned once."""
        if physics not in self._operators:
            self._operators[physics] = FromDeepinv(physics)
        return self._operators[physics]

    def forward(self, y: Tensor, physics: Any, **kwargs: Any) -> Tensor:
        found = self.trained.restore(y, self.operator(physics), self.sigma, draws=self.draws, **self.options)
        images = found if self.draws is None else found.mean(0)
        return ((images + 1) / 2).to(y.device)
