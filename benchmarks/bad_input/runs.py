"""Small runs to break and to kill."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from bad_input.case import speak_into

WORDS = ["--preset", "smoke", "--iterations", "6", "--checkpoint-every", "1", "--evaluate-every", "2"]


def small_run(folder: Path) -> Path:
    """A run that was stopped after four of six iterations, made by a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            speak_into(folder.with_suffix(".out"), folder.with_suffix(".out"))
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
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the small run ended with {status}: {folder.with_suffix('.out').read_text()[-500:]}")
    return folder
