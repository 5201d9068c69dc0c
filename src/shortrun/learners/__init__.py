"""One file per learning method, each readable beside its paper; all are driven by :mod:`shortrun.train`."""

from shortrun.learners.short_run import ShortRun

METHODS = {"short-run": ShortRun}

__all__ = ["METHODS", "ShortRun"]
