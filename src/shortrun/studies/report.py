"""Self-contained HTML pages: text, tables and pictures in one file that can be mailed."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:13px;margin:.6rem 0}td,th{padding:2px 12px 2px 0;"
    "border-bottom:1px solid #eee;vertical-align:top;text-align:left}h1{margin-bottom:0}section{margin-top:2rem}"
    "h2{margin:0}p{margin:.2rem 0 .6rem;color:#555}code{font-size:12px}"
)


def page(title: str, introduction: str, sections: Sequence[str]) -> str:
    """The whole file; ``introduction`` and ``sections`` are HTML."""
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{introduction}{''.join(sections)}</html>\n"
    )


def section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def picture(path: Path, title: str) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{encoded}">'


def table(rows: Iterable[Iterable[Any]], heads: Sequence[str] = ()) -> str:
    parts = []
    if heads:
        parts.append("<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>")
    for row in rows:
        parts.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>")
    return f"<table>{''.join(parts)}</table>"


def markdown_table(rows: Iterable[Iterable[Any]], heads: Sequence[str]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
