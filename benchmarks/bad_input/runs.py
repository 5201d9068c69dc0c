"""Small runs to break and to kill."""

from __future__ import annotations

import os
from pathlib import Path

WORDS = ["--preset", "smoke", "--iterations", "6", "--checkpoint-every", "1", "--evaluate-every", "2"]


def small_run(folder: Path) -> Path:
    """A run that was stopped after four of six iterations, made by a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            import shortrun as sr
            from shortrun.data import load
            from shortrun.training.presets import preset

            config = preset("smoke").changed(iterations=6, checkpoint_every=1.0, evaluate_every=2.0)
            sr.fit(
                None,
                load("embedded"),
                validation=load("embedded", "test"),
                folder=folder,
                config=config,
                quiet=True,
                callback=lambda trained: trained.info["iterations"] >= 4,
            )
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the small run ended with {status}")
    return folder
