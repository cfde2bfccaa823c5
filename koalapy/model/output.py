"""The two streams of a program's output, and names of files for them with patterns such as ``%j``."""

import re
from collections.abc import Mapping
from enum import StrEnum


class OutputStream(StrEnum):
    OUTPUT = "output"
    ERROR = "error"
    MARKED = "marked"
    """Both, in order, with marks by which a client divides them."""


PATTERNS = {
    "j": "the job's id",
    "A": "the array's id",
    "a": "its index in the array",
    "c": "the cluster",
    "r": "the rank",
    "x": "the job's name",
    "%": "a percent sign",
}
"""Meanings of the letters that may follow ``%``."""
_PATTERN = re.compile("%(.?)", re.DOTALL)
_NOT_IN_NAME = re.compile(r"[^\w.+=@-]")


def describe_patterns() -> str:
    """Return the patterns with their meanings, for a hint."""
    return ", ".join(f"%{letter} for {meaning}" for letter, meaning in PATTERNS.items())


def find_unknown_pattern(name: str) -> str:
    """Return the first pattern in a file name that has no meaning; empty if all have one."""
    return next((match[0] for match in _PATTERN.finditer(name) if match[1] not in PATTERNS), "")


def escape_percent(text: str) -> str:
    """Return a text in the form that yields it as part of a pattern."""
    return text.replace("%", "%%")


def fill_pattern(name: str, values: Mapping[str, str]) -> str:
    """Replace the patterns with a letter in ``values``. ``%r`` and ``%%`` stay, since a runner replaces them.

    Characters that are special in file names or shells become ``_``, so that a value is a part of one name.
    """
    return _PATTERN.sub(lambda match: _NOT_IN_NAME.sub("_", values[match[1]]) if match[1] in values else match[0], name)
