"""Looks at how much room there is where we write."""

import os
from collections.abc import Mapping
from pathlib import Path

from koalapy.model.disk import Disk


def look(folders: Mapping[str, Path]) -> list[Disk]:
    """The disks of some folders by what we have there; those on one disk are one. ``OSError``."""
    found: dict[int, Disk] = {}
    for what, folder in folders.items():
        path = folder.absolute()
        while not path.exists():
            path = path.parent
        device = path.stat().st_dev
        names = f"{found[device].what} and {what}" if device in found else what
        room = os.statvfs(path)
        files = room.f_favail if room.f_files else None
        place = found[device].path if device in found else str(folder)
        found[device] = Disk(names, place, room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize, files)
    return list(found.values())
