"""Connect a runner to its agent: JSON over TCP, one message a line."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable

from koalapy.runner.connections import Credentials, LineTooLong, Loop, ParentLink, Refused, Side, begin_connecting
from koalapy.runner.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""Options that detect a lost host within half a minute, whether or not anything is sent to it."""
RECEIVE_SIZE = 64 * 1024
CONNECT_TIMEOUT = 3.0
MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0
"""Seconds between two attempts to connect."""


class Link:
    """The connection to the agent, which is re-established whenever it breaks."""

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        describe_runner: Callable[[], dict[str, Any]],
        receive: Callable[[dict[str, Any]], None],
    ) -> None:
        """``describe_runner`` is for an authenticated agent. ``receive`` handles its messages."""
        self._loop, self._settings, self._describe, self._receive = loop, settings, describe_runner, receive
        self._buffer = memoryview(bytearray(RECEIVE_SIZE))
        self._agent: ParentLink | None = None
        self._has_warned = False
        self._backoff = MIN_BACKOFF
        self.on_disconnect: Callable[[], None] = lambda: None
        """Called when the connection to an authenticated agent ends."""
        self.welcomed = False
        self.address = ""
        """This node's address on the last connection."""

    def connect(self) -> None:
        """Connect to the address in the agent's file, and begin authentication. Retry later if that fails."""
        settings = self._settings
        try:
            with open(settings.agent_file, encoding="utf-8") as file:
                address = json.load(file)
            try:
                connection, is_connecting = begin_connecting(address["host"], address["port"])
            finally:
                self._loop.awake()  # a resolver may take long
            for level, option, value in KEEPALIVE:
                connection.setsockopt(level, option, value)
        except (OSError, ValueError, LookupError, TypeError, OverflowError):  # the file may be damaged
            self._retry_later()
            return
        self.address = connection.getsockname()[0]
        self._agent = ParentLink(
            self._loop,
            Side(connection, is_connecting=is_connecting),
            self._buffer,
            Credentials(settings.secret, settings.component_name, settings.node, "component"),
            self._receive_message,
            self._lose_agent,
            describe=self._describe,
            max_line=sys.maxsize,
            max_output=sys.maxsize,
        )
        self._loop.set_alarm("connect", CONNECT_TIMEOUT, self._check_connected)
        self._agent.start()

    def reconnect(self) -> None:
        """Replace the connection, since a silent agent may have been replaced at another address."""
        self.close()
        self.connect()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it without a connection: important ones are repeated after the agent's welcome."""
        if self._agent is not None:
            self._agent.send(message)

    def close(self) -> None:
        """Close the connection and drop unsent messages, without planning another attempt."""
        self._loop.cancel_alarm("connect")  # else it would connect twice after a reconnection
        agent, self._agent, self.welcomed = self._agent, None, False
        if agent is not None:
            agent.close()
            if agent.channel is not None:
                self.on_disconnect()

    def _check_connected(self) -> None:
        if self._agent is not None and self._agent.is_connecting:
            self.close()
            self._retry_later()

    def _receive_message(self, message: dict[str, Any]) -> None:
        if message["t"] == "welcome":
            self.welcomed, self._backoff = True, MIN_BACKOFF
        self._receive(message)

    def _lose_agent(self, error: Exception) -> None:
        if isinstance(error, (Refused, LineTooLong)) and not self._has_warned:
            print(f"koala runner: the process at the agent's port is not our agent: {error}", file=sys.stderr)
            self._has_warned = True
        self.close()
        self._retry_later()

    def _retry_later(self) -> None:
        self._loop.set_alarm("connect", self._backoff, self.connect)
        self._backoff = min(MAX_BACKOFF, self._backoff * 2)
