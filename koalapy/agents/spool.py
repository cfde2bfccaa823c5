"""What an agent must still know after a crash: a folder for each component, with a journal of what was decided."""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEARD = "heard"
"""A file of each daemon instance: its time is when the daemon was last heard of."""


@dataclass(frozen=True, slots=True)
class Folder:
    """One component's folder; its journal has one JSON object a line. Lines may be torn, and those say nothing."""

    path: Path

    def write(self, **entry: Any) -> None:
        """Add to the journal; ``OSError`` also when there was room for a part of it only."""
        line = b"\n" + json.dumps(entry).encode() + b"\n"  # whatever was torn before this ends here
        descriptor = os.open(self.path / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def entries(self) -> dict[str, Any]:
        """All that was written, the later word over the earlier."""
        known: dict[str, Any] = {}
        try:
            lines = (self.path / "journal").read_bytes().splitlines()
        except FileNotFoundError:
            return known
        for line in lines:
            with contextlib.suppress(ValueError):
                known |= json.loads(line)
        return known

    def result(self, node: int) -> dict[str, Any] | None:
        """What a node's runner left for us when it ended, where it could."""
        try:
            result: dict[str, Any] = json.loads((self.path / f"result.{node}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return result

    def keep_result(self, node: int, result: dict[str, Any]) -> None:
        """What a runner told, where it could not leave it itself: its spool may be another machine's."""
        path = self.path / f"result.{node}.json"
        if not path.exists():
            path.write_text(json.dumps(result))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Spool:
    """The folders of all components, by daemon instance and token."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make(self, instance: str, token: str) -> Folder:
        path = self._directory / instance / token
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Folder(path)

    def heard(self, instance: str) -> None:
        """Note that a daemon was heard of now."""
        (self._directory / instance).mkdir(mode=0o700, exist_ok=True)
        (self._directory / instance / HEARD).touch(mode=0o600)

    def silence(self, instance: str) -> float:
        """Seconds since a daemon was heard of; counted from now when that was never noted."""
        with contextlib.suppress(FileNotFoundError):
            return time.time() - (self._directory / instance / HEARD).stat().st_mtime
        self.heard(instance)
        return 0.0

    def load(self) -> Iterator[tuple[str, str, Folder]]:
        """Every (instance, token, folder) there is."""
        for journal in sorted(self._directory.glob("*/*/journal")):
            yield journal.parent.parent.name, journal.parent.name, Folder(journal.parent)
