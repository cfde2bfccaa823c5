"""Whether the configuration file is still what the daemon runs with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.errors import UsageError
from koalapy.model.wording import format_list

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
        if difference := await asyncio.to_thread(self._compare):
            summary = f"the daemon does not run with what {self._path} says now"
            yield Alert(AlertKind.CONFIGURATION, Severity.WARNING, "configuration", summary, difference, REMEDY, now)

    def _compare(self) -> str:
        """Return what is different; the file is read only when it has changed."""
        try:
            status = self._path.stat()
            stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
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


def difference_of(old: Values, new: Values) -> str:
    """Return in words which settings differ, each cluster by its name; empty when none does."""
    settings = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    differences = [name for name in settings if name != "clusters"]
    if "clusters" in settings:
        differences += _cluster_differences(old.get("clusters") or {}, new.get("clusters") or {})
    return f"different: {', '.join(differences)}" if differences else ""


def _cluster_differences(old: object, new: object) -> list[str]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ["clusters"]
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    groups = {"added": new.keys() - old.keys(), "removed": old.keys() - new.keys(), "changed": changed}
    return [
        f"{'cluster' if len(names) == 1 else 'clusters'} {format_list(sorted(map(str, names)))} {change}"
        for change, names in groups.items()
        if names
    ]
