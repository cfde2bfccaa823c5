"""A PostgreSQL server for tests: in a temporary folder, on a Unix socket, run by an unprivileged user."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

DEADLINE = 60.0
READY = b"database system is ready to accept"
SETTINGS = ("listen_addresses=", "fsync=off", "full_page_writes=off", "max_connections=50", "autovacuum=off")


class Server:
    """A server that runs from ``start`` to ``stop``; ``remove`` deletes its folder."""

    def __init__(self, folder: Path, primary: "Server | None" = None) -> None:
        """Create the files of a server: empty ones, or a copy of those of ``primary``, which it follows."""
        self._programs = folder
        self.home = Path(tempfile.mkdtemp(prefix="koala-pg-", dir="/tmp"))
        self._user = self._unprivileged()
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
        command = [*self._as_user(), str(self._programs / program), *arguments]
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

    @staticmethod
    def _unprivileged() -> str:
        """Return the user to run as, since PostgreSQL rejects root; empty if this process is not root's."""
        if os.getuid() != 0:
            return ""
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in names else "nobody"

    def _as_user(self) -> list[str]:
        if not self._user:
            return []
        user = pwd.getpwnam(self._user)
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--pdeathsig=INT"]

    def start(self) -> None:
        settings = [part for setting in SETTINGS for part in ("-c", setting)]
        command = [str(self._programs / "postgres"), "-D", self._data, "-k", str(self.home), *settings]
        self._process = subprocess.Popen(
            [*self._as_user(), *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self.home
        )
        log = self._process.stderr
        assert log is not None
        lines: list[bytes] = []
        for line in log:
            lines.append(line)
            if READY in line:
                threading.Thread(target=log.read, name="postgresql log", daemon=True).start()
                return
        pytest.fail(b"".join(lines).decode(errors="replace"))

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop the server at once, as if it had crashed."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(DEADLINE)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.home)

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"koala{self._databases}"
        self.execute(f"create database {name}")
        return f"postgresql://koala@/{name}?host={self.home}"
