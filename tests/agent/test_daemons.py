"""What an agent remembers of daemons."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.core.daemons import MAX_KNOWN_DAEMONS, Daemons
from koalapy.protocol.messages import Hello, KnownDaemon, from_agent


def told(directory: Path) -> list[tuple[str, int, str, int]]:
    """What an agent that is started now would tell."""
    return [(known.instance, known.epoch, known.life, known.job) for known in Daemons(directory).known()]


def test_the_next_agent_knows_the_same(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    assert daemons.known() == []
    daemons.heard_of("one", 3)  # which was never served
    assert daemons.serve("one", 4, "a")
    daemons.heard_of("one", 9)
    daemons.heard_of("one", 7)
    assert told(tmp_path) == [("one", 4, "a", 9)]
    again = Daemons(tmp_path)
    assert not again.serve("one", 3, "a")
    assert not again.serve("one", 4, "b"), "it is another daemon, though it counts alike"
    assert again.serve("one", 4, "a")
    assert again.serve("one", 5, "b")
    assert again.serve("two", 1, "c")
    assert told(tmp_path) == [("one", 5, "b", 9), ("two", 1, "c", 0)]


def test_a_hello_names_those_that_were_met_last(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    for number in range(MAX_KNOWN_DAEMONS + 3):
        assert daemons.serve(f"d{number}", 1, "a")
    assert daemons.serve("d0", 1, "a")
    names = [known.instance for known in daemons.known()]
    assert len(names) == MAX_KNOWN_DAEMONS
    assert names[-2:] == [f"d{MAX_KNOWN_DAEMONS + 2}", "d0"]


def test_what_could_not_be_noted_is_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = Daemons(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert daemons.serve("one", 4, "a"), "it is obeyed: jobs do not wait for that"
    assert told(tmp_path) == []
    assert daemons.serve("one", 4, "a")
    assert told(tmp_path) == [("one", 4, "a", 0)]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_torn_notes_harm_nobody(tmp_path_factory: pytest.TempPathFactory, epoch: bytes, job: bytes) -> None:
    directory = tmp_path_factory.mktemp("notes")
    assert Daemons(directory).serve("one", 4, "a")
    (directory / "one" / "daemon").write_bytes(epoch)
    (directory / "one" / "job").write_bytes(job)
    known = Daemons(directory).known()
    hello = Hello(cluster="north", version="1", lrm="local", host="a", pid=1, known=known)
    assert from_agent.validate_json(from_agent.dump_json([hello])) == [hello]
    assert all(isinstance(each, KnownDaemon) for each in known)
