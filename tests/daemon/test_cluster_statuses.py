"""Cluster statuses, saved by one daemon and restored by the next."""

from pathlib import Path

from koalapy.config.settings import ClusterSection, Settings
from koalapy.daemon.core import collect_clusters, describe_cluster
from koalapy.model.cluster import ClusterState, Drain
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.attempts.contact import RETURN_TIME
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.records import Batch, ClusterRecord, Saved
from koalapy.store.sql import JobStore
from tests.databases import migrate

SETTINGS = Settings(clusters={"north": ClusterSection(), "south": ClusterSection(speed=2.0)})


def saved_by(path: Path, *clusters: ClusterStatus) -> Saved:
    """Write these clusters to the database as the daemon does; return the saved data."""
    grid = GridStatus(clusters)
    engine = make_engine(f"sqlite:///{path / 'koala.db'}")
    migrate(engine)
    store = JobStore(Database(engine))
    store.write(
        Batch(
            at=1.0,
            epoch=store.epoch,
            clusters=[describe_cluster(SETTINGS, grid, path, cluster.name) for cluster in clusters],
        )
    )
    saved = store.load()
    store.release_lease()
    store.close()
    return saved


def make_statuses(settings: Settings, saved: Saved) -> list[ClusterStatus]:
    return [cluster.make_status() for cluster in collect_clusters(settings, saved)]


def stored_fields(cluster: ClusterStatus) -> tuple[object, ...]:
    return (
        cluster.last_report.total,
        cluster.health.errors,
        cluster.health.unusable,
        cluster.health.note,
        cluster.health.trials,
        cluster.drained,
    )


def test_cluster_unusable_without_agent_stays_unusable(tmp_path: Path) -> None:
    north = ClusterStatus("north")
    north.nodes.last_report = ClusterReport(4, 0)
    north.health.errors, north.health.unusable, north.health.trials = 5, True, 2
    north.health.note, north.contact.connected = "unusable after 5 errors in a row, the last: no shell", False
    assert north.state is ClusterState.UNREACHABLE
    again, south = make_statuses(SETTINGS, saved_by(tmp_path, north))
    assert stored_fields(again) == stored_fields(north)
    again.contact.connected = True
    assert (again.state, again.state_reason) == (ClusterState.UNUSABLE, north.health.summary)
    assert stored_fields(south) == stored_fields(ClusterStatus("south"))


def test_cluster_drained_keeps_state_and_errors_after_restart(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerState(Rules(), builtin_policies(), [north := ClusterStatus("north")]), nonces=str)
    north.health.errors, north.health.unusable, north.health.note = 3, True, "three errors"
    scheduler.step([ClusterDrained("north", "ops", "new switches")], 50.0)
    again = make_statuses(SETTINGS, saved_by(tmp_path, north))[0]
    assert stored_fields(again) == stored_fields(north)
    assert (again.drained, again.state) == (Drain(50.0, "ops", "new switches"), ClusterState.DRAINED)
    successor = Scheduler(SchedulerState(Rules(), builtin_policies(), [again]), nonces=str)
    assert successor.step([ClusterResumed("north")], 60.0).clusters == {"north"}
    resumed = make_statuses(SETTINGS, saved_by(tmp_path, again))[0]
    assert (resumed.drained, resumed.health.note) == (None, "three errors")


def test_cluster_removed_from_configuration_stays_while_used() -> None:
    attempt = Attempt(1, (Component(0, "west", 1),), placed_at=1.0)
    job = Job(1, JobSpec(FlexibleRequest(1), ("x",)), 0.0, JobState.CLAIMING, generation=1, attempt=attempt)
    record = ClusterRecord("east", "local", "usable", 4, 0, 0, 0, 0, 0, "", None, 1, 1.0)
    clusters = make_statuses(SETTINGS, Saved((job,), (), (record,), 2))
    assert [cluster.name for cluster in clusters] == ["north", "south", "west"]


def test_cluster_removed_from_configuration_loses_jobs_in_time() -> None:
    """The daemon rejects the agent of a removed cluster, so it receives no further report about the job."""
    component = Component(0, "west", 1, ComponentState.RUNNING, hosts=("w1",), lease=0.5)
    attempt = Attempt(1, (component,), placed_at=1.0, barrier_at=2.0, launched_at=3.0, nonce="a1")
    job = Job(1, JobSpec(FlexibleRequest(1), ("x",)), 0.0, JobState.RUNNING, generation=1, attempt=attempt)
    rules = Rules(unreachable_after=10.0)
    clusters = make_statuses(SETTINGS, Saved((job,), (), (), 2))
    scheduler = Scheduler(SchedulerState(rules, builtin_policies(), clusters), nonces=str)
    scheduler.restore([job], 100.0)
    jobs = {now: changed[1] for now in range(101, 140) if (changed := scheduler.step([], float(now)).jobs)}
    assert [job.state for job in jobs.values()] == [JobState.UNKNOWN, JobState.QUEUED]
    assert min(jobs) == 100 + RETURN_TIME
    again = jobs[max(jobs)]
    assert (again.generation, again.restarts) == (1, 1)


def test_cluster_details_contain_no_agent_token(tmp_path: Path) -> None:
    """The status includes the cluster's configuration and may be logged."""
    token = "shown-to-nobody-at-all"
    for section in (ClusterSection(token=token), ClusterSection(kind="slurm", token=token)):
        settings = Settings(clusters={"north": section})
        (north,) = make_statuses(settings, saved_by(tmp_path))
        assert section.token == token
        assert token not in f"{north!r} {north.profile} {settings}"
