"""An event loop whose virtual time and order of callbacks depend on nothing but a seed."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch
from uuid import UUID

from tests.virtual_time import EPOCH, VirtualTimeLoop


class SingleThreadLoop(VirtualTimeLoop):
    """Run the work of all executors at once, in the loop's own thread."""

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            future.set_exception(error)
        return future


@contextmanager
def repeatable_process(loop: VirtualTimeLoop, seed: int) -> Iterator[None]:
    """Replace the clocks, the random numbers and the identifiers of this process by those of a schedule."""
    state, numbers = random.getstate(), count(1)
    random.seed(seed)
    try:
        with (
            patch.object(time, "time", lambda: EPOCH + loop.time()),
            patch.object(time, "monotonic", loop.time),
            patch.object(time, "thread_time", lambda: 0.0),
            patch("uuid.uuid4", lambda: UUID(int=next(numbers))),
            patch("koalapy.agent.runners.uplink.uuid4", lambda: UUID(int=next(numbers))),
        ):
            yield
    finally:
        random.setstate(state)
