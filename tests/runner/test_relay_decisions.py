"""When the head node of a job decides on relayed links, and its messages to the other nodes."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.runner.connections import Loop
from koalapy.runner.plan import Plan
from koalapy.runner.preflight import Preflight, Prober
from koalapy.runner.relay_child import RelayChild
from koalapy.runner.relay_links import RelayedLinks
from koalapy.runner.settings import Failure

HOSTS = {"north": "127.0.9.1", "south": "127.0.9.2", "west": "127.0.9.3"}


class RecordingRunner:
    """The runner of the head node; it records messages, relays and results."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.settings: Any = SimpleNamespace(name="head")
        self.environment: dict[str, str] = {}
        self.relayed_before: tuple[set[tuple[str, str]], int] = (set(), 0)
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.relay_starts: list[Callable[[bool, str], None]] = []
        self.relayed: list[Any] = []
        self.unreached: list[Any] = []
        self.errors: list[str] = []
        self.successes = 0

    def relay(self, token: str, _node: int, payload: dict[str, Any]) -> None:
        self.messages.append((token, payload))

    def start_relay(self, _plan: Plan, on_start: Callable[[bool, str], None]) -> None:
        self.relay_starts.append(on_start)

    def report_relayed(self, pairs: Any, unreached: Any, layout: int) -> None:
        self.relayed.append((sorted(pairs), layout))
        self.unreached = sorted(unreached)

    def conclude(self, _code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        assert infrastructure
        self.errors.append(error)


class Decision:
    """The pre-flight of a job with one node on each cluster, and answers of the other nodes."""

    def __init__(self, *pairs: tuple[str, str, str], clusters: tuple[str, ...] = ("north", "south"), **relay: Any):
        self.runner = RecordingRunner()
        nodes = [{"host": HOSTS[name], "cluster": name, "token": name, "node": 0, "slots": 1} for name in clusters]
        contexts = [{"token": name, "nodes": [i]} for i, name in enumerate(clusters)]
        offer = {"attempt": "7.1", "pairs": pairs, "bases": [21_000, 22_000], **relay}
        message = {"nodes": nodes, "contexts": contexts, "head": clusters[0], "relay": offer}
        self.plan = Plan(message, clusters[0], 0)
        runner: Any = self.runner
        self.preflight = Preflight(runner, self.plan, 5, self._note_success, lambda: None)
        self.preflight.start()

    def _note_success(self) -> None:
        self.runner.successes += 1

    def last(self, kind: str) -> dict[str, Any]:
        """Return the last message of a kind, after the events that are due."""
        while not (found := [payload for _, payload in self.runner.messages if payload["op"] == kind]):
            self.runner.loop.turn()
        return found[-1]

    def send_ready(self, index: int = 1) -> None:
        node = self.plan.nodes[index]
        ready = {"op": "ready", "index": index, "name": node["cluster"], "series": 5, "port": 1, "word": "w"}
        self.preflight.receive({**ready, "way": self.way, "choices": [], "host_name": node["cluster"], "networks": []})

    def send_reached(self, index: int, *failed: int) -> None:
        failures = [(other, "timed out") for other in failed]
        self.preflight.receive({"op": "reached", "index": index, "way": self.way, "failures": failures})

    @property
    def way(self) -> int:
        return max((payload["way"] for _, payload in self.runner.messages if payload["op"] == "move"), default=0)

    def run_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.runner.loop.turn()


@pytest.fixture
def decide() -> Iterator[Callable[..., Decision]]:
    made: list[Decision] = []

    def make(*pairs: tuple[str, str, str], **options: Any) -> Decision:
        made.append(Decision(*pairs, **options))
        return made[-1]

    yield make
    for decision in made:
        decision.preflight.close()
        decision.runner.loop.close()


@pytest.mark.parametrize(("image", "errors"), [("", ["node 127.0.9.2 was not ready within 30 s"]), ("/image", [])])
def test_preflight_waits_for_a_node_that_checks_its_image(
    decide: Callable[..., Decision], image: str, errors: list[str]
) -> None:
    """The check may take 60 s. The head node, which may have no ranks or a smaller image, was faster."""
    decision, now = decide(), [0.0]
    runner: Any = decision.runner
    decision.preflight.close()
    runner.loop.time = lambda: now[0]
    decision.plan.contexts[1]["container"] = image
    decision.preflight = Preflight(runner, decision.plan, 5, lambda: None, lambda: None)
    decision.preflight.start()
    for now[0] in range(3, 90, 3):
        runner.loop.turn()
    assert runner.errors[:1] == errors


def test_failed_pair_that_may_be_relayed_is_relayed(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "any"))
    decision.send_ready()
    assert not decision.preflight.must_relay
    assert "skip" not in decision.last("probe")
    assert not decision.runner.relay_starts
    decision.send_reached(1, 0)
    relayed = decision.last("move")["relayed"]
    assert relayed["pairs"] == [("north", "south")]
    assert relayed["layout"] == 0
    assert len(decision.runner.relay_starts) == 1


def test_pair_that_is_always_relayed_is_not_probed(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "relayed"))
    decision.send_ready()
    assert decision.preflight.must_relay
    assert decision.last("probe")["skip"] == [("north", "south")]
    decision.send_reached(1)
    assert decision.last("move")["relayed"]["pairs"] == [("north", "south")]
    assert not decision.runner.errors
    assert not decision.runner.successes


def test_later_program_of_a_script_uses_the_former_decision(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "any"))
    decision.runner.relayed_before = ({("north", "south"), ("east", "west")}, 1)
    runner: Any = decision.runner
    decision.preflight.close()
    decision.preflight = Preflight(runner, decision.plan, 5, lambda: None, lambda: None)
    decision.preflight.start()
    decision.send_ready()
    assert decision.last("probe")["skip"] == [("north", "south")]
    decision.send_reached(1)
    assert decision.last("move")["relayed"]["layout"] == 1


def test_relay_that_awaits_its_next_start_is_started_once(decide: Callable[..., Decision]) -> None:
    """Two would take the ports from each other."""
    decision = decide(("north", "south", "relayed"))
    plan, starts = decision.plan, list[int]()
    plan.message["relay_head"] = ["127.0.0.1", 1]
    plan.relayed = RelayedLinks({("north", "south")}, 0, {}, on_loopback=True)

    def start(*_: object) -> int:
        starts.append(len(starts) + 1)
        return starts[-1]

    processes: Any = SimpleNamespace(start=start)
    settings: Any = SimpleNamespace(name="head", secret=b"secret")
    child = RelayChild(decision.runner.loop, processes, settings, plan, decision.runner.errors.append)
    child.wait(lambda *_: None)
    assert child.child_ended(1, 1)
    child.wait(lambda *_: None)
    assert starts == [1]
    decision.run_until(lambda: starts == [1, 2])
    child.finish()


def test_failed_pair_that_must_be_direct_is_an_error(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "any"), clusters=("north", "south", "west"))
    decision.send_ready(1)
    decision.send_ready(2)
    decision.last("probe")
    decision.send_reached(1, 2)
    decision.send_reached(2)
    # The head node reports it unless the faulty cluster's node does.
    decision.run_until(
        lambda: decision.runner.errors or any(p["op"] == "unreached" for _, p in decision.runner.messages)
    )
    assert not decision.runner.relay_starts


def test_pairs_relayed_with_a_failed_one_are_not_reported_as_unreached(decide: Callable[..., Decision]) -> None:
    pairs = [("north", "south"), ("north", "west"), ("south", "west")]
    decision = decide(*((*pair, "any") for pair in pairs), clusters=("north", "south", "west"))

    def answer(*failed_at_1: int) -> None:
        for index in (1, 2):
            decision.send_ready(index)
        for index, failed in ((0, ()), (1, failed_at_1), (2, ())):
            decision.send_reached(index, *failed)

    answer(2)
    assert decision.last("move")["relayed"]["on_loopback"], "no network of a node is known"
    decision.run_until(lambda: decision.runner.relay_starts)
    decision.runner.relay_starts[-1](True, "")
    answer()
    decision.run_until(lambda: decision.runner.successes)
    assert decision.runner.relayed == [(pairs, 0)]
    assert decision.runner.unreached == [("south", "west")]


def test_taken_ports_select_the_next_layout_until_none_is_left(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "relayed"))
    decision.send_ready()
    decision.last("probe")
    decision.send_reached(1)
    assert decision.last("move")["relayed"]["layout"] == 0
    taken = {"op": "taken", "index": 1, "why": "port 21000 is taken"}
    decision.preflight.receive({**taken, "way": decision.way - 1})  # an answer to an earlier step
    assert decision.way == 1
    decision.preflight.receive({**taken, "way": 1})
    assert decision.last("move")["relayed"]["layout"] == 1
    with pytest.raises(Failure, match="no ports are free for relayed links: port 21000 is taken"):
        decision.preflight.receive({**taken, "way": 2})


def test_job_without_layouts_fails_with_the_pair_that_needs_relays(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "relayed"), bases=[])
    decision.send_ready()
    decision.last("probe")
    with pytest.raises(Failure, match="relayed links cannot be used between clusters north and south"):
        decision.send_reached(1)


def test_relayed_pair_that_the_relays_do_not_join_is_an_error(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "relayed"))
    decision.send_ready()
    decision.last("probe")
    decision.send_reached(1)
    decision.runner.messages = [m for m in decision.runner.messages if m[1]["op"] == "move"]
    decision.runner.relay_starts[0](True, "")
    decision.send_ready()
    decision.send_reached(0)
    decision.send_reached(1, 0)
    assert "node south cannot reach node head by the relays (timed out)" in decision.last("unreached")["error"]


def test_prober_that_is_closed_ignores_its_relay(decide: Callable[..., Decision]) -> None:
    decision = decide(("north", "south", "relayed"))
    decision.send_ready()
    decision.last("probe")
    decision.send_reached(1)
    sent: list[dict[str, Any]] = []
    runner: Any = decision.runner
    prober = Prober(runner, decision.plan, 5, sent.append, 1)
    prober.start()
    prober.close()
    decision.runner.relay_starts[-1](True, "")
    assert not sent
