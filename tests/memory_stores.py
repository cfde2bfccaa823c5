"""Stores in memory for tests of their users."""

from pathlib import Path

from koalapy.store.engine import MEMORY
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import OutputStore


def memory_stores() -> Stores:
    """Open new stores in memory. Output is not kept."""
    return open_stores(MEMORY, OutputStore(Path("unused"), 0))
