"""Encode messages as JSON frames of bounded size."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from koalapy.protocol.messages import Message

MAX_FRAME_SIZE = 64 * 1024 * 1024
"""Bytes of a frame that an agent accepts from the daemon; a larger one costs the connection."""
MAX_AGENT_FRAME_SIZE = 24 * 1024 * 1024
"""Bytes of a frame that the daemon accepts from an agent: an inventory of 50,000 components, or a batch of 16 Mi
characters from an agent of an earlier version."""
MAX_HELLO_SIZE = 1024 * 1024
"""Bytes of the first frame of an agent, which has nothing but the hello: a few hundred bytes for each daemon that it
knows."""
MAX_BATCH_SIZE = 1024 * 1024
"""Characters of a frame with several messages, small enough that it does not delay other tasks; more are sent in
several frames."""


def join_frames(texts: Iterable[str]) -> Iterator[str]:
    """Yield encoded messages in frames of at most ``MAX_BATCH_SIZE``. A larger message gets a separate frame."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > MAX_BATCH_SIZE:
            yield f"[{','.join(batch)}]"
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    if batch:
        yield f"[{','.join(batch)}]"


def encode_frame(speaker: TypeAdapter[Any], messages: Sequence[Any]) -> str:
    """Encode messages as one frame; ``speaker``: ``from_agent`` or ``from_daemon``.

    Replace lone surrogates, which texts of resource managers and file systems may contain, so that they do not break
    the connection.
    """
    try:
        return speaker.dump_json(messages).decode()
    except PydanticSerializationError:
        plain = speaker.dump_python(messages)
        return json.dumps(plain, ensure_ascii=False, default=list).encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of an ``Open`` that is the same for all components of an attempt, encoded as JSON once."""

    job: int
    generation: int
    text: str = field(repr=False)

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Plan":
        return cls(content["job"], content["generation"], _encode_json(content))

    @property
    def key(self) -> tuple[int, int]:
        return self.job, self.generation


PLAN = "plan"
"""The key of a command's ``Plan``, which the frame replaces by the plan's content."""


def command_frames(messages: Iterable[dict[str, Any] | Message], *, joins_opens: bool = False) -> Iterator[str]:
    """Return the daemon's messages in frames.

    Stored messages are dictionaries, which are not validated again. ``joins_opens``: the agent accepts ``Open.others``.
    """
    return join_frames(map(_command_text, _join_opens(messages) if joins_opens else messages))


def _join_opens(messages: Iterable[dict[str, Any] | Message]) -> Iterator[dict[str, Any] | Message]:
    """Replace successive ``Open`` of an attempt by the first, with the others in its field ``others``."""
    for plan, group in groupby(messages, find_plan):
        if plan is None:
            yield from group
            continue
        first, *following = [message for message in group if isinstance(message, dict)]
        fields = ("id", "token", "script")
        joined = [{name: message[name] for name in fields if name in message} for message in following]
        yield {**first, "others": joined} if joined else first


def find_plan(message: dict[str, Any] | Message) -> Plan | None:
    """Return the plan of an ``Open``; None for any other message."""
    plan = message.get(PLAN) if isinstance(message, dict) else None
    return plan if isinstance(plan, Plan) else None


def _command_text(message: dict[str, Any] | Message) -> str:
    plan = find_plan(message)
    if plan is None:
        return _encode_json(message)
    fields = {name: value for name, value in message.items() if name != PLAN}  # type: ignore[union-attr]
    return f"{_encode_json(fields)[:-1]},{plan.text[1:]}"


def _encode_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=Message.model_dump)
    return text.encode(errors="replace").decode()
