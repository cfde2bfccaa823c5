"""The order in which threads write to a SQLite database."""

import os
import threading

import pytest

from koalapy.model.errors import StoreUnavailable
from koalapy.store.database import FairLock


def test_threads_write_in_the_order_in_which_they_came() -> None:
    lock, order = FairLock(), list[int]()

    def write(number: int) -> None:
        with lock.acquire():
            order.append(number)

    threads = []
    with lock.acquire():
        for number in range(5):
            threads.append(threading.Thread(target=write, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                os.sched_yield()
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    with lock.acquire():
        order.append(5)


def test_lock_behind_an_endless_transaction_is_given_up() -> None:
    lock = FairLock(timeout_s=0.0)
    with lock.acquire(), pytest.raises(StoreUnavailable, match="another transaction"), lock.acquire():
        pass
    with lock.acquire():
        pass
