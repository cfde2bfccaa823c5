"""Explanations and hints for the values that pydantic rejects."""

import operator
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

NUMBER_BOUNDS = (
    ("less_than_equal", "le", "at most", operator.le),
    ("less_than", "lt", "less than", operator.lt),
    ("greater_than_equal", "ge", "at least", operator.ge),
    ("greater_than", "gt", "more than", operator.gt),
)
"""For each bound: the type of pydantic's error, its name in constraints and error contexts, its text, and its test."""
CORRECTIONS = {
    "int_type": ("not an integer", "give a whole number"),
    "int_parsing": ("not an integer", "give a whole number"),
    "int_from_float": ("not an integer", "give a whole number"),
    "finite_number": ("no finite number", "give a number"),
    "string_type": ("not a text", "write it as a text, in quotes"),
    "list_type": ("not a list", "give a list"),
    "dict_type": ("not an object", "give names and values"),
    "bool_parsing": ("neither true nor false", "use true or false"),
    "float_parsing": ("not a number", "give a number"),
    "float_type": ("not a number", "give a number"),
    "date_parsing": ("no date", "write it as 2026-11-01"),
    "date_from_datetime_parsing": ("no date", "write it as 2026-11-01"),
    "string_unicode": ("no Unicode text", "remove lone surrogates"),
}
"""The problem and the hint, by type of error."""
SAME = {
    "dataclass_type": "dict_type",
    "model_type": "dict_type",
    "mapping_type": "dict_type",
    "tuple_type": "list_type",
    "set_type": "list_type",
    "frozen_set_type": "list_type",
    "bool_type": "bool_parsing",
}
"""Types of errors that have the same explanation as another type."""
BOUNDS = {
    **{kind: (name, f"give {words} {{}}") for kind, name, words, _ in NUMBER_BOUNDS},
    "string_too_long": ("max_length", "give at most {} characters"),
    "string_too_short": ("min_length", "give at least {} characters"),
    "too_long": ("max_length", "give at most {}"),
    "enum": ("expected", "use {}"),
    "literal_error": ("expected", "use {}"),
}
"""The value of the error's context that the hint names, and the hint."""


def explain_error(kind: str, context: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the problem and the hint for an error of pydantic.

    The problem is empty if the hint explains it. Both are empty for other types, whose own messages suffice.
    """
    kind = SAME.get(kind, kind)
    if kind in CORRECTIONS:
        return CORRECTIONS[kind]
    if kind not in BOUNDS:
        return "", ""
    name, text = BOUNDS[kind]
    bound = (context or {})[name]
    if bound == inf:
        return CORRECTIONS["finite_number"]
    return "", text.format(f"{bound:.15g}" if isinstance(bound, float) else bound)


def describe_bounds(constraint: Any, broken_by: Any = None) -> Iterator[str]:
    """Yield the bounds of a constraint of ``annotated_types`` as text: all, or those that a value violates."""
    for _, name, text, holds in NUMBER_BOUNDS:
        bound = getattr(constraint, name, None)
        if bound is not None and (broken_by is None or not holds(broken_by, bound)):
            yield "finite" if bound == inf else f"{text} {bound:.15g}"
