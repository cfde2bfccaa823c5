"""Run a command with the restrictions of a systemd unit, without systemd.

``python -m tests.confined UNIT DATA COMMAND…``, as root on Linux. The folder ``DATA`` is mounted at ``/mnt``; only it
and ``/tmp`` can be written. Applied are
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


def call_libc(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def read_unit(unit: Path) -> dict[str, list[str]]:
    """Return the values of each key of a unit, in order. An empty value drops those before it."""
    values: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith(("#", "[")):
            values[key] = [*values.get(key, []), value] if value else [""]
    return values


def restrict_file_system(data: str) -> None:
    """Make all files read-only but the data and a private /tmp, and hide the processes of other accounts in /proc."""
    call_libc("unshare", NEW_NAMESPACE_OF_MOUNTS)
    call_libc("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    call_libc("mount", data.encode(), b"/mnt", None, BIND, None)
    # The repository and Python may be below /tmp, which is hidden.
    needed = [path for path in {REPOSITORY, Path(sys.prefix)} if path.is_relative_to("/tmp")]
    opened = [(path, os.open(path, os.O_PATH)) for path in sorted(needed)]
    call_libc("mount", b"tmp", b"/tmp", b"tmpfs", 0, b"mode=0700")
    for path, descriptor in opened:
        if not path.exists():
            path.mkdir(parents=True)
            call_libc("mount", f"/proc/self/fd/{descriptor}".encode(), bytes(path), None, BIND, None)
    call_libc("mount", b"proc", b"/proc", b"proc", 0, b"hidepid=invisible")
    _change_mount(b"/", ATTR_READ_ONLY, 0, AT_RECURSIVE)
    for path in (b"/mnt", b"/tmp", b"/proc"):
        _change_mount(path, 0, ATTR_READ_ONLY, 0)


def _change_mount(path: bytes, set_flags: int, cleared_flags: int, flags: int) -> None:
    call_libc("syscall", MOUNT_SETATTR, -1, path, flags, struct.pack("=QQQQ", set_flags, cleared_flags, 0, 0), 32)


def read_allowed_calls(filters: list[str]) -> set[int]:
    """Return the numbers of the system calls that the filters allow."""
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADERS.read_text())}
    allowed_names: set[str] = set()
    for filter_text in filters:
        calls = _expand_groups(*filter_text.removeprefix("~").split())
        allowed_names = allowed_names - calls if filter_text.startswith("~") else allowed_names | calls
    return {numbers[name] for name in allowed_names & numbers.keys()}


def _expand_groups(*groups: str) -> set[str]:
    calls: set[str] = set()
    for group in groups:
        if not group.startswith("@"):
            calls.add(group)
            continue
        listing = subprocess.check_output(["systemd-analyze", "syscall-filter", group], text=True)
        calls |= _expand_groups(
            *(line.strip() for line in listing.splitlines()[1:] if line.strip() and "#" not in line)
        )
    return calls


def filter_calls(numbers: set[int], families: set[int]) -> None:
    """Let the kernel reject all other calls, and sockets of all other families."""
    (socket,) = re.findall(r"#define __NR_socket (\d+)", HEADERS.read_text())
    rejection = (RETURN, 0, 0, ERROR | errno.EPERM)
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, X86_64), rejection, (LOAD, 0, 0, 0)]
    for number in sorted(numbers - {int(socket)}):
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    program += [(JUMP_EQUAL, 1, 0, int(socket)), rejection, (LOAD, 0, 0, 16)]
    for family in sorted(families):
        program += [(JUMP_EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("=H6xQ", len(program), ctypes.addressof(code))
    call_libc("prctl", SET_SECCOMP, 2, filters, 0, 0)


def main(unit: Path, data: str, command: list[str]) -> None:
    unit_settings = read_unit(unit)
    # Read these before the restrictions hide the files that they come from.
    numbers = read_allowed_calls(unit_settings["SystemCallFilter"])
    families = {FAMILIES[name] for name in " ".join(unit_settings["RestrictAddressFamilies"]).split()}
    assert unit_settings["ProtectSystem"] == ["strict"]
    assert unit_settings["SystemCallErrorNumber"] == ["EPERM"]
    for key in ("PrivateTmp", "NoNewPrivileges", "MemoryDenyWriteExecute"):
        assert unit_settings[key] == ["yes"], key
    restrict_file_system(data)
    os.chdir("/")
    if unit_settings["CapabilityBoundingSet"] == [""]:
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            call_libc("prctl", CAPBSET_DROP, capability, 0, 0, 0)
    call_libc("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call_libc("prctl", SET_MDWE, 1, 0, 0, 0)
    filter_calls(numbers, families)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
