"""The escapes of ``koala shell``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.terminal.remote_terminal import EscapeFilter


@pytest.mark.parametrize(
    ("typed", "sent", "is_detached"),
    [
        (b"~.", b"", True),
        (b"ls\r~.rest", b"ls\r", True),
        (b"ls\n~~.", b"ls\n~.", False),
        (b"a~.", b"a~.", False),
        (b"~x~.", b"~x~.", False),
        (b"~\r~.", b"~\r", True),
        (b"~", b"", False),
        (b"", b"", False),
    ],
)
def test_escape_filter_detaches_at_line_start_only(typed: bytes, sent: bytes, is_detached: bool) -> None:
    whole, single = EscapeFilter(), EscapeFilter()
    assert whole.filter_input(typed) == sent
    assert b"".join(single.filter_input(typed[i : i + 1]) for i in range(len(typed)) if not single.is_detached) == sent
    assert whole.is_detached is single.is_detached is is_detached


@given(st.binary().filter(lambda data: b"~" not in data))
def test_escape_filter_without_tilde_passes_everything(data: bytes) -> None:
    assert EscapeFilter().filter_input(data) == data
