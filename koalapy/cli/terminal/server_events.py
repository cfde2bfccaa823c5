"""Server-sent events, however the connection cuts them."""

from collections.abc import Iterator


def events(pieces: Iterator[bytes]) -> Iterator[dict[str, str]]:
    """The fields of each: ``event``, ``data``, ``id``. What only keeps the connection open is none."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            fields = dict(line.split(": ", 1) for line in event.decode().splitlines() if not line.startswith(":"))
            if fields:
                yield fields
