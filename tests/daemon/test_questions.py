"""Questions to agents, and between them, over a wire made of lists."""

import asyncio

import pytest

from koalapy.daemon.agents.questions import Questions
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.protocol.messages import Answer, Ask


class Wire:
    def __init__(self, *connected: str) -> None:
        self.sent: dict[str, list[Ask | Answer]] = {name: [] for name in connected}
        self.brought = {("north", "south", "/a")}
        self.questions = Questions(self._send, lambda *asked: asked in self.brought)

    def _send(self, cluster: str, message: Ask | Answer) -> bool:
        if cluster not in self.sent:
            return False
        self.sent[cluster].append(message)
        return True

    def asked(self, cluster: str) -> Ask:
        message = self.sent[cluster].pop()
        assert isinstance(message, Ask)
        return message


async def begun(wire: Wire, cluster: str, timeout: float = 30) -> "asyncio.Task[dict[str, object]]":
    asking = asyncio.create_task(wire.questions.ask_agent(cluster, "stat", {"path": "/a"}, timeout))
    await asyncio.sleep(0)
    return asking


async def test_the_daemon_asks_and_is_answered() -> None:
    wire = Wire("north", "south")
    asking = await begun(wire, "north")
    asked = wire.asked("north")
    assert (asked.what, asked.payload, asked.cluster) == ("stat", {"path": "/a"}, "")
    wire.questions.deliver_answer("south", Answer(ident=asked.ident, payload={"size": 0}))
    await asyncio.sleep(0)
    assert not asking.done(), "another agent's word does not count"
    wire.questions.deliver_answer("north", Answer(ident=asked.ident, payload={"size": 7}))
    assert await asking == {"size": 7}
    wire.questions.deliver_answer("north", Answer(ident=asked.ident, payload={"size": 8}))  # late: nobody waits


async def test_a_refusal_says_why() -> None:
    wire = Wire("north")
    asking = await begun(wire, "north")
    wire.questions.deliver_answer(
        "north", Answer(ident=wire.asked("north").ident, error="there is no /a", fault="missing")
    )
    with pytest.raises(SiteRejected, match="there is no /a") as refused:
        await asking
    assert refused.value.fault == "missing"


async def test_nobody_waits_for_an_agent_that_is_gone() -> None:
    wire = Wire("north")
    with pytest.raises(SiteUnavailable, match="east is out of reach"):
        await wire.questions.ask_agent("east", "stat", {})
    asking = await begun(wire, "north")
    wire.questions.fail_questions("north")
    with pytest.raises(SiteUnavailable, match="north was lost before it answered"):
        await asking
    with pytest.raises(SiteUnavailable, match=r"north has not answered for 0\.01 s"):
        await wire.questions.ask_agent("north", "stat", {}, 0.01)


@pytest.mark.parametrize("what", ["stat", "export", "unexport"])
def test_agents_ask_each_other_by_way_of_the_daemon(what: str) -> None:
    wire = Wire("north", "south")
    wire.questions.forward_question("north", Ask(ident="1", what=what, payload={"path": "/a"}, cluster="south"))
    asked = wire.asked("south")
    assert (asked.ident, asked.what, asked.cluster) == ("1", what, "north")
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
@pytest.mark.parametrize("what", ["stat", "export"])
@pytest.mark.parametrize("payload", [{"path": "/b"}, {"path": "/a/"}, {"path": None}, {}, {"path": ["/a"]}])
def test_agents_are_told_nothing_of_what_no_job_of_theirs_is_to_have(what: str, payload: dict[str, object]) -> None:
    wire = Wire("north", "south", "east")
    for asking, path in (("north", payload), ("east", {"path": "/a"})):
        wire.questions.forward_question(asking, Ask(ident="1", what=what, payload=path, cluster="south"))
        answer = wire.sent[asking].pop()
        assert isinstance(answer, Answer)
        assert (answer.error, answer.fault) == (f"no job on {asking} is to have that from south", "refused")
    assert wire.sent["south"] == []
