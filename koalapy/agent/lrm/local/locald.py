"""locald: the resource manager of one embedded cluster, a process of its own that outlives those who talk to it.

``python -I -S locald.py --dir DIR --cluster NAME --nodes N --network 127.0.1`` takes the directory's lock, ends what an
earlier locald left behind, detaches itself and returns when it answers. Exit codes: 0 answers, 2 cannot run as asked,
3 another one holds the directory. Nodes are ``NAME-1`` to ``NAME-N`` at ``127.0.1.1`` and so on.

Its parent is a keeper process: when locald is killed, the keeper ends every process that locald and its runners leave,
and holds the directory's lock until none is left.
"""

import argparse
import fcntl
import gc
import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # -I leaves out the directory of our own package
    sys.path.append(str(Path(__file__).resolve().parents[4]))

from koalapy.agent.lrm.local.jobs import JobTable, LocalNode
from koalapy.agent.lrm.local.journal import Journal
from koalapy.agent.lrm.local.processes import MARK, adopt_orphans, end_children, kill_marked
from koalapy.agent.lrm.local.runs import Deadlines, Runs
from koalapy.agent.lrm.local.server import Server
from koalapy.agent.lrm.local.spawn import Preloaded, PreloadError, Spawner
from koalapy.runner.atomic_files import replace_file
from koalapy.system.hardening import forbid_dumps

CANNOT_RUN = 2
HELD_BY_ANOTHER = 3
RUNNERS_TIMEOUT = 3.0
"""Seconds that runners of an earlier locald have to end their programs and themselves before they are killed."""
PUBLISH_INTERVAL = 2.0
"""Seconds between two looks whether the file is there that says where locald listens."""
MAX_NODES = 254
"""Addresses of the last octet."""
_MAX_SOCKET_PATH = 107


def main() -> int:
    options = _parse()
    directory = options.dir.resolve()
    mark_ending = f"@{directory}"
    if os.environ.get(MARK) != mark_ending:  # so that processes forked without exec carry the mark too
        _start_again(mark_ending)
    forbid_dumps()
    os.umask(0o077)
    directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory / "locald.pid")
    if lock is None:
        return HELD_BY_ANOTHER
    try:
        kill_marked(str(directory), within=5, patience=RUNNERS_TIMEOUT)
        return _serve(options, directory, mark_ending, lock)
    except (PreloadError, OSError) as error:
        print(f"locald: {error}", file=sys.stderr)
        return CANNOT_RUN


def _serve(options: argparse.Namespace, directory: Path, mark_ending: str, lock: int) -> int:
    deadlines = Deadlines()
    journal = Journal(directory / "locald.jobs")
    jobs = JobTable(_nodes(options), journal.load())
    journal.rewrite(jobs.remembered())
    listener, path = _listen(directory)
    facts = {"cluster": options.cluster, "nodes": options.nodes, "network": options.network, "keeps_key": True}
    server = Server(jobs, deadlines, journal, listener, facts=facts, linger=options.linger)

    def release() -> None:
        server.release()
        os.close(lock)

    spawner = Spawner(Preloaded(options.preload) if options.preload else None, release)
    base_env = {key: value for key, value in os.environ.items() if not key.startswith("LOCALD_")}
    runs = Runs(jobs, spawner, deadlines, mark_ending=mark_ending, base_env=base_env)
    runs.kill_grace = options.kill_grace
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        number = os.read(reading, 16)
        if not number:
            raise OSError(f"it ended while it started; see {directory / 'locald.log'}")
        _publish(directory, lock, {"socket": path, "pid": int(number)})
        return 0
    _detach(directory / "locald.log")
    adopt_orphans()
    if pid := os.fork():
        listener.close()
        journal.close()
        os.write(writing, str(pid).encode())
        os.close(writing)
        return _keep(pid)
    os.close(reading)
    os.close(writing)
    adopt_orphans()  # a fork does not inherit that

    def publish_again() -> None:
        with suppress(OSError):
            if not (directory / "locald.json").exists():
                _publish(directory, lock, {"socket": path, "pid": os.getpid()})
        deadlines.set("publish", PUBLISH_INTERVAL, publish_again)

    deadlines.set("publish", PUBLISH_INTERVAL, publish_again)
    gc.freeze()
    try:
        server.run(runs)
    finally:
        end_children()
        for leftover in (directory / "locald.json", Path(path)):
            leftover.unlink(missing_ok=True)
        if Path(path).parent != directory:
            Path(path).parent.rmdir()
        server.release()  # last, as clients take the end of their connections for the end of everything
    return 0


def _keep(locald: int) -> int:
    """Wait for the end of locald, then end the processes that it left. The lock is held until this process ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.waitpid(locald, 0)
    end_children(patience=RUNNERS_TIMEOUT)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="locald", description="The resource manager of one embedded cluster.")
    parser.add_argument("--dir", type=Path, required=True, help="where its socket, lock and log are")
    parser.add_argument("--cluster", required=True, help="name of the cluster")
    parser.add_argument("--nodes", type=int, required=True, help=f"number of nodes, at most {MAX_NODES}")
    parser.add_argument("--network", required=True, help="first three octets of the nodes' addresses: 127.0.1")
    parser.add_argument("--preload", help="Python file whose main(args) is run without starting an interpreter")
    parser.add_argument("--linger", type=float, default=30.0, help="seconds without clients and jobs before it ends")
    parser.add_argument("--kill-grace", type=float, default=1.0, help="seconds between SIGTERM and SIGKILL")
    options = parser.parse_args()
    if not 1 <= options.nodes <= MAX_NODES:
        parser.error(f"--nodes: 1 to {MAX_NODES}, not {options.nodes}")
    if not re.fullmatch(r"127(\.(25[0-5]|2[0-4]\d|1?\d?\d)){2}", options.network):
        parser.error(f"--network: three octets, the first of them 127, not {options.network!r}")
    return options


def _start_again(mark_ending: str) -> None:
    flags = ["-I", "-S"] if sys.flags.isolated else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCALD_")}
    command = [sys.executable, *flags, os.path.abspath(__file__), *sys.argv[1:]]
    os.execve(sys.executable, command, {**environment, MARK: mark_ending})


def _nodes(options: argparse.Namespace) -> list[LocalNode]:
    return [LocalNode(f"{options.cluster}-{k}", f"{options.network}.{k}") for k in range(1, options.nodes + 1)]


def _lock(path: Path) -> int | None:
    """The locked file, held as long as it stays open; None when another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def _listen(directory: Path) -> tuple[socket.socket, str]:
    path = str(directory / "locald.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        path = os.path.join(tempfile.mkdtemp(prefix="locald-"), "locald.sock")
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener, path


def _publish(directory: Path, lock: int, facts: dict[str, object]) -> None:
    os.ftruncate(lock, 0)
    os.write(lock, f"{facts['pid']}\n".encode())
    replace_file(directory / "locald.json", json.dumps(facts).encode())


def _detach(log: Path) -> None:
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for target, source in ((0, nothing), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(sink)


if __name__ == "__main__":
    sys.exit(main())
