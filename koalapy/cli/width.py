"""How many columns of a terminal a text takes: East Asian signs take two, accents that stand by themselves none."""

import shutil
import unicodedata
from itertools import accumulate, takewhile
from typing import TextIO


def columns_of(text: str) -> int:
    """Columns."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def left(text: str, columns: int) -> str:
    """With blanks after it."""
    return text + " " * (columns - columns_of(text))


def right(text: str, columns: int) -> str:
    """With blanks before it."""
    return " " * (columns - columns_of(text)) + text


def cut(text: str, columns: int, mark: str = "…") -> str:
    """As much of it as has room, with a mark of one column where something is missing."""
    if columns_of(text) <= columns:
        return text
    filled = accumulate(map(_columns, text))
    return text[: sum(1 for _ in takewhile(lambda so_far: so_far < columns, filled))] + mark


def folded(text: str, columns: int) -> list[str]:
    """In lines of as many columns at most, broken at blanks where there are any."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if columns_of(joined) <= columns:
            lines[-1] = joined
            continue
        lines += [""] if lines[-1] else []
        while columns_of(word) > columns:
            first = max(1, sum(1 for _ in takewhile(lambda so_far: so_far <= columns, accumulate(map(_columns, word)))))
            lines[-1:] = [word[:first], ""]
            word = word[first:]
        lines[-1] = word
    return lines if lines[-1] or len(lines) == 1 else lines[:-1]


def room(stream: TextIO) -> tuple[int, int] | None:
    """Columns and lines of a terminal; None where the text goes elsewhere."""
    return shutil.get_terminal_size() if stream.isatty() else None
