"""Learning rate and observation noise over a run."""

from __future__ import annotations

import math

from shortrun.learners.base import Moment
from shortrun.training.config import RunSettings

DECAY_FROM = 0.6  # share of a run after which the learning rate decays
LOWEST_RATE = 0.02  # share of the learning rate that is left at the end


def learning_rate(run: RunSettings, iteration: int, share: float) -> float:
    """After ``share`` of the run."""
    rates = run.learning_rates
    if run.rate_changes:
        rate = rates[sum(iteration >= change for change in run.rate_changes)]
    else:
        rate = rates[min(int(share * len(rates)), len(rates) - 1)]
    if run.warm_up:
        rate *= min(1.0, (iteration + 1) / run.warm_up)
    if run.decay and share > DECAY_FROM:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (share - DECAY_FROM) / (1 - DECAY_FROM))))
        rate *= max(LOWEST_RATE, cosine)
    return rate


def sigma(run: RunSettings, share: float) -> float:
    """Observation noise after ``share`` of the run."""
    first, last = run.sigma
    passed = 1.0
    if share < run.anneal:
        passed = max(0.0, (share - run.anneal_from) / (run.anneal - run.anneal_from))
    return first + (last - first) * passed if run.anneal_shape == "linear" else first * (last / first) ** passed


def moment(run: RunSettings, iteration: int, share: float) -> Moment:
    """What an update is told."""
    return Moment(share, learning_rate(run, iteration, share))
