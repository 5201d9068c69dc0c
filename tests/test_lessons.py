"""Every lesson of the documentation runs from top to bottom at tiny size, and draws the pictures that it shows."""

import json
import re
from pathlib import Path

import pytest
from scripts import load_script

DOCS = Path(__file__).parents[1] / "docs"
LESSONS = DOCS / "lessons"
TINY: dict[str, dict[str, str]] = {
    "1_short_run": {"chains": "300", "longest": "25"},
    "2_step_size": {"cells": "64", "chains": "64", "iterations": "1", "digits": "1"},
    "3_own_decoder": {"minutes": "0.02", "images": "300"},
    "4_inverse_problems": {"draws": "2", "checked": "2", "steps": "50", "shown": "2"},
    "5_layers": {"pairs": "10", "redraws": "2"},
    "6_comparing": {"minutes": "0.0002", "count": "100", "tested": "20", "watched": "4", "seeds": "1"},
    "7_not_images": {"iterations": "2", "examples": "60", "test_days": "6", "draws": "3"},
}
runner = load_script(DOCS / "run_lesson.py")


def pictures(page):
    return re.findall(r"\]\(\.\./images/lessons/([\w.-]+)\)", page.read_text())


def test_every_lesson_is_tried():
    assert {page.stem for page in LESSONS.glob("*.md")} - {"index"} == set(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_lesson_runs(tmp_path, name):
    page = LESSONS / f"{name}.md"
    runner.run(page, tmp_path, TINY[name])
    assert pictures(page)
    for picture in pictures(page):
        assert (tmp_path / picture).is_file()
        assert (DOCS / "images" / "lessons" / picture).is_file()


def test_blocks_share_their_names_and_numbers_can_be_changed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '# A\n\n```python\nsize = 3  # three\n```\n\nb\n\n```python\nPath = size * 2\nopen("x", "w").close()\n```\n'
    )
    assert runner.run(page, tmp_path / "out")["Path"] == 6
    assert runner.run(page, tmp_path / "out", {"size": "5"})["Path"] == 10
    assert (tmp_path / "out" / "x").is_file()
    with pytest.raises(ValueError, match="no length"):
        runner.run(page, tmp_path, {"length": "5"})


def test_an_error_names_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\n\nwrong\n```\n")
    with pytest.raises(NameError) as error:
        runner.run(page, tmp_path)
    assert error.traceback[-1].lineno == 4  # counted from 0


def test_a_lesson_becomes_a_notebook(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\na = 1\nb = 2\n```\n\nend\n")
    runner.main([str(page), "--notebook", str(tmp_path / "page.ipynb")])
    cells = json.loads((tmp_path / "page.ipynb").read_text())["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]
    assert "".join(cells[1]["source"]) == "a = 1\nb = 2"
