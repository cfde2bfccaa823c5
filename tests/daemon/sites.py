"""What agents find on their clusters, as a test says; checksums as the agents make them."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

Content = bytes | dict[str, bytes]


@dataclass
class Sites:
    """Files and folders by cluster and path; a cluster that is ``away`` answers nothing."""

    content: dict[tuple[str, str], Content | SiteRejected] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def ask_agent(self, cluster: str, what: str, payload: dict[str, Any], timeout: float = 0.0) -> dict[str, Any]:
        path = payload["path"]
        self.asked.append((cluster, path))
        if cluster in self.away:
            raise SiteUnavailable(f"{cluster} is out of reach", hint="try again when its agent is connected")
        found = self.content.get((cluster, path))
        if found is None:
            raise SiteRejected(f"{path} is not there", fault=SiteFault.MISSING)
        if isinstance(found, SiteRejected):
            raise found
        if isinstance(found, bytes):
            return {"path": path, "size": len(found), "checksum": sha(found), "parts": None}
        parts = [{"name": name, "size": len(data), "checksum": sha(data)} for name, data in sorted(found.items())]
        text = "".join(f"file {part['checksum']} {part['name']}\0" for part in parts)
        return {"path": path, "size": sum(map(len, found.values())), "checksum": sha(text.encode()), "parts": parts}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
