"""Hostile messages of agents: the daemon continues, and closes the connection for out-of-range values."""

import asyncio
import json
import types
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from koalapy.agent.runners import runner_messages
from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.files.files import Found
from koalapy.model.bounds import MAX_NOTICES, MAX_NOTICES_LENGTH, MaxEntries, TruncateList
from koalapy.model.job import ComponentState
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus
from koalapy.protocol import messages as wire
from koalapy.protocol.frames import encode_frame
from tests.daemon.test_hub import DEADLINE, Daemon, connect_agent, report_nodes, running_daemon
from tests.daemon.test_trust import COUPLED, Grid, wait_for_job
from tests.fuzz.messages import FLOATS, NUMBERS, Vocabulary, is_record, read_fields

TEXTS = st.text() | st.sampled_from(
    ["", "1.1.0", "1.1.0.fa", "1.1.1.fa", "x" * 100_000, "\x00", "\ud800", "north", "south"]
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def to_plain_json(message: object) -> dict[str, Any]:
    (sent,) = json.loads(encode_frame(wire.from_agent, [message]))
    return dict(sent)


KINDS = get_args(get_args(wire.FromAgent)[0])
VOCABULARY = Vocabulary({}, TEXTS)
SHAPED = st.one_of([VOCABULARY.draw_odd(kind) for kind in KINDS])
SENSIBLE = [
    ComponentStatus(token="1.1.0.fa", state=ComponentState.CLAIMED, hosts=("n1",)),
    ComponentStatus(token="1.1.0.fa", state=ComponentState.ENDED, program_exit=3),
    StageStatus(token="1.1.0.fa", state="done", size=1, staged=1),
    ClusterReport(total=4, idle=3, background=0, down=0, holding=frozenset({"1.1.0.fa"})),
    wire.Output(token="1.1.0.fa", offset=0, data="aGk="),
    wire.Relay(token="1.1.1.fa", node=0, payload={"op": "ready"}, sender="1.1.0.fa", sender_node=0),
    wire.Ask(ident="1", what="stat", payload={}, cluster="south"),
    wire.Answer(ident="1", cluster="south"),
    wire.Ack(id=1_000_000_001),
    Inventory(components=()),
]


@st.composite
def altered_messages(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid message, and replace up to two fields by odd values of the right shape."""
    message = draw(st.sampled_from(SENSIBLE))
    fields = read_fields(type(message))
    chosen = draw(st.sets(st.sampled_from([name for name in fields if name != "type"]), max_size=2))
    return to_plain_json(message) | {name: draw(VOCABULARY.draw_odd(fields[name])) for name in chosen}


class Loop:
    """A daemon that is shared by many examples."""

    def __init__(self, path: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.daemon: Daemon = self._runner.run(self._stack.enter_async_context(running_daemon(path)))
        self.cluster_view = "", 0, ""
        """State of north when its last message had been processed."""
        self._runner.run(self._start_daemon())

    async def _start_daemon(self) -> None:
        async with self.daemon.agent_of("north") as north, self.daemon.agent_of("south") as south:
            for name, agent in (("north", north), ("south", south)):
                await connect_agent(self.daemon, name, agent)
            await Grid(self.daemon, north, south).submit_job(1, COUPLED)

    def receive_message(self, messages: list[Any]) -> str:
        """Send messages as north's agent; return the reason for the closed connection, or ""."""
        return self._runner.run(self._receive_message(json.dumps(messages)))

    async def _receive_message(self, frame: str) -> str:
        async with asyncio.timeout(DEADLINE), self.daemon.agent_of("north") as north:
            await wait_for_job(lambda: north.heard)
            north.say_to_daemon(
                Inventory(components=(ComponentStatus(token="1.1.0.fa", state=ComponentState.WAITING),))
            )
            north.says_frame(frame)
            north.say_to_daemon(wire.Ask(ident="mark", what="nothing", payload={}))
            await wait_for_job(lambda: north.closed or any(m.get("ident") == "mark" for m in north.heard))
            await self.daemon.engine.commit(WorkItem())
            self.cluster_view = self.daemon.cluster_view("north")
            return north.closed

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    loop = Loop(tmp_path_factory.mktemp("hostile") / "koala.db")
    yield loop
    loop.close()


@pytest.mark.evidence("G6")
@settings(suppress_health_check=list(HealthCheck))
@given(messages=st.lists(SHAPED | altered_messages() | ANYTHING, min_size=1, max_size=3))
def test_agent_with_any_message_never_stops_daemon(loop: Loop, messages: list[Any]) -> None:
    loop.receive_message(messages)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("total", 2**63),
        ("total", -1),
        ("idle", 2**31),
        ("down", -3),
        ("background", 10**400),
        ("holding", ["x" * 1001]),
    ],
)
def test_agent_with_count_out_of_bounds_is_disconnected(loop: Loop, field: str, value: object) -> None:
    closed = loop.receive_message([to_plain_json(report_nodes(4)) | {field: value}])
    assert closed.startswith(f"a message is invalid: 0.report.{field}")


@pytest.mark.parametrize("host", ["", "-x", "../../tmp/x", "a,b", "a b", "a;id", "a\nb", "x" * 256, "ü"])
def test_rejected_runner_address_must_be_ip_address(loop: Loop, host: str) -> None:
    """The address becomes part of file names and of command lines on the head node."""
    status = ComponentStatus(
        token="1.1.0.fa", state=ComponentState.CLAIMED, hosts=("127.0.1.1", "fe80::1%eth0", "node-1.b_c")
    )
    assert not loop.receive_message([to_plain_json(status)])
    closed = loop.receive_message([to_plain_json(status) | {"hosts": ["127.0.1.1", host]}])
    assert closed.startswith("a message is invalid: 0.status.hosts.1")


def test_agent_texts_for_users_are_truncated(loop: Loop) -> None:
    assert not loop.receive_message([to_plain_json(report_nodes(4)) | {"problem": "no " * 100_000}])
    assert loop.cluster_view[2] == ("no " * 100_000)[:2000]


def test_report_with_many_long_notices_is_truncated(loop: Loop) -> None:
    loud = {"notices": ['<n>&"' * 4000] * 1000, "lacks": [f"{n:04}" + "x" * 20_000 for n in range(1000)]}
    assert not loop.receive_message([to_plain_json(report_nodes(4)) | loud])
    cluster = loop.daemon.engine.queries.grid["north"]
    assert len(cluster.last_report.notices) <= MAX_NOTICES
    assert sum(map(len, cluster.last_report.notices)) <= MAX_NOTICES_LENGTH
    assert cluster.last_report.notices[-1].endswith("more are left out")
    assert len(cluster.status_text) < 10_000


@pytest.mark.parametrize(
    "large",
    [
        {"node_classes": [{"name": f"{n:04}" + "x" * 900, "total": 1, "idle": 1} for n in range(1000)]},
        {"calls": [{"operation": "snapshot", "last_error": "x"}] * 51},
    ],
)
def test_report_larger_than_a_page_is_disconnected(loop: Loop, large: dict[str, Any]) -> None:
    assert loop.receive_message([to_plain_json(report_nodes(4)) | large]).startswith("a message is invalid")


@pytest.mark.evidence("G6")
@pytest.mark.parametrize(
    ("frame", "errors"),
    [
        ("[" + ",".join(["{}"] * 100_000) + "]", 1),
        (f'[{{"type": "inventory", "components": [{",".join(["{}"] * 100_000)}]}}]', 2),
        (encode_frame(wire.from_agent, [wire.Confirmed(sequence=1)] * (wire.MAX_FRAME_MESSAGES + 1)), 1),
    ],
)
def test_frame_is_rejected_at_its_first_invalid_entry(frame: str, errors: int) -> None:
    with pytest.raises(ValidationError) as raised:
        wire.from_agent.validate_json(frame)
    assert raised.value.error_count() == errors


@pytest.mark.evidence("G10")
def test_texts_of_agent_are_printable_lines(loop: Loop) -> None:
    text = "down\n\x1b[2J\u202e\x00"
    disk = {"what": text, "path": text, "free": 1, "size": 2}
    odd = {"problem": text, "notices": [text], "lacks": [text], "disks": [disk], "lost_records": [text]}
    odd |= {"versions": {"lrm": text}, "calls": [{"operation": text, "last_error": text}]}
    assert not loop.receive_message([to_plain_json(report_nodes(4)) | odd])
    cluster = loop.daemon.engine.queries.grid["north"]
    (calls,), (low,) = cluster.last_report.calls, cluster.last_report.disks
    shown = (
        *cluster.last_report.notices,
        *cluster.last_report.lacks,
        *cluster.last_report.lost_records,
        cluster.last_report.problem,
        calls.operation,
    )
    assert set(shown) == {low.what} == {low.path} == {calls.last_error} == {"down  [2J  "}
    named = {"node_classes": [{"name": text, "total": 1, "idle": 1}]}
    assert loop.receive_message([to_plain_json(report_nodes(4)) | named]).startswith("a message is invalid")


@pytest.mark.evidence("G10")
@pytest.mark.parametrize("clock", [1e12, -1e12, float("nan"), float("inf")])
def test_clock_in_a_year_without_dates_is_disconnected(loop: Loop, clock: float) -> None:
    message = {"type": "confirmed", "sequence": 1, "clock": clock}
    assert loop.receive_message([message]).startswith("a message is invalid")


@given(st.lists(st.text(max_size=300), max_size=60), st.integers(1, 30), st.integers(100, 3000))
def test_truncate_list_keeps_bounds_and_is_idempotent(texts: list[str], max_length: int, characters: int) -> None:
    limit = TruncateList(max_length, characters)
    cut = limit.cut(tuple(texts))
    assert len(cut) <= max_length
    assert sum(map(len, cut)) <= characters
    assert limit.cut(cut) == cut
    if len(texts) <= max_length and sum(map(len, texts)) <= characters:
        assert cut == tuple(texts)


def is_unbounded(kind: Any) -> bool:
    """Return whether a type accepts unbounded numbers, texts or lists."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if get_origin(inside[0]) not in (list, tuple, frozenset):
            return False
        entries = [argument for argument in get_args(inside[0]) if argument is not Ellipsis]
        return not any(isinstance(mark, MaxEntries) for mark in inside[1:]) or any(map(is_unbounded, entries))
    if origin in (Union, types.UnionType):
        return any(is_unbounded(argument) for argument in inside)
    if origin is dict:
        return False  # its receiver checks the contents
    if is_record(kind):
        return bool(list_unbounded_fields(kind))
    return kind in (int, float, str) or origin in (list, tuple, frozenset)


def list_unbounded_fields(kind: type) -> list[str]:
    return [name for name, hint in read_fields(kind).items() if is_unbounded(hint)]


RUNNERS = (runner_messages.Hello, runner_messages.Out, runner_messages.Relay, runner_messages.Exit)


@pytest.mark.evidence("G6", "C15")
@pytest.mark.parametrize("model", [*KINDS, Found, *RUNNERS])
def test_agent_message_fields_all_have_bounds(model: type) -> None:
    assert list_unbounded_fields(model) == []
