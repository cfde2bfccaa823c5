"""Text that every database takes, wherever it comes from: resource managers and programs say what they like."""

from sqlalchemy import Dialect, String, Text, TypeDecorator


class PlainText(TypeDecorator[str]):
    """Text without NULs and lone surrogates, which PostgreSQL refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _: Dialect) -> str | None:
        return None if value is None else _plain(value)


class Plain(TypeDecorator[str]):
    """The same, cut to the length of its column."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._length = length

    def process_bind_param(self, value: str | None, _: Dialect) -> str | None:
        return None if value is None else _plain(value)[: self._length]


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
