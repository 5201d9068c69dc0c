"""What the site adds to the pages in ``docs/``: the files of the repository that they link to, and folders in the nav.

A link such as ``[tuning](../src/shortrun/core/tune.py#tune_by_grid)`` works on a code host, where it opens the file. On
the site it opens a page with the source, at the line where the symbol is defined. Links to results open them as they
are, and links to folders a list of what is in them. A link to what is not there, or to a symbol that is not defined, is
an error.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOME = "files"
"""Where the site keeps files of the repository."""
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*\s*$|^(?:>>>|\.\.\.) .*?$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    "Makefile": "make",
    "LICENSE": "text",
    "constraints.txt": "text",
}
"""What is shown as source, by its ending or its name; all else is served as it is."""
HIDDEN = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n"

log = logging.getLogger("mkdocs.plugins.repository")


def links(markdown: str) -> Iterator[re.Match[str]]:
    """Links and pictures outside code."""
    code = [match.span() for match in FENCE.finditer(markdown)]
    code += [match.span() for match in re.finditer(r"(`+)(?!`).+?(?<!`)\1(?!`)", markdown) if "](" in match[0]]
    for match in LINK.finditer(markdown):
        if not any(start <= match.start() < end for start, end in code):
            yield match


def in_repository(target: str, page: str) -> tuple[str, str] | None:
    """Where a link of a page (``howto/a.md``) leads to: the path from the root of the repository, and the symbol there.

    None for links that stay among the pages or end outside the repository.
    """
    path, _, symbol = target.partition("#")
    if not path or ":" in path:
        return None
    whole = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if whole.startswith("..") or (whole.startswith("docs/") and not whole.endswith(".py")):
        return None
    return whole, symbol


def line_of(path: Path, symbol: str) -> int:
    """The line on which a file defines ``name``, ``Class.method`` or a constant."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 0
    for name in symbol.split("."):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            else:
                names = []
            if name in names:
                line, body = node.lineno, getattr(node, "body", [])
                break
        else:
            raise LookupError(f"{path.name} does not define {symbol}")
    return line


def page_of(path: str) -> str:
    """Where the site has a file or folder of the repository, as a path among the pages."""
    place = ROOT / path
    if place.is_dir():
        return f"{HOME}/{path}/index.md"
    return f"{HOME}/{path}.md" if _language(place) else f"{HOME}/{path}"


def _language(place: Path) -> str:
    return LANGUAGES.get(place.suffix) or LANGUAGES.get(place.name, "")


def _source_page(path: str) -> str:
    text, fence = (ROOT / path).read_text(encoding="utf-8"), "~" * 12
    return f'{HIDDEN}# `{path}`\n\n{fence}{_language(ROOT / path)} linenums="1"\n{text}\n{fence}\n'


def _folder_page(path: str) -> str:
    lines = []
    for place in sorted((ROOT / path).iterdir()):
        target = posixpath.relpath(page_of(f"{path}/{place.name}"), f"{HOME}/{path}")
        lines.append(f"- [{place.name}{'/' * place.is_dir()}]({target})")
    return f"{HIDDEN}# `{path}/`\n\n" + "\n".join(lines) + "\n"


def _with_contents(path: str) -> Iterator[str]:
    yield path
    if (ROOT / path).is_dir():
        for each in sorted((ROOT / path).iterdir()):
            yield from _with_contents(f"{path}/{each.name}")


def _linked_from(path: str) -> Iterator[str]:
    """What a report among the results links to, beside it."""
    if path.endswith(".md") and (ROOT / path).is_file():
        for match in links((ROOT / path).read_text(encoding="utf-8")):
            beside = posixpath.join(posixpath.dirname(path), match["target"])
            if (ROOT / beside).is_file():
                yield beside


def on_config(config: Any) -> Any:
    """Nav entries that are folders become their pages, in the order of their names."""

    def unfolded(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
            if isinstance(value, list):
                yield {title: list(unfolded(value))}
            elif value.endswith("/"):
                pages = sorted((DOCS / value).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
                if pages:
                    yield {title: [page.relative_to(DOCS).as_posix() for page in pages]}
            else:
                yield entry

    config.nav = list(unfolded(config.nav))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    wanted: dict[str, None] = {}
    for page in [file for file in files if file.is_documentation_page()]:
        for match in links(page.content_string):
            if found := in_repository(match["target"], page.src_uri):
                for path in _with_contents(found[0]):
                    wanted |= dict.fromkeys([path, *_linked_from(path)])
    for path in wanted:
        place, where = ROOT / path, page_of(path)
        if not place.exists():
            continue  # the page that has the link says so
        if place.is_dir():
            files.append(File.generated(config, where, content=_folder_page(path)))
        elif _language(place):
            files.append(File.generated(config, where, content=_source_page(path)))
        else:
            files.append(File.generated(config, where, abs_src_path=str(place)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository become links to where the site has them."""
    here = page.file.src_uri
    if here.startswith(f"{HOME}/"):
        return markdown
    pieces, end = [], 0
    for match in links(markdown):
        found = in_repository(match["target"], here)
        if found is None:
            continue
        path, symbol = found
        if not (ROOT / path).exists():
            log.warning(f"'{here}' links to '{match['target']}', which does not exist")
            continue
        new = posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")
        line = ""
        if symbol:
            try:
                line = f'{{ data-line="{line_of(ROOT / path, symbol)}" }}'
            except LookupError as error:
                log.warning(f"'{here}' links to '{match['target']}': {error}")
        pieces += [markdown[end : match.start()], f"{match['text']}({new}){line}"]
        end = match.end()
    return "".join([*pieces, markdown[end:]])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Links that name a line lead to it."""
    html = re.sub(r'data-line="(\d+)" href="([^"]*)"', r'href="\2#__codelineno-0-\1"', html)
    return re.sub(r'href="([^"]*)" data-line="(\d+)"', r'href="\1#__codelineno-0-\2"', html)
