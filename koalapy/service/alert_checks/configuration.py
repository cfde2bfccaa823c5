"""Whether the configuration file is still what the daemon runs with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.errors import UsageError
from koalapy.model.wording import listed

REMEDY = "start the daemon anew, as settings are read at its start only: systemctl restart koala-serve; jobs go on"
Values = Mapping[str, Any]


class ConfigurationCheck:
    """Report a configuration file that has other settings than the daemon was started with."""

    def __init__(self, path: Path, started_with: Values, read: Callable[[Path], Values]) -> None:
        """``read`` returns the settings in a file, and raises ``UsageError`` for one that cannot be read."""
        self._path, self._started_with, self._read = path, started_with, read
        self._stamp: tuple[int, ...] | None = None
        self._difference = ""

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        if difference := await asyncio.to_thread(self._look):
            summary = f"the daemon does not run with what {self._path} says now"
            yield Alert(AlertKind.CONFIGURATION, Severity.WARNING, "configuration", summary, difference, REMEDY, now)

    def _look(self) -> str:
        """Return what is different; the file is read only when it has changed."""
        try:
            seen = self._path.stat()
            stamp = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        except OSError as error:
            self._stamp = None
            return f"it cannot be read: {error.strerror}"
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._difference = difference_of(self._started_with, self._read(self._path))
            except UsageError as error:
                self._difference = f"the daemon would not start with it: {error.message}"
        return self._difference


def difference_of(before: Values, now: Values) -> str:
    """Return in words which settings differ, each cluster by its name; empty when none does."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    told = [name for name in names if name != "clusters"]
    clusters = [source.get("clusters") or {} for source in (before, now)]
    if "clusters" in names and all(isinstance(each, dict) for each in clusters):
        was, becomes = clusters
        for what, some in (
            ("added", becomes.keys() - was.keys()),
            ("removed", was.keys() - becomes.keys()),
            ("changed", {name for name in was.keys() & becomes.keys() if was[name] != becomes[name]}),
        ):
            if some:
                word = "cluster" if len(some) == 1 else "clusters"
                told.append(f"{word} {listed(sorted(map(str, some)))} {what}")
    elif "clusters" in names:
        told.append("clusters")
    return f"different: {', '.join(told)}" if told else ""
