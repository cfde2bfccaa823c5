"""Texts in columns of a terminal: East Asian signs take two, accents that stand by themselves none."""

import os
import shutil
from typing import TextIO

from rich.cells import cell_len, chop_cells

WITHOUT_CURSOR = ("", "dumb", "unknown")
"""Terminals, by ``TERM``, on which nothing can be written over."""


def left(text: str, columns: int) -> str:
    """With blanks after it."""
    return text + " " * (columns - cell_len(text))


def right(text: str, columns: int) -> str:
    """With blanks before it."""
    return " " * (columns - cell_len(text)) + text


def cut(text: str, columns: int, mark: str = "…") -> str:
    """As much of it as has room, with a mark of one column where something is missing."""
    if cell_len(text) <= columns:
        return text
    return (chop_cells(text, columns - 1)[0] if columns > 1 else "") + mark


def folded(text: str, columns: int) -> list[str]:
    """In lines of as many columns at most, broken at blanks where there are any."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines[-1:] = [line for line in (lines[-1], *(chop_cells(word, columns) or [word])) if line]
    return lines


def terminal_size(stream: TextIO) -> tuple[int, int] | None:
    """Columns and lines of a terminal; None where the text goes elsewhere."""
    return shutil.get_terminal_size() if stream.isatty() else None


def can_redraw(stream: TextIO) -> bool:
    """Whether somebody sits there, at a terminal on which what was written can be written over."""
    return stream.isatty() and os.environ.get("TERM", "") not in WITHOUT_CURSOR
