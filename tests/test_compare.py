"""Comparisons: equal terms, what a table shows, and that they can be stopped and continued."""

import json

import pytest

from shortrun.studies.compare import Terms, compare, markdown

TERMS = Terms(preset="smoke", updates=6, images=4, samples=0, likelihood_images=0)


def test_budgets_are_equal_for_all_methods():
    by_updates = [Terms(preset="smoke", updates=12).config(method) for method in ("short-run", "abp", "vae", "glow")]
    assert {config.updates_in(config.run.iterations) for config in by_updates} == {12}
    assert {config.run.minutes for config in by_updates} == {None}
    by_minutes = [Terms(minutes=0.5).config(method).run for method in ("short-run", "vae")]
    assert {(run.minutes, run.iterations) for run in by_minutes} == {(0.5, None)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images is 0"),
        ({"samples": 1}, "at least two"),
        ({"likelihood_images": -1}, "likelihood_images is -1"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"updates": -1}, "updates is -1"),
    ],
)
def test_terms_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Terms(**options)


def test_cells_of_the_table():
    row = {
        "method": "vae", "mse": 0.01234, "fid": 12.34, "kid_normal": 0.01, "lower_bound_bits": 3.456,
        "annealed_bits": 3.2, "annealed_bits_error": 0.05, "updates": 1234, "seconds": 89.6, "parameters": 56789,
    }  # fmt: skip
    shown = [cell.strip() for cell in markdown([row]).splitlines()[-1].split("|")[1:-1]]
    bits = ["3.46", "-", "3.20 ± 0.05"]
    assert shown == ["vae", "0.0123", "-", "-", "-", "12.3", "-", "-", "0.0100", *bits, "1,234", "90", "56,789"]
    assert "error" in markdown([{"method": "glo", "error": "out of luck"}])


def test_a_failing_method_does_not_stop_the_others(tmp_path):
    def measure(method, ground, folder):
        assert len(ground.held_out) == TERMS.images
        if method == "glo":
            raise RuntimeError("out of luck")
        return {"method": method, "mse": 0.5}

    messages = []
    rows = compare(("glo", "vae"), TERMS, tmp_path, messages.append, measure=measure)
    assert rows == [{"method": "glo", "error": "out of luck"}, {"method": "vae", "mse": 0.5}]
    assert messages == ["glo failed: out of luck"]
    assert json.loads((tmp_path / "table.json").read_text()) == rows
    assert (tmp_path / "table.csv").read_text().count("\n") == 3
    with pytest.raises(ValueError, match=r"other terms \(images differ\)"):
        compare(("vae",), Terms(preset="smoke", updates=6, images=5, samples=0, likelihood_images=0), tmp_path)


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was_stopped(tmp_path):
    (row,) = compare(("vae",), TERMS, tmp_path)
    assert row["measured"] == ["training", "reconstruction", "inpainting", "samples", "likelihood", "fid"]
    assert row["updates"] == 6
    assert row["mse"] != row["mse_by_dynamics"]
    path = tmp_path / "vae" / "result.json"
    unfinished = {**row, "measured": ["training"]}
    path.write_text(json.dumps(unfinished))
    seconds = (tmp_path / "vae" / "run" / "metrics.jsonl").stat().st_mtime_ns
    assert compare(("vae",), TERMS, tmp_path) == [row]
    assert (tmp_path / "vae" / "run" / "metrics.jsonl").stat().st_mtime_ns == seconds  # it is not trained again
