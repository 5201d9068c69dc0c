"""What settings may be: kinds and ranges, said once by the annotations of a dataclass and checked by :func:`check`."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which may reach ``low`` and ``high`` but not ``above`` and ``below``."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.low, "at most": self.high, "above": self.above, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, 2**31 - 1)]
BelowOne = Annotated[float, Range(0, below=1)]


def check(settings: Any) -> None:
    """Raise an error that names each field of a dataclass whose value its annotation does not allow.

    Numbers must be finite. A field that is annotated ``Annotated[kind, Range(..)]`` must lie in that range.

    >>> @dataclass
    ... class Example:
    ...     batch: Count = 0
    >>> check(Example())
    Traceback (most recent call last):
    ValueError: batch is 0; expected a whole number, at least 1
    """
    if found := list(_problems(settings)):
        raise ValueError("; ".join(found))


def _problems(settings: Any) -> Iterator[str]:
    kind: Any = type(settings)
    hints = _hints(kind)
    for each in fields(settings):
        value = getattr(settings, each.name)
        hint = hints[each.name]
        expected = _expected(value, hint)
        if expected is not None and get_origin(hint) is Literal:
            yield f"{each.name} is {value!r}; accepted: {', '.join(map(str, get_args(hint)))}"
        elif expected is not None:
            yield f"{each.name} is {value!r}; expected {expected}"


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _expected(value: Any, hint: Any) -> str | None:
    """What was expected instead of the value; None if it is fine."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [mark for mark in hint.__metadata__ if isinstance(mark, Range)]
        expected = _expected(value, parts[0])
        fine = expected is None and all(mark.holds(value) for mark in ranges)
        return None if fine else ", ".join([_name(parts[0]), *map(str, ranges)])
    if origin is Literal:
        return None if value in parts else f"one of {', '.join(map(str, parts))}"
    if origin in (Union, types.UnionType):
        wanted = [_expected(value, part) for part in parts]
        return None if None in wanted else " or ".join(str(each) for each in wanted)
    if origin is tuple:
        return _expected_list(value, parts)
    if hint is Any:
        return None
    if origin is dict:
        return None if isinstance(value, dict) else "a table of names and values"
    return None if _is(value, hint) else _name(hint)


def _expected_list(value: Any, parts: tuple[Any, ...]) -> str | None:
    any_number = len(parts) == 2 and parts[1] is Ellipsis
    if isinstance(value, tuple) and (any_number or len(value) == len(parts)):
        kinds = parts[:1] * len(value) if any_number else parts
        wanted = [_expected(each, kind) for each, kind in zip(value, kinds, strict=True)]
        if all(each is None for each in wanted):
            return None
    each = _expected(object(), parts[0])
    return f"a list, each {each}" if any_number else f"a list of {len(parts)}, each {each}"


def _is(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):  # which Python takes for a whole number
        return False
    if kind is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, Integral if kind is int else kind)


def _name(kind: Any) -> str:
    names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", type(None): "none"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
