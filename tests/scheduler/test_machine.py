"""Anything that can happen, in any order: the laws hold at each step, and in the end everything is answered.

More of it: ``make machine`` (100,000 steps) and ``make test-nightly``.
"""

from hypothesis import settings
from hypothesis.stateful import invariant

from koalapy.model.job import JobState
from koalapy.model.placement import Refusal
from koalapy.scheduler import grid
from koalapy.scheduler.events import ClusterCleared, ClusterResumed, LinkMeasured, PeriodicScan, ReplicasChanged
from tests.scheduler import invariants, recomputation
from tests.scheduler.machine.base import LINKS
from tests.scheduler.machine.nodes import Nodes
from tests.scheduler.machine.operations import Operations
from tests.scheduler.machine.users import Users
from tests.scheduler.leftovers import grown, jobs_named, sizes

MAX_TOUCHES = grid.MAX_TOUCHES
MAY_GROW = (
    "Scheduler._grid._replicas",
    "Scheduler._grid._links",
    "Scheduler._grid._touches",
    "Scheduler._state.owner_use",
    "Scheduler._state.experience",
    "Scheduler._cycle._knowledge._waits",
    "Scheduler._queues._requests",
)
"""What is kept of files, of the network, of people and of programs; and so many touches, waits and requests at most."""
MAY_NAME = (
    "Scheduler._state.timers",
    "Scheduler._queues.reservation._placed",
    "Scheduler._cycle._events._transfers._strays",
    "Scheduler._contact._components._strays",
)
"""Some of the jobs that are over: no more deadlines than others have, whose turn it was last, the last strays."""


class Grid(Users, Nodes, Operations):
    """Users, local users, agents, clusters, the network and the daemon itself, each on its own time."""

    @invariant()
    def clusters_are_never_overbooked(self) -> None:
        """What the scheduler takes for free is free, once all promises are kept, as far as it has been told."""
        for cluster in self.world.queries.grid.clusters():
            site = self.world.sites[cluster.name]
            told = not site.stream and not site.inbox and site.connected and cluster.contact.connected
            if told and site.current_report() == site.last_report and cluster.available:
                promised = sum(size for token, size in cluster.live.items() if token not in site.held)
                assert cluster.available + promised <= site.idle

    @invariant()
    def all_is_as_it_would_be_worked_out_anew(self) -> None:
        if not self.world.strict:
            return
        recomputation.check_positions(self.world)
        recomputation.check_views(self.world)
        recomputation.check_owners(self.world)

    @invariant()
    def what_was_given_out_has_not_changed(self) -> None:
        self.world.given.note([self.world.queries.grid.view()])
        if self.world.strict:
            self.world.given.note(self.world.queries.jobs()[:3])
        self.world.given.check()

    # The end

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.all_is_answered()
        grid.MAX_TOUCHES = MAX_TOUCHES

    def all_is_answered(self) -> None:
        """Once everybody is well, and those who use nodes of their own have left."""
        world = self.world
        world.strict = True
        world.start_automation()
        world.step([ReplicasChanged("file", ("north",))])
        world.step([LinkMeasured(one, other, link) for (one, other), link in LINKS.items()])
        self.mend()
        if not self.is_extreme:
            world.advance(150)
            self.who_waits_has_a_reason()
        for name, users in self.users.items():
            for user in users:
                world.sites[name].remove_local_user(user)
        self.mend()
        for _ in range(3):
            self.go_on_with_what_may()
            world.advance(100 + 40 * len(world.queries.jobs()))
        waiting = {job.id: (job.state, job.reason) for job in world.queries.jobs()}
        assert not waiting, "with everybody well and everything free, some still wait"
        invariants.check_quiet(world)
        assert all(site.idle == site.total for site in world.sites.values())
        assert all(cluster.available == cluster.total for cluster in world.queries.grid.clusters())
        self.nothing_is_kept()

    def go_on_with_what_may(self) -> None:
        """Jobs that were held are released; those that may never have nodes, as things are, are cancelled."""
        world = self.world
        for job in world.queries.jobs():
            if self.is_extreme or (job.state.is_waiting and world.queries.over_limit(job.spec) is not None):
                world.cancel(job.id)
            elif job.state is JobState.HELD:
                world.release(job.id)

    def mend(self) -> None:
        """What was broken is taken away by its resource manager, agents come back, operators see to their clusters."""
        world = self.world
        for name, site in world.sites.items():
            site.mend()
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
            site.rejection_fault = lambda asked: ""
        world.settle()
        world.step([ClusterCleared(name) for name in world.sites])
        world.step([ClusterResumed(name) for name in world.sites])
        world.settle()

    def who_waits_has_a_reason(self) -> None:
        world = self.world
        world.step([PeriodicScan()] * world.rules.high_scans_per_low)
        world.finish()
        for job in world.queries.jobs():
            if job.state is JobState.QUEUED:
                assert world.queries.waiting_reason(job)
                if world.rules.queue == "scan" and world.queries.over_limit(job.spec) is None:
                    view = world.queries.view(job.spec.priority)
                    answer = world.queries.evaluate(job.spec, view, world.queries.barred(job))
                    assert isinstance(answer, Refusal), "it waits though it would fit"

    def nothing_is_kept(self) -> None:
        """Of jobs that are over nothing is left, and nothing grows with how many there were."""
        self.world.step([PeriodicScan()])
        self.world.finish()
        named = jobs_named(self.world.scheduler)
        assert not {path for path in named if not path.startswith(MAY_NAME)}, named
        fuller = grown(self.fresh, sizes(self.world.scheduler))
        assert not {path for path in fuller if not path.startswith(MAY_GROW)}, fuller


Grid.TestCase.settings = settings(stateful_step_count=60, database=None)
TestGrid = Grid.TestCase
