"""A PostgreSQL server and a pooler for tests: in temporary folders, on Unix sockets, run by an unprivileged user."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import needs

DEADLINE = 60.0
SOCKET = ".s.PGSQL.5432"
READY = b"database system is ready to accept"
POOLER_READY = b"process up"
POOLER_CONFIG = """
[databases]
* = host={server} user=koala
[pgbouncer]
unix_socket_dir = {home}
listen_port = 5432
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = {ignored}
"""
SETTINGS = ("listen_addresses=", "fsync=off", "full_page_writes=off", "max_connections=50", "autovacuum=off")


def _find_user() -> str:
    """Return the user to run as, since PostgreSQL rejects root; empty if this process is not root's."""
    if os.getuid() != 0:
        return ""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _as_user(user: str) -> list[str]:
    """Return the beginning of a command that runs as this user, and ends with this process."""
    if not user:
        return []
    entry = pwd.getpwnam(user)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", "--pdeathsig=INT"]


def _start_process(command: list[str], user: str, home: Path, ready: bytes) -> subprocess.Popen[bytes]:
    """Start a process and wait until its log says that it is ready."""
    process = subprocess.Popen([*_as_user(user), *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=home)
    log = process.stderr
    assert log is not None
    lines: list[bytes] = []
    for line in log:
        lines.append(line)
        if ready in line:
            threading.Thread(target=log.read, name=f"log of {command[0]}", daemon=True).start()
            return process
    pytest.fail(b"".join(lines).decode(errors="replace"))


class Server:
    """A server that runs from ``start`` to ``stop``; ``remove`` deletes its folder."""

    def __init__(self, folder: Path, primary: "Server | None" = None, disk_mb: int = 0) -> None:
        """Create the files of a server: empty ones, or a copy of those of ``primary``, which it follows.

        With ``disk_mb`` they are on a disk of this size in memory, which only root can mount.
        """
        self._programs, self._has_disk = folder, bool(disk_mb)
        self.home = Path(tempfile.mkdtemp(prefix="koala-pg-", dir="/tmp"))
        if disk_mb:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mb}m", "tmpfs", str(self.home)], check=True)
        self._user = _find_user()
        if self._user:
            shutil.chown(self.home, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        if primary is None:
            self._run("initdb", "-D", self._data, "-U", "koala", "-A", "trust", "-N", "-E", "UTF8", "--no-locale")
        else:
            self._run("pg_basebackup", "-D", self._data, "-U", "koala", "-h", str(primary.home), "-R", "-c", "fast")

    @property
    def _data(self) -> str:
        return f"{self.home}/data"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*_as_user(self._user), str(self._programs / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE, cwd=self.home)

    def replicate(self) -> "Server":
        """Start a server that follows this one."""
        replica = Server(self._programs, self)
        replica.start()
        return replica

    def promote(self) -> None:
        """Let a replica accept writes."""
        self._run("pg_ctl", "promote", "-D", self._data)

    def execute(self, statement: str) -> None:
        """Execute a statement as an administrator, outside a transaction."""
        import psycopg

        with psycopg.connect(host=str(self.home), user="koala", dbname="postgres", autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    def start(self) -> None:
        settings = [part for setting in SETTINGS for part in ("-c", setting)]
        command = [str(self._programs / "postgres"), "-D", self._data, "-k", str(self.home), *settings]
        self._process = _start_process(command, self._user, self.home, READY)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop the server at once, as if it had crashed."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(DEADLINE)

    def remove(self) -> None:
        self.stop()
        if self._has_disk:
            subprocess.run(["umount", str(self.home)], check=True)
        shutil.rmtree(self.home)

    @contextmanager
    def fill_disk(self) -> Iterator[None]:
        """Leave no space on the disk of the server."""
        ballast = self.home / "ballast"
        try:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            yield
        finally:
            ballast.unlink()

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"koala{self._databases}"
        self.execute(f"create database {name}")
        return f"postgresql://koala@/{name}?host={self.home}"


class Pooler:
    """PgBouncer between clients and a server."""

    def __init__(self, server: Server, mode: str, ignored: str = "options") -> None:
        self.home, self._user = Path(tempfile.mkdtemp(prefix="koala-pool-", dir="/tmp")), _find_user()
        config = self.home / "pgbouncer.ini"
        config.write_text(POOLER_CONFIG.format(server=server.home, home=self.home, mode=mode, ignored=ignored))
        if self._user:
            shutil.chown(self.home, self._user)
        self._server = server
        self.start()

    def start(self) -> None:
        # A shell without job control lets what it starts in the background ignore SIGQUIT.
        command = ["env", "--default-signal=QUIT", needs.PGBOUNCER_PATH, str(self.home / "pgbouncer.ini")]
        self._process = _start_process(command, self._user, self.home, POOLER_READY)

    def stop(self) -> None:
        """End it and all its connections at once."""
        self._process.send_signal(signal.SIGQUIT)  # from PgBouncer 1.23 on, SIGTERM waits for the clients
        self._process.wait(DEADLINE)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.home)

    def url_of(self, url: str) -> str:
        """Return the URL of a database of the server through this pooler."""
        return url.replace(str(self._server.home), str(self.home))


class SlowProxy:
    """A socket of a server that delays each message to it by ``delay_s``."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.delay_s, self._closed = 0.0, threading.Event()
        self._target = str(server.home / SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, target = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                target.connect(self._target)
                threading.Thread(target=self._copy, args=(client, target, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(target, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                self._closed.wait(self.delay_s if is_slow else 0.0)
                target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
