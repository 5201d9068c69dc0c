r"""Operators: what is known of how a measurement ``y`` comes from an image ``x`` in [-1, 1].

The likelihood of a measurement is that of Gaussian noise around what the operator makes of the image of the generator,

.. math:: p(y \mid z) = N(y;\, A(g(z)),\, \sigma^2 I) ,

unless the operator knows better (:class:`Quantise`). Any differentiable function from images to measurements will do;
an :class:`Operator` can also say that parts of ``y`` were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shortrun.core.model import gaussian_log_likelihood, visible_sum

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
FIRST_SEED = 0x50524F4A
"""Of random projections. Small seeds have other uses, and noise from the same seed would be rows of the matrix."""


class Operator:
    """A measurement; subclasses say how it is made."""

    visible: Tensor | None = None
    """True where ``y`` was measured, for all images or one row per image; None where all of it was."""
    rounding: float = 0.0
    """Standard deviation of what rounding adds to ``y``, beside the noise."""

    def measure(self, x: Tensor) -> Tensor:
        """``A(x)``, batch first, each image by itself; what is not visible may be anything."""
        raise NotImplementedError

    def smooth(self, x: Tensor) -> Tensor:
        """A differentiable stand-in, where ``measure`` has no useful derivative and the likelihood is its own."""
        return self.measure(x)

    def __call__(self, x: Tensor) -> Tensor:
        """The measurement of ``x`` without noise; zero where nothing is measured."""
        y = self.measure(x)
        return y if self.visible is None else torch.where(self.visible.to(y.device).expand_as(y), y, 0.0)

    def log_likelihood(self, y: Tensor, seen: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        """``log p(y | x)``, shape ``(n,)``, of ``seen``, the :meth:`smooth` measurement of x."""
        return gaussian_log_likelihood(y, seen, sigma, mask)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Identity(Operator):
    """``y = x + noise``: denoising."""

    def measure(self, x: Tensor) -> Tensor:
        return x


class Function(Operator):
    """Any differentiable function from images to measurements, batch first."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def measure(self, x: Tensor) -> Tensor:
        return self.function(x)

    def __repr__(self) -> str:
        return f"Function({getattr(self.function, '__name__', type(self.function).__name__)})"


class Mask(Operator):
    """``y = m * x``: some pixels are hidden (inpainting). ``mask`` is true where a pixel is visible."""

    def __init__(self, mask: Tensor) -> None:
        self.visible = mask.bool()

    def measure(self, x: Tensor) -> Tensor:
        return x


class Downsample(Operator):
    r"""``y_{ij} = \frac1{f^2} \sum_{a, b < f} x_{fi+a, fj+b}``: means of squares (super-resolution)."""

    def __init__(self, factor: int) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 2:
            raise ValueError(f"factor is {factor!r}; expected a whole number, two or more")
        self.factor = factor

    def measure(self, x: Tensor) -> Tensor:
        height, width = _sides(x, self)
        if height % self.factor or width % self.factor:
            raise ValueError(f"images of {height}x{width} do not divide into squares of {self.factor}x{self.factor}")
        return F.avg_pool2d(x, self.factor)

    def __repr__(self) -> str:
        return f"Downsample({self.factor})"


class Blur(Operator):
    r"""``y = k * x``: a convolution of every colour with a kernel whose sum is one; edges are repeated."""

    def __init__(self, kernel: Tensor) -> None:
        kernel = torch.as_tensor(kernel, dtype=torch.float32)
        if kernel.ndim != 2 or not kernel.isfinite().all() or not abs(float(kernel.sum())) > 1e-6:
            raise ValueError(
                f"kernel has shape {tuple(kernel.shape)}; expected (height, width) with finite numbers whose sum is "
                "not zero"
            )
        self.kernel = kernel / kernel.sum()

    @classmethod
    def gaussian(cls, width: float) -> Blur:
        """With standard deviation ``width``, in pixels."""
        if not 0 < width <= 100:
            raise ValueError(f"the width of a blur is {width!r}; expected above 0 to 100 pixels")
        reach = math.ceil(3 * width)
        line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / width) ** 2)
        return cls(line[:, None] * line)

    @classmethod
    def motion(cls, length: float, degrees: float = 0.0) -> Blur:
        """Along a straight line of ``length`` pixels; 0 degrees is horizontal, 90 upwards."""
        if not 1 <= length <= 100:
            raise ValueError(f"the length of a motion is {length!r}; expected 1 to 100 pixels")
        reach = math.ceil(length / 2)
        angle = math.radians(degrees)
        along = torch.linspace(-0.5, 0.5, 20 * reach + 1) * (length - 1)
        kernel = torch.zeros(2 * reach + 1, 2 * reach + 1)
        rows, columns = reach - along * math.sin(angle), reach + along * math.cos(angle)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):  # each point goes to its four neighbours
            top, left = math.floor(row), math.floor(column)
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                weight = (1 - abs(row - top - i)) * (1 - abs(column - left - j))
                if weight > 0 and top + i <= 2 * reach and left + j <= 2 * reach:
                    kernel[top + i, left + j] += weight
        return cls(kernel)

    def measure(self, x: Tensor) -> Tensor:
        _sides(x, self)
        height, width = self.kernel.shape
        above, before = (height - 1) // 2, (width - 1) // 2
        padded = F.pad(x, (before, width - 1 - before, above, height - 1 - above), mode="replicate")
        kernel = self.kernel.to(x).flip(0, 1).expand(x.shape[1], 1, height, width)
        return F.conv2d(padded, kernel, groups=x.shape[1])

    def __repr__(self) -> str:
        return f"Blur({self.kernel.shape[0]}x{self.kernel.shape[1]})"


class Grey(Operator):
    """``y = 0.299 R + 0.587 G + 0.114 B``: colourisation."""

    def measure(self, x: Tensor) -> Tensor:
        _sides(x, self)
        if x.shape[1] != 3:
            raise ValueError(f"images have {x.shape[1]} colours; expected three, to be made grey")
        weights = torch.tensor(LUMINANCE, dtype=x.dtype, device=x.device)
        return (x * weights.view(1, 3, 1, 1)).sum(1, keepdim=True)


class Project(Operator):
    r"""``y = P x``: ``count`` random projections (compressed sensing); ``P_{ij} ~ N(0, 1 / pixels)``."""

    def __init__(self, count: int, seed: int = 0) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 100_000:
            raise ValueError(f"count is {count!r}; expected a whole number from 1 to 100000")
        self.count, self.seed = count, seed
        self._matrix: Tensor | None = None

    def measure(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        if self._matrix is None or self._matrix.shape[1] != flat.shape[1]:
            rng = torch.Generator().manual_seed(FIRST_SEED + self.seed)
            self._matrix = torch.randn(self.count, flat.shape[1], generator=rng) / math.sqrt(flat.shape[1])
        return flat @ self._matrix.to(flat).T

    def __repr__(self) -> str:
        return f"Project({self.count}, seed={self.seed})"


class Clip(Operator):
    """``y = min(max(x, low), high)``: over- and underexposed images. Where a pixel is clipped it says only that."""

    def __init__(self, low: float, high: float) -> None:
        if not low < high:
            raise ValueError(f"low is {low!r} and high {high!r}; expected low below high")
        self.low, self.high = low, high

    def measure(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)

    def smooth(self, x: Tensor) -> Tensor:
        return x

    def log_likelihood(self, y: Tensor, seen: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        """Gaussian within the limits; at a limit the probability that the noisy pixel lies there or beyond."""
        within = -0.5 * (((y - seen) / sigma).square() + math.log(2 * math.pi)) - sigma.log()
        above = torch.special.log_ndtr((seen - self.high) / sigma)
        below = torch.special.log_ndtr((self.low - seen) / sigma)
        value = torch.where(y >= self.high, above, torch.where(y <= self.low, below, within))
        return visible_sum(value, mask)

    def __repr__(self) -> str:
        return f"Clip({self.low:g}, {self.high:g})"


class Quantise(Operator):
    r"""Pixels rounded to the middle of one of ``2^bits`` equal parts of [-1, 1].

    Rounding has no useful derivative, and its error is no Gaussian. The likelihood is that of rounding a noisy pixel,

    .. math:: p(y \mid x) = \prod_i \Phi\bigl((b_i - x_i) / \sigma\bigr) - \Phi\bigl((a_i - x_i) / \sigma\bigr) ,

    with ``(a_i, b_i)`` the part that ``y_i`` is the middle of; the outermost parts have no outer end.
    """

    def __init__(self, bits: int) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
            raise ValueError(f"bits is {bits!r}; expected a whole number from 1 to 8")
        self.bits = bits
        self.rounding = self.part / math.sqrt(12)

    @property
    def part(self) -> float:
        """How wide each part is."""
        return 2.0 / 2**self.bits

    def measure(self, x: Tensor) -> Tensor:
        place = ((x + 1) / self.part).floor().clamp(0, 2**self.bits - 1)
        return (place + 0.5) * self.part - 1

    def smooth(self, x: Tensor) -> Tensor:
        return x

    def log_likelihood(self, y: Tensor, seen: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        half = self.part / 2
        first, last = y - half <= -1 + 1e-4, y + half >= 1 - 1e-4
        low = torch.where(first, -torch.inf, (y - half - seen) / sigma)
        high = torch.where(last, torch.inf, (y + half - seen) / sigma)
        return visible_sum(log_ndtr_between(low, high), mask)

    def __repr__(self) -> str:
        return f"Quantise({self.bits})"


def log_ndtr_between(low: Tensor, high: Tensor) -> Tensor:
    """``log(Phi(high) - Phi(low))`` for ``low < high``, accurate in both tails.

    >>> log_ndtr_between(torch.tensor([-torch.inf, -1.0]), torch.tensor([0.0, 1.0]))
    tensor([-0.6931, -0.3817])
    """
    # Phi(high) - Phi(low) = Phi(-low) - Phi(-high): of the two, the one that lies in the lower tail keeps its digits.
    swap = low + high > 0
    a, b = torch.where(swap, -high, low), torch.where(swap, -low, high)
    top, bottom = torch.special.log_ndtr(b), torch.special.log_ndtr(a.clamp_min(-1e4))
    ratio = torch.where(a == -torch.inf, -torch.inf, bottom - top).clamp_max(-1e-6)
    return top + torch.log1p(-ratio.exp())


class Compose(Operator):
    """One after the other: ``Compose(Blur.gaussian(1.0), Downsample(2))`` blurs first.

    Only the last one may hide anything or have a likelihood of its own; what comes before must be differentiable.
    """

    def __init__(self, *operators: Operator | Callable[[Tensor], Tensor]) -> None:
        if not operators:
            raise ValueError("nothing to compose; expected one operator or more")
        self.operators: Sequence[Operator] = [as_operator(each) for each in operators]
        for each in self.operators[:-1]:
            if each.visible is not None or type(each).log_likelihood is not Operator.log_likelihood:
                raise ValueError(f"{each!r} can only be the last of the operators that are composed")
        self.last = self.operators[-1]
        self.visible = self.last.visible

    def _before(self, x: Tensor) -> Tensor:
        for each in self.operators[:-1]:
            x = each.measure(x)
        return x

    def measure(self, x: Tensor) -> Tensor:
        return self.last.measure(self._before(x))

    def smooth(self, x: Tensor) -> Tensor:
        return self.last.smooth(self._before(x))

    def log_likelihood(self, y: Tensor, seen: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        return self.last.log_likelihood(y, seen, sigma, mask)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.operators))})"


class FromDeepinv(Operator):
    """A ``deepinv.physics.Physics``, whose images lie in [0, 1]: ``y = A((x + 1) / 2)``. Only its ``A`` is called."""

    def __init__(self, physics: Any) -> None:
        self.physics = physics

    def measure(self, x: Tensor) -> Tensor:
        return self.physics.A((x + 1) / 2)

    def __repr__(self) -> str:
        return f"FromDeepinv({type(self.physics).__name__})"


def as_operator(operator: Any) -> Operator:
    """An operator from what users have: one of ours, one of deepinv's, any function; None is the identity."""
    if operator is None:
        return Identity()
    if isinstance(operator, Operator):
        return operator
    if any(kind.__module__.startswith("deepinv.") for kind in type(operator).__mro__) and hasattr(operator, "A"):
        return FromDeepinv(operator)
    if callable(operator):
        return Function(operator)
    raise TypeError(
        f"operator is a {type(operator).__name__}; expected a function from images to measurements, one of "
        "shortrun.inverse, or a deepinv.physics.Physics"
    )


def _sides(x: Tensor, operator: Operator) -> tuple[int, int]:
    if x.ndim != 4:
        raise ValueError(f"{operator!r} takes images (n, colours, height, width); shape {tuple(x.shape)} was given")
    return x.shape[2], x.shape[3]
