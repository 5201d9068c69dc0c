"""Small runs to break."""

from __future__ import annotations

from pathlib import Path

from bad_input.case import begin, finish


def small_run(folder: Path) -> Path:
    """A run that was stopped after four of six iterations, made by a process of its own."""

    def work() -> int:
        import shortrun as sr
        from shortrun.data import load
        from shortrun.training.presets import preset

        images, test = load("embedded"), load("embedded", "test")
        config = preset("smoke").changed(iterations=6, checkpoint_every=1.0, evaluate_every=2.0)
        stop = {"callback": lambda trained: trained.info["iterations"] >= 4}
        sr.fit(None, images, validation=test, folder=folder, config=config, quiet=True, **stop)
        return 0

    said = folder.with_suffix(".out")
    if code := finish(begin(work, said)):
        raise RuntimeError(f"the small run ended with {code}: {said.read_text()[-500:]}")
    return folder
