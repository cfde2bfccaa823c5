"""Whatever an agent says, the daemon lives: what is out of bounds costs the agent its connection."""

import asyncio
import json
import types
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.agent.runners import runner_messages
from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.bounds import MAX_NOTICES, MAX_NOTICES_LENGTH, TruncateList
from koalapy.model.job import ComponentState
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus
from koalapy.protocol import messages as wire
from tests.daemon.test_hub import DEADLINE, Daemon, report, running, until
from tests.daemon.test_trust import COUPLED, Grid, when
from tests.fuzz.messages import FLOATS, NUMBERS, Vocabulary, is_record, read_fields

TEXTS = st.text() | st.sampled_from(
    ["", "1.1.0", "1.1.0.fa", "1.1.1.fa", "x" * 100_000, "\x00", "\ud800", "north", "south"]
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def plain(message: object) -> dict[str, Any]:
    (sent,) = json.loads(wire.encode_frame(wire.from_agent, [message]))
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
def altered(draw: st.DrawFn) -> dict[str, Any]:
    """A sensible message with some of its fields of the right shape and else anything."""
    message = draw(st.sampled_from(SENSIBLE))
    fields = read_fields(type(message))
    chosen = draw(st.sets(st.sampled_from([name for name in fields if name != "type"]), max_size=2))
    return plain(message) | {name: draw(VOCABULARY.draw_odd(fields[name])) for name in chosen}


class Loop:
    """A daemon for many examples."""

    def __init__(self, path: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.daemon: Daemon = self._runner.run(self._stack.enter_async_context(running(path)))
        self.seen = "", 0, ""
        """The cluster as it was known when its last message had been taken in, its agent being connected still."""
        self._runner.run(self._begin())

    async def _begin(self) -> None:
        async with self.daemon.agent_of("north") as north, self.daemon.agent_of("south") as south:
            for name, agent in (("north", north), ("south", south)):
                agent.says(Inventory(components=()), report(4))
                await until(self.daemon, name, ("usable", 4, ""))
            await Grid(self.daemon, north, south).submit(1, COUPLED)

    def hears(self, messages: list[Any]) -> str:
        """Why the connection of an agent that says this was closed, if it was."""
        return self._runner.run(self._hears(json.dumps(messages)))

    async def _hears(self, frame: str) -> str:
        async with asyncio.timeout(DEADLINE), self.daemon.agent_of("north") as north:
            await when(lambda: north.heard)
            north.says(Inventory(components=(ComponentStatus(token="1.1.0.fa", state=ComponentState.WAITING),)))
            north.says_frame(frame)
            north.says(wire.Ask(ident="mark", what="nothing", payload={}))
            await when(lambda: north.closed or any(m.get("ident") == "mark" for m in north.heard))
            await self.daemon.engine.commit(WorkItem())
            self.seen = self.daemon.seen("north")
            return north.closed

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    made = Loop(tmp_path_factory.mktemp("hostile") / "koala.db")
    yield made
    made.close()


@pytest.mark.evidence("G6")
@settings(suppress_health_check=list(HealthCheck))
@given(messages=st.lists(SHAPED | altered() | ANYTHING, min_size=1, max_size=3))
def test_nothing_that_an_agent_says_ends_the_daemon(loop: Loop, messages: list[Any]) -> None:
    loop.hears(messages)


EXTREMES = (-(2**63) - 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 10**400)


@pytest.mark.parametrize("message", SENSIBLE, ids=lambda message: message.type)
def test_no_number_ends_the_daemon(loop: Loop, message: Any) -> None:
    for name, hint in get_type_hints(type(message)).items():
        if hint in (int, float, int | None):
            for value in EXTREMES:
                loop.hears([plain(message) | {name: value}])


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
def test_a_count_out_of_bounds_costs_the_connection_and_says_which(loop: Loop, field: str, value: object) -> None:
    closed = loop.hears([plain(report(4)) | {field: value}])
    assert closed.startswith(f"a message is invalid: 0.report.{field}")


@pytest.mark.parametrize("host", ["", "-x", "../../tmp/x", "a,b", "a b", "a;id", "a\nb", "x" * 256, "ü"])
def test_a_nodes_address_is_one(loop: Loop, host: str) -> None:
    """It stands in names of files and on command lines where the gang has its head."""
    status = ComponentStatus(
        token="1.1.0.fa", state=ComponentState.CLAIMED, hosts=("127.0.1.1", "fe80::1%eth0", "node-1.b_c")
    )
    assert not loop.hears([plain(status)])
    closed = loop.hears([plain(status) | {"hosts": ["127.0.1.1", host]}])
    assert closed.startswith("a message is invalid: 0.status.hosts.1")


def test_words_for_people_are_cut_and_cost_nothing(loop: Loop) -> None:
    assert not loop.hears([plain(report(4)) | {"problem": "no " * 100_000}])
    assert loop.seen[2] == ("no " * 100_000)[:2000]


def test_report_with_many_long_notices_is_cut_and_keeps_the_connection(loop: Loop) -> None:
    loud = {"notices": ['<n>&"' * 4000] * 1000, "lacks": [f"{n:04}" + "x" * 20_000 for n in range(1000)]}
    assert not loop.hears([plain(report(4)) | loud])
    cluster = loop.daemon.engine.queries.grid["north"]
    assert len(cluster.notices) <= MAX_NOTICES
    assert sum(map(len, cluster.notices)) <= MAX_NOTICES_LENGTH
    assert cluster.notices[-1].endswith("more are left out")
    assert len(cluster.status_text) < 10_000


@pytest.mark.parametrize(
    "large",
    [
        {"disks": [{"what": "spool", "path": "/" + "x" * 60_000, "free": 1, "size": 2}] * 20},
        {"node_classes": [{"name": f"{n:04}" + "x" * 900, "total": 1, "idle": 1} for n in range(1000)]},
        {"calls": [{"operation": "snapshot", "last_error": "x"}] * 51},
    ],
)
def test_report_with_more_than_a_page_holds_costs_the_connection(loop: Loop, large: dict[str, Any]) -> None:
    assert loop.hears([plain(report(4)) | large]).startswith("a message is invalid")


@given(st.lists(st.text(max_size=300), max_size=60), st.integers(1, 30), st.integers(100, 3000))
def test_truncate_list_keeps_its_bounds_and_is_idempotent(texts: list[str], most: int, characters: int) -> None:
    limit = TruncateList(most, characters)
    cut = limit.cut(tuple(texts))
    assert len(cut) <= most
    assert sum(map(len, cut)) <= characters
    assert limit.cut(cut) == cut
    if len(texts) <= most and sum(map(len, texts)) <= characters:
        assert cut == tuple(texts)


def bare(kind: Any) -> bool:
    """Whether numbers, or texts and lists from outside, are taken without bounds."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        many = get_origin(inside[0]) in (list, tuple, frozenset)
        return many and any(bare(each) for each in get_args(inside[0]) if each is not Ellipsis)
    if origin in (Union, types.UnionType):
        return any(bare(each) for each in inside)
    if origin is dict:
        return False  # what is in there is checked by whom it is for
    if is_record(kind):
        return bool(unbounded(kind))
    return kind in (int, float, str) or origin in (list, tuple, frozenset)


def unbounded(kind: type) -> list[str]:
    return [name for name, hint in read_fields(kind).items() if bare(hint)]


RUNNERS = (runner_messages.Hello, runner_messages.Out, runner_messages.Relay, runner_messages.Exit)


@pytest.mark.evidence("G6", "C15")
@pytest.mark.parametrize("model", [*KINDS, wire.Found, *RUNNERS])
def test_every_field_of_what_comes_in_has_bounds(model: type) -> None:
    assert unbounded(model) == []
