"""Epochs and job numbers that agents know and a restored database does not."""

from pathlib import Path

import pytest

from deploy.documentation.evidence_page import SECURITY
from koalapy.daemon.agents.hub import MAX_EPOCHS_AHEAD
from koalapy.daemon.jobs.submissions import MAX_JOBS_AHEAD
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.protocol import messages as wire
from tests.daemon.test_hub import Agent, connect_agent, report_nodes, running_daemon, wait_for_state
from tests.daemon.test_jobs import SPEC
from tests.daemon.test_trust import ON_NORTH, Grid, received_messages, wait_for_job
from tests.identities import ADA


def make_known_daemon(epoch: int, life: str = "another", job: int = 0, instance: str = "test") -> wire.KnownDaemon:
    return wire.KnownDaemon(instance=instance, epoch=epoch, life=life, job=job)


async def read_welcome(agent: Agent) -> int:
    """Return the epoch of the daemon's welcome; 0 if it rejects the agent."""
    await wait_for_job(lambda: received_messages(agent, "welcome") or agent.closed)
    return int(received_messages(agent, "welcome")[0]["epoch"]) if received_messages(agent, "welcome") else 0


@pytest.mark.parametrize(
    ("known_daemons", "epoch"),
    [
        ([], 1),
        ([make_known_daemon(0)], 1),
        ([make_known_daemon(1, "own")], 1),
        ([make_known_daemon(1)], 2),
        ([make_known_daemon(7)], 8),
        ([make_known_daemon(7, "own")], 8),
        ([make_known_daemon(7, instance="of somebody else")], 1),
        ([make_known_daemon(9, instance="of somebody else"), make_known_daemon(3)], 4),
        ([make_known_daemon(MAX_EPOCHS_AHEAD + 1)], MAX_EPOCHS_AHEAD + 2),
        ([make_known_daemon(MAX_EPOCHS_AHEAD + 2)], 0),
    ],
)
async def test_epoch_is_raised_above_epoch_known_to_agent(
    tmp_path: Path, known_daemons: list[wire.KnownDaemon], epoch: int
) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north", *known_daemons) as north:
        assert await read_welcome(north) == epoch
        assert daemon.engine.epoch == daemon.store.epoch == max(1, epoch)
        if not epoch:
            assert north.closed == (
                f"the agent of north knows epoch {MAX_EPOCHS_AHEAD + 2}, and the daemon's is 1: "
                "if that is right, empty the agent's directory once nothing of it runs"
            )


async def test_commands_after_raised_epoch_have_new_ids(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north", make_known_daemon(6)) as north:
        assert await read_welcome(north) == 7
        await connect_agent(daemon, "north", north)
        await Grid(daemon, north, north).submit_job(1, ON_NORTH)
        (order,) = received_messages(north, "submit")
        assert order["epoch"] == 7
        assert order["id"] > 7 * 10**9


async def test_epoch_is_raised_once_per_cluster(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        for cluster, known_daemons, epoch in (
            ("north", 4, 5),
            ("south", 5, 6),
            ("north", 5, 6),
            ("north", 9, 0),
            ("south", 6, 0),
        ):
            async with daemon.agent_of(cluster, make_known_daemon(known_daemons)) as agent:
                assert await read_welcome(agent) == epoch
        async with daemon.agent_of("north", make_known_daemon(6, "own")) as agent:
            assert await read_welcome(agent) == 6, "epochs of this daemon raise nothing"


async def test_epoch_is_raised_when_the_database_is_available_again(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        daemon.engine.database.note_failure("engine", "the database is locked")
        async with daemon.agent_of("north", make_known_daemon(7)) as agent:
            assert not await read_welcome(agent)
            assert agent.closed == "the database is locked; nothing was changed"
        daemon.engine.database.note_success("engine")
        async with daemon.agent_of("north", make_known_daemon(7)) as agent:
            assert await read_welcome(agent) == 8


async def test_job_numbers_are_raised_above_those_of_agents(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        for cluster, job, following in (("north", 4, 5), ("south", 2, 6), ("north", 9, 7)):
            async with daemon.agent_of(cluster, make_known_daemon(0, job=job)) as agent:
                assert await read_welcome(agent)
                record, _ = await jobs.submit(SPEC, ADA)
                assert record.job.id == following, "later on it can know of none that are news to us"


def test_limits_of_numbers_are_those_of_the_threat_model() -> None:
    text = SECURITY.read_text()
    assert f"at most {MAX_JOBS_AHEAD:,} jobs and {MAX_EPOCHS_AHEAD:,} epochs in one run of the daemon" in text


async def test_job_number_too_far_ahead_is_rejected(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        async with daemon.agent_of("north", make_known_daemon(0, job=MAX_JOBS_AHEAD + 1)) as agent:
            assert not await read_welcome(agent)
            assert agent.closed.startswith(
                f"the agent of north knows job {MAX_JOBS_AHEAD + 1}, far above all jobs of the daemon: "
            )
            assert "first_job_number: 1000002" in daemon.hub.describe_agent("north").rejection.remedy  # type: ignore[union-attr]
        assert (await jobs.submit(SPEC, ADA))[0].job.id == 1


async def test_agents_raise_job_numbers_above_those_of_this_run_by_the_limit(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        assert (await daemon.jobs.submit(SPEC, ADA))[0].job.id == 1
        async with daemon.agent_of("north", make_known_daemon(0, job=MAX_JOBS_AHEAD + 1)) as north:
            assert await read_welcome(north)
        async with daemon.agent_of("south", make_known_daemon(0, job=MAX_JOBS_AHEAD + 1)) as south:
            assert await read_welcome(south), "it is no news"
        assert (await daemon.jobs.submit(SPEC, ADA))[0].job.id == MAX_JOBS_AHEAD + 2


async def test_unknown_component_is_forgotten_before_new_submits(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            await connect_agent(daemon, "north", north)
            (token,) = await Grid(daemon, north, north).submit_job(1, ON_NORTH)
        await wait_for_state(daemon, "north", ("unreachable", 4, "its agent is not connected"))
        async with daemon.agent_of("north") as north:
            ended_job, hanging = (
                ComponentStatus(token="1.1.0", state=ComponentState.ENDED),
                ComponentStatus(token="9.1.0.ff", state=ComponentState.RUNNING),
            )
            north.say_to_daemon(Inventory(components=(ended_job, hanging)), report_nodes(3))
            await wait_for_job(lambda: received_messages(north, "submit"))
            orders = [(m["type"], m["token"]) for m in north.heard if "epoch" in m and "token" in m]
            assert orders == [("forget", "1.1.0"), ("stop", "9.1.0.ff"), ("submit", token)]


@pytest.mark.evidence("G5")
async def test_job_numbers_of_several_agents_share_one_limit(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        jobs = daemon.jobs
        for cluster, job, epoch, is_let_in in (
            ("north", MAX_JOBS_AHEAD, MAX_EPOCHS_AHEAD, True),
            ("south", MAX_JOBS_AHEAD + 1, 0, False),
            ("south", 0, MAX_EPOCHS_AHEAD + 5, False),
        ):
            async with daemon.agent_of(cluster, make_known_daemon(epoch, job=job)) as agent:
                assert bool(await read_welcome(agent)) == is_let_in
        assert (await jobs.submit(SPEC, ADA))[0].job.id == MAX_JOBS_AHEAD + 1
