"""locald when it has no file left for one more client."""

import errno
import selectors
import socket
from pathlib import Path
from typing import cast

from koalapy.agent.lrm.local.jobs import JobTable
from koalapy.agent.lrm.local.journal import Journal
from koalapy.agent.lrm.local.runs import Deadlines
from koalapy.agent.lrm.local.server import Server


class Full(socket.socket):
    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


def test_who_cannot_be_let_in_is_not_tried_all_the_time(tmp_path: Path) -> None:
    """A client that waits at the door kept it busy with nothing else."""
    deadlines = Deadlines()
    with Full(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        jobs = cast(JobTable, type("Empty", (), {"seq": 0}))
        server = Server(jobs, deadlines, cast(Journal, None), listener, facts={}, linger=1.0)
        server._selector = selector
        server._listen()
        server._accept()
        assert listener not in selector.get_map()
        assert deadlines.timeout() is not None
        server._listen()
        assert listener in selector.get_map()
