"""Answers of many releases are read alike; whatever else comes in is one clear error."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agents.lrm.port import LrmJob, LrmJobState
from koalapy.agents.lrm.slurm.adapter import snapshot_of
from koalapy.agents.lrm.slurm.answers import SlurmJob, read_columns, read_jobs, read_nodes
from koalapy.agents.lrm.slurm.offer import Offer, Partition
from koalapy.agents.lrm.slurm.states import job_state
from koalapy.model.errors import SiteUnavailable

from .conftest import ANSWERS

OTHERS = ["21.08", "23.02", "23.11", "24.11"]


def answer(name: str) -> bytes:
    return (ANSWERS / f"{name}.json").read_bytes()


def words(*found: str) -> frozenset[str]:
    return frozenset(found)


def test_the_recorded_queue_of_22_05() -> None:
    assert read_jobs(answer("squeue-22.05"), "koala-") == [
        SlurmJob("166", "koala-x-1.1.0", 1500, words("FAILED"), ("n1", "n2"), 7, 0, "NonZeroExitCode", 2),
        SlurmJob("167", "koala-x-2.1.0", 1500, words("RUNNING"), ("n1", "n2"), 0, 0, "None", 2),
        SlurmJob("168", "koala-y-3.1.0", 1501, words("RUNNING"), ("n3",), 0, 0, "None", 1),
        SlurmJob("169", "koala-x-4.1.0", 1500, words("PENDING"), (), 0, 0, "Resources", 3),
    ]


def test_the_recorded_nodes_of_22_05() -> None:
    main = {node.name: (node.words, node.reason) for node in read_nodes(answer("sinfo-22.05"), ["main"])}
    assert main == {
        "n1": (words("ALLOCATED"), ""),
        "n2": (words("ALLOCATED"), ""),
        "n3": (words("ALLOCATED"), ""),
        "n4": (words("IDLE", "DRAIN"), "disk"),
    }
    (x9,) = [node for node in read_nodes(answer("sinfo-22.05"), ["other"]) if node.name == "x9"]
    assert (x9.words, x9.reason) == (words("DOWN", "NOT_RESPONDING"), "not bought yet")


@pytest.mark.parametrize("release", OTHERS)
def test_the_queue_in_other_releases_shapes(release: str) -> None:
    assert read_jobs(answer(f"squeue-{release}"), "koala-") == [
        SlurmJob("166", "koala-x-1.1.0", 1500, words("FAILED"), ("n1", "n2"), 7, 0, "NonZeroExitCode", 2),
        SlurmJob("167", "koala-x-2.1.0", 1500, words("RUNNING"), ("n1", "n2"), 0, 0, "None", 2),
        SlurmJob("168", "koala-y-3.1.0", 1501, words("RUNNING"), ("n3",), 0, 0, "None", 2),
        SlurmJob("169", "koala-x-4.1.0", 1500, words("PENDING"), (), 0, 0, "Resources", 2),
        SlurmJob("170", "koala-x-5.1.0", 1500, words("CANCELLED"), ("n1",), 0, 15, "None", 2),
    ]


@pytest.mark.parametrize("release", OTHERS)
def test_nodes_in_other_releases_shapes(release: str) -> None:
    nodes = {node.name: (node.words, node.reason) for node in read_nodes(answer(f"sinfo-{release}"), ["main"])}
    drained = "DRAINING" if release == "21.08" else "DRAIN"
    assert nodes == {
        "n1": (words("ALLOCATED"), ""),
        "n2": (words("ALLOCATED"), ""),
        "n3": (words("MIXED"), ""),
        "n4": (words("IDLE", drained), "disk"),
        "n5": (words("IDLE"), ""),
    }
    assert {node.name for node in read_nodes(answer(f"sinfo-{release}"), ["other"])} == {"n1", "n2", "x9"}


def test_nodes_only_named_in_the_jobs_resources() -> None:
    document = json.loads(answer("squeue-24.11"))
    for job in document["jobs"]:
        del job["nodes"]
    read = read_jobs(json.dumps(document).encode(), "koala-")
    assert [job.nodes for job in read] == [("n1", "n2"), ("n1", "n2"), ("n3",), (), ("n1",)]


def test_jobs_of_others_cannot_spoil_the_answer() -> None:
    document = json.loads(answer("squeue-22.05"))
    document["jobs"] += [{"name": "theirs", "job_id": "?", "job_state": 3}]
    assert read_jobs(json.dumps(document).encode(), "koala-") == read_jobs(answer("squeue-22.05"), "koala-")


@pytest.mark.parametrize("odd", [b"sim\xfc", b"sim\x01", b"sim\xed\xa0\x80"])
def test_names_and_reasons_may_be_any_bytes(odd: bytes) -> None:
    """One job of a stranger's had been the end of every look at the cluster."""
    queue = json.loads(answer("squeue-22.05"))
    queue["jobs"] += [{**queue["jobs"][0], "job_id": 999, "name": "ODD"}]
    told = json.dumps(queue).encode().replace(b"ODD", odd)
    assert read_jobs(told, "koala-") == read_jobs(answer("squeue-22.05"), "koala-")
    nodes = read_nodes(answer("sinfo-22.05").replace(b'"disk"', b'"disk: ' + odd + b'"'), ["main"])
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes[3].reason.startswith("disk: sim")


@pytest.mark.parametrize("reason", ["Lüfter", "L\udcfcfter", "a\x0bb", "\u2028", "ü" * 48])
def test_a_reason_of_any_bytes_leaves_the_columns_where_they_are(reason: str) -> None:
    told = reason.encode(errors="surrogateescape")
    line = f"{'166':24}{'RUNNING':32}{'0':16}{'2':16}{'n[1-2]':8192}{'1500':16}".encode()
    line += told.ljust(96) + b"koala-x-1.1.0".ljust(256)
    (job,) = read_columns(line + b"\n", "koala-", {1500})
    assert (job.id, job.nodes, job.user, job.wants) == ("166", ("n1", "n2"), 1500, 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"", "squeue answered what is no JSON: nothing"),
        (b"slurm_load_jobs error:\n Unable", "squeue answered what is no JSON: slurm_load_jobs error: Unable"),
        (answer("squeue-22.05")[:2000], 'squeue answered what is no JSON: { "meta"'),
        (b"\xff\xfe", "squeue answered what is no JSON"),
        (b"[" * 100_000, "squeue answered what is no JSON"),
        (b"[]", "squeue answered what cannot be understood: it is no object"),
        (b'{"jobs": {}}', "squeue answered what cannot be understood: it has no list of jobs"),
        (b'{"jobs": [3]}', "squeue answered what cannot be understood: it has no list of jobs"),
        (b'{"jobs": [{"job_id": 3}]}', "squeue answered what cannot be understood: a job without number or name"),
        (
            b'{"jobs": [], "errors": [{"description": "Failed while looking for jobs", "error": "Socket timed out"}]}',
            "squeue: Failed while looking for jobs: Socket timed out",
        ),
    ],
)
def test_nonsense_is_one_clear_line(given: bytes, told: str) -> None:
    with pytest.raises(SiteUnavailable) as caught:
        read_jobs(given, "koala-")
    assert caught.value.message.startswith(told)
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
PLAIN = st.integers(0, 70_000)
NUMBER = st.one_of(PLAIN, st.builds(lambda n: {"set": True, "infinite": False, "number": n}, PLAIN), st.none())
Shape = st.SearchStrategy[Any]


def some(item: Shape, least: int = 0) -> Shape:
    return st.lists(item, min_size=least, max_size=3)


def answers(maybe: Callable[[Shape], Shape]) -> tuple[Shape, Shape]:
    """Of squeue and sinfo in the shapes of all releases mixed; ``maybe`` is what may be put in place of any part."""
    state = maybe(st.one_of(STATES, some(STATES, 1)))
    code = st.one_of(NUMBER, st.fixed_dictionaries({"return_code": maybe(NUMBER), "signal": maybe(NUMBER)}))
    resources = st.fixed_dictionaries({"nodes": maybe(st.one_of(HOSTS, st.builds(lambda text: {"list": text}, HOSTS)))})
    job = st.fixed_dictionaries(
        {
            "job_id": maybe(st.integers(1, 9)),
            "name": maybe(st.sampled_from(["koala-a", "koala-b", "other"])),
            "user_id": maybe(st.just(1500)),
            "job_state": state,
        },
        optional={"nodes": maybe(HOSTS), "job_resources": maybe(resources), "exit_code": maybe(code)},
    )
    node = st.fixed_dictionaries(
        {"name": maybe(NAMES), "state": state, "partitions": maybe(some(st.sampled_from(["main", "other"])))},
        optional={"state_flags": maybe(some(STATES)), "reason": maybe(st.just("disk"))},
    )
    group = st.fixed_dictionaries(
        {
            "node": maybe(st.fixed_dictionaries({"state": state})),
            "nodes": maybe(st.fixed_dictionaries({"nodes": maybe(some(NAMES))})),
            "partition": maybe(st.sampled_from([{"name": "main"}, {"name": "other"}, "main*"])),
        },
        optional={"reason": maybe(st.just({"description": "disk"}))},
    )
    errors = {"errors": maybe(st.just([]))}
    squeue = st.fixed_dictionaries({"jobs": maybe(some(job))}, optional=errors)
    by_node = st.fixed_dictionaries({"nodes": maybe(some(node))}, optional=errors)
    by_group = st.fixed_dictionaries({"sinfo": maybe(some(group))}, optional=errors)
    return maybe(squeue), maybe(st.one_of(by_node, by_group))


def add_up(squeue: Any, sinfo: Any) -> None:
    jobs = read_jobs(json.dumps(squeue).encode(), "koala-")
    nodes = read_nodes(json.dumps(sinfo).encode(), ["main"])
    ours = [LrmJob(job.id, job.name, job_state(job.words), job.nodes) for job in jobs]
    seen = snapshot_of(nodes, ours, Offer((Partition("main"),)))
    holders = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
    names = {node.name for node in nodes}
    held = {node for job in ours if job.state in holders for node in job.nodes} & names
    assert seen.total == len(names) == seen.idle + seen.background + seen.down + len(held)


@given(*answers(lambda good: good))
def test_any_mix_of_known_shapes_is_read_and_adds_up(squeue: Any, sinfo: Any) -> None:
    add_up(squeue, sinfo)


@given(*answers(lambda good: st.one_of(*[good] * 7, ODD)))
def test_with_odd_parts_it_adds_up_or_is_one_clear_error(squeue: Any, sinfo: Any) -> None:
    problem = ""
    try:
        add_up(squeue, sinfo)
    except SiteUnavailable as error:
        problem = error.message or "\n"
    assert "\n" not in problem
