"""Compressed pages that many browsers share; only the session's token in the forms differs."""

import struct
import zlib
from dataclasses import dataclass

LEVEL = 5
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True, slots=True)
class SharedPage:
    """A page in pieces, to be joined by a text that differs between viewers.

    Each piece is compressed by itself, so that a page for one viewer is made without compressing it again.
    """

    pieces: tuple[bytes, ...]
    compressed: tuple[bytes, ...]
    """The pieces as raw DEFLATE data; each but the last ends at a byte, and none refers to an earlier one."""

    def as_bytes(self, inserted: bytes) -> bytes:
        """Return the page with a text between its pieces."""
        return inserted.join(self.pieces)

    def as_gzip(self, inserted: bytes) -> bytes:
        """Return the page compressed by gzip, with at most 65,535 bytes inserted, uncompressed, between its pieces."""
        stored = struct.pack("<BHH", 0, len(inserted), 0xFFFF ^ len(inserted)) + inserted
        checksum, length = 0, len(inserted) * (len(self.pieces) - 1)
        for index, piece in enumerate(self.pieces):
            checksum = zlib.crc32(piece, zlib.crc32(inserted, checksum) if index else checksum)
            length += len(piece)
        trailer = struct.pack("<II", checksum, length & 0xFFFFFFFF)
        return b"".join((_GZIP_HEADER, stored.join(self.compressed), trailer))


def compress_page(text: str, placeholder: str) -> SharedPage:
    """Return a page with gaps in place of a placeholder."""
    pieces = text.encode().split(placeholder.encode()) if placeholder else [text.encode()]
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    compressed = [compressor.compress(piece) + compressor.flush(zlib.Z_FULL_FLUSH) for piece in pieces[:-1]]
    compressed.append(compressor.compress(pieces[-1]) + compressor.flush())
    return SharedPage(tuple(pieces), tuple(compressed))
