"""Compatibility with messages, spools and stage journals of the previous version.

That version recorded ``previous/``: its messages, the folders of its spool and of a stage, and the component statuses
that it read from those folders.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from koalapy.agent.components.component import Component
from koalapy.agent.core.daemons import Daemons
from koalapy.agent.core.spool import JournalFolder, Spool
from koalapy.model.bounds import MAX_TEXT_LENGTH
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.protocol.frames import encode_frame
from koalapy.protocol.messages import PROTOCOL, KnownDaemon, Output, OutputAck, Stage, from_agent, from_daemon

PREVIOUS = Path(__file__).parent / "previous"
INSTANCE, TOKEN = "k1f3", "7.2.0.3fa9c1d2"


def read_recorded(name: str) -> list[dict[str, Any]]:
    return list(json.loads((PREVIOUS / name).read_bytes()))


SPEAKERS = [
    pytest.param(speaker, message, id=f"{name}-{index}-{message['type']}")
    for name, speaker in (("from_agent", from_agent), ("from_daemon", from_daemon))
    for index, message in enumerate(read_recorded(f"{name}.json"))
]


@pytest.mark.parametrize(("speaker", "message"), SPEAKERS)
def test_message_of_previous_version_is_read_unchanged(speaker: TypeAdapter[Any], message: dict[str, Any]) -> None:
    """Newer fields have defaults that mean their absence."""
    read = speaker.validate_json(json.dumps([message]))
    (sent,) = json.loads(encode_frame(speaker, read))
    added = {name: sent.pop(name) for name in sent.keys() - message.keys()}
    for now, previous in zip(sent.get("components", ()), message.get("components", ()), strict=True):
        added |= {f"components.{name}": now.pop(name) for name in now.keys() - previous.keys()}
    assert sent == message
    assert {name: value for name, value in added.items() if value} in ({}, {"identity": "service"})


@pytest.mark.parametrize(("speaker", "message"), SPEAKERS)
def test_message_with_unknown_field_is_accepted(speaker: TypeAdapter[Any], message: dict[str, Any]) -> None:
    """The unknown fields include ``cluster``, since the sender determines the cluster."""
    extended = message | {"later": {"a": 1}} | ({"cluster": "south"} if "cluster" not in message else {})
    assert speaker.validate_json(json.dumps([extended])) == speaker.validate_json(json.dumps([message]))


def test_protocol_version_is_unchanged() -> None:
    assert read_recorded("from_agent.json")[0]["protocol"] == PROTOCOL


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
def test_message_without_newer_fields_has_defaults(message: dict[str, Any]) -> None:
    (report,) = from_agent.validate_json(json.dumps([message]))
    (sent,) = json.loads(encode_frame(from_agent, [report]))
    (again,) = from_agent.validate_json(json.dumps([sent]))
    assert again == report
    assert {name: value for name, value in sent.items() if name in message and name != "components"} == {
        name: value for name, value in message.items() if name != "components"
    }


def test_component_status_hides_internal_states() -> None:
    (inventory,) = from_agent.validate_json(json.dumps([read_recorded("from_agent.json")[1]]))
    assert isinstance(inventory, Inventory)
    assert [status.state for status in inventory.components] == [ComponentState.WAITING, ComponentState.ENDED]


@pytest.mark.parametrize("state", ["placed", "stopping", "gone", None])
def test_component_status_before_orders_is_unknown(state: object) -> None:
    with pytest.raises(ValueError, match=r"status\.state"):
        from_agent.validate_json(json.dumps([{"type": "status", "token": TOKEN, "state": state}]))


def test_message_texts_for_users_are_truncated() -> None:
    long = {"type": "status", "token": TOKEN, "state": "ended", "error": "ä" * 30_000}
    (status,) = from_agent.validate_json(json.dumps([long]))
    assert status == ComponentStatus(TOKEN, ComponentState.ENDED, error="ä" * MAX_TEXT_LENGTH)


def test_spool_of_previous_agent_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    shutil.copytree(PREVIOUS / "spool", directory)
    components = [Component.load_journal(*status) for status in Spool(directory).load_folders()]
    statuses = json.loads(encode_frame(from_agent, [component.current_status() for component in components]))
    assert not any(status.pop("warned") or status.pop("exceeded") for status in statuses), (
        "neither was told at that time"
    )
    assert not any(status.pop("use") for status in statuses), "their runners measured no use of processors and memory"
    assert not any(status.pop("lease") for status in statuses), "their runners count no silence of the daemon"
    assert not any(status.pop("relayed") or status.pop("unreached") or status.pop("relay_lost") for status in statuses)
    assert not any(status.pop("results_lost") for status in statuses)
    assert not any(status.pop("refused_sizes") or status.pop("limited") for status in statuses)
    assert statuses == read_recorded("recalled.json")
    (daemon,) = Daemons(directory).known_daemons()
    assert daemon == KnownDaemon(instance=INSTANCE, epoch=4, life="b7", job=7)


def test_stage_journal_of_previous_agent_is_read() -> None:
    order = Stage.model_validate(JournalFolder(PREVIOUS / "stages" / f".{INSTANCE}-{TOKEN}").load_entries()["order"])
    (sent,) = (message for message in read_recorded("from_daemon.json") if message["type"] == "stage")
    assert json.loads(encode_frame(from_daemon, [order])) == [sent | {"local_user": "", "result_names": []}]


def test_output_acknowledgement_accepts_end_of_any_piece() -> None:
    largest = 64 * 1024 * 1024
    piece = Output(token="1.0.0.1", offset=2**52, data="")
    assert OutputAck(token=piece.token, offset=piece.offset + largest).offset == 2**52 + largest
    with pytest.raises(ValidationError, match="offset"):
        Output(token="1.0.0.1", offset=2**53 - 3, data="")
