"""Short texts for people, the same in every room."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

SHOWN = 4
"""How much of a long list a one-line text shows."""
LONGEST = 200
"""Characters of a name that are compared with others."""


def listed(texts: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    """The first few texts in one line; ``count`` is how many there are in all, if more than ``texts`` holds."""
    shown = separator.join(texts[:SHOWN])
    more = (len(texts) if count is None else count) - min(len(texts), SHOWN)
    return f"{shown} and {more} more" if more > 0 else shown


def nodes(count: int, kind: str = "") -> str:
    """``1 node``, ``2 nodes``, ``2 idle nodes``."""
    return f"{count} {kind}{' ' if kind else ''}{'node' if count == 1 else 'nodes'}"


def are_idle(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'} idle"


def known_names(wrong: str, names: Iterable[str]) -> str:
    """The way out after a wrong name: the nearest one there is, then all of them."""
    known = sorted(names)
    near = get_close_matches(wrong[:LONGEST], known, 1)
    question = f"did you mean {near[0]}? " if near else ""
    return f"{question}known: {', '.join(known) or 'none'}"
