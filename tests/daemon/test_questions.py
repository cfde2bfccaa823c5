"""Questions to agents and between agents, over lists instead of connections."""

import asyncio
from typing import Any

import pytest

from koalapy.daemon.agents.questions import NODES_WAIT_S, KnownNodes, NodeLists, Questions
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.protocol.messages import Answer, Ask


class Wire:
    def __init__(self, *connected: str) -> None:
        self.sent: dict[str, list[Ask | Answer]] = {name: [] for name in connected}
        self.brought = {("north", "south", "/a")}
        self.questions = Questions(self._send, lambda *question: question in self.brought)

    def _send(self, cluster: str, message: Ask | Answer) -> bool:
        if cluster not in self.sent:
            return False
        self.sent[cluster].append(message)
        return True

    def last_question(self, cluster: str) -> Ask:
        message = self.sent[cluster].pop()
        assert isinstance(message, Ask)
        return message


async def begin_question(wire: Wire, cluster: str, timeout: float = 30) -> "asyncio.Task[dict[str, object]]":
    asking = asyncio.create_task(wire.questions.ask_agent(cluster, "stat", {"path": "/a"}, timeout))
    await asyncio.sleep(0)
    return asking


async def test_ask_agent_returns_answer() -> None:
    wire = Wire("north", "south")
    asking = await begin_question(wire, "north")
    question = wire.last_question("north")
    assert (question.what, question.payload, question.cluster) == ("stat", {"path": "/a"}, "")
    wire.questions.deliver_answer("south", Answer(ident=question.ident, payload={"size": 0}))
    await asyncio.sleep(0)
    assert not asking.done(), "another agent's word does not count"
    wire.questions.deliver_answer("north", Answer(ident=question.ident, payload={"size": 7}))
    assert await asking == {"size": 7}
    wire.questions.deliver_answer(
        "north", Answer(ident=question.ident, payload={"size": 8})
    )  # a late answer, for which no task waits


async def test_ask_agent_rejected_raises_reason() -> None:
    wire = Wire("north")
    asking = await begin_question(wire, "north")
    wire.questions.deliver_answer(
        "north", Answer(ident=wire.last_question("north").ident, error="there is no /a", fault="missing")
    )
    with pytest.raises(SiteRejected, match="there is no /a") as refused:
        await asking
    assert refused.value.fault == "missing"


async def test_ask_agent_disconnected_raises_site_unavailable() -> None:
    wire = Wire("north")
    with pytest.raises(SiteUnavailable, match="east is out of reach"):
        await wire.questions.ask_agent("east", "stat", {})
    asking = await begin_question(wire, "north")
    wire.questions.fail_questions("north")
    with pytest.raises(SiteUnavailable, match="north was lost before it answered"):
        await asking
    with pytest.raises(SiteUnavailable, match=r"north has not answered for 0\.01 s"):
        await wire.questions.ask_agent("north", "stat", {}, 0.01)


@pytest.mark.parametrize("kind", ["stat", "export", "unexport"])
def test_questions_between_agents_are_forwarded(kind: str) -> None:
    wire = Wire("north", "south")
    wire.questions.forward_question("north", Ask(ident="1", what=kind, payload={"path": "/a"}, cluster="south"))
    question = wire.last_question("south")
    assert (question.ident, question.what, question.cluster) == ("1", kind, "north")
    wire.questions.deliver_answer("south", Answer(ident="other", cluster="north"))
    wire.questions.deliver_answer("east", Answer(ident="1", cluster="north"))
    assert wire.sent["north"] == [], "only answers to questions are forwarded"
    wire.questions.deliver_answer("south", Answer(ident="1", payload={"port": 5}, cluster="north"))
    answer = wire.sent["north"].pop()
    assert answer == Answer(ident="1", payload={"port": 5}, cluster="south")
    wire.questions.forward_question("north", Ask(ident="3", what="background", payload={}, cluster="south"))
    answer = wire.sent["north"].pop()
    assert isinstance(answer, Answer)
    assert (answer.error, wire.sent["south"]) == ("agents do not ask each other for 'background'", [])
    wire.brought.add(("north", "east", "/a"))
    wire.questions.forward_question("north", Ask(ident="2", what="export", payload={"path": "/a"}, cluster="east"))
    refused = wire.sent["north"].pop()
    assert refused == Answer(ident="2", error="east is out of reach", fault="unavailable", cluster="east")


@pytest.mark.evidence("G4")
@pytest.mark.parametrize("kind", ["stat", "export"])
@pytest.mark.parametrize("payload", [{"path": "/b"}, {"path": "/a/"}, {"path": None}, {}, {"path": ["/a"]}])
def test_questions_about_unneeded_replicas_are_rejected(kind: str, payload: dict[str, object]) -> None:
    wire = Wire("north", "south", "east")
    for asking, path in (("north", payload), ("east", {"path": "/a"})):
        wire.questions.forward_question(asking, Ask(ident="1", what=kind, payload=path, cluster="south"))
        answer = wire.sent[asking].pop()
        assert isinstance(answer, Answer)
        assert (answer.error, answer.fault) == (f"no job on {asking} is to have that from south", "refused")
    assert wire.sent["south"] == []


async def test_node_lists_asks_agent_once_and_survives_bad_answers() -> None:
    asked: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()

    class Agents:
        async def ask_agent(self, cluster: str, kind: str, payload: object, timeout: float = 0.0) -> dict[str, Any]:
            assert (cluster, kind, payload) == ("north", "nodes", {})
            asked.put_nowait(answer := asyncio.get_running_loop().create_future())
            return dict(await answer)

    lists = NodeLists(Agents(), lambda: 100.0)
    viewers = [asyncio.create_task(lists.list_nodes("north")) for _ in range(5)]
    (await asked.get()).set_result({"nodes": [{"name": "n" * 500, "state": "down", "reason": "fan"}], "age": 4.0})
    known = await viewers[0]
    assert [await viewer for viewer in viewers] == [known] * 5
    assert (known.known_at, known.problem, len(known.nodes[0].name)) == (96.0, "", 200)
    assert await lists.list_nodes("north") == known
    assert asked.empty(), "within some seconds an agent is asked once"
    bad_answers = (
        {"nodes": [{"name": "n1", "state": "broken"}]},
        {"nodes": [{"name": "n", "state": "idle"}] * 1001},
        {"nodes": 7},
    )
    for answer in bad_answers:
        lists = NodeLists(Agents(), lambda: 100.0)
        viewer = asyncio.create_task(lists.list_nodes("north"))
        (await asked.get()).set_result(answer)
        assert await viewer == KnownNodes(problem="its agent's answer is not valid")


async def test_node_lists_of_hanging_agent_delay_viewer_shortly() -> None:
    wire = Wire("north")
    lists = NodeLists(wire.questions, lambda: 100.0)
    async with asyncio.timeout(20 * NODES_WAIT_S):
        assert (await lists.list_nodes("north")).problem == "its agent has not answered yet"
    question = wire.last_question("north")
    wire.questions.deliver_answer("north", Answer(ident=question.ident, payload={"nodes": [], "age": 0.0}))
    assert (await lists.list_nodes("north")).known_at == 100.0
    assert "out of reach" in (await lists.list_nodes("south")).problem
