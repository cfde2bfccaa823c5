"""Lines between a runner and its agent: each is accepted once, in order, and only unchanged."""

import pytest

from koalapy.runner.session import TAG_LENGTH, Line, Session


def make_sessions() -> tuple[Session, Session]:
    """Return the two sides of a connection."""
    names = b"secret", "7.1.0", 0, ("a" * 32, "b" * 32)
    return Session(*names, is_agent=False), Session(*names, is_agent=True)


def test_line_arrives_unchanged() -> None:
    runner, agent = make_sessions()
    for text in (b"first", b"second"):
        assert agent.open(runner.seal(Line(text)).rstrip(b"\n")) == text
        assert runner.open(agent.seal(Line(text)).rstrip(b"\n")) == text


@pytest.mark.parametrize("position", [*range(TAG_LENGTH), TAG_LENGTH, -1])
def test_line_with_a_changed_byte_is_rejected(position: int) -> None:
    runner, agent = make_sessions()
    sealed = bytearray(runner.seal(Line(b"content")).rstrip(b"\n"))
    sealed[position] ^= 1
    with pytest.raises(ValueError, match="its tag is wrong"):
        agent.open(bytes(sealed))


def test_repeated_and_returned_lines_are_rejected() -> None:
    runner, agent = make_sessions()
    sealed = runner.seal(Line(b"content")).rstrip(b"\n")
    assert agent.open(sealed) == b"content"
    with pytest.raises(ValueError, match="its tag is wrong"):
        agent.open(sealed)
    with pytest.raises(ValueError, match="its tag is wrong"):
        runner.open(sealed)
