"""Output pieces and their acknowledgements."""

import pytest
from pydantic import ValidationError

from koalapy.protocol.messages import Output, OutputAck


def test_output_acknowledgement_accepts_end_of_any_piece() -> None:
    largest = 64 * 1024 * 1024
    piece = Output(token="1.0.0.1", offset=2**52, data="")
    assert OutputAck(token=piece.token, offset=piece.offset + largest).offset == 2**52 + largest
    with pytest.raises(ValidationError, match="offset"):
        Output(token="1.0.0.1", offset=2**53 - 3, data="")
