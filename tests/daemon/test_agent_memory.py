"""Agents know of a daemon's past what its database may have forgotten."""

from pathlib import Path

import pytest

from koalapy.daemon.agents.hub import MAX_EPOCHS_AHEAD
from koalapy.daemon.jobs.jobs import MAX_JOBS_AHEAD
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.protocol import messages as wire
from tests.daemon.test_hub import Agent, report, running, until
from tests.daemon.test_jobs import SPEC
from tests.daemon.test_trust import ON_NORTH, Grid, heard, when
from tests.identities import ADA


def known(epoch: int, life: str = "another", job: int = 0, instance: str = "test") -> wire.KnownDaemon:
    return wire.KnownDaemon(instance=instance, epoch=epoch, life=life, job=job)


async def welcomed(agent: Agent) -> int:
    """The epoch with which an agent is let in; 0 when it is not."""
    await when(lambda: heard(agent, "welcome") or agent.closed)
    return int(heard(agent, "welcome")[0]["epoch"]) if heard(agent, "welcome") else 0


@pytest.mark.parametrize(
    ("told", "epoch"),
    [
        ([], 1),
        ([known(0)], 1),
        ([known(1, "own")], 1),
        ([known(1)], 2),
        ([known(7)], 8),
        ([known(7, "own")], 8),
        ([known(7, instance="of somebody else")], 1),
        ([known(9, instance="of somebody else"), known(3)], 4),
        ([known(MAX_EPOCHS_AHEAD + 1)], MAX_EPOCHS_AHEAD + 2),
        ([known(MAX_EPOCHS_AHEAD + 2)], 0),
    ],
)
async def test_the_epoch_is_above_all_that_an_agent_has_seen(
    tmp_path: Path, told: list[wire.KnownDaemon], epoch: int
) -> None:
    async with running(tmp_path / "koala.db") as daemon, daemon.agent_of("north", *told) as north:
        assert await welcomed(north) == epoch
        assert daemon.engine.epoch == daemon.store.epoch == max(1, epoch)
        if not epoch:
            assert north.closed == (
                f"the agent of north knows epoch {MAX_EPOCHS_AHEAD + 2}, and the daemon's is 1: "
                "if that is right, empty the agent's directory once nothing of it runs"
            )


async def test_commands_carry_the_higher_epoch_and_ids_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon, daemon.agent_of("north", known(6)) as north:
        assert await welcomed(north) == 7
        north.says(Inventory(components=()), report(4))
        await until(daemon, "north", ("usable", 4, ""))
        await Grid(daemon, north, north).submit(1, ON_NORTH)
        (order,) = heard(north, "submit")
        assert order["epoch"] == 7
        assert order["id"] > 7 * 10**9


async def test_each_cluster_raises_the_epoch_once(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        for cluster, told, epoch in (
            ("north", 4, 5),
            ("south", 5, 6),
            ("north", 5, 6),
            ("north", 9, 0),
            ("south", 6, 0),
        ):
            async with daemon.agent_of(cluster, known(told)) as agent:
                assert await welcomed(agent) == epoch
        async with daemon.agent_of("north", known(6, "own")) as agent:
            assert await welcomed(agent) == 6, "what it has from us is not a news"


async def test_jobs_are_numbered_above_all_that_agents_know(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        for cluster, job, following in (("north", 4, 5), ("south", 2, 6), ("north", 9, 7)):
            async with daemon.agent_of(cluster, known(0, job=job)) as agent:
                assert await welcomed(agent)
                record, _ = await jobs.submit(SPEC, ADA)
                assert record.job.id == following, "later on it can know of none that are news to us"


async def test_a_number_far_above_all_is_not_believed(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        async with daemon.agent_of("north", known(0, job=MAX_JOBS_AHEAD + 1)) as agent:
            assert not await welcomed(agent)
            assert agent.closed.startswith(
                f"the agent of north knows job {MAX_JOBS_AHEAD + 1}, far above all jobs of the daemon: "
            )
        assert (await jobs.submit(SPEC, ADA))[0].job.id == 1


async def test_what_nobody_knows_is_gone_before_anything_new_is_submitted(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            north.says(Inventory(components=()), report(4))
            await until(daemon, "north", ("usable", 4, ""))
            (token,) = await Grid(daemon, north, north).submit(1, ON_NORTH)
        await until(daemon, "north", ("unreachable", 4, "its agent is not connected"))
        async with daemon.agent_of("north") as north:
            over, hanging = (
                ComponentStatus(token="1.1.0", state=ComponentState.ENDED),
                ComponentStatus(token="9.1.0.ff", state=ComponentState.RUNNING),
            )
            north.says(Inventory(components=(over, hanging)), report(3))
            await when(lambda: heard(north, "submit"))
            orders = [(m["type"], m["token"]) for m in north.heard if "epoch" in m and "token" in m]
            assert orders == [("forget", "1.1.0"), ("stop", "9.1.0.ff"), ("submit", token)]


@pytest.mark.evidence("G5")
async def test_agents_raise_numbers_together_by_no_more_than_one_may(tmp_path: Path) -> None:
    async with running(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        for cluster, job, epoch, is_let_in in (
            ("north", MAX_JOBS_AHEAD, MAX_EPOCHS_AHEAD, True),
            ("south", MAX_JOBS_AHEAD + 1, 0, False),
            ("south", 0, MAX_EPOCHS_AHEAD + 5, False),
        ):
            async with daemon.agent_of(cluster, known(epoch, job=job)) as agent:
                assert bool(await welcomed(agent)) == is_let_in
        assert (await jobs.submit(SPEC, ADA))[0].job.id == MAX_JOBS_AHEAD + 1
