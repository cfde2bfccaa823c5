"""Texts in columns of a terminal: their width, and how they are aligned, cut and folded."""

import shutil
from typing import TextIO


def cell_len(text: str) -> int:
    """Return the number of columns of a text in a terminal."""
    if text.isascii() and text.isprintable():
        return len(text)
    from rich import cells  # slow to import, and most texts are ASCII

    return cells.cell_len(text)


def chop_cells(text: str, columns: int) -> list[str]:
    """Split a text into parts of at most ``columns`` columns."""
    from rich import cells

    return cells.chop_cells(text, columns)


def align_left(text: str, columns: int) -> str:
    return text + " " * (columns - cell_len(text))


def cut_text(text: str, columns: int, mark: str = "…") -> str:
    """Cut a text to a number of columns. End a shortened text with a mark of one column."""
    if cell_len(text) <= columns:
        return text
    return (chop_cells(text, columns - 1)[0] if columns > 1 else "") + mark


def fold_text(text: str, columns: int) -> list[str]:
    """Fold a text into lines of at most ``columns`` columns, at blanks if possible."""
    lines = [""]
    for part in text.split(" "):
        joined = f"{lines[-1]} {part}" if lines[-1] else part
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines[-1:] = [line for line in (lines[-1], *(chop_cells(part, columns) or [part])) if line]
    return lines


def terminal_size(stream: TextIO) -> tuple[int, int] | None:
    """Return columns and lines of a terminal; None for another stream."""
    return shutil.get_terminal_size() if stream.isatty() else None
