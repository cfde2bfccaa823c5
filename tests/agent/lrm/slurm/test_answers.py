"""Answers of many releases of Slurm, and invalid answers."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.port import LrmJob, LrmJobState
from koalapy.agent.lrm.slurm.adapter import make_snapshot
from koalapy.agent.lrm.slurm.answers import SlurmJob, read_columns, read_nodes, read_uid
from koalapy.agent.lrm.slurm.offer import Offer, Partition
from koalapy.agent.lrm.slurm.states import job_state
from koalapy.model.errors import SiteUnavailable

from .conftest import ANSWERS, column_line, recorded_queue

OTHERS = ["21.08", "23.02", "23.11", "24.11"]


def read_answer(name: str) -> bytes:
    return (ANSWERS / f"{name}.json").read_bytes()


def make_flags(*parts: str) -> frozenset[str]:
    return frozenset(parts)


@pytest.mark.parametrize("status", ["1792", "7:0"])
def test_read_columns_of_recorded_queue(status: str) -> None:
    ended = read_columns(recorded_queue({166}, status=status).encode(), "koala-", {1500, 1501})[0]
    assert ended == [
        SlurmJob("166", "koala-x-1.1.0", 1500, make_flags("FAILED"), ("n1", "n2"), 7, 0, "NonZeroExitCode", 2)
    ]
    assert read_columns(recorded_queue({167, 168, 169}).encode(), "koala-", {1500, 1501})[0] == [
        SlurmJob("167", "koala-x-2.1.0", 1500, make_flags("RUNNING"), ("n1", "n2"), 0, 0, "None", 2),
        SlurmJob("168", "koala-y-3.1.0", 1501, make_flags("RUNNING"), ("n3",), 0, 0, "None", 1),
        SlurmJob("169", "koala-x-4.1.0", 1500, make_flags("PENDING"), (), 0, 0, "Resources", 3),
    ]


@given(st.integers(0, (1 << 32) - 1))
def test_read_uid_of_signed_number_is_unsigned(uid: int) -> None:
    signed = uid - (1 << 32) if uid >= 1 << 31 else uid
    assert read_uid(str(uid)) == read_uid(f"  {signed} ") == uid


def test_read_nodes_of_release_22_05() -> None:
    main = {node.name: (node.words, node.reason) for node in read_nodes(read_answer("sinfo-22.05"), ["main"])}
    assert main == {
        "n1": (make_flags("ALLOCATED"), ""),
        "n2": (make_flags("ALLOCATED"), ""),
        "n3": (make_flags("ALLOCATED"), ""),
        "n4": (make_flags("IDLE", "DRAIN"), "disk"),
    }
    (x9,) = [node for node in read_nodes(read_answer("sinfo-22.05"), ["other"]) if node.name == "x9"]
    assert (x9.words, x9.reason) == (make_flags("DOWN", "NOT_RESPONDING"), "not bought yet")


@pytest.mark.parametrize("release", OTHERS)
def test_read_nodes_of_other_releases(release: str) -> None:
    nodes = {node.name: (node.words, node.reason) for node in read_nodes(read_answer(f"sinfo-{release}"), ["main"])}
    drained = "DRAINING" if release == "21.08" else "DRAIN"
    assert nodes == {
        "n1": (make_flags("ALLOCATED"), ""),
        "n2": (make_flags("ALLOCATED"), ""),
        "n3": (make_flags("MIXED"), ""),
        "n4": (make_flags("IDLE", drained), "disk"),
        "n5": (make_flags("IDLE"), ""),
    }
    assert {node.name for node in read_nodes(read_answer(f"sinfo-{release}"), ["other"])} == {"n1", "n2", "x9"}


@pytest.mark.parametrize("odd", [b"sim\xfc", b"sim\x01", b"sim\xed\xa0\x80"])
def test_read_nodes_with_reason_of_any_bytes(odd: bytes) -> None:
    nodes = read_nodes(read_answer("sinfo-22.05").replace(b'"disk"', b'"disk: ' + odd + b'"'), ["main"])
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes[3].reason.startswith("disk: sim")


@pytest.mark.parametrize("odd", [{}, {"name": 3, "partitions": ["other"]}, {"partitions": [None, {}]}])
def test_read_nodes_skips_invalid_entry_of_other_partition(odd: dict[str, Any]) -> None:
    document = json.loads(read_answer("sinfo-22.05"))
    document["nodes"].append(odd)
    assert read_nodes(json.dumps(document).encode(), ["main"]) == read_nodes(read_answer("sinfo-22.05"), ["main"])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"", "sinfo answered no JSON: nothing"),
        (b"slurm_load_node error:\n Unable", "sinfo answered no JSON: slurm_load_node error: Unable"),
        (read_answer("sinfo-22.05")[:2000], 'sinfo answered no JSON: { "meta"'),
        (b"\xff\xfe", "sinfo answered no JSON"),
        (b"[" * 100_000, "sinfo answered no JSON"),
        (b"[]", "the answer of sinfo cannot be read: it is not an object"),
        (b'{"nodes": {}}', "the answer of sinfo cannot be read: it has no list of nodes"),
        (b'{"nodes": [3]}', "the answer of sinfo cannot be read: it has no list of nodes"),
        (b'{"nodes": [{"partitions": ["main"]}]}', "the answer of sinfo cannot be read: a node without name"),
        (
            b'{"nodes": [], "errors": [{"description": "Failed while looking", "error": "Socket timed out"}]}',
            "sinfo: Failed while looking: Socket timed out",
        ),
    ],
)
def test_read_nodes_of_invalid_answer_is_unavailable(output: bytes, expected: str) -> None:
    with pytest.raises(SiteUnavailable) as caught:
        read_nodes(output, ["main"])
    assert caught.value.message.startswith(expected)
    assert "\n" not in caught.value.message


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 33),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.text(max_size=4), max_size=2),
    st.just({}),
    st.just({"set": True, "infinite": False}),
    st.just({"set": 1, "number": "1"}),
    st.sampled_from(["n[", "n[3-1]", "a b", "n[1-99999999]"]),
)
STATES = st.sampled_from(
    ["IDLE", "idle", "MIXED", "DOWN", "DRAIN", "COMPLETING", "mystery", "RUNNING", "PENDING", "FAILED", "NODE_FAIL"]
)
HOSTS = st.sampled_from(["", "n1", "n[1-3]", "n[01-02],m1", "(null)"])
NAMES = st.sampled_from(["n1", "n[2-3]", "m1"])
Shape = st.SearchStrategy[Any]
JOBS = st.lists(
    st.builds(
        column_line,
        name=st.sampled_from(["koala-a", "koala-b", "other", "x\nkoala-a"]),
        id=st.integers(1, 9).map(str),
        nodes=HOSTS,
        state=STATES,
        status=st.sampled_from(["0", "1792", "9", "7:0", "0:9"]),
        user=st.sampled_from(["1500", "1999"]),
    ),
    max_size=3,
)


def repeat_shape(item: Shape, minimum: int = 0) -> Shape:
    return st.lists(item, min_size=minimum, max_size=3)


def nodes_answers(maybe: Callable[[Shape], Shape]) -> Shape:
    """Return answers of sinfo in the shapes of all releases; ``maybe`` may replace any part."""
    state = maybe(st.one_of(STATES, repeat_shape(STATES, 1)))
    node = st.fixed_dictionaries(
        {"name": maybe(NAMES), "state": state, "partitions": maybe(repeat_shape(st.sampled_from(["main", "other"])))},
        optional={"state_flags": maybe(repeat_shape(STATES)), "reason": maybe(st.just("disk"))},
    )
    group = st.fixed_dictionaries(
        {
            "node": maybe(st.fixed_dictionaries({"state": state})),
            "nodes": maybe(st.fixed_dictionaries({"nodes": maybe(repeat_shape(NAMES))})),
            "partition": maybe(st.sampled_from([{"name": "main"}, {"name": "other"}, "main*"])),
        },
        optional={"reason": maybe(st.just({"description": "disk"}))},
    )
    errors = {"errors": maybe(st.just([]))}
    by_node = st.fixed_dictionaries({"nodes": maybe(repeat_shape(node))}, optional=errors)
    by_group = st.fixed_dictionaries({"sinfo": maybe(repeat_shape(group))}, optional=errors)
    return maybe(st.one_of(by_node, by_group))


def add_up(lines: list[str], sinfo: Any) -> None:
    jobs = read_columns("".join(lines).encode(), "koala-", {1500})[0]
    nodes = read_nodes(json.dumps(sinfo).encode(), ["main"])
    grid_jobs = [LrmJob(job.id, job.name, job_state(job.words), job.nodes) for job in jobs]
    snapshot = make_snapshot(nodes, grid_jobs, Offer((Partition("main"),)))
    holders = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
    names = {node.name for node in nodes}
    held_nodes = {node for job in grid_jobs if job.state in holders for node in job.nodes} & names
    assert (
        snapshot.total
        == len(names)
        == snapshot.idle + snapshot.withheld + snapshot.background + snapshot.down + len(held_nodes)
    )


@given(JOBS, nodes_answers(lambda good: st.one_of(*[good] * 7, ODD)))
def test_read_nodes_of_any_answer_adds_up_or_fails(lines: list[str], sinfo: Any) -> None:
    problem = ""
    try:
        add_up(lines, sinfo)
    except SiteUnavailable as error:
        problem = error.message or "\n"
    assert "\n" not in problem
