"""Questions between agents, and from the daemon to an agent."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import structlog
from pydantic import ValidationError

from koalapy.agent.runners.uplink import Uplink
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.protocol.messages import Answer, Ask
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

ANSWER_TIMEOUT = 20.0
"""Seconds that another agent has to answer while this one is connected."""
RECONNECT_ALLOWANCE = 120.0
"""Seconds after a reconnect in which other agents may still be offline: a daemon restart disconnects all."""
REPEAT_INTERVAL = 5.0
"""Seconds after which a question without an answer is sent again."""

ASKER = "asker"
"""Key of every payload: the asking agent's cluster, set by the daemon; empty for the daemon itself."""
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Answers the payload of a question. Raises ``SiteError`` if it cannot."""


class Questions:
    """The questions that this agent asks other agents, and those of other agents and the daemon that it answers."""

    def __init__(self, uplink: Uplink, handlers: Mapping[str, Handler], clock: Clock = SYSTEM_CLOCK) -> None:
        """Set up. ``handlers`` by the kind of question that each answers."""
        self._uplink, self._handlers, self._clock = uplink, handlers, clock
        self._asking: dict[str, asyncio.Future[Answer]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    @property
    def is_recently_connected(self) -> bool:
        """Return whether other agents may still be reconnecting, since this one did so just now."""
        return self._clock.monotonic() - self._uplink.online_since < RECONNECT_ALLOWANCE

    async def ask_cluster(
        self, cluster: str, kind: str, payload: Mapping[str, object], timeout: float = ANSWER_TIMEOUT
    ) -> dict[str, Any]:
        """Return the answer of another cluster's agent.

        Raise ``SiteUnavailable`` if it does not answer, ``SiteRejected`` if it rejects the question. Time without a
        connection does not count towards the timeout.
        """
        ident = uuid4().hex
        question = Ask(ident=ident, what=kind, payload=dict(payload), cluster=cluster)
        answer_future = self._asking[ident] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(max(1, round(timeout / REPEAT_INTERVAL))):
                await self._uplink.online.wait()
                self._uplink.send_soon(question, urgent=True)
                finished, _ = await asyncio.wait((answer_future,), timeout=min(REPEAT_INTERVAL, timeout))
                if finished:
                    break
            else:
                raise SiteUnavailable(f"{cluster} has not answered for {timeout:g} s")
        finally:
            del self._asking[ident]
        answer = answer_future.result()
        if answer.fault in (SiteFault.UNAVAILABLE, SiteFault.LOST):
            raise SiteUnavailable(answer.error or "no answer")
        if answer.error:
            raise SiteRejected(answer.error, fault=answer.fault or SiteFault.REFUSED)
        return dict(answer.payload)

    def receive_answer(self, message: Answer) -> None:
        """Pass an answer to the call that waits for it. Ignore late ones."""
        waiting = self._asking.get(message.ident)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def answer_question(self, message: Ask) -> None:
        """Answer a question, however long that takes. Ignore repetitions of a question that is being answered."""
        if message.ident not in self._answering:
            task = asyncio.create_task(self._send_answer(message))
            self._answering[message.ident] = task
            task.add_done_callback(lambda task: self._finish_answer(message, task))

    def _finish_answer(self, message: Ask, task: "asyncio.Task[None]") -> None:
        """Unregister an answered question. If its handler crashed, log that and send an error as the answer."""
        del self._answering[message.ident]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(
                "question failed by an error in the agent", action="question-failed", what=message.what, exc_info=error
            )
            text = f"{type(error).__name__}: {error}"
            refusal = Answer(ident=message.ident, cluster=message.cluster, error=text, fault=SiteFault.REFUSED)
            self._uplink.send_soon(refusal, urgent=True)

    async def stop_answering(self) -> None:
        """Cancel all answers that are being computed, and wait for their end."""
        for task in list(self._answering.values()):
            task.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    async def _send_answer(self, message: Ask) -> None:
        """Run the handler of a question and send its answer, or the error that it raised."""
        answer = Answer(ident=message.ident, cluster=message.cluster)
        handler = self._handlers.get(message.what)
        try:
            if handler is None:
                raise SiteRejected(
                    f"this agent does not support the question {message.what!r}", fault=SiteFault.UNKNOWN
                )
            answer = answer.model_copy(
                update={"payload": dict(await handler({**message.payload, ASKER: message.cluster}))}
            )
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            answer = answer.model_copy(update={"error": f"{field}: {first['msg']}", "fault": SiteFault.INVALID})
        except SiteError as error:
            text = f"{error.message}: {error.hint}" if error.hint else error.message
            fault = error.fault if isinstance(error, SiteRejected) else SiteFault.UNAVAILABLE
            answer = answer.model_copy(update={"error": text, "fault": fault})
        except OSError as error:
            log.warning("question failed", action="question-failed", what=message.what, reason=str(error))
            answer = answer.model_copy(update={"error": error.strerror or str(error), "fault": SiteFault.UNAVAILABLE})
        self._uplink.send_soon(answer, urgent=True)
