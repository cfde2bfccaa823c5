"""Slurm's short form for many host names, ``n[1-3,07],m1``, spelled out. Pure."""

import re

_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
_LIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MAX_NAMES = 100_000
"""Names beyond which the text is no list of a cluster's nodes."""


def expand(text: str) -> list[str]:
    """All names, in order; ``ValueError`` for what is no host list."""
    if not text:
        return []
    if not _LIST.fullmatch(text):
        raise _wrong(text)
    names: list[str] = []
    for part in _PART.findall(text):
        names += _names(part)
        if len(names) > _MAX_NAMES:
            raise _wrong(text)
    return names


def _names(part: str) -> list[str]:
    """The names of one part without a comma outside of brackets."""
    names = [""]
    for numbers, plain in _PIECE.findall(part):
        endings = _numbers(numbers) if numbers else [plain]
        if len(names) * len(endings) > _MAX_NAMES:
            raise _wrong(part)
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(text: str) -> list[str]:
    """``1-3,07`` one by one; leading zeros give the width."""
    found: list[str] = []
    for each in text.split(","):
        matched = _RANGE.fullmatch(each)
        if matched is None:
            raise _wrong(text)
        first, last = matched.group(1), matched.group(2) or matched.group(1)
        if not 0 <= int(last) - int(first) < _MAX_NAMES:
            raise _wrong(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is no list of host names")
