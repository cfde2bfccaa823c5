"""Listeners of a runner that cannot accept connections."""

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.runner.connections import ACCEPT_PAUSE_S, Loop
from koalapy.runner.folders import short_socket_path
from koalapy.runner.preflight import ProbeListener
from koalapy.runner.steps import SOCKET, Calls


def listen_for_probes(loop: Loop, _folder: Path) -> tuple[ProbeListener, socket.socket]:
    listener = ProbeListener(loop, "n1", "127.0.0.1", None)
    return listener, socket.create_connection(("127.0.0.1", listener.port))


def listen_for_calls(loop: Loop, folder: Path) -> tuple[Calls, socket.socket]:
    calls, client = Calls(loop, str(folder), lambda *_: None), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_socket_path(folder / SOCKET) as path:
        client.connect(path)
    return calls, client


@pytest.mark.parametrize("listen", [listen_for_probes, listen_for_calls])
def test_listener_without_free_files_pauses_between_two_tries(
    tmp_path: Path, listen: Callable[[Loop, Path], tuple[Any, socket.socket]]
) -> None:
    loop, now, tries = Loop(), [0.0], list[float]()
    loop.time = lambda: now[0]  # type: ignore[method-assign]
    listener, client = listen(loop, tmp_path)
    real = listener._listener

    def accept() -> None:
        tries.append(now[0])
        raise OSError(errno.EMFILE, "Too many open files")

    def turn() -> None:
        loop.set_alarm("end", 0.0, lambda: None)  # else a turn waits for the next event
        loop.turn()

    listener._listener = SimpleNamespace(accept=accept, fileno=real.fileno, close=real.close)
    for _ in range(3):
        turn()
    assert tries == [0.0]
    now[0] = ACCEPT_PAUSE_S
    turn()
    turn()
    assert tries == [0.0, ACCEPT_PAUSE_S]
    listener.close()
    now[0] *= 2
    turn()
    client.close()
    loop.close()
