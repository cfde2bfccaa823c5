"""The control socket of a hub or head, without streams."""

import asyncio
import json
from pathlib import Path
from typing import Any

HEAD = {"hub_connected": True, "certificate": "PEM", "listen": ["0.0.0.0", 8644], "listen_for_heads": None}
"""What a head describes of itself."""


class FakeRelay:
    """A control socket that records requests. The test sends the events."""

    def __init__(self, path: Path, description: dict[str, Any] | None = None) -> None:
        """``description``: a head's; a hub has none."""
        self.path, self.description = path, description or {}
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """All requests, except regular questions whether it answers."""
        self.attempts: dict[str, dict[str, Any]] = {}
        """The live attempts, as a relay would know them."""
        self.lost: dict[str, dict[str, Any]] = {}
        self.following: list[dict[str, Any]] = []
        """Events sent in one piece with the answer to a state."""
        self.rejected = {"wrong"}
        """Names of attempts whose requests are rejected."""
        self.rejected_kinds = set[str]()
        """Kinds of requests that a relay of another version does not know."""
        self.is_answering = True
        self.writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        """End as a process does: without a word, and with no memory of attempts."""
        assert self._server is not None
        self._server.close()
        if self.writer is not None:
            self.writer.close()
        self.attempts.clear()
        self.path.unlink(missing_ok=True)
        await asyncio.sleep(0)

    async def wait_for(self, kind: str) -> dict[str, Any]:
        """Return the next request of a kind. Drop those before it."""
        while (request := await self.requests.get())["t"] != kind:
            pass
        return request

    def send(self, event: dict[str, Any]) -> None:
        assert self.writer is not None
        self.writer.write(json.dumps(event).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            request = json.loads(line)
            if request["t"] != "describe":
                self.requests.put_nowait(request)
            if self.is_answering:
                messages = [{"id": request["id"], **self._answer(request)}]
                messages += self.following if request["t"] == "state" else []
                writer.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        writer.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["t"] in self.rejected_kinds:
            return {"t": "error", "why": "it is unknown"}
        match request["t"]:
            case "state":
                self.attempts = {entry["attempt"]: entry for entry in request["attempts"]}
                return {"t": "done", "lost": self.lost, **self.description}
            case "metrics":
                return {"t": "metrics", "text": "koala_relay_streams 1\n"}
            case "add" if request["attempt"]["attempt"] not in self.rejected:
                self.attempts[request["attempt"]["attempt"]] = request["attempt"]
            case "remove" if request["attempt"] not in self.rejected:
                self.attempts.pop(request["attempt"], None)
            case "describe":
                return {"t": "done", "lost": self.lost, **self.description}
            case _:
                return {"t": "error", "why": "it is wrong"}
        return {"t": "done"}
