"""Documentation: links lead somewhere, command lines parse, the API has its reference, the site needs no network.

Its doctests are run by pytest itself.
"""

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import load_script
from studio_server import browser

import shortrun as sr
from shortrun import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
HOOKS = load_script(DOCS / "site_hooks.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- links ------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = HOOKS.FENCE.sub("", path.read_text())
    headings = [line.lstrip("#").strip() for line in text.splitlines() if re.match("#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for match in HOOKS.links(page.read_text()):
        target, _, anchor = match["target"].partition("#")
        if ":" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.is_relative_to(ROOT), f"{match['target']} is outside the repository"
        assert place.exists(), f"{match['target']} does not exist"
        if anchor and place.suffix == ".py":
            HOOKS.line_of(place, anchor)
        elif anchor:
            assert anchor in anchors(place), f"{target} has no heading #{anchor}"


def test_a_link_into_code_goes_to_the_line_that_defines_the_symbol(tmp_path):
    source = "import os\n\nLIMIT: int = 3\n\n\n@property\nclass A:\n    size = 1\n\n    def go(self):\n        pass\n"
    (tmp_path / "a.py").write_text(source)
    lines = [HOOKS.line_of(tmp_path / "a.py", symbol) for symbol in ("LIMIT", "A", "A.size", "A.go")]
    assert lines == [3, 7, 8, 10]
    with pytest.raises(LookupError, match=r"A\.stay"):
        HOOKS.line_of(tmp_path / "a.py", "A.stay")


def test_links_in_code_are_not_links():
    text = "[a](b.md)\n\n```python\nx = y[0](1)\n```\n\n>>> f[0](2)\n3\n\n`z[1](4)` and ``a[2](5)`` ![p](c.png)\n"
    assert [match["target"] for match in HOOKS.links(text)] == ["b.md", "c.png"]


# --- command lines ----------------------------------------------------------------------------------------

COMMAND = re.compile(r"(?:\w+=\S+ +)*(?:shortrun|python -m shortrun(?:\.cli)?|torchrun .*?-m shortrun\.cli) +(?=[a-z])")
SCRIPT = re.compile(r"(?:\w+=\S+ +)*python ((?:benchmarks|examples)/\w+\.py)")
STAND_INS = {"METHOD": "short-run", "NAME": "vae", "N": "1", "PRESET": "cpu", "TARGET": "all"}
HISTORY = ("CHANGELOG.md", "docs/lab_notes.md")  # commands of earlier versions


def blocks(text: str) -> Iterator[str]:
    """Code of a page that is not Python: fenced blocks, indented ones, and what is between backticks in a line."""
    for fence in re.finditer(r"^( {0,3})```(\w*)\n(.*?)^ {0,3}```", text, re.M | re.S):
        if fence[2] != "python":
            yield fence[3]
    text = re.sub(r"^ {0,3}```.*?^ {0,3}```", "", text, flags=re.M | re.S)
    for indented in re.finditer(r"(?:^ {4}.*\n)+", text, re.M):
        yield indented[0]
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(span[1].split())


def command_lines(text: str) -> Iterator[str]:
    for block in blocks(text):
        line = ""
        for each in [*block.splitlines(), ""]:
            each = each.strip()
            if line.endswith("\\") or each.startswith("--"):  # the line before goes on
                line = f"{line.rstrip(chr(92))} {each}"
                continue
            if COMMAND.match(line) or SCRIPT.match(line):
                yield line
            line = each.removeprefix("$ ")


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [STAND_INS.get(word, word) for word in words if word not in ("..", "...")]


def parses(words: list[str]) -> str:
    """Nothing, or why the command line of the package refuses these words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.parse(words)
    except (SystemExit, ValueError) as error:
        return f"{error} {said.getvalue()}"
    return ""


LINES = [
    (name_of(page), line) for page in PAGES if name_of(page) not in HISTORY for line in command_lines(page.read_text())
]


def test_command_lines_are_found():
    text = "`shortrun fid\nRUN`\n\n```\nshortrun train \\\n  --out a  # why\n```\n\n"
    text += "    python benchmarks/a.py X\n        --json b\n"
    expected = ["shortrun train  --out a  # why", "python benchmarks/a.py X --json b", "shortrun fid RUN"]
    assert list(command_lines(text)) == expected
    assert len(LINES) > 50


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}:{line[:60]}" for page, line in LINES])
def test_quoted_command_lines_are_understood(page, line):
    """Every flag exists and takes what it is given. Lines in running text may leave out the run and the folder."""
    script = SCRIPT.match(line)
    if script:
        source = (ROOT / script[1]).read_text()
        for flag in re.findall(r" (--[a-z][a-z-]*)", line):
            assert flag in source, f"{script[1]} has no {flag}"
        return
    words = words_of(line[COMMAND.match(line).end() :])
    if len(words) == 1 or "--help" in words:
        assert words[0] in {command.__name__.lower() for command in cli.COMMANDS}
        return
    attempts = [words, [*words, "--out", "somewhere"], [words[0], "RUN", *words[1:]]]
    attempts.append([*attempts[-1], "--out", "somewhere"])
    refusals = [parses(attempt) for attempt in attempts]
    assert not all(refusals), refusals[0]


def test_a_wrong_command_line_is_refused():
    assert "quiet-step" in parses(["evaluate", "RUN", "--quiet-step", "3", "--out", "x"])
    assert parses(["evaluate", "RUN", "--images", "three", "--out", "x"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_python(page):
    """Blocks that doctest does not run, because they show a part of something, can at least be parsed."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        if ">>>" not in block:
            ast.parse(block)


# --- pages ------------------------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """The headings of the reference, and the objects under them."""
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    return {
        heading: path for path, heading in re.findall(r'^::: (\S+)\n    options:\n      heading: "([^"]+)"', text, re.M)
    }


def test_the_public_api_has_its_reference():
    found = reference()
    missing = [name for name in sr.__all__ if f"shortrun.{name}" not in found]
    assert not missing


@pytest.mark.parametrize(("heading", "path"), reference().items())
def test_what_the_reference_names_can_be_imported_by_that_name(heading, path):
    if not heading.startswith("shortrun."):
        return
    module, _, name = heading.rpartition(".")
    pytest.importorskip("deepinv") if module.endswith("deepinv") else None
    home, _, _ = path.rpartition(".")
    there = getattr(importlib.import_module(module), name)
    assert there is getattr(importlib.import_module(home), name)


def test_every_page_is_in_the_nav():
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"!!python/\S+ ", "", (ROOT / "mkdocs.yml").read_text())
    listed: set[str] = set()

    def collect(entry: object) -> None:
        if isinstance(entry, str):
            listed.add(entry)
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:  # type: ignore[attr-defined]
                collect(each)

    collect(yaml.safe_load(text)["nav"])
    folders = {entry for entry in listed if entry.endswith("/")}
    absent = [entry for entry in listed - folders if not (DOCS / entry).exists()]
    assert not absent
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"assets/README.md"}
    assert not {page for page in pages - listed if not page.startswith(tuple(folders))}


# --- the site ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return place


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = [path for path in site.rglob("*.html") if path.name != "report.html"]
    assert len(pages) > 30
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe|source|video)\b[^>]*>", page.read_text()):
            where = re.search(r'(?:src|href)="?((?:https?:)?//[^" >]*)', tag)
            assert where is None or 'rel="canonical"' in tag, f"{page.name} loads {where and where[1]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


LOOK = """() => ({
  wider: document.documentElement.scrollWidth - innerWidth,
  wrong: [...document.querySelectorAll(".katex-error")].map((each) => each.title),
  unrendered: [...document.querySelectorAll(".arithmatex")].filter((each) => !each.querySelector(".katex")).length,
  broken: [...document.images].filter((each) => each.complete && !each.naturalWidth).map((each) => each.src),
})"""


@pytest.mark.slow
def test_pages_look_right_on_a_narrow_screen(site):
    """Opened as files: no page is wider than the screen, equations and pictures appear, nothing is fetched."""
    good = {"wider": 0, "wrong": [], "unrendered": 0, "broken": []}
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 375, "height": 800})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for path in sorted(site.rglob("*.html")):
            if path.name == "404.html" or site / "files" in path.parents:
                continue
            page.goto(path.as_uri())
            assert page.evaluate(LOOK) == good, path.relative_to(site)
        assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        page.goto((site / "index.html").as_uri())
        page.locator("label[for=__search]").first.click()
        page.keyboard.type("momentum")
        page.wait_for_selector(".md-search-result__link", timeout=60_000)
