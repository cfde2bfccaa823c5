"""The door that a node opens for the others of its gang, at which anybody may knock."""

import socket

import pytest

from koalapy.runtime import doors
from koalapy.runtime.link import Loop


def test_who_stays_at_the_door_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "GUESTS", 3)
    loop = Loop()
    door = doors.Door(loop, "node-1", "127.0.0.1", None)
    guests = []
    try:
        for _ in range(8):
            guests.append(socket.create_connection(("127.0.0.1", door.port), timeout=30))
            loop.turn()
            assert guests[-1].recv(100).decode() == f"{door.word} 127.0.0.1\n"
        assert [guest.recv(100) for guest in guests[:5]] == [b""] * 5, "the oldest had to leave"
    finally:
        for guest in guests:
            guest.close()
        door.close()
