"""Which files in a component's folder its job wants to have back."""

from __future__ import annotations

import fnmatch
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Patterns:
    """As in a shell: ``*``, ``?`` and ``[...]`` stay within a name, ``**`` is any number of folders, and a folder
    stands for all that is in it."""

    def __init__(self, patterns: Iterable[str]) -> None:
        found = [[part for part in pattern.split("/") if part not in ("", ".")] for pattern in patterns]
        self._patterns = [[_part(part) for part in _plain(parts)] for parts in found if parts]

    def matches(self, path: Sequence[str]) -> bool:
        """``path`` as the names of folders and, at last, the file."""
        return any(_matches(pattern, path) for pattern in self._patterns)


def _plain(parts: Sequence[str]) -> Iterator[str]:
    """One ``**`` after another adds nothing but time."""
    return (part for part, before in zip(parts, ("", *parts)) if (part, before) != ("**", "**"))


def _part(text: str) -> re.Pattern[str] | None:
    """None for any number of folders."""
    return None if text == "**" else re.compile(fnmatch.translate(text))


def _matches(pattern: Sequence[re.Pattern[str] | None], path: Sequence[str]) -> bool:
    """Step by step through the names, with all places in the pattern where we may be."""
    places = _past_any(pattern, {0})
    for name in path:
        if len(pattern) in places:
            return True  # the folder above matched
        after = {place for place in places if pattern[place] is None}
        after |= {place + 1 for place in places if (part := pattern[place]) is not None and part.match(name)}
        places = _past_any(pattern, after)
    return len(pattern) in places


def _past_any(pattern: Sequence[re.Pattern[str] | None], places: set[int]) -> set[int]:
    """``**`` may also stand for no folder at all."""
    found = set(places)
    for place in sorted(places):
        while place < len(pattern) and pattern[place] is None:
            place += 1
            found.add(place)
    return found
