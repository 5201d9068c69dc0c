"""Settings are checked by their annotations: kind and range."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from shortrun.settings import Count, CountOrZero, Positive, Share, check


@dataclass
class Settings:
    count: Count = 1
    zero: CountOrZero = 0
    size: Positive = 0.5
    share: Share = 1.0
    word: Literal["a", "b"] = "a"
    several: tuple[Positive, ...] = (1.0, 2)
    two: tuple[Share, Share] = (0.0, 1.0)
    maybe: Count | Literal["all"] | None = None
    plain: bool = True
    text: str = ""
    anything: Any = None


def test_good_values_pass():
    check(Settings())
    check(Settings(maybe="all"))
    check(Settings(maybe=3, several=(), size=2, anything=object()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0; expected a whole number, at least 1"),
        ({"count": 1.5}, "count is 1.5; expected a whole number, at least 1"),
        ({"count": True}, "count is True"),
        ({"count": None}, "count is None"),
        ({"count": "3"}, "count is '3'"),
        ({"zero": -1}, "zero is -1; expected a whole number, at least 0"),
        ({"size": 0.0}, "size is 0.0; expected a finite number, above 0"),
        ({"size": float("nan")}, "size is nan"),
        ({"size": float("inf")}, "size is inf"),
        ({"share": 1.1}, "share is 1.1; expected a finite number, at least 0 and at most 1"),
        ({"word": "c"}, "word is 'c'; accepted: a, b"),
        ({"word": []}, "word is \\[\\]; accepted: a, b"),
        ({"several": 1.0}, "several is 1.0; expected a list, each a finite number, above 0"),
        ({"several": (1.0, -1.0)}, "several is"),
        ({"several": (1.0, None)}, "several is"),
        ({"two": (0.1,)}, "two is .*; expected a list of 2, each a finite number"),
        ({"two": (0.1, 2.0)}, "two is"),
        ({"maybe": "some"}, "maybe is 'some'; expected a whole number, at least 1 or one of all or none"),
        ({"maybe": 0}, "maybe is 0"),
        ({"plain": 1}, "plain is 1; expected true or false"),
        ({"text": 3}, "text is 3; expected text"),
        ({"count": 0, "share": 2.0}, "count is 0; .*; share is 2.0"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        check(Settings(**values))
