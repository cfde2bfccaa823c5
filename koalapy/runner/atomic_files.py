"""Replace files atomically. Standard library only: runners and locald import it."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    Path = Union[str, os.PathLike[str]]


def replace_file(path: Path, content: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Write a temporary file in the same folder and rename it to ``path``. Raise ``OSError``.

    ``sync``: flush file and folder to the disk, so that the content survives a failure of the machine.
    """
    folder, name = os.path.split(os.fspath(path))
    fresh = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if mode != 0o600:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    if sync:
        sync_folder(folder or ".")


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk. Raise ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
