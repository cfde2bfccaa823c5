"""The order in which threads write to a SQLite database."""

import os
import threading

import pytest

from koalapy.model.errors import StoreUnavailable
from koalapy.store.lease import Turns


def test_threads_write_in_the_order_in_which_they_came() -> None:
    turns, order = Turns(), list[int]()

    def write(number: int) -> None:
        with turns.next_turn():
            order.append(number)

    threads = []
    with turns.next_turn():
        for number in range(5):
            threads.append(threading.Thread(target=write, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:
                os.sched_yield()
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    with turns.next_turn():
        order.append(5)


def test_turn_after_an_endless_transaction_is_given_up() -> None:
    turns = Turns(timeout_s=0.0)
    with turns.next_turn(), pytest.raises(StoreUnavailable, match="another transaction"), turns.next_turn():
        pass
    with turns.next_turn():
        pass
