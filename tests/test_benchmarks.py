"""Every script of benchmarks/ runs from end to end, at tiny size."""

import json
from pathlib import Path

import pytest
import torch
from linear_images import linear_trained
from scripts import load_script

from shortrun.cli import main
from shortrun.studies.sources import Cells

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = {
    "calibration": ["mnist-small", "--images", "2", "--draws", "3", "--long", "3", "--times", "1", "--only", "N(0, I)"],
    "equal_images": ["--preset", "smoke", "--data", "mnist", "--layers", "1", "--variants", "short-run", "ladder-vae"],
    "import_time": ["--repeats", "1"],
    "inference": ["--tiny"],
    "faults": ["--only", "idx", "kills", "--share", "0.2", "--kills", "1"],
    "half_digit_bound": ["--data", "embedded", "--images", "60", "--width", "8", "--epochs", "1"],
    "long_run": ["--minutes", "0.02", "--evaluate-every", "0.2"],
    "measurements_only": ["--iterations", "2", "--train-images", "40", "--images", "3", "--channels", "4", "--only",
                          "shifted"],
    "own_modules": ["--tiny"],
    "restoring": ["mnist-small", "--data", "embedded", "--images", "2", "--draws", "2", "--steps", "3", "--tasks",
                  "downsampled by 4", "half of the pixels", "1 bit", "--csgm-iterations", "3"],
    "priors": ["mnist-small", "--data", "embedded", "--images", "60", "--samples", "20", "--features", "pixels",
               "--kinds", "gaussian", "mixture"],
    "scaling": ["--gpus", "1", "--large", "1", "--one", "smoke:mnist:4", "--two", "smoke:mnist:4", "--repeats", "1",
                "--size", "64"],
    "studio": ["--models", "mnist-small", "--users", "2", "--seconds", "4", "--pause", "0", "0.1"],
    "time_to_quality": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.01", "--samples", "0",
                        "--evaluations", "2"],
    "tuned_against_fixed": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.01", "--seeds", "0",
                            "--learn-last", "1"],
    "tuning_choice": ["--preset", "smoke", "--data", "embedded", "--minutes", "0.02", "--latents", "2", "3",
                      "--channels", "4", "--reference-images", "1", "--reference-chains", "2", "--repeats", "1"],
}  # fmt: skip

SLOW = (
    "calibration", "equal_images", "faults", "inference", "measurements_only", "own_modules", "restoring", "scaling",
    "studio",
    "time_to_quality", "tuning_choice",
)  # fmt: skip


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


# --- calibration --------------------------------------------------------------------------------------


def test_uniform_ranks_are_within_intervals_as_often_as_they_should():
    """Each rank from 0 to n once: exactly the share of the level, whatever n, by 1 - 2 k / (n + 1)."""
    within = script("calibration").within
    for count in (3, 20, 39):
        ranks = torch.arange(count + 1)
        for level in (0.1, 0.5, 0.77, 0.9):
            assert float(within(ranks, count, level).mean()) == pytest.approx(level)
    assert within(torch.tensor([0, 1, 19, 38, 39]), 39, 0.9).tolist() == pytest.approx([0, 0, 1, 0, 0])


@pytest.mark.parametrize("levels", [None, 3, 1])
def test_ranks_are_uniform_among_ties(levels):
    """Truth and draws from one law, rounded to a few values or to a single one: ranks have one chance each."""
    module = script("calibration")
    values = torch.rand(20, 20_000, generator=torch.Generator().manual_seed(0))
    if levels is not None:
        values = (values * levels).floor()
    draws, truth = values[1:] + 1e-6, values[0]  # the arithmetic of a decoder is not exact
    ranks = module.random_ranks(draws, truth, torch.Generator().manual_seed(1))
    shares = ranks.bincount(minlength=20) / len(truth)
    assert len(shares) == 20
    assert float((shares - 0.05).abs().max()) < 5 * (0.05 * 0.95 / len(truth)) ** 0.5
    assert float(module.within(ranks, 19, 0.9).mean()) == pytest.approx(0.9, abs=0.01)


def test_draws_that_are_too_sure_are_found_out():
    """The central 90 % of N(0, 0.5^2) hold a truth from N(0, 1) with probability 0.589."""
    module = script("calibration")
    rng = torch.Generator().manual_seed(0)
    draws, truth = 0.5 * torch.randn(199, 4000, generator=rng), torch.randn(4000, generator=rng)
    ranks = module.random_ranks(draws, truth, rng)
    expected = torch.special.ndtr(torch.tensor(0.5 * 1.6449)) * 2 - 1
    assert float(module.within(ranks, 199, 0.9).mean()) == pytest.approx(float(expected), abs=0.03)


def test_draws_of_a_linear_model_are_calibrated():
    """Whose short run distribution is its posterior to within a few per cent."""
    module = script("calibration")
    trained, _, _ = linear_trained(steps=200)
    found = module.Judge(trained, images=150, draws=19).from_normal(trained.dynamics)
    at = found["levels"].index(0.9)
    assert found["pixels"][at] == pytest.approx(0.9, abs=4 * found["pixels_error"])
    assert found["latents"][at] == pytest.approx(0.9, abs=4 * found["latents_error"])
    assert 0.005 < found["latents_error"] < 0.03
    assert found["rank_variance"] == pytest.approx(1, abs=0.2)
    assert found["varying_pixels"] == 1


def test_a_long_measurement_goes_on_where_it_was_stopped(tmp_path):
    path, calls = tmp_path / "deeper" / "cells.json", []

    def how(value):
        calls.append(value)
        return {"share": value / 3, "list": [value / 3, 1], "note": None}

    assert Cells(path, "a", "command 1").measure("cell", lambda: how(1)) == {
        "share": 0.3333, "list": [0.3333, 1], "note": None,
    }  # fmt: skip
    later = Cells(path, "a", "command 1")
    Cells(path, "b", "command 2").measure("cell", lambda: how(2))  # which the first part leaves as it is
    assert later.measure("cell", lambda: how(9))["share"] == 0.3333
    again = Cells(path, "a", "command 1")
    assert again.measure("cell", lambda: how(3))["share"] == 0.3333
    again.measure("other", lambda: how(4))
    assert calls == [1, 2, 4]
    assert set(Cells(path, "a", "command 1").values) == {"cell", "other"}
    assert not Cells(path, "a", "command 1 --images 9").values
    later.measure("third", lambda: how(5))
    assert Cells(path, "b", "command 2").values["cell"]["share"] == 0.6667


# --- learning from measurements -----------------------------------------------------------------------


def test_what_a_measurement_does_not_show_says_nothing():
    """The likelihood of an image with holes of its own is that of its visible pixels."""
    module = script("measurements_only")
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    sigma = torch.tensor(0.3)
    data, operator = module.lessons(x, x.mean(0), torch.Generator().manual_seed(1))["half of the pixels"]
    made = x + 0.1
    for i, row in enumerate(data):
        shown = row[1:] > 0
        assert 16 < int(shown.sum()) < 48
        assert not row[:1][~shown].any()
        expected = torch.distributions.Normal(made[i][shown], sigma).log_prob(x[i][shown]).sum()
        found = operator.log_likelihood(row[None], operator.measure(made[i : i + 1]), sigma, None)
        assert float(found[0]) == pytest.approx(float(expected), rel=1e-4)


def test_each_image_shows_the_means_of_one_shift():
    module = script("measurements_only")
    x = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data, _ = module.lessons(x, x.mean(0), torch.Generator().manual_seed(1))["downsampled, each shifted"]
    values, shown = data.chunk(2, 1)
    assert shown.flatten(2).all(2).sum(1).tolist() == [1] * 20
    which = shown.flatten(2).all(2).int().argmax(1)
    assert len(which.unique()) > 5
    for i in range(20):
        down, right = divmod(int(which[i]), 4)  # where the first block ends
        block = x[i, 0, down + 1 : down + 5, right + 1 : right + 5]
        assert float(values[i, which[i], 1, 1]) == pytest.approx(float(block.mean()), abs=1e-5)
