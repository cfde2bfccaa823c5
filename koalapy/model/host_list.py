"""Read lists of host names in Slurm's short form, such as ``n[1-3,07],m1``."""

import re
from collections.abc import Iterator
from itertools import product
from math import prod

MAX_HOSTS = 100_000
"""Maximum number of names that a list is expanded to."""
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
_LIST = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*")
_PART = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
Ranges = list[tuple[str, range]]
"""Ranges of numbers, each with its first number as written, which sets the width."""


def expand_host_list(text: str) -> list[str]:
    """Return all names of a list. Raise ``ValueError`` for other text, and for more than ``MAX_HOSTS`` names."""
    if count_hosts(text) > MAX_HOSTS:
        raise _not_a_list(text)
    return ["".join(parts) for name in _parse_names(text) for parts in product(*map(_list_texts, name))]


def count_hosts(text: str) -> int:
    """Return the number of names that a list stands for. Raise ``ValueError`` for other text."""
    return sum(prod(map(_count_texts, name)) for name in _parse_names(text))


def _parse_names(text: str) -> Iterator[list[str | Ranges]]:
    """Yield each name of a list as its parts: plain text, or ranges of numbers. Raise ``ValueError``."""
    if not text:
        return
    if not _LIST.fullmatch(text):
        raise _not_a_list(text)
    for name in _NAME.findall(text):
        yield [_parse_ranges(numbers) if numbers else plain for numbers, plain in _PART.findall(name)]


def _parse_ranges(text: str) -> Ranges:
    ranges: Ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _not_a_list(text)
        ranges.append((match[1], range(int(match[1]), int(match[2] or match[1]) + 1)))
    return ranges


def _count_texts(part: str | Ranges) -> int:
    return 1 if isinstance(part, str) else sum(numbers.stop - numbers.start for _, numbers in part)


def _list_texts(part: str | Ranges) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [str(number).zfill(len(first)) for first, numbers in part for number in numbers]


def _not_a_list(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not a list of host names")
