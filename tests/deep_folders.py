"""Folders within each other, more than Python can go down."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def deepened(top: Path) -> Iterator[Path]:
    """A folder that is there, with such below it until the end; pytest could not remove them."""
    folder = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    try:
        yield top
    finally:
        subprocess.run(("rm", "-rf", "--", top), check=True)
