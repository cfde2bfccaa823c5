"""Choose a node's role in the program of its job."""

from __future__ import annotations

from koalapy.runner.openmpi import Follower, Head
from koalapy.runner.plan import Plan, Role
from koalapy.runner.process_launcher import Single

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runner.plan import Node


def make_role(runner: Node, plan: Plan) -> Role:
    """Return the role of a node, as the plan's launcher, script and head say."""
    is_head = plan.me is plan.head
    if plan.message["launcher"] == "processes":
        return Single(runner, plan)
    if plan.message.get("is_script"):
        from koalapy.runner.script import ScriptFollower, ScriptHead  # few jobs need it

        return ScriptHead(runner, plan) if is_head else ScriptFollower(runner, plan)
    return Head(runner, plan) if is_head else Follower(runner, plan)
