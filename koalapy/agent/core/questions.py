"""Questions between agents, and from the daemon to an agent: who answers what, and how to ask another cluster's."""

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
"""Seconds that another agent has to answer, while we are connected."""
RECONNECT_ALLOWANCE = 120.0
"""Seconds after a connection was made in which others may not have theirs yet: a restart of the daemon breaks all."""
REPEAT_INTERVAL = 5.0
"""Seconds after which a question that may have got lost is asked again."""

ASKER = "asker"
"""What every payload says besides: which cluster's agent asks, by the daemon's word; empty for the daemon itself."""
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Answers a question's payload; ``SiteError`` when it cannot."""


class Questions:
    """Asks and answers over the agent's connection to the daemon."""

    def __init__(self, uplink: Uplink, handlers: Mapping[str, Handler], clock: Clock = SYSTEM_CLOCK) -> None:
        """``handlers`` by the kind of question that each answers."""
        self._uplink, self._handlers, self._clock = uplink, handlers, clock
        self._asking: dict[str, asyncio.Future[Answer]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    @property
    def is_recently_connected(self) -> bool:
        """Whether the daemon, or we, came only just now: other agents may still be on their way to it."""
        return self._clock.monotonic() - self._uplink.online_since < RECONNECT_ALLOWANCE

    async def ask_cluster(
        self, cluster: str, what: str, payload: Mapping[str, object], timeout: float = ANSWER_TIMEOUT
    ) -> dict[str, Any]:
        """What another cluster's agent answers; ``SiteUnavailable`` when it does not, ``SiteRejected`` when it refuses.

        While there is no connection we wait, and none of the timeout is lost.
        """
        ident = uuid4().hex
        question = Ask(ident=ident, what=what, payload=dict(payload), cluster=cluster)
        answered = self._asking[ident] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(max(1, round(timeout / REPEAT_INTERVAL))):
                await self._uplink.online.wait()
                self._uplink.send_soon(question, urgent=True)
                done, _ = await asyncio.wait((answered,), timeout=min(REPEAT_INTERVAL, timeout))
                if done:
                    break
            else:
                raise SiteUnavailable(f"{cluster} has not answered for {timeout:g} s")
        finally:
            del self._asking[ident]
        answer = answered.result()
        if answer.fault in (SiteFault.UNAVAILABLE, SiteFault.LOST):
            raise SiteUnavailable(answer.error or "no answer")
        if answer.error:
            raise SiteRejected(answer.error, fault=answer.fault or SiteFault.REFUSED)
        return dict(answer.payload)

    def receive_answer(self, message: Answer) -> None:
        waiting = self._asking.get(message.ident)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def answer_question(self, message: Ask) -> None:
        """Answer, however long that takes; a question that is repeated meanwhile is the same one."""
        if message.ident not in self._answering:
            task = asyncio.create_task(self._answer(message))
            self._answering[message.ident] = task
            task.add_done_callback(lambda task: self._answered(message, task))

    def _answered(self, message: Ask, task: "asyncio.Task[None]") -> None:
        del self._answering[message.ident]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("no answer by an error of ours", action="question-failed", what=message.what, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            refusal = Answer(ident=message.ident, cluster=message.cluster, error=text, fault=SiteFault.REFUSED)
            self._uplink.send_soon(refusal, urgent=True)

    async def stop_answering(self) -> None:
        for task in list(self._answering.values()):
            task.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    async def _answer(self, message: Ask) -> None:
        answer = Answer(ident=message.ident, cluster=message.cluster)
        handler = self._handlers.get(message.what)
        try:
            if handler is None:
                raise SiteRejected(f"this agent answers no question {message.what!r}", fault=SiteFault.UNKNOWN)
            answer = answer.model_copy(
                update={"payload": dict(await handler({**message.payload, ASKER: message.cluster}))}
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            answer = answer.model_copy(update={"error": f"{where}: {first['msg']}", "fault": SiteFault.INVALID})
        except SiteError as error:
            text = f"{error.message}: {error.hint}" if error.hint else error.message
            fault = error.fault if isinstance(error, SiteRejected) else SiteFault.UNAVAILABLE
            answer = answer.model_copy(update={"error": text, "fault": fault})
        except OSError as error:
            log.warning("cannot answer", action="question-failed", what=message.what, reason=str(error))
            answer = answer.model_copy(update={"error": error.strerror or str(error), "fault": SiteFault.UNAVAILABLE})
        self._uplink.send_soon(answer, urgent=True)
