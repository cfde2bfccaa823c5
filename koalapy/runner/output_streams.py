"""Keep a program's two output streams apart: mark the error stream in the output, label lines, read the tags of mpirun.

Output is one stream of bytes from runner to daemon. In the output of jobs with an error stream of its own, that stream
is marked: ``ERROR_BEGINS`` starts it, and ``ERROR_ENDS`` or the end of the line ends it. So a line is complete by
itself, as agents interleave the lines of several nodes. ``ESCAPE`` precedes such bytes of the program itself.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    RankedBytes = tuple[Optional[int], bytes]
    """Output of one rank; None: of koalapy or mpirun itself."""

ERROR_BEGINS, ERROR_ENDS, ESCAPE = b"\x0e", b"\x0f", b"\x10"
"""Shift out, shift in and data link escape, which text does not have."""
_SPECIAL = re.compile(rb"[\x0e\x0f\x10]")
_ESCAPED = re.compile(rb"\x10([\s\S])")
_ERROR_TEXT = re.compile(rb"\x10[\s\S]|\x0e([^\x0f\n\x10]*(?:\x10[\s\S][^\x0f\n\x10]*)*)(\x0f|\n|\Z)")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
MAX_LINE = 64 * 1024
"""Bytes of an unfinished line that are held back."""


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines with their ends. Unlike ``bytes.splitlines``, take only line feeds for ends."""
    return _LINE.findall(data)


def mark_stream(data: bytes, *, is_error: bool) -> bytes:
    """Return a piece of one stream as it is sent to the daemon."""
    data = _SPECIAL.sub(ESCAPE + rb"\g<0>", data)
    if not is_error or not data:
        return data
    lines = data.split(b"\n")
    whole = b"".join(ERROR_BEGINS + line + b"\n" for line in lines[:-1])
    return whole + (ERROR_BEGINS + lines[-1] + ERROR_ENDS if lines[-1] else b"")


class StreamSplitter:
    """Divides marked output into its two streams, piece by piece."""

    def __init__(self) -> None:
        self._carried = b""
        """Bytes that the next piece is read after: an open mark, an incomplete escape, or both."""

    def split(self, data: bytes) -> list[tuple[bool, bytes]]:
        """Return parts of a piece in order, each with whether it belongs to the error stream."""
        data, self._carried = self._carried + data, b""
        if (len(data) - len(data.rstrip(ESCAPE))) % 2:
            data, self._carried = data[:-1], ESCAPE
        parts: list[tuple[bool, bytes]] = []
        position = 0
        for match in _ERROR_TEXT.finditer(data):
            if match[1] is None:
                continue  # an escape of the program's own output
            parts.append((False, data[position : match.start()]))
            parts.append((True, match[1] + (b"\n" if match[2] == b"\n" else b"")))
            position = match.end()
            if not match[2]:
                self._carried = ERROR_BEGINS + self._carried
        parts.append((False, data[position:]))
        return [(is_error, _ESCAPED.sub(rb"\1", part)) for is_error, part in parts if part]


class LineLabels:
    """Begins each line with its rank, and holds back unfinished lines, so that those of other ranks do not mix in."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int | None, bool], bytes] = {}
        self._cut: set[tuple[int | None, bool]] = set()
        """Ranks and streams with a line of which a part was released, since it is long."""

    def add(self, rank: int | None, data: bytes, *, is_error: bool) -> bytes:
        """Return the lines that are complete with this piece, with labels. Lines without a rank get none."""
        data = self._unfinished.pop((rank, is_error), b"") + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE:
            end = len(data)
        elif data[end:]:
            self._unfinished[rank, is_error] = data[end:]
        return self._label(rank, data[:end], is_error)

    def take_unfinished(self) -> list[tuple[bool, bytes]]:
        """Return the unfinished lines with labels, each with whether it belongs to the error stream."""
        unfinished, self._unfinished = self._unfinished, {}
        return [(is_error, self._label(rank, line, is_error) + b"\n") for (rank, is_error), line in unfinished.items()]

    def _label(self, rank: int | None, data: bytes, is_error: bool) -> bytes:
        if rank is None or not data:
            return data
        label, key = b"%d: " % rank, (rank, is_error)
        labelled = (b"" if key in self._cut else label) + label.join(split_lines(data))
        self._cut.discard(key) if data.endswith(b"\n") else self._cut.add(key)
        return labelled


class TagReader:
    """Reads the ranks from the output of ``mpirun``, which tags the beginning of each line or of each piece of one."""

    _TAG = re.compile(rb"\[[^\[\]\s,]{1,255},(\d{1,9})\]<(?:stdout|stderr|stddiag)>:")

    def __init__(self, size: int, separator: bytes) -> None:
        """``size``: number of ranks; a tag of another rank is text. ``separator``: text between a tag and the line."""
        self._size, self._separator = size, separator
        self._unfinished = b""

    def read(self, data: bytes) -> list[RankedBytes]:
        """Return the output of each rank in order, up to the last whole line."""
        data = self._unfinished + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE:
            end = len(data)
        self._unfinished = data[end:]
        return self._split_tags(data[:end])

    def take_unfinished(self) -> list[RankedBytes]:
        """Return the output after the last whole line."""
        unfinished, self._unfinished = self._unfinished, b""
        return self._split_tags(unfinished)

    def _split_tags(self, data: bytes) -> list[RankedBytes]:
        output: list[RankedBytes] = []
        for line in split_lines(data):
            rank, position = None, 0
            for tag in self._TAG.finditer(line):
                if int(tag[1]) < self._size:
                    output.append((rank, line[position : tag.start()]))
                    rank, position = int(tag[1]), tag.end()
                    position += len(self._separator) if line.startswith(self._separator, position) else 0
            output.append((rank, line[position:]))
        return [(rank, text) for rank, text in output if text]
