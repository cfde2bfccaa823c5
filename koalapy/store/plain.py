"""Text and numbers that every database takes: resource managers and programs say what they like."""

from sqlalchemy import BigInteger, Dialect, String, Text, TypeDecorator
from sqlalchemy.types import TypeEngine


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


class Whole(TypeDecorator[int]):
    """A number that its column can hold; what is beyond that counts as the largest or smallest there is."""

    impl = BigInteger
    cache_ok = True

    def __init__(self, kind: TypeEngine[int] | None = None, bits: int = 64) -> None:
        super().__init__()
        self._kind, self._largest = kind or BigInteger(), 2 ** (bits - 1) - 1

    def load_dialect_impl(self, _: Dialect) -> TypeEngine[int]:
        return self._kind

    def process_bind_param(self, value: int | None, _: Dialect) -> int | None:
        return None if value is None else max(-self._largest, min(self._largest, value))


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
