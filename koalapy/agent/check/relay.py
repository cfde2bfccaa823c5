"""Check whether the nodes of a cluster can use relayed links: the head, which is the relay beside the agent."""

import asyncio
import json
from pathlib import Path
from typing import Any

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.port import Finding
from koalapy.relay.client import MAX_LINE

SUBJECT = "relayed links"
ANSWER_TIMEOUT_S = 10.0


async def check_relay(settings: AgentSettings, timeout_s: float = ANSWER_TIMEOUT_S) -> Finding:
    """Return whether the head can be used, by its control socket. Change nothing."""
    cluster, control = settings.cluster, settings.relay
    setting = f"clusters.{cluster}.relay"
    if control is None and settings.relayed_only:
        problem = f"clusters.{cluster}.relayed_only is set, and {setting} is not: no job can span this site and others"
        return Finding(SUBJECT, False, problem, f"start koala relay head, and set {setting} to its control socket")
    if control is None:
        hint = f"if nodes of other sites do not reach these, start koala relay head and set {setting}"
        return Finding(SUBJECT, True, "none: nodes exchange messages with those of other sites directly", hint)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _describe_head(Path(control))
    except TimeoutError:
        problem = f"the relay at {control} has not answered for {timeout_s:g} s"
        return Finding(SUBJECT, False, problem, f"restart it: systemctl restart koala-relay-head@{cluster}")
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        hint = f"start it in the agent's account: systemctl start koala-relay-head@{cluster}; or correct the path"
        return Finding(SUBJECT, False, f"there is no relay at {control}: {reason}", hint)
    return _judge_answer(cluster, answer)


async def _describe_head(control: Path) -> dict[str, Any]:
    """Return the description of itself that a head gives. Raise ``OSError`` or ``ValueError``."""
    reader, writer = await asyncio.open_unix_connection(str(control), limit=MAX_LINE)
    try:
        writer.write(b'{"t":"describe"}\n')
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ValueError("it accepts only its own account and root")
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.get("t") != "done":
        raise ValueError(f"it gives no description: {line[:200].decode(errors='replace').strip()}")
    return answer


def _judge_answer(cluster: str, answer: dict[str, Any]) -> Finding:
    """Return the finding about a head that has answered."""
    if "hub_connected" not in answer:
        problem = "the relay at this socket is the hub, not the relay of a site"
        return Finding(
            SUBJECT, False, problem, f"set clusters.{cluster}.relay to the control socket of koala relay head"
        )
    if not answer.get("has_key", True):
        hint = "the agent gives it: start the agent, and repeat this check"
        return Finding(SUBJECT, True, "the relay waits for its key", hint)
    if not answer["hub_connected"]:
        hint = f"see why: journalctl -u koala-relay-head@{cluster}; the daemon must accept the agent's token"
        return Finding(SUBJECT, False, "the relay is not connected to the hub", hint)
    files = answer["files"]
    encryption = (
        "encrypted between sites" if answer.get("certificate") else "not encrypted: the relay has no certificate"
    )
    if files["allowed"] < files["needed"]:
        problem = f"the relay may open {files['allowed']} files, and needs {files['needed']} for its limit of streams"
        return Finding(SUBJECT, False, problem, "raise LimitNOFILE in its unit, or lower limits.streams")
    return Finding(SUBJECT, True, f"the relay is connected to the hub; streams are {encryption}")
