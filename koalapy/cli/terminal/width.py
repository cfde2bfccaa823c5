"""Texts in columns of a terminal: East Asian signs take two, accents that stand by themselves none."""

import os
import shutil
from typing import TextIO

from rich.cells import cell_len, chop_cells

WITHOUT_CURSOR = ("", "dumb", "unknown")
"""Terminals, by ``TERM``, on which nothing can be written over."""


def left(text: str, columns: int) -> str:
    return text + " " * (columns - cell_len(text))


def right(text: str, columns: int) -> str:
    return " " * (columns - cell_len(text)) + text


def cut(text: str, columns: int, mark: str = "…") -> str:
    """Return as much of a text as has room, with a mark of one column if something is missing."""
    if cell_len(text) <= columns:
        return text
    return (chop_cells(text, columns - 1)[0] if columns > 1 else "") + mark


def folded(text: str, columns: int) -> list[str]:
    """Return a text in lines of at most so many columns, broken at blanks if there are any."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines[-1:] = [line for line in (lines[-1], *(chop_cells(word, columns) or [word])) if line]
    return lines


def terminal_size(stream: TextIO) -> tuple[int, int] | None:
    """Return columns and lines of a terminal; None for another stream."""
    return shutil.get_terminal_size() if stream.isatty() else None


def can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which text can be replaced."""
    return stream.isatty() and os.environ.get("TERM", "") not in WITHOUT_CURSOR
