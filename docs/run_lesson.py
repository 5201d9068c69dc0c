"""Runs the Python of a lesson from top to bottom, as a notebook would, and keeps its pictures.

    python docs/run_lesson.py docs/lessons/1_short_run.md --out docs/images/lessons

A lesson is a page; its ``python`` blocks share one namespace and run in the folder ``--out``, where their pictures go.
``--set minutes=0.1`` changes a number that the lesson assigns, for a quick look; ``--notebook FILE`` writes the lesson
as a Jupyter notebook instead of running it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("page", type=Path, help="docs/lessons/NAME.md")
    parser.add_argument("--out", type=Path, default=Path("lesson"), help="folder for the pictures")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="numbers to change")
    parser.add_argument("--notebook", type=Path, help="write a notebook here, and run nothing")
    given = parser.parse_args(words)
    text = given.page.read_text(encoding="utf-8")
    if given.notebook is not None:
        given.notebook.write_text(json.dumps(notebook(text), indent=1) + "\n", encoding="utf-8")
        return
    run(given.page, given.out, dict(word.split("=", 1) for word in given.set))


def run(page: Path, out: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run all blocks of a page and return what they defined."""
    text = page.read_text(encoding="utf-8")
    for name, value in (changes or {}).items():
        text, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value} ", text, flags=re.MULTILINE)
        if count == 0:
            raise ValueError(f"{page} assigns no {name} at the beginning of a line")
    source, out = str(page.resolve()), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {"__name__": page.stem}
    with contextlib.chdir(out):
        for block in BLOCK.finditer(text):
            above = "\n" * text.count("\n", 0, block.start(1))  # so that errors name the line of the page
            exec(compile(above + block[1], source, "exec"), names)
    return names


def notebook(text: str) -> dict[str, Any]:
    """A page as a Jupyter notebook: its code and what stands between."""
    cells = []
    for i, part in enumerate(BLOCK.split(text)):
        lines = part.strip("\n").splitlines(keepends=True)
        if lines and i % 2:
            cells.append({"cell_type": "code", "metadata": {}, "source": lines, "outputs": [], "execution_count": None})
        elif lines:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines})
    return {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 4}


if __name__ == "__main__":
    main()
