"""What is wanted in place of a value that pydantic refuses, by its error's type: what is wrong, and the way out."""

WANTED = {
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
BOUNDS = {
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
}
"""The bound in the error's context, and in words."""
LENGTHS = {
    "string_too_long": ("max_length", "at most {} characters"),
    "string_too_short": ("min_length", "at least {} characters"),
    "too_long": ("max_length", "at most {}"),
}
