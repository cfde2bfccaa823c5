"""Runners that are played in the event loop: they speak the protocol of ``koalapy/runner``, and run no program."""

import asyncio
import base64
import json
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from koalapy.agent.runners.runners import RunnerConnection, lrm_name
from koalapy.runner.lease import SilenceClock, renewal_interval
from koalapy.runner.session import TAG_LENGTH, Line, Session, derive_key
from koalapy.system.clock import Clock

RECONNECT_S = 1.0


class Port:
    """The port of a cluster's agent for runners, in place of a listening socket."""

    def __init__(self, connection: Callable[[], RunnerConnection]) -> None:
        self._make = connection
        self.context = copy_context()
        """In which the agent's code runs."""
        self.sockets = [self]
        self.is_open = True
        self._ends: list[RunnerEnd] = []

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def close(self) -> None:
        self.is_open = False

    def accept(self, end: "RunnerEnd") -> None:
        end.connection, end.context = self._make(), self.context
        self._ends.append(end)
        self.context.copy().run(end.connection.connection_made, end)

    def break_all(self) -> None:
        self.close()
        for end in self._ends:
            end.abort()


class RunnerEnd:
    """The transport of an agent's connection to a runner, and the runner's socket."""

    def __init__(self) -> None:
        self.connection: RunnerConnection | None = None
        self.context = copy_context()
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._buffer = b""
        self._is_closed = False

    # The agent's transport

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            asyncio.get_running_loop().call_soon(self._arrive, bytes(data))

    def _arrive(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self.lines.put_nowait(line)

    def abort(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.lines.put_nowait(None)
            assert self.connection is not None
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None, context=self.context.copy())

    close = abort

    def is_closing(self) -> bool:
        return self._is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 2) if name == "peername" else self

    def setsockopt(self, *_: object) -> None:
        return

    # The runner's side

    def say(self, data: bytes) -> None:
        if not self._is_closed:
            asyncio.get_running_loop().call_soon(self._say, data, context=self.context.copy())

    def _say(self, data: bytes) -> None:
        if not self._is_closed:
            self.connection.data_received(data)  # type: ignore[union-attr]


@dataclass
class Program:
    """What the program of one node did, as the node itself knows it."""

    token: str
    node: int
    host: str
    lrm_job: str
    run_id: str
    begin: float | None = None
    end: float | None = None
    code: int | None = None
    output: bytes = b""


@dataclass
class PlayedRunner:
    """The runner of one node of a component."""

    instance: str
    program: Program
    find_port: Callable[[], Port | None]
    key: bytes
    clock: Clock
    duration_s: float
    exit_code: int
    life: str
    phase: str = "waiting"
    result: dict[str, Any] | None = None
    start: int = 0
    warned: bool = False
    _lease: float | None = None
    _end: RunnerEnd | None = None
    _session: Session | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Serve the agent until it acknowledges the result. Return the exit code for the resource manager."""
        self._silence = SilenceClock(self.clock.since_boot(), self.clock.since_boot)
        name = lrm_name(self.instance, self.program.token)
        secret = derive_key(self.key, "runner", name, str(self.program.node))
        watching = asyncio.create_task(self._watch_lease())
        attempt = 0
        try:
            while True:
                attempt += 1
                if (port := self.find_port()) is not None and port.is_open:
                    end = self._end = RunnerEnd()
                    port.accept(end)
                    if await self._converse(end, name, secret, f"{attempt:064x}"):
                        return 0
                    end.abort()
                    self._end = self._session = None
                await asyncio.sleep(RECONNECT_S)
        finally:
            watching.cancel()
            self._stop_program(None)
            if self._end is not None:
                self._end.abort()

    async def _converse(self, end: RunnerEnd, name: str, secret: bytes, nonce: str) -> bool:
        """Speak with the agent until the connection ends; return whether it has taken the result."""
        end.say(
            json.dumps({"t": "hello", "component": name, "node": self.program.node, "nonce": nonce}).encode() + b"\n"
        )
        challenge = await end.lines.get()
        if challenge is None:
            return False
        nonces = nonce, json.loads(challenge[TAG_LENGTH:])["nonce"]
        self._session = Session(secret, name, self.program.node, nonces, is_agent=False)
        self._session.open(challenge)
        number = self._silence.start_query()
        self._say(
            t="here", life=self.life, host=self.program.host, name=self.program.host, phase=self.phase,
            lrm_job=self.program.lrm_job, start=self.start, warned=self.warned, streams=True, renew=number,
        )  # fmt: skip
        while (sealed := await end.lines.get()) is not None:
            message = json.loads(self._session.open(sealed))
            match message["t"]:
                case "welcome":
                    self._lease = message["lease"]
                    if message.get("silence") is not None:
                        self._silence.record_answer(number, message["silence"])
                    self.start = message["output"]
                    self._send_rest()
                case "lease" if message.get("silence") is not None:
                    self._silence.record_answer(message["number"], message["silence"])
                case "open" if self.phase == "waiting":
                    self._start_program()
                case "output":
                    self.start = max(self.start, message["offset"])
                case "stop" if self.result is None:
                    self._conclude(None, stopped=True)
                case "refused":
                    return True
                case "exit_ack" if self.phase == "ended":
                    return True
        return False

    def _say(self, **message: Any) -> None:
        if self._session is not None and self._end is not None:
            self._end.say(self._session.seal(Line(json.dumps(message).encode())))

    def _send_rest(self) -> None:
        if self._session is None:
            return
        if rest := self.program.output[self.start :]:
            self._say(t="out", offset=self.start, data=base64.b64encode(rest).decode())
        if self.phase == "ended":
            self._say(t="exit", **(self.result or {}))

    def _start_program(self) -> None:
        self.phase, self.program.begin = "running", self.clock.now()
        self.program.output = f"begin {self.program.token} {self.program.node}\n".encode()
        self._say(t="running")
        self._send_rest()
        self._timer = asyncio.get_running_loop().call_later(self.duration_s, self._conclude, self.exit_code)

    def _conclude(self, code: int | None, error: str = "", *, stopped: bool = False) -> None:
        if self.result is not None:
            return
        self.result = {"code": code, "error": error, "infrastructure": bool(error), "stopped": stopped, "warned": False}
        self._stop_program(code)
        self.phase = "ended"
        self._send_rest()

    def _stop_program(self, code: int | None) -> None:
        if self.program.begin is not None and self.program.end is None:
            self.program.end, self.program.code = self.clock.now(), code
            self.program.output += b"end\n" if code is not None else b""

    async def _watch_lease(self) -> None:
        """Renew the lease, and end the program when it is over."""
        while True:
            await asyncio.sleep(renewal_interval(self._lease))
            if self._lease is not None and self._silence.silence > self._lease:
                self._conclude(None, "its lease is over")
            elif self.result is None:
                self._say(t="renew", number=self._silence.start_query())
