"""Which nodes a job with sbatch's ``--constraint`` may get. Pure; any text gets an answer."""

import re
from collections.abc import Callable, Collection, Iterable

_WORD = re.compile(r"[^\s&|,()*]+|[&|,()]|\*\d*")


def may_have(features: Collection[str], constraint: str) -> bool:
    """Whether a node with these features may be given to a job with that constraint.

    Where the constraint counts nodes, as in ``[a*1&b*2]``, a node need only be one of those that it speaks of; and of
    ``[a|b]``, by which all nodes are of one kind, either will do.
    """
    words = _WORD.findall(constraint.replace("[", "(").replace("]", ")"))
    counts = any(word.startswith("*") for word in words)
    found = _either([word for word in words if not word.startswith("*")], features, any if counts else all)
    return found or not words


def _either(words: list[str], features: Collection[str], join: Callable[[Iterable[bool]], bool]) -> bool:
    """Takes a constraint up to its end, or that of its parenthesis, from the words: ``&`` binds stronger than ``|``."""
    found, parts = False, list[bool]()
    while words and (word := words.pop(0)) != ")":
        if word == "(":
            parts.append(_either(words, features, join))
        elif word == "|":
            found, parts = found or (bool(parts) and join(parts)), []
        elif word not in ("&", ","):
            parts.append(word in features)
    return found or (bool(parts) and join(parts))
