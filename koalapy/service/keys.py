"""Idempotency keys looked up in the store: those together that are asked for at the same time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from koalapy.model.errors import StoreUnavailable
from koalapy.ports import Store, Submitted
from koalapy.service.database import READING, asked


@dataclass(slots=True)
class Question:
    """Keys that will be asked for in one go."""

    keys: set[str] = field(default_factory=set)
    asking: "asyncio.Task[Mapping[str, Submitted]] | None" = None


class Keys:
    """One question to the store at a time; who comes meanwhile is in the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._next: Question | None = None

    async def find(self, key: str) -> Submitted | None:
        """What a key was used for, as of now; ``StoreUnavailable``."""
        question = self._next
        if question is None:
            self._next = question = Question()
            question.asking = asyncio.ensure_future(self._ask(question))
        question.keys.add(key)
        assert question.asking is not None
        return (await asyncio.shield(question.asking)).get(key)

    async def _ask(self, question: Question) -> Mapping[str, Submitted]:
        await asyncio.sleep(0)  # for those who are there at this very moment
        try:
            async with asyncio.timeout(READING), self._turn:
                self._next = None
                return await asked(self._store.submitted, question.keys)
        except TimeoutError:
            raise StoreUnavailable(f"the database has not answered for {READING:g} s", hint="ask again later") from None
        finally:
            if self._next is question:
                self._next = None
