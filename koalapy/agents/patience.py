"""Waiting for others, which we may do only while we are awake ourselves."""

import asyncio

SLEEP_SLICE = 0.5
"""Seconds."""


async def listened(seconds: float) -> None:
    """Wait until so many seconds have passed while this process ran: what came while it was stopped is read first."""
    loop = asyncio.get_running_loop()
    left = seconds
    while left > 0:
        pause, began = min(SLEEP_SLICE, left), loop.time()
        await asyncio.sleep(pause)
        if loop.time() - began < pause + SLEEP_SLICE:
            left -= pause
