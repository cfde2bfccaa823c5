"""Random sequences of all events: the invariants hold at each step, and in the end all jobs finish.

Longer runs: ``make machine`` (100,000 steps) and ``make test-nightly``.
"""

from hypothesis import settings
from hypothesis.stateful import invariant

from koalapy.model.cluster import LinkUse
from koalapy.model.job import JobState
from koalapy.model.placement import Refusal
from koalapy.scheduler import grid
from koalapy.scheduler.events import (
    ClusterCleared,
    ClusterResumed,
    LinkMeasured,
    PeriodicScan,
    RelayChanged,
    ReplicasChanged,
)
from tests.scheduler import invariants, recomputation
from tests.scheduler.leftovers import container_sizes, find_job_references, grown_containers
from tests.scheduler.machine.base import LINKS
from tests.scheduler.machine.nodes import Nodes
from tests.scheduler.machine.operations import Operations
from tests.scheduler.machine.users import Users

MAX_TOUCHES = grid.MAX_TOUCHES
MAY_GROW = (
    "Scheduler._grid._replicas",
    "Scheduler._grid._links",
    "Scheduler._grid._touches",
    "Scheduler._state.owner_use",
    "Scheduler._state.experience",
    "Scheduler._cycle._knowledge._waits",
    "Scheduler._queues.promises._past",
    "Scheduler._queues._requests",
)
"""Containers of files, network, users and programs, and bounded ones of touches, waits, past starts and requests."""
MAY_NAME = (
    "Scheduler._state.timers",
    "Scheduler._queues.plan._placed",
    "Scheduler._cycle._events._transfers._strays",
    "Scheduler._contact._components._strays",
)
"""Paths that may reference finished jobs: timers, the last planned job, the last strays."""
NAMED_IN_SPEC = ".after[][].job"
"""The end of the paths of dependencies in job specifications, which bounded caches keep."""


class Grid(Users, Nodes, Operations):
    """The complete state machine."""

    @invariant()
    def check_no_overbooking(self) -> None:
        """Check that available nodes are really idle, as far as reports are complete."""
        for cluster in self.world.queries.grid.clusters():
            site = self.world.sites[cluster.name]
            is_reported = not site.stream and not site.inbox and site.connected and cluster.contact.connected
            if is_reported and site.current_report() == site.last_report and cluster.nodes.available:
                promised = sum(size for token, size in cluster.nodes.live.items() if token not in site.held)
                assert cluster.nodes.available + promised <= site.idle

    @invariant()
    def check_recomputed_state(self) -> None:
        if not self.world.strict:
            return
        recomputation.check_positions(self.world)
        recomputation.check_views(self.world)
        recomputation.check_owners(self.world)

    @invariant()
    def check_returned_values(self) -> None:
        self.world.returned_values.add([self.world.queries.grid.view()])
        if self.world.strict:
            self.world.returned_values.add(self.world.queries.jobs()[:3])
        self.world.returned_values.check()

    # Final checks

    def teardown(self) -> None:
        if hasattr(self, "initial_sizes"):  # it has begun
            self.check_all_jobs_finish()
        grid.MAX_TOUCHES = MAX_TOUCHES

    def check_all_jobs_finish(self) -> None:
        """Repair everything, remove local users and check that all jobs finish."""
        world = self.world
        world.strict = True
        world.start_automation()
        world.step([ReplicasChanged("file", ("north",))])
        world.step([LinkMeasured(source, target, link) for (source, target), link in LINKS.items()])
        world.step([RelayChanged(name, is_ready=True) for name in world.sites])
        self.repair_everything()
        if not self.is_extreme:
            world.advance(150)
            self.check_waiting_reasons()
        for name, users in self.users.items():
            for user in users:
                world.sites[name].remove_local_user(user)
        self.repair_everything()
        for _ in range(3):
            self.release_or_cancel_waiting()
            world.advance(100 + 40 * len(world.queries.jobs()))
        waiting = {job.id: (job.state, job.reason) for job in world.queries.jobs()}
        assert not waiting, "jobs still wait though all clusters are idle"
        invariants.check_nothing_remains(world)
        assert all(site.idle == site.total for site in world.sites.values())
        assert all(cluster.nodes.available == cluster.last_report.total for cluster in world.queries.grid.clusters())
        self.check_nothing_is_kept()

    def release_or_cancel_waiting(self) -> None:
        """Release held jobs and cancel those that can never start."""
        world = self.world
        for job in world.queries.jobs():
            if world.state(job.id).is_final:  # a task of an array that was cancelled before
                continue
            is_waiting, queries = job.state.is_waiting, world.queries
            needs_relays = bool(world.relays) or job.spec.links is LinkUse.RELAYED
            is_impossible = needs_relays and queries.questions.refusal_on_empty_grid(job.spec) != ""
            if self.is_extreme or (is_waiting and (is_impossible or queries.over_limit(job.spec) is not None)):
                world.cancel(job.id)
            elif job.state is JobState.HELD:
                world.release(job.id)

    def repair_everything(self) -> None:
        """Repair all clusters, reconnect all agents, and clear and resume all clusters."""
        world = self.world
        for name, site in world.sites.items():
            site.end_black_hole()
            site.repair_nodes()
            site.release_stuck_nodes()
            site.set_missing_programs()
            site.set_problem("")
            for token, runner in list(site.runners.items()):
                if runner.error or runner.exit_code is not None:
                    site.end_component(token)
                site.finish_delivery(token)
            site.delays_delivery = False
            if not site.connected:
                world.connect(name)
            site.rejection_fault = lambda size: ""
        world.settle()
        world.step([ClusterCleared(name) for name in world.sites])
        world.step([ClusterResumed(name, planned=True) for name in world.sites])
        world.step([ClusterResumed(name) for name in world.sites])
        world.settle()

    def check_waiting_reasons(self) -> None:
        world = self.world
        world.step([PeriodicScan()] * world.rules.high_scans_per_low)
        world.finish()
        for job in world.queries.jobs():
            if job.state is JobState.QUEUED:
                assert world.queries.waiting_reason(job)
                if world.rules.queue == "scan" and job.tasks is None and world.queries.over_limit(job.spec) is None:
                    view = world.queries.offer(job.spec).view
                    answer = world.queries.questions.ask(job.spec, view, job.barred_sizes(world.queries.now))
                    assert isinstance(answer, Refusal), "a job waits though it would be placed"

    def check_nothing_is_kept(self) -> None:
        """Check that no finished job is referenced and that no container grows with the number of jobs."""
        self.world.step([PeriodicScan()])
        self.world.finish()
        references = find_job_references(self.world.scheduler)
        assert all(path.startswith(MAY_NAME) or path.endswith(NAMED_IN_SPEC) for path in references), references
        fuller = grown_containers(self.initial_sizes, container_sizes(self.world.scheduler))
        assert not {path for path in fuller if not path.startswith(MAY_GROW)}, fuller


Grid.TestCase.settings = settings(stateful_step_count=60, database=None)
TestGrid = Grid.TestCase
