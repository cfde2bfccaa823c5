"""Look up idempotency keys in the store, those requested at the same time in one query."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from koalapy.daemon.engine.database import QUERY_TIMEOUT_S, query
from koalapy.model.errors import ConflictError, ProblemCode, StoreUnavailable
from koalapy.ports import Store, Submitted


def check_same_submission(first: Submitted, digest: str, key: str) -> None:
    """Raise ``ConflictError`` if a submission differs from the first one with its key. ``digest``: its hash."""
    if digest != first.digest:
        raise ConflictError(
            f"the Idempotency-Key was used for job {first.job}, whose specification differs",
            field="Idempotency-Key",
            value=key,
            hint="use a new key for a new job",
            code=ProblemCode.IDEMPOTENCY_KEY_REUSED,
        )


@dataclass(slots=True)
class Lookup:
    """The keys of one query."""

    keys: set[str] = field(default_factory=set)
    task: "asyncio.Task[Mapping[str, Submitted]] | None" = None


class IdempotencyKeys:
    """The submissions of idempotency keys. One query runs at a time; the next looks up all keys requested meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._next: Lookup | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks that are held or waited for; others are discarded."""

    def lock_of(self, key: str) -> asyncio.Lock:
        """Return the lock that prevents two concurrent submissions with one key from becoming two jobs."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def find_submission(self, key: str) -> Submitted | None:
        """Return the submission of a key, or None. Raise ``StoreUnavailable`` on timeout."""
        lookup = self._next
        if lookup is None:
            self._next = lookup = Lookup()
            lookup.task = asyncio.ensure_future(self._run_lookup(lookup))
        lookup.keys.add(key)
        assert lookup.task is not None
        return (await asyncio.shield(lookup.task)).get(key)

    async def _run_lookup(self, lookup: Lookup) -> Mapping[str, Submitted]:
        """Return the earlier submissions of all keys that were requested meanwhile, by one query."""
        await asyncio.sleep(0)  # collect the keys of all tasks that are ready
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S), self._turn:
                self._next = None
                return await query(self._store.submitted, lookup.keys)
        except TimeoutError:
            raise StoreUnavailable(
                f"the database has not answered for {QUERY_TIMEOUT_S:g} s", hint="try again later"
            ) from None
        finally:
            if self._next is lookup:
                self._next = None
