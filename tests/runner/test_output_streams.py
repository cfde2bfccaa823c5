"""Marks of the error stream, labels of lines, and tags of mpirun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.output_streams import LineLabels, StreamSplitter, TagReader, mark_stream, split_lines

TEXT = st.text(alphabet="ab\n\r\x0e\x0f\x10 ", max_size=12).map(str.encode)
WRITES = st.lists(st.tuples(st.booleans(), TEXT), max_size=12)


def join_streams(parts: list[tuple[bool, bytes]]) -> tuple[bytes, bytes]:
    """Return the output and the errors of parts."""
    output, errors = (b"".join(text for is_error, text in parts if is_error is wanted) for wanted in (False, True))
    return output, errors


@given(WRITES, st.data())
def test_split_of_marked_output_returns_both_streams_for_any_pieces(
    writes: list[tuple[bool, bytes]], data: st.DataObject
) -> None:
    marked = b"".join(mark_stream(text, is_error=is_error) for is_error, text in writes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(marked)), max_size=5)))
    splitter, parts = StreamSplitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(marked)], strict=True):
        parts += splitter.split(marked[start:end])
    assert join_streams(parts) == join_streams(writes)
    assert b"".join(text for _, text in parts) == b"".join(text for _, text in writes)


@given(WRITES, WRITES, st.data())
def test_lines_of_two_nodes_keep_their_streams_in_any_order(
    first: list[tuple[bool, bytes]], second: list[tuple[bool, bytes]], data: st.DataObject
) -> None:
    """Agents interleave the output of nodes by whole lines."""
    whole = [[*writes, (True, b"end\n")] for writes in (first, second)]
    queues = [split_lines(b"".join(mark_stream(text, is_error=e) for e, text in writes)) for writes in whole]
    merged = []
    while any(queues):
        merged.append(data.draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    output, errors = join_streams(StreamSplitter().split(b"".join(merged)))
    expected = [join_streams(writes) for writes in whole]
    assert sorted(output) == sorted(b"".join(streams[0] for streams in expected))
    assert sorted(errors) == sorted(b"".join(streams[1] for streams in expected))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), TEXT), max_size=15))
def test_labels_begin_each_line_and_mix_no_ranks(writes: list[tuple[int, bool, bytes]]) -> None:
    labels, shown = LineLabels(), b""
    for rank, is_error, text in writes:
        piece = labels.add(rank, text, is_error=is_error)
        assert piece.endswith(b"\n") or not piece
        shown += piece
    shown += b"".join(line for _, line in labels.take_unfinished())
    lines = split_lines(shown)
    for rank in range(3):
        label = b"%d: " % rank
        written = [join_streams([(e, text) for r, e, text in writes if r == rank])[i] for i in (0, 1)]
        expected = [line.rstrip(b"\n") for stream in written for line in split_lines(stream)]
        assert sorted(line[len(label) :].rstrip(b"\n") for line in lines if line.startswith(label)) == sorted(expected)
    assert all(line[:3] in (b"0: ", b"1: ", b"2: ") for line in lines)


def test_label_of_long_line_is_written_once() -> None:
    labels = LineLabels()
    assert labels.add(3, b"x" * 70_000, is_error=False) == b"3: " + b"x" * 70_000
    assert labels.add(3, b"y\nz\n", is_error=False) == b"y\n3: z\n"
    assert labels.add(None, b"koala: note\n", is_error=True) == b"koala: note\n"


SERIES_5 = b"mpirun says\n[prterun-a-1@1,0]<stdout>:  spaced\n[prterun-a-1@1,12]<stderr>: oops\n[x,99]<stdout>: text\n"
SERIES_4 = b"[1,0]<stdout>:par[1,12]<stderr>:oops\n[1,0]<stdout>:tial\n[1,12]<stdout>:end"


@pytest.mark.parametrize(
    ("output", "separator", "ranked"),
    [
        (
            SERIES_5,
            b" ",
            [(None, b"mpirun says\n"), (0, b" spaced\n"), (12, b"oops\n"), (None, b"[x,99]<stdout>: text\n")],
        ),
        (SERIES_4, b"", [(0, b"par"), (12, b"oops\n"), (0, b"tial\n"), (12, b"end")]),
    ],
)
@given(data=st.data())
def test_tags_of_mpirun_give_ranks_for_any_pieces(
    output: bytes, separator: bytes, ranked: list[tuple[int | None, bytes]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(output)))
    tags = TagReader(20, separator)
    assert [*tags.read(output[:cut]), *tags.read(output[cut:]), *tags.take_unfinished()] == ranked
