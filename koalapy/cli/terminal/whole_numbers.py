"""Whole numbers as texts of the command line: ASCII digits only, since ``int`` also reads ``12_3`` as 123."""

import re

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,100}")


def parse_int(text: str) -> int | None:
    """Return the whole number that a text is; None if it is another text."""
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else None
