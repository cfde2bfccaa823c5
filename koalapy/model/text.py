"""Text as UTF-8 can hold it: JSON, file systems and arguments may bring lone surrogates, which it cannot."""


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded at all."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """A text for people, with what cannot be encoded as escapes."""
    return text.encode(errors="backslashreplace").decode()
