"""Idempotency keys looked up in the store: those together that are asked for at the same time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from koalapy.daemon.engine.database import QUERY_TIMEOUT, query
from koalapy.model.errors import StoreUnavailable
from koalapy.ports import Store, Submitted


@dataclass(slots=True)
class Lookup:
    """Keys that will be asked for in one go."""

    keys: set[str] = field(default_factory=set)
    asking: "asyncio.Task[Mapping[str, Submitted]] | None" = None


class IdempotencyKeys:
    """What keys were used for: one lookup in the store at a time, and who comes meanwhile is in the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._next: Lookup | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock is kept by those who have it and those who wait for it."""

    def lock(self, key: str) -> asyncio.Lock:
        """Held by a submission under way, so that two with one key do not both become jobs."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def find(self, key: str) -> Submitted | None:
        """What a key was used for, as of now; ``StoreUnavailable``."""
        lookup = self._next
        if lookup is None:
            self._next = lookup = Lookup()
            lookup.asking = asyncio.ensure_future(self._ask(lookup))
        lookup.keys.add(key)
        assert lookup.asking is not None
        return (await asyncio.shield(lookup.asking)).get(key)

    async def _ask(self, lookup: Lookup) -> Mapping[str, Submitted]:
        await asyncio.sleep(0)  # for those who are there at this very moment
        try:
            async with asyncio.timeout(QUERY_TIMEOUT), self._turn:
                self._next = None
                return await query(self._store.submitted, lookup.keys)
        except TimeoutError:
            raise StoreUnavailable(
                f"the database has not answered for {QUERY_TIMEOUT:g} s", hint="ask again later"
            ) from None
        finally:
            if self._next is lookup:
                self._next = None
