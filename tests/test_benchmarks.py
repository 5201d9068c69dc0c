"""Every script of benchmarks/ runs from end to end, at tiny size."""

import json
from pathlib import Path

import pytest
from scripts import load_script

from shortrun.cli import main

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = {
    "equal_images": ["--preset", "smoke", "--data", "mnist", "--layers", "1", "--variants", "short-run", "ladder-vae"],
    "import_time": ["--repeats", "1"],
    "inference": ["--tiny"],
    "faults": ["--only", "idx", "kills", "--share", "0.2", "--kills", "1"],
    "half_digit_bound": ["--data", "embedded", "--images", "60", "--width", "8", "--epochs", "1"],
    "long_run": ["--minutes", "0.02", "--evaluate-every", "0.2"],
    "priors": ["mnist-small", "--data", "embedded", "--images", "60", "--samples", "20", "--features", "pixels",
               "--kinds", "gaussian", "mixture"],
    "time_to_quality": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.01", "--samples", "0",
                        "--evaluations", "2"],
    "tuned_against_fixed": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.01", "--seeds", "0",
                            "--learn-last", "1"],
    "tuning_choice": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.02", "--latents", "2", "3",
                      "--channels", "4", "--reference-images", "1", "--reference-chains", "2", "--repeats", "1"],
}  # fmt: skip

SLOW = ("equal_images", "faults", "inference", "time_to_quality", "tuning_choice")


def script(name):
    return load_script(FOLDER / f"{name}.py")


def test_every_script_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*TINY, "learning"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TINY])
def test_a_script_runs(tmp_path, capsys, name):
    words = TINY[name]
    path = tmp_path / "figures.json"
    if name != "half_digit_bound":  # which only prints
        words = [*words, "--json", str(path)]
    script(name).main(words)
    assert capsys.readouterr().out
    if path.is_file():
        assert json.loads(path.read_text())


def test_the_curve_of_runs(tmp_path, capsys):
    for method in ("short-run", "vae"):
        main(["train", "--preset", "smoke", "--method", method, "--out", str(tmp_path / method)])
    words = ["--images", "10", "--json", str(tmp_path / "found"), "--plot", str(tmp_path / "curves.png")]
    script("learning").main([str(tmp_path / "short-run"), str(tmp_path / "vae"), *words])
    assert "largest_over_best" in capsys.readouterr().out
    found = json.loads((tmp_path / "found" / "short-run.json").read_text())
    errors = [row[2] for row in found["curve"]]
    assert found["last_over_best"] == pytest.approx(errors[-1] / min(errors), rel=1e-3)
    assert found["iterations"] == 6
    assert (tmp_path / "curves.png").stat().st_size > 5000
