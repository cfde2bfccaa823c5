"""Lines between a runner and its agent; ``tests/relay/test_protocol.py`` repeats and reflects them."""

import pytest

from koalapy.runner.session import TAG_LENGTH, Line, Session


@pytest.mark.parametrize("position", [*range(TAG_LENGTH), TAG_LENGTH, -1])
def test_line_with_a_changed_byte_is_rejected(position: int) -> None:
    names = b"secret", "7.1.0", 0, ("a" * 32, "b" * 32)
    runner, agent = Session(*names, is_agent=False), Session(*names, is_agent=True)
    sealed = bytearray(runner.seal(Line(b"content")).rstrip(b"\n"))
    sealed[position] ^= 1
    with pytest.raises(ValueError, match="its tag is wrong"):
        agent.open(bytes(sealed))
