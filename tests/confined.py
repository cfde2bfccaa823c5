"""Runs a command under what a unit takes away, without systemd: ``python -m tests.confined UNIT DATA COMMAND…``.

As root, Linux only. ``DATA`` is there as ``/mnt``, and with ``/tmp`` all that can be written. Played are
NoNewPrivileges, CapabilityBoundingSet (if empty), ProtectSystem=strict, PrivateTmp, ProtectProc,
RestrictAddressFamilies, MemoryDenyWriteExecute and SystemCallFilter with SystemCallErrorNumber=EPERM.
"""

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
NEW_NAMESPACE_OF_MOUNTS = 0x20000
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_RECURSIVE, ATTR_READ_ONLY = 442, 0x8000, 1
CAPBSET_DROP, SET_NO_NEW_PRIVS, SET_SECCOMP, SET_MDWE = 24, 38, 22, 65
X86_64 = 0xC000003E
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
REPOSITORY = Path(__file__).resolve().parents[1]
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def settings(unit: Path) -> dict[str, list[str]]:
    """What a unit says, key by key, in order; what is empty takes back what stands before it."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith(("#", "[")):
            found[key] = [*found.get(key, []), value] if value else [""]
    return found


def mounts(data: str) -> None:
    """A file system of which only the data and a /tmp of its own can be written, and a /proc of one's own processes."""
    call("unshare", NEW_NAMESPACE_OF_MOUNTS)
    call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    call("mount", data.encode(), b"/mnt", None, BIND, None)
    # What is run may itself be below /tmp.
    needed = [path for path in {REPOSITORY, Path(sys.prefix)} if path.is_relative_to("/tmp")]
    opened = [(path, os.open(path, os.O_PATH)) for path in sorted(needed)]
    call("mount", b"tmp", b"/tmp", b"tmpfs", 0, b"mode=0700")
    for path, descriptor in opened:
        if not path.exists():
            path.mkdir(parents=True)
            call("mount", f"/proc/self/fd/{descriptor}".encode(), bytes(path), None, BIND, None)
    call("mount", b"proc", b"/proc", b"proc", 0, b"hidepid=invisible")
    _attributes(b"/", ATTR_READ_ONLY, 0, AT_RECURSIVE)
    for path in (b"/mnt", b"/tmp", b"/proc"):
        _attributes(path, 0, ATTR_READ_ONLY, 0)


def _attributes(path: bytes, given: int, taken: int, flags: int) -> None:
    call("syscall", MOUNT_SETATTR, -1, path, flags, struct.pack("=QQQQ", given, taken, 0, 0), 32)


def allowed(filters: list[str]) -> set[int]:
    """The numbers of the calls that are left."""
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADERS.read_text())}
    names: set[str] = set()
    for words in filters:
        found = _calls(*words.removeprefix("~").split())
        names = names - found if words.startswith("~") else names | found
    return {numbers[name] for name in names & numbers.keys()}


def _calls(*groups: str) -> set[str]:
    found: set[str] = set()
    for group in groups:
        if not group.startswith("@"):
            found.add(group)
            continue
        told = subprocess.check_output(["systemd-analyze", "syscall-filter", group], text=True)
        found |= _calls(*(line.strip() for line in told.splitlines()[1:] if line.strip() and "#" not in line))
    return found


def filter_calls(numbers: set[int], families: set[int]) -> None:
    """Let the kernel refuse all other calls, and sockets of all other families."""
    (socket,) = re.findall(r"#define __NR_socket (\d+)", HEADERS.read_text())
    refused = (RETURN, 0, 0, ERROR | errno.EPERM)
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, X86_64), refused, (LOAD, 0, 0, 0)]
    for number in sorted(numbers - {int(socket)}):
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    program += [(JUMP_EQUAL, 1, 0, int(socket)), refused, (LOAD, 0, 0, 16)]
    for family in sorted(families):
        program += [(JUMP_EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("=H6xQ", len(program), ctypes.addressof(code))
    call("prctl", SET_SECCOMP, 2, filters, 0, 0)


def main(unit: Path, data: str, command: list[str]) -> None:
    found = settings(unit)
    # Asked before nothing can be asked any more.
    numbers = allowed(found["SystemCallFilter"])
    families = {FAMILIES[name] for name in " ".join(found["RestrictAddressFamilies"]).split()}
    assert found["ProtectSystem"] == ["strict"]
    assert found["SystemCallErrorNumber"] == ["EPERM"]
    for key in ("PrivateTmp", "NoNewPrivileges", "MemoryDenyWriteExecute"):
        assert found[key] == ["yes"], key
    mounts(data)
    os.chdir("/")
    if found["CapabilityBoundingSet"] == [""]:
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            call("prctl", CAPBSET_DROP, capability, 0, 0, 0)
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", SET_MDWE, 1, 0, 0, 0)
    filter_calls(numbers, families)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
