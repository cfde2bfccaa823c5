"""Pieces of output."""

import pytest
from pydantic import ValidationError

from koalapy.protocol.messages import Output, OutputAck


def test_wherever_a_piece_may_begin_its_end_can_be_acknowledged() -> None:
    largest = 64 * 1024 * 1024
    piece = Output(token="1.0.0.1", offset=2**52, data="")
    assert OutputAck(token=piece.token, offset=piece.offset + largest).offset == 2**52 + largest
    with pytest.raises(ValidationError, match="offset"):
        Output(token="1.0.0.1", offset=2**53 - 3, data="")
