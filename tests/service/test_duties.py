"""What comes by the calendar is done, however it is said."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from koalapy.service.duties import Duties, Duty


def test_a_duty_is_done_that_only_returns_what_is_to_be_awaited() -> None:
    async def play() -> None:
        done = asyncio.Event()

        async def work() -> None:
            done.set()

        rules = SimpleNamespace(scan_interval=1000.0)
        engine: Any = SimpleNamespace(queries=SimpleNamespace(rules=rules), database=SimpleNamespace())
        duties = Duties(engine, cast(Any, None), lambda: None, [Duty("audit", 0.01, lambda: work())])
        duties.start()
        try:
            async with asyncio.timeout(30):
                await done.wait()
        finally:
            duties.stop()

    asyncio.run(play())
