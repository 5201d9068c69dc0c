"""Docstrings as the site shows them: their equations, roles and doctests, in markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([\w.]+)`")
MATH = re.compile(r":math:`([^`]+)`")
PACKAGE = "shortrun."


def converted(text: str, scope: str = "") -> str:
    """A docstring in markdown.

    >>> converted("See :func:`shortrun.fit`, with :math:`x^2`.")
    'See <autoref optional identifier="shortrun.fit"><code>fit</code></autoref>, with $x^2$.'
    >>> converted(".. math:: a\\n    + b\\n\\n>>> 1 + 1\\n2").split("\\n")
    ['$$', 'a', '+ b', '$$', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        line = lines[i]
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith(".. math::"):
            block = [line.partition(".. math::")[2].strip()]
            i += 1
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith(indent + " ")):
                if not lines[i].strip() and any(block):
                    break
                block.append(lines[i].strip())
                i += 1
            out += [indent + "$$", *(indent + each for each in block if each), indent + "$$"]
        elif line.lstrip().startswith(">>>"):
            out.append(f"{indent}```pycon")
            while i < len(lines) and lines[i].strip():
                out.append(lines[i])
                i += 1
            out.append(f"{indent}```")
        else:
            out.append(ROLE.sub(lambda match: _reference(match[1], scope), MATH.sub(r"$\1$", line)))
            i += 1
    return "\n".join(out)


def _reference(name: str, scope: str) -> str:
    full = name if name.startswith(PACKAGE) else f"{scope}.{name}"
    shown = name.removeprefix(PACKAGE).rpartition(".")[2]
    return f'<autoref optional identifier="{full}"><code>{shown}</code></autoref>'


class Docstrings(griffe.Extension):
    """Converts every docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            scope = obj.path if isinstance(obj, (griffe.Module, griffe.Class)) else obj.path.rpartition(".")[0]
            obj.docstring.value = converted(obj.docstring.value, scope)
