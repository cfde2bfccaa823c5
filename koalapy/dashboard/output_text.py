"""A program's output as text that may stand in a page: whatever bytes it is, no more than letters and lines."""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ORDERS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Invisible, they have other text shown in another order."""
_CONTINUES = range(0x80, 0xC0)
MAX_CUT_LINE = 4096
"""Bytes of a line that began before: it is left out if it is no longer."""


def text_of(data: bytes, *, begun_before: bool = False) -> str:
    """Colours are left out, other control characters are shown as signs; lines end with ``\\n``.

    ``begun_before``: there were more bytes, so that the first line, or letter, may not be whole.
    """
    if begun_before:
        end = data.find(b"\n", 0, MAX_CUT_LINE)
        data = data[end + 1 :] if end >= 0 else data.lstrip(bytes(_CONTINUES))
    text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    text = _ORDERS.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", text))
    return "".join(_sign(letter) if letter < " " or "\x7f" <= letter <= "\x9f" else letter for letter in text)


def _sign(letter: str) -> str:
    if letter in "\n\t":
        return letter
    return chr(0x2400 + ord(letter)) if letter < " " else "\N{SYMBOL FOR DELETE}"
