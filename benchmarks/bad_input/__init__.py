"""Bad input, by kind: each module makes cases for ``benchmarks/faults.py``."""

from __future__ import annotations

from bad_input.case import Case
from bad_input.data_files import data_cases
from bad_input.flags import flag_cases
from bad_input.folders import folder_cases
from bad_input.kills import kills
from bad_input.python_interface import python_cases

__all__ = ["Case", "all_cases", "kills"]


def all_cases() -> list[Case]:
    return [*flag_cases(), *data_cases(), *folder_cases(), *python_cases()]
