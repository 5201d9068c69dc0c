"""One file per learning method, each readable beside its paper; all are driven by :mod:`shortrun.train`."""

from shortrun.learners.base import Learner
from shortrun.learners.short_run import ShortRun

METHODS: dict[str, type[Learner]] = {"short-run": ShortRun}

__all__ = ["METHODS", "Learner", "ShortRun"]
