"""Counts as Slurm prints them for people: ``1536``, or ``1.5K``. Pure."""

import re

_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([KMGTP]?)", re.ASCII)
_UNITS = ("", "K", "M", "G", "T", "P")


def read_count(text: str) -> int | None:
    """None for what is none, as ``infinite``."""
    matched = _COUNT.fullmatch(text.strip())
    if matched is None:
        return None
    unit = 1024 ** _UNITS.index(matched[2])
    return int(matched[1]) * unit if matched[1].isdecimal() else int(float(matched[1]) * unit)
