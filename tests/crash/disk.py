"""The files of a grid after a loss of power: replay recorded writes on a disk that forgets unflushed ones.

A file's content is durable when the file was flushed, and a name in a folder when the folder was flushed. That is less
than what usual file systems keep. The record is that of ``interpose.c``.
"""

import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

_HEADER = struct.Struct("=IIdQqIIII")
BLOCK_SIZE = 4096


class Loss(StrEnum):
    """What a disk forgets."""

    STRICT = "strict"
    """All content and all names that were not flushed."""
    CONTENT = "content"
    """Content that was not flushed, and no names: files are empty that were renamed without a flush."""
    TORN = "torn"
    """Any unflushed parts, drawn at random: names, blocks, and the ends of files."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Change:
    """A recorded change of a file or folder."""

    kind: str
    """C(reate), W(rite), T(runcate), S(ync), U(nlink), R(ename), L(ink) or make D(irectory)."""
    time_s: float
    """Of the machine's monotonic clock."""
    inode: int
    offset: int
    path: str
    target: str
    data: bytes


def read_changes(path: Path) -> Iterator[Change]:
    """Yield all changes of a record, in their order."""
    content = path.read_bytes()
    position = 0
    while position + _HEADER.size <= len(content):
        size, kind, time_s, inode, offset, path_size, target_size, _, _ = _HEADER.unpack_from(content, position)
        texts = position + _HEADER.size
        data = texts + path_size + target_size
        name = content[texts : texts + path_size].decode()
        target = content[texts + path_size : data].decode()
        yield Change(chr(kind), time_s, inode, offset, name, target, content[data : position + size])
        position += size


@dataclass(eq=False, slots=True)
class File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False, slots=True)
class Folder:
    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    synced: "dict[str, File | Folder]" = field(default_factory=dict)


class Disk:
    """The files below one folder, live and as they are on the disk."""

    def __init__(self, root: Path) -> None:
        self._root, self.folder = root, Folder()
        self._by_inode: dict[int, File | Folder] = {}

    def apply(self, change: Change) -> None:
        """Apply one change. Changes of files that were never created below the root have no effect."""
        if change.path == str(self._root) and change.kind == "D":
            self._by_inode[change.inode] = self.folder
            return
        match change.kind:
            case "C":
                self._put(change.path, File(), change.inode)
            case "D":
                self._put(change.path, Folder(), change.inode)
            case "U":
                self._take(change.path)
            case "R":
                if (moved := self._take(change.path)) is not None:
                    self._put(change.target, moved, change.inode)
            case "L":
                if (linked := self._by_inode.get(change.inode)) is not None:
                    self._put(change.target, linked, change.inode)
            case "W" | "T" | "S":
                self._change_node(change)

    def _change_node(self, change: Change) -> None:
        node = self._by_inode.get(change.inode)
        if isinstance(node, Folder):
            node.synced = dict(node.entries)
        elif node is not None and change.kind == "S":
            node.synced = bytes(node.content)
        elif node is not None:
            end = change.offset + len(change.data)
            node.content.extend(bytes(max(0, end - len(node.content))))
            if change.kind == "T":
                del node.content[change.offset :]
            else:
                node.content[change.offset : end] = change.data

    def _find_parent(self, path: str) -> tuple[Folder, str] | None:
        """Return the folder of a path and the last name; None if there is no such folder below the root."""
        *parents, name = Path(path).relative_to(self._root).parts
        folder = self.folder
        for parent in parents:
            child = folder.entries.get(parent)
            if not isinstance(child, Folder):
                return None
            folder = child
        return folder, name

    def _put(self, path: str, node: File | Folder, inode: int) -> None:
        if (found := self._find_parent(path)) is not None:
            found[0].entries[found[1]] = node
            self._by_inode[inode] = node

    def _take(self, path: str) -> File | Folder | None:
        found = self._find_parent(path)
        return found[0].entries.pop(found[1], None) if found is not None else None

    def list_forgettable(self) -> Iterator[tuple[str, bool]]:
        """Yield the relative paths that a loss of power may forget or empty, and whether the name itself is at risk."""
        yield from _list_forgettable(self.folder, "", is_durable=True)

    def write_to(self, target: Path, loss: Callable[[str], Loss], chance: random.Random) -> None:
        """Write the rest after a loss of power; ``loss`` returns what the disk of a relative path forgets."""
        self._write_folder(self.folder, target, "", loss, chance)

    def _write_folder(
        self, folder: Folder, target: Path, name: str, loss: Callable[[str], Loss], chance: random.Random
    ) -> None:
        target.mkdir(mode=0o700)
        for child, node in _list_entries(folder, loss(name), chance).items():
            path = f"{name}{child}"
            if isinstance(node, Folder):
                self._write_folder(node, target / child, f"{path}/", loss, chance)
            elif not child.endswith("-shm"):  # SQLite makes it anew
                (target / child).write_bytes(_find_content(node, loss(path), chance))
                (target / child).chmod(0o700)
                if child.startswith("result."):
                    os.utime(target / child, (0, 0))  # a runner saved it before this boot


def _list_forgettable(folder: Folder, name: str, *, is_durable: bool) -> Iterator[tuple[str, bool]]:
    for child, node in folder.entries.items():
        is_child_durable = is_durable and folder.synced.get(child) is node
        path = f"{name}{child}"
        if not is_child_durable:
            yield path, True
        elif isinstance(node, File) and node.content != node.synced:
            yield path, False
        if isinstance(node, Folder):
            yield from _list_forgettable(node, f"{path}/", is_durable=is_child_durable)


def _list_entries(folder: Folder, loss: Loss, chance: random.Random) -> "dict[str, File | Folder]":
    if loss is Loss.STRICT:
        return folder.synced
    if loss is not Loss.TORN:
        return folder.entries
    entries = {}
    for name in sorted(folder.entries.keys() | folder.synced.keys()):
        node = (folder.entries if chance.random() < 0.5 else folder.synced).get(name)
        if node is not None:
            entries[name] = node
    return entries


def _find_content(file: File, loss: Loss, chance: random.Random) -> bytes:
    if loss is Loss.NOTHING:
        return bytes(file.content)
    if loss is not Loss.TORN or file.synced == file.content:
        return file.synced
    shorter, longer = sorted((len(file.synced), len(file.content)))
    blocks = []
    for start in range(0, longer, BLOCK_SIZE):
        source = file.content if chance.random() < 0.5 else file.synced
        blocks.append(bytes(source[start : start + BLOCK_SIZE]).ljust(BLOCK_SIZE, b"\0"))
    return b"".join(blocks)[: chance.randint(shorter, longer)]
