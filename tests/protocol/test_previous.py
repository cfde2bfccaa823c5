"""What agents, daemons and spools of the version before this one say is understood, and said in the same way.

``previous/`` was recorded with that version: its messages, the folders of its spool and of a stage, and what it said
of those folders' components when it had read them again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from koalapy.agent.components.component import Component
from koalapy.agent.core.daemons import Daemons
from koalapy.agent.core.spool import JournalFolder, Spool
from koalapy.model.bounds import MAX_TEXT_LENGTH
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.protocol.messages import PROTOCOL, KnownDaemon, Stage, encode_frame, from_agent, from_daemon

PREVIOUS = Path(__file__).parent / "previous"
INSTANCE, TOKEN = "k1f3", "7.2.0.3fa9c1d2"


def recorded(name: str) -> list[dict[str, Any]]:
    return list(json.loads((PREVIOUS / name).read_bytes()))


SPEAKERS = [
    pytest.param(speaker, message, id=f"{name}-{index}-{message['type']}")
    for name, speaker in (("from_agent", from_agent), ("from_daemon", from_daemon))
    for index, message in enumerate(recorded(f"{name}.json"))
]


@pytest.mark.parametrize(("speaker", "message"), SPEAKERS)
def test_each_message_is_read_and_would_be_sent_as_it_was(speaker: TypeAdapter[Any], message: dict[str, Any]) -> None:
    """What was added since has a default that means what it meant not to say it."""
    read = speaker.validate_json(json.dumps([message]))
    (sent,) = json.loads(encode_frame(speaker, read))
    added = {name: sent.pop(name) for name in sent.keys() - message.keys()}
    for now, before in zip(sent.get("components", ()), message.get("components", ()), strict=True):
        added |= {f"components.{name}": now.pop(name) for name in now.keys() - before.keys()}
    assert sent == message
    assert added in ({}, {"identity": "service"}) or not any(added.values())


@pytest.mark.parametrize(("speaker", "message"), SPEAKERS)
def test_unknown_field_of_message_is_ignored(speaker: TypeAdapter[Any], message: dict[str, Any]) -> None:
    """Neither whose it is: that is who sent it."""
    more = message | {"later": {"a": 1}} | ({"cluster": "south"} if "cluster" not in message else {})
    assert speaker.validate_json(json.dumps([more])) == speaker.validate_json(json.dumps([message]))


def test_the_protocol_is_the_same() -> None:
    assert recorded("from_agent.json")[0]["protocol"] == PROTOCOL


@pytest.mark.parametrize(
    "message",
    [
        {"type": "status", "token": TOKEN, "state": "claimed"},
        {"type": "report", "total": 1, "idle": 1, "background": 0, "down": 0, "holding": []},
        {"type": "stage_status", "token": TOKEN, "state": "done", "size": 1, "staged": 1},
        {"type": "inventory", "components": [{"token": TOKEN, "state": "ended"}]},
    ],
    ids=lambda message: message["type"],
)
def test_what_was_not_said_once_need_not_be_said(message: dict[str, Any]) -> None:
    (report,) = from_agent.validate_json(json.dumps([message]))
    (sent,) = json.loads(encode_frame(from_agent, [report]))
    (again,) = from_agent.validate_json(json.dumps([sent]))
    assert again == report
    assert {name: value for name, value in sent.items() if name in message and name != "components"} == {
        name: value for name, value in message.items() if name != "components"
    }


def test_a_state_is_the_schedulers_own_from_the_message_on() -> None:
    (inventory,) = from_agent.validate_json(json.dumps([recorded("from_agent.json")[1]]))
    assert isinstance(inventory, Inventory)
    assert [status.state for status in inventory.components] == [ComponentState.WAITING, ComponentState.ENDED]


@pytest.mark.parametrize("state", ["placed", "stopping", "gone", None])
def test_no_agent_knows_of_states_before_its_orders(state: object) -> None:
    with pytest.raises(ValueError, match=r"status\.state"):
        from_agent.validate_json(json.dumps([{"type": "status", "token": TOKEN, "state": state}]))


def test_texts_for_people_are_cut() -> None:
    long = {"type": "status", "token": TOKEN, "state": "ended", "error": "ä" * 30_000}
    (status,) = from_agent.validate_json(json.dumps([long]))
    assert status == ComponentStatus(TOKEN, ComponentState.ENDED, error="ä" * MAX_TEXT_LENGTH)


def test_an_agents_spool_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    shutil.copytree(PREVIOUS / "spool", directory)
    components = [Component.load_journal(*each) for each in Spool(directory).load_folders()]
    said = json.loads(encode_frame(from_agent, [component.current_status() for component in components]))
    assert not any(each.pop("warned") or each.pop("exceeded") for each in said), "neither was told at that time"
    assert not any(each.pop("lease") for each in said), "their runners count no silence of the daemon"
    assert said == recorded("recalled.json")
    (known,) = Daemons(directory).known_daemons()
    assert known == KnownDaemon(instance=INSTANCE, epoch=4, life="b7", job=7)


def test_a_stages_journal_is_read() -> None:
    order = Stage.model_validate(JournalFolder(PREVIOUS / "stages" / f".{INSTANCE}-{TOKEN}").load_entries()["order"])
    (sent,) = (message for message in recorded("from_daemon.json") if message["type"] == "stage")
    assert json.loads(encode_frame(from_daemon, [order])) == [sent | {"local_user": ""}]
