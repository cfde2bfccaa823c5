"""Combined lookups of idempotency keys. Each answer is newer than its request."""

import asyncio
import threading
from collections.abc import Collection

import pytest

from koalapy.daemon.engine.database import query
from koalapy.daemon.jobs.submissions import IdempotencyKeys
from koalapy.model.errors import StoreUnavailable
from koalapy.store.records import Submitted
from tests import signals


class Slow:
    """A store that answers after ``may_answer`` is released."""

    def __init__(self) -> None:
        self.known: dict[str, Submitted] = {}
        self.asked: list[set[str]] = []
        self.may_answer = threading.Semaphore(0)
        self.away = False

    def submitted(self, keys: Collection[str]) -> dict[str, Submitted]:
        self.asked.append(set(keys))
        assert self.may_answer.acquire(timeout=60)
        if self.away:
            raise StoreUnavailable("the database is away")
        return {key: self.known[key] for key in keys if key in self.known}


async def wait_for_questions(store: Slow, questions: int) -> None:
    await signals.until(lambda: len(store.asked) >= questions)


async def test_find_submission_during_query_joins_next_query() -> None:
    store = Slow()
    keys = IdempotencyKeys(store)  # type: ignore[arg-type]
    first = [asyncio.create_task(keys.find_submission(key)) for key in "ab"]
    await wait_for_questions(store, 1)
    store.known["c"] = Submitted("c", 3, "digest")
    later = [asyncio.create_task(keys.find_submission(key)) for key in "cdc"]
    await asyncio.sleep(0)
    later[1].cancel()
    store.may_answer.release(2)
    assert await asyncio.gather(*first) == [None, None]
    assert await asyncio.gather(later[0], later[2]) == [store.known["c"]] * 2
    assert store.asked == [{"a", "b"}, {"c", "d"}]


async def test_find_submission_failure_affects_its_callers_only() -> None:
    store = Slow()
    keys = IdempotencyKeys(store)  # type: ignore[arg-type]
    store.away = True
    failing = [asyncio.create_task(keys.find_submission(key)) for key in "ab"]
    await wait_for_questions(store, 1)
    store.may_answer.release()
    for lookup in failing:
        with pytest.raises(StoreUnavailable):
            await lookup
    store.away = False
    store.may_answer.release()
    assert await keys.find_submission("a") is None


async def test_find_submission_does_not_wait_for_long_reads() -> None:
    store, proceed = Slow(), threading.Event()
    store.may_answer.release()
    reads = [asyncio.create_task(query(proceed.wait)) for _ in range(20)]  # more than threads
    await asyncio.sleep(0)
    try:
        assert await IdempotencyKeys(store).find_submission("a") is None  # type: ignore[arg-type]
        assert not any(read.done() for read in reads)
    finally:
        proceed.set()
    assert all(await asyncio.gather(*reads))


async def test_find_submission_behind_hanging_query_raises_store_unavailable() -> None:
    store = Slow()
    keys = IdempotencyKeys(store)  # type: ignore[arg-type]
    finding = [asyncio.create_task(keys.find_submission(key)) for key in "abc"]
    await wait_for_questions(store, 1)
    with signals.hanging_threads():
        for task in finding:
            with pytest.raises(StoreUnavailable):
                await task
    assert len(store.asked) == 1, "they waited for their turn"
    store.known["d"] = Submitted("d", 4, "digest")
    store.may_answer.release(10)
    assert await keys.find_submission("d") == store.known["d"]
