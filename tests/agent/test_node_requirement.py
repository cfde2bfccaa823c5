"""The requirement of a component in the daemon's message and in the agent's journal."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from koalapy.agent.components.component import Component
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.lrm.node_classes import NodeGroups
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.node_requirement import Gpus, NodeRequirement
from koalapy.protocol.messages import Submit

TOKEN = "7.1.0"
REQUIREMENT = NodeRequirement(
    16, 10**9, Gpus(2, "a100"), ("ib", "ssd"), "large", ("n[1-3]", "m1"), account="climate", qos="long"
)


def make_message(requirement: object) -> Submit:
    return Submit.model_validate(
        {"id": 1, "epoch": 1, "token": TOKEN, "size": 2, "name": "x", "requirement": requirement}
    )


def test_exclusion_of_too_many_nodes_is_rejected_without_listing_them() -> None:
    requirement = NodeRequirement(exclude=tuple(f"{prefix}[0-99999]" for prefix in ("a", "b", "c")))
    with pytest.raises(SiteRejected, match="more than 100000 nodes") as rejection:
        NodeGroups(()).admitted_nodes("", requirement, 1, ["n1"])
    assert rejection.value.fault is SiteFault.JOB


def test_excluded_nodes_are_known_by_name_short_name_and_alias() -> None:
    requirement = NodeRequirement(exclude=("n[1-2]", "m3.site"))
    nodes = ["n1.site", "m3.site", "m3", "127.0.1.2", "127.0.1.3"]
    aliases = {"127.0.1.2": "n2", "127.0.1.3": "n3"}
    assert NodeGroups(()).admitted_nodes("", requirement, 1, nodes, aliases) == {"m3", "127.0.1.3"}


def test_requirement_survives_message_and_agent_restart(tmp_path: Path) -> None:
    message = Submit.model_validate_json(make_message(REQUIREMENT).model_dump_json())
    assert message.requirement == REQUIREMENT
    folder = JournalFolder(tmp_path)
    folder.write_entry(submit=message.model_dump(include={"size", "requirement"}))
    assert Component.load_journal("test", TOKEN, JournalFolder(tmp_path)).requirement == REQUIREMENT


@pytest.mark.parametrize(
    "requirement",
    [
        {"features": ["a&b"]},
        {"features": ["--exclusive"]},
        {"features": ["ib"] * 129},
        {"partition": "a,b"},
        {"account": "x y"},
        {"qos": "a\nb"},
        {"exclude": ["-n1"]},
        {"exclude": ["n1,n2"]},
        {"exclude": [""]},
        {"gpus": {"count": 1, "type": "a:b"}},
        {"gpus": {"count": 1001}},
        {"cores": 0},
        {"cores": 65537},
        {"memory": 2**53 + 1},
    ],
)
def test_message_with_hostile_requirement_is_rejected(requirement: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="requirement"):
        make_message(requirement)
