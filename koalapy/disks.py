"""Looks at how much room there is where we write."""

import os
from collections.abc import Mapping
from pathlib import Path

from koalapy.model.disk import Disk


def look(folders: Mapping[str, Path]) -> list[Disk]:
    """The disks of some folders, each by the first that lies on it. ``OSError``."""
    found: dict[int, Disk] = {}
    for what, folder in folders.items():
        path = folder.absolute()
        while not path.exists():
            path = path.parent
        device = path.stat().st_dev
        if device not in found:
            room = os.statvfs(path)
            size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
            found[device] = Disk(what, str(folder), free, size, room.f_favail if room.f_files else None)
    return list(found.values())
