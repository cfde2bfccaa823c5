"""Folders that are nested deeper than Python can recurse."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def deep_folder(top: Path) -> Iterator[Path]:
    """Create 1,500 nested folders in ``top`` and remove it at the end, since pytest could not."""
    folder = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        subfolder = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = subfolder
    os.close(folder)
    try:
        yield top
    finally:
        subprocess.run(("rm", "-rf", "--", top), check=True)
