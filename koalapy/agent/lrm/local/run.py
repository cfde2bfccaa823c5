"""Runs a command on an embedded cluster as one of its local users would: past the scheduler. Light to import."""

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from koalapy.agent.lrm.local.cluster import LocalCluster, LocalConnection

_POLL_INTERVAL = 0.1
"""Seconds between two looks at the output file."""
_INTERRUPTED = 130


class _Interrupted(BaseException):
    """SIGINT or SIGTERM has arrived."""


def local_run(
    cluster: LocalCluster, nodes: int, argv: Sequence[str], user: str, env: Mapping[str, str], cwd: Path
) -> int:
    """Run ``argv`` on each of so many nodes, its output on stdout; returns its exit code, 130 when interrupted.

    Nothing of it runs on when this process ends. Raises ``SiteError``.
    """
    with cluster.reach() as connection:
        folder = cluster.directory.resolve() / "local-run"
        folder.mkdir(exist_ok=True)
        output = folder / f"{os.getpid()}.out"
        output.write_bytes(b"")
        name = f"{Path(argv[0]).name}-{os.getpid()}"
        try:
            with output.open("rb") as shown, _interruptible():
                job = connection.request(
                    "submit",
                    name=name,
                    user=user,
                    nodes=nodes,
                    argv=list(argv),
                    env=dict(env),
                    cwd=str(cwd),
                    output=str(output),
                    attached=True,
                )["job"]
                return _exit_code(_follow(cluster, connection, job, name, shown))
        except _Interrupted:  # before there was an answer, or again while the job is cancelled
            return _INTERRUPTED
        finally:
            output.unlink(missing_ok=True)


def _follow(cluster: LocalCluster, connection: LocalConnection, job: str, name: str, shown: BinaryIO) -> dict[str, Any]:
    connection.send("wait", job=job)
    interrupted = False
    while True:
        try:
            while not select.select([connection], [], [], _POLL_INTERVAL)[0]:
                _show(shown)
            record = connection.receive()
            _show(shown)
            return {**record, "interrupted": interrupted}
        except _Interrupted:
            interrupted = True
            with LocalConnection(cluster.socket_path()) as second:
                second.request("cancel", job=job, name=name)


def _show(shown: BinaryIO) -> None:
    shutil.copyfileobj(shown, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _exit_code(record: dict[str, Any]) -> int:
    if record["interrupted"]:
        return _INTERRUPTED
    if record.get("lost"):
        print(f"lost: {record['reason']}", file=sys.stderr)
    code = record.get("exit_code")
    return 1 if code is None else int(code)


@contextmanager
def _interruptible() -> Iterator[None]:
    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
