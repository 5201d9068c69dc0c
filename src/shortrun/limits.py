"""How much a file may ask for, so that one that is broken or hostile cannot take the machine down.

Beyond these limits a file is refused by name. ``allow_large`` (``--allow-large`` on the command line) lifts them.
"""

from __future__ import annotations

MOST_FILE_BYTES = 1 << 28
"""Of one image file, packed or unpacked: 256 MB."""
MOST_PIXELS = 10**8
"""Of one image."""
MOST_ARRAY_BYTES = 1 << 32
"""Of all images of an array or a table: 4 GB, or 350,000 coloured ones of 64x64."""
MOST_STEPS = 10_000
"""Of the chains of a model."""

HOW_TO_LIFT = "--allow-large (allow_large=True in Python) lifts it"


def too_large(what: str, amount: float, limit: float, allow_large: bool) -> str | None:
    """Why ``amount`` is refused; None if it is not.

    >>> too_large("it has {} steps", 20_000, MOST_STEPS, allow_large=False)
    'it has 20,000 steps, more than the limit of 10,000; --allow-large (allow_large=True in Python) lifts it'
    >>> too_large("it has {} steps", 20_000, MOST_STEPS, allow_large=True)
    """
    if allow_large or amount <= limit:
        return None
    return f"{what.format(f'{amount:,.0f}')}, more than the limit of {limit:,.0f}; {HOW_TO_LIFT}"
