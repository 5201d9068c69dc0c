r"""How well chains have mixed: R-hat and effective sample size (Gelman et al. 2013, Ch. 11; Vehtari et al. 2021).

Both look at one number along several chains of the same posterior, here shape ``(..., chains, length)``, with each
chain split in two, so that a chain that still drifts counts as two that disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _split(traces: Tensor) -> Tensor:
    """Halves of chains, in double precision; shape ``(..., 2 chains, length // 2)``."""
    length = traces.shape[-1] // 2
    if length < 2:
        raise ValueError(f"the traces have {traces.shape[-1]} points; expected four or more")
    return torch.cat([traces[..., :length], traces[..., -length:]], -2).double()


def _variances(halves: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean variance within chains, W, and the estimate of the whole, :math:`\frac{n - 1}{n} W + B / n`."""
    length = halves.shape[-1]
    within = halves.var(-1).mean(-1)
    return within, (length - 1) / length * within + halves.mean(-1).var(-1)


def r_hat(traces: Tensor) -> Tensor:
    r"""``sqrt(V / W)``, shape ``(...)``: how much wider all chains are together than each by itself. Above
    1.01 or so they have not mixed.
    """
    within, whole = _variances(_split(traces))
    return (whole / within.clamp_min(1e-300)).sqrt()


def effective_sample_size(traces: Tensor) -> Tensor:
    r"""How many independent draws tell as much about the mean, shape ``(...)``.

    .. math:: \frac{m n}{1 + 2 \sum_t \rho_t}, \qquad \rho_t = 1 - \frac{W - \bar\gamma_t}{V} ,

    with the autocovariances averaged over chains, and the sum stopped where a pair of neighbours is no longer positive
    (Geyer 1992).
    """
    halves = _split(traces)
    chains, length = halves.shape[-2:]
    within, whole = _variances(halves)
    centred = halves - halves.mean(-1, keepdim=True)
    size = 2 * length  # so that the transform does not wrap around
    power = torch.fft.rfft(centred, size).abs().square()
    covariance = torch.fft.irfft(power, size)[..., :length].mean(-2) / length  # biased, as usual
    unbiased = within * (length - 1) / length
    rho = 1 - (unbiased[..., None] - covariance) / whole[..., None].clamp_min(1e-300)
    pairs = rho[..., : length // 2 * 2].unflatten(-1, (-1, 2)).sum(-1)
    pairs = torch.where((pairs > 0).cumprod(-1).bool(), pairs, 0.0).cummin(-1).values
    time = (2 * pairs.sum(-1) - 1).clamp_min(1 / (chains * length))
    return (chains * length / time).clamp_max(chains * length * 10)
