"""The daemon's questions about reserved nodes, and jobs that use them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.port import PolledLrm
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.virtual_time import EPOCH

NAME = "koala-0123456789ab-7"
T = "7.1.0"
FAR = EPOCH + 1e6
ORDER: dict[str, Any] = {"name": NAME, "nodes": 2, "begins": FAR, "ends": FAR + 3600, "accounts": [""]}


async def test_reserve_list_and_release(daemon: FakeDaemon, agent: Path, lrm: MemoryLrm) -> None:
    assert (await daemon.ask_agent("north", "reserve", **ORDER))["payload"] == {"nodes": ["n0", "n1"]}
    order = lrm.reservations[NAME]
    assert (order.nodes, order.begins, order.ends, order.accounts) == (2, FAR, FAR + 3600, ("",))
    lrm.reservations["koala-0123456789ac-7"] = order
    listing = await daemon.ask_agent("north", "reservations", prefix="koala-0123456789ab-")
    assert listing["payload"] == {"names": [NAME]}
    for _ in range(2):
        assert (await daemon.ask_agent("north", "unreserve", name=NAME))["error"] == ""
    assert set(lrm.reservations) == {"koala-0123456789ac-7"}
    assert daemon.received("hello")[0]["reserves"] is True


async def test_reserve_repeated_after_lost_answer_returns_the_same(
    daemon: FakeDaemon, agent: Path, lrm: MemoryLrm
) -> None:
    lrm.is_answering.clear()
    asking = [asyncio.create_task(daemon.ask_agent("north", "reserve", **{**ORDER, "nodes": n})) for n in (2, 1)]
    await lrm.is_reserving.wait()
    lrm.is_answering.set()
    assert [answer["payload"] for answer in await asyncio.gather(*asking)] == [{"nodes": ["n0", "n1"]}] * 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": value}, "name")
        for value in ("", "r", NAME + " Flags=MAINT", NAME + "\n", "koala-0123456789AB-7", "koala-0123456789ab-", 7)
    ]
    + [({"nodes": value}, "nodes") for value in (0, -1, 10**7, True, "2", None)]
    + [({"begins": value}, "begins") for value in (-1, 5e9, "now", None)]
    + [({"ends": FAR}, "not after begins"), ({"accounts": []}, "accounts"), ({"accounts": ["a"] * 101}, "accounts")]
    + [({"begins": 1.0, "ends": 2.0}, "by the clock of this host it would have ended")],
)
async def test_reserve_of_invalid_order_is_rejected(
    daemon: FakeDaemon, agent: Path, lrm: MemoryLrm, changes: dict[str, Any], error: str
) -> None:
    answer = await daemon.ask_agent("north", "reserve", **(ORDER | changes))
    assert error in answer["error"]
    assert lrm.reservations == {}


@pytest.mark.parametrize("prefix", ["", "koala-", "koala-0123456789ab-7", None])
async def test_list_with_invalid_prefix_is_rejected(daemon: FakeDaemon, agent: Path, prefix: object) -> None:
    assert "prefix" in (await daemon.ask_agent("north", "reservations", prefix=prefix))["error"]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (SiteRejected("Requested nodes are busy", hint="another time"), "refused"),
        (SiteUnavailable("slurmctld did not answer"), "unavailable"),
    ],
)
async def test_reserve_error_has_words_of_site(
    daemon: FakeDaemon, agent: Path, lrm: MemoryLrm, error: SiteRejected | SiteUnavailable, fault: str
) -> None:
    lrm.error = error
    answer = await daemon.ask_agent("north", "reserve", **ORDER)
    assert (answer["error"].startswith(error.message), answer["fault"]) == (True, fault)


async def test_lrm_without_reservations_rejects_them() -> None:
    class OtherLrm(PolledLrm):
        product = "a DRMAA library"

    with pytest.raises(SiteRejected, match="driven by a DRMAA library cannot reserve nodes"):
        await OtherLrm(1.0).reserve_nodes(None)  # type: ignore[arg-type,abstract]


async def test_submit_with_reservation_keeps_it_over_agent_restart(daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm = MemoryLrm()
    lrm.submit_rejection = SiteUnavailable("no answer")
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.wait_for_ack(await daemon.submit_component(T, reservation=NAME))
    lrm.submit_rejection = None
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(lrm.submissions))
    assert [submission.reservation for submission in lrm.submissions] == [NAME]


async def test_submit_with_invalid_reservation_is_rejected(daemon: FakeDaemon, agent: Path, lrm: MemoryLrm) -> None:
    ident = await daemon.submit_component(T, reservation="x --exclusive")
    assert await daemon.wait_for_ack(ident) == "'x --exclusive' is not a valid name of a reservation"
    assert lrm.submissions == []
