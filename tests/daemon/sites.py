"""Simulated agents that answer questions about files on their clusters."""

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

Content = bytes | dict[str, bytes]


@dataclass
class Sites:
    """Files and folders by cluster and path. Agents of clusters in ``away`` give no answer."""

    content: dict[tuple[str, str], Content | SiteRejected] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    questions: list[tuple[str, str]] = field(default_factory=list)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Answers to ``nodes`` by cluster."""
    reserved: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Orders of reservations by cluster and name."""
    kept: set[str] = field(default_factory=set)
    """The names of reservations that clusters do not release."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By cluster, why it reserves no nodes."""
    agents: dict[str, Any] = field(default_factory=dict)
    """The sessions of connected agents by cluster."""

    async def ask_agent(self, cluster: str, kind: str, payload: dict[str, Any], timeout: float = 0.0) -> dict[str, Any]:
        if kind == "nodes" and cluster in self.nodes:
            return self.nodes[cluster]
        if kind == "nodes":
            raise SiteUnavailable(f"{cluster} is out of reach")
        if kind in ("reserve", "unreserve", "reservations"):
            return self._answer_about_reservations(cluster, kind, payload)
        path = payload["path"]
        self.questions.append((cluster, path))
        if cluster in self.away:
            raise SiteUnavailable(f"{cluster} is out of reach", hint="try again when its agent is connected")
        content = self.content.get((cluster, path))
        if content is None:
            raise SiteRejected(f"{path} is not there", fault=SiteFault.MISSING)
        if isinstance(content, SiteRejected):
            raise content
        if isinstance(content, bytes):
            return {"path": path, "size": len(content), "checksum": sha256_hex(content), "parts": None}
        parts = [
            {"name": name, "size": len(data), "checksum": sha256_hex(data)} for name, data in sorted(content.items())
        ]
        text = "".join(f"file {part['checksum']} {part['name']}\0" for part in parts)
        return {
            "path": path,
            "size": sum(map(len, content.values())),
            "checksum": sha256_hex(text.encode()),
            "parts": parts,
        }

    def _answer_about_reservations(self, cluster: str, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        if cluster in self.away:
            raise SiteUnavailable(f"{cluster} is out of reach", hint="try again when its agent is connected")
        if kind == "reservations":
            return {"names": [name for site, name in self.reserved if site == cluster]}
        if kind == "unreserve":
            if payload["name"] in self.kept:
                raise SiteRejected("Slurm: reservation is busy")
            self.reserved.pop((cluster, payload["name"]), None)
            return {}
        if cluster in self.refusals:
            raise SiteRejected(self.refusals[cluster])
        self.reserved.setdefault((cluster, payload["name"]), payload)
        return {"nodes": [f"{cluster}-{index}" for index in range(payload["nodes"])]}

    def connect_agents(self, *clusters: str, reserves: bool = True) -> None:
        """Begin new sessions of agents."""
        hello = SimpleNamespace(reserves=reserves)
        self.agents |= {name: SimpleNamespace(ready=True, hello=hello) for name in clusters}

    def get(self, cluster: str) -> Any:
        """Return the session of a cluster, as ``Sessions`` does; None without one."""
        return self.agents.get(cluster)


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
