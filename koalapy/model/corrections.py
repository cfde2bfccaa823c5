"""What is wrong with a value that pydantic refuses, and the way out, in the words of this project."""

from collections.abc import Mapping
from typing import Any

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
    "string_unicode": ("no Unicode text", "remove lone surrogates"),
}
"""What is wrong and the way out, by the type of the error."""
SAME = {
    "dataclass_type": "dict_type",
    "model_type": "dict_type",
    "mapping_type": "dict_type",
    "tuple_type": "list_type",
    "set_type": "list_type",
    "frozen_set_type": "list_type",
    "bool_type": "bool_parsing",
}
"""Types of errors that say the same as another."""
BOUNDS = {
    "less_than_equal": ("le", "give at most {}"),
    "less_than": ("lt", "give less than {}"),
    "greater_than_equal": ("ge", "give at least {}"),
    "greater_than": ("gt", "give more than {}"),
    "string_too_long": ("max_length", "give at most {} characters"),
    "string_too_short": ("min_length", "give at least {} characters"),
    "too_long": ("max_length", "give at most {}"),
    "enum": ("expected", "use {}"),
    "literal_error": ("expected", "use {}"),
}
"""The value in the error's context that the way out names."""


def correct(kind: str, context: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return what is wrong, or an empty text where the way out says it, and the way out.

    Both are empty for errors of other types, whose own messages say enough.
    """
    kind = SAME.get(kind, kind)
    if kind in CORRECTIONS:
        return CORRECTIONS[kind]
    if kind not in BOUNDS:
        return "", ""
    name, words = BOUNDS[kind]
    bound = (context or {})[name]
    return "", words.format(f"{bound:.15g}" if isinstance(bound, float) else bound)
