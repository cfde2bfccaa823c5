"""locald: the resource manager of one embedded cluster, a process that outlives its clients.

``python -I -S locald.py --dir DIR --cluster NAME --nodes N --network 127.0.1`` locks the directory, ends the processes
of an earlier locald, detaches itself and returns when it answers. Exit codes: 0 answers, 2 cannot run as asked, 3
another one holds the directory. Nodes are ``NAME-1`` to ``NAME-N`` at ``127.0.1.1`` and so on.

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

from koalapy.agent.lrm.local.jobs import JobTable, Journal, LocalNode
from koalapy.agent.lrm.local.processes import MARK, adopt_orphans, end_children, kill_cluster, redirect_streams
from koalapy.agent.lrm.local.runs import Runs, Timers
from koalapy.agent.lrm.local.server import Server
from koalapy.agent.lrm.local.spawn import Preloaded, PreloadError, Spawner
from koalapy.runner.atomic_files import replace_file
from koalapy.system.process import forbid_dumps

CANNOT_RUN = 2
HELD_BY_ANOTHER = 3
KILL_TIMEOUT_S = 5.0
RUNNER_GRACE_S = 3.0
"""Seconds that runners of an earlier locald have to end their programs and themselves before they are killed."""
PUBLISH_INTERVAL_S = 2.0
MAX_NODES = 254
"""Addresses of the last octet."""
_MAX_SOCKET_PATH_BYTES = 107


def main() -> int:
    """Start locald; return its exit code in this process, and in the detached ones when they end."""
    options = _parse_options()
    directory = options.dir.resolve()
    mark_ending = f"@{directory}"
    if os.environ.get(MARK) != mark_ending:  # exec again, so that processes forked without exec carry the mark too
        flags = ["-I", "-S"] if sys.flags.isolated else []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCALD_")}
        command = [sys.executable, *flags, os.path.abspath(__file__), *sys.argv[1:]]
        os.execve(sys.executable, command, {**environment, MARK: mark_ending})
    forbid_dumps()
    os.umask(0o077)
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "locald.pid", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return HELD_BY_ANOTHER
    try:
        kill_cluster(str(directory), KILL_TIMEOUT_S, grace_s=RUNNER_GRACE_S)
        return _start(options, directory, mark_ending, lock)
    except (PreloadError, OSError) as error:
        print(f"locald: {error}", file=sys.stderr)
        return CANNOT_RUN


def _parse_options() -> argparse.Namespace:
    """Parse and check the command line; exit with an error if the number of nodes or the network is invalid."""
    parser = argparse.ArgumentParser(prog="locald", description="The resource manager of one embedded cluster.")
    parser.add_argument("--dir", type=Path, required=True, help="directory of its socket, lock and log")
    parser.add_argument("--cluster", required=True, help="name of the cluster")
    parser.add_argument("--nodes", type=int, required=True, help=f"number of nodes, at most {MAX_NODES}")
    parser.add_argument("--network", required=True, help="first three octets of the nodes' addresses: 127.0.1")
    parser.add_argument("--preload", help="Python file whose main(args) is run without starting an interpreter")
    parser.add_argument("--linger", type=float, default=30.0, help="seconds without clients and jobs before it ends")
    parser.add_argument("--worker-linger", type=float, default=1.0, help="seconds without a job before a worker ends")
    parser.add_argument("--kill-grace", type=float, default=1.0, help="seconds between SIGTERM and SIGKILL")
    options = parser.parse_args()
    if not 1 <= options.nodes <= MAX_NODES:
        parser.error(f"--nodes: must be 1 to {MAX_NODES}, not {options.nodes}")
    if not re.fullmatch(r"127(\.(25[0-5]|2[0-4]\d|1?\d?\d)){2}", options.network):
        parser.error(f"--network: must be three octets, the first of them 127, not {options.network!r}")
    return options


def _start(options: argparse.Namespace, directory: Path, mark_ending: str, lock: int) -> int:
    """Load everything that may fail, fork the keeper and locald, and return when locald answers. Raise ``OSError``."""
    journal = Journal(directory / "locald.jobs")
    nodes = [LocalNode(f"{options.cluster}-{k}", f"{options.network}.{k}") for k in range(1, options.nodes + 1)]
    jobs = JobTable(nodes, journal.load())
    journal.rewrite(jobs.all_jobs)
    listener, socket_path = _bind_socket(directory)
    preloaded = Preloaded(options.preload) if options.preload else None
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        number = os.read(reader, 16)
        if not number:
            raise OSError(f"it ended while it started; see {directory / 'locald.log'}")
        _publish(directory, lock, socket_path, int(number))
        return 0
    os.setsid()
    os.chdir("/")
    redirect_streams(str(directory / "locald.log"), 0o600)
    adopt_orphans()
    if pid := os.fork():
        listener.close()
        journal.close()
        os.write(writer, str(pid).encode())
        os.close(writer)
        return _run_keeper(pid)
    os.close(reader)
    os.close(writer)
    adopt_orphans()  # a fork does not inherit that
    timers = Timers()

    def release() -> None:
        server.release()
        os.close(lock)

    base_env = {key: value for key, value in os.environ.items() if not key.startswith("LOCALD_")}
    spawner = Spawner(preloaded, release)
    runs = Runs(
        jobs,
        spawner,
        timers,
        mark_ending=mark_ending,
        base_env=base_env,
        kill_grace_s=options.kill_grace,
        worker_linger_s=options.worker_linger,
    )
    settings = {"cluster": options.cluster, "nodes": options.nodes, "network": options.network}
    server = Server(jobs, runs, timers, journal, listener, settings=settings, linger_s=options.linger)

    def publish_again() -> None:
        """Write locald.json again if it was removed."""
        with suppress(OSError):
            if not (directory / "locald.json").exists():
                _publish(directory, lock, socket_path, os.getpid())
        timers.set("publish", PUBLISH_INTERVAL_S, publish_again)

    timers.set("publish", PUBLISH_INTERVAL_S, publish_again)
    gc.freeze()
    try:
        server.run()
    finally:
        end_children()
        for leftover in (directory / "locald.json", Path(socket_path)):
            leftover.unlink(missing_ok=True)
        if Path(socket_path).parent != directory:
            Path(socket_path).parent.rmdir()
        server.release()  # last: clients take the end of their connections for the end of everything
    return 0


def _run_keeper(locald: int) -> int:
    """Wait until locald ends, then end the processes that it left. This process holds the lock until it ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.waitpid(locald, 0)
    end_children(grace_s=RUNNER_GRACE_S)
    return 0


def _bind_socket(directory: Path) -> tuple[socket.socket, str]:
    """Return a listening socket and its path, which is in a temporary directory if this one's path is too long."""
    path = str(directory / "locald.sock")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        path = os.path.join(tempfile.mkdtemp(prefix="locald-"), "locald.sock")
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener, path


def _publish(directory: Path, lock: int, socket_path: str, pid: int) -> None:
    """Write the process id to locald.pid, and the socket's path to locald.json."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{pid}\n".encode(), 0)
    replace_file(directory / "locald.json", json.dumps({"socket": socket_path, "pid": pid}).encode())


if __name__ == "__main__":
    sys.exit(main())
