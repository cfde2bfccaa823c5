"""Anything that can happen, in any order: the laws hold at each step, and in the end everything is answered.

More of it: ``KOALA_TEST_EXAMPLES=5000 pytest tests/scheduling/test_machine.py`` (and other examples each time).
"""

import os
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from koalapy.model.cluster import ClusterView, GridView, Link
from koalapy.model.job import ClaimingMode, Job, JobId, JobSpec, JobState, Launcher, Priority, Token
from koalapy.model.placement import Placement, Refusal
from koalapy.model.reports import ClusterReport, StageFault
from koalapy.model.request import FixedRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduling.events import (
    ClusterCleared,
    ClusterDrained,
    ClusterResumed,
    JobCancelled,
    JobHeld,
    JobPriorityChanged,
    JobReleased,
    JobSubmitted,
    PeriodicScan,
    ReplicasChanged,
)
from koalapy.scheduling.rules import Rules
from tests.scheduling import laws
from tests.scheduling.requests import fixed, flexible, nonfixed
from tests.scheduling.sites import STAGE_SIZE, Site
from tests.scheduling.world import Program, World

pytestmark = pytest.mark.timeout(0 if "KOALA_TEST_EXAMPLES" in os.environ else 300)
LIVE = ("waiting", "claimed", "running")
SIZES = {"north": 4, "south": 3, "west": 2}
LINKS = {(one, other): Link(0.001, 100.0) for one in SIZES for other in SIZES if one < other}
"""100 bytes a second."""
WHOLE_GRID = GridView(tuple(ClusterView(name, total, total) for name, total in SIZES.items()))
MANY = int(os.environ.get("KOALA_TEST_EXAMPLES", "0"))

names = st.sampled_from(list(SIZES))
sizes = st.integers(1, 4)
picks = st.integers(0, 7)
rounds = st.sampled_from([4, 4, 3, 2, 1, 0])
"""How often, after something happened, everybody does what they should; four times brings a job to run."""
inputs = st.one_of(
    st.none(),
    st.none(),
    st.builds(InputFile, st.just("file"), st.sampled_from([200, 2000]), names.map(lambda name: (name,))),
)


def with_input(request: FixedRequest | NonFixedRequest, file: InputFile | None) -> Request:
    components = tuple(replace(component, inputs=(file,) if file else ()) for component in request.components)
    return FixedRequest(components) if isinstance(request, FixedRequest) else NonFixedRequest(components)


spelled_out = st.one_of(
    st.lists(sizes, min_size=1, max_size=4).map(lambda some: nonfixed(*some)),
    st.dictionaries(names, st.integers(1, 3), min_size=1).map(lambda some: fixed(**some)),
)
requests = st.one_of(
    st.builds(flexible, st.integers(1, 9), st.integers(1, 3), st.sampled_from([None, None, 1, 2, 3])),
    st.just(flexible(6, split=((6,), (4, 2), (3, 3), (2, 2, 2)))),
    st.builds(with_input, spelled_out, inputs),
)


def pick_of(some: list[tuple[Site, Token]], pick: int) -> tuple[Site, Token]:
    return some[pick % len(some)]


class Grid(RuleBasedStateMachine):
    """Users, local users, agents, clusters, the network and the daemon itself, each on its own time."""

    world: World

    @initialize(
        queue=st.sampled_from(["scan", "scan", "head", "fcfs"]),
        order=st.sampled_from(["fcfs", "narrowest-first"]),
        event_driven=st.booleans(),
        max_restarts=st.sampled_from([None, 1]),
        low_patience=st.sampled_from([None, 41.0]),
        restart_pause=st.sampled_from([0.0, 5.0]),
        now=st.sampled_from([0.0, 1.7e9 + 0.3]),
        threshold=st.sampled_from([None, 0.0, 0.5, 1.0]),
        factor=st.sampled_from([0.75, 0.3]),
        preemption=st.sampled_from(["placement", "placement", "claiming", "never"]),
        preemption_order=st.sampled_from(["least-harm", "least-harm", "jst"]),
        aging_tries=st.sampled_from([1, 3, 1000]),
        probation=st.booleans(),
    )
    def begin(
        self,
        queue: Any,
        order: Any,
        event_driven: bool,
        max_restarts: int | None,
        low_patience: float | None,
        restart_pause: float,
        now: float,
        threshold: float | None,
        factor: float,
        preemption: Any,
        preemption_order: Any,
        aging_tries: int,
        probation: bool,
    ) -> None:
        rules = Rules(
            queue=queue,
            queue_order=order,
            event_driven=event_driven,
            max_restarts=max_restarts,
            low_patience=low_patience,
            restart_pause=restart_pause,
            claiming=ClaimingMode.ATOMIC if threshold is None else ClaimingMode.INCREMENTAL,
            claim_threshold=threshold or 0.0,
            claim_factor=factor,
            preemption=preemption,
            preemption_order=preemption_order,
            aging_tries=aging_tries,
            probation=probation,
            probation_pause=20,
            probation_pause_max=60,
            claim_grace=10,
            barrier_timeout=30,
            unreachable_after=5,
            lost_after=40,
            scan_interval=15,
        )
        nonces = count(1)
        self.world = World(SIZES, rules, manual=True, now=now, links=LINKS, nonces=lambda: f"{next(nonces):x}")
        for site in self.world.sites.values():
            site.delivers_long = True
        self.users: dict[str, list[str]] = {name: [] for name in SIZES}
        self.seen: dict[str, ClusterReport] = {}

    def all_goes_well(self, rounds: int) -> None:
        """What usually happens between the accidents."""
        for _ in range(rounds):
            for name, site in self.world.sites.items():
                self.world.obey(name)
                for token in site.startable():
                    site.runners_report(token)
                for token in list(site.stages):
                    site.stage(token, STAGE_SIZE)
                if site.connected:
                    site.report()
                self.world.deliver(name)

    # Users

    @rule(
        some=st.lists(requests, min_size=1, max_size=4),
        launcher=st.sampled_from(Launcher),
        priority=st.sampled_from(Priority),
        code=st.sampled_from([0, 0, 3]),
        tries=st.sampled_from([None, None, 3]),
        collect=st.sampled_from([(), (), ("*",)]),
        rounds=rounds,
    )
    def submit(
        self,
        some: list[Request],
        launcher: Launcher,
        priority: Priority,
        code: int,
        tries: int | None,
        collect: tuple[str, ...],
        rounds: int,
    ) -> None:
        possible = [request for request in some if self.is_possible(request)]
        for request in possible:
            self.world.submit(
                request,
                launcher=launcher,
                priority=priority,
                code=code,
                walltime=60,
                max_placement_tries=tries,
                collect=collect,
            )
        self.all_goes_well(rounds)

    def is_possible(self, request: Request) -> bool:
        policy = self.world.policies.resolve("", request)
        return isinstance(policy.place(request, WHOLE_GRID), Placement)

    @rule(
        some=st.lists(st.tuples(requests, st.sampled_from(Priority)), min_size=2, max_size=4),
        claims=st.sampled_from([None, None, 2]),
        pick=picks,
        rounds=rounds,
    )
    def submit_together(self, some: list[tuple[Request, Priority]], claims: int | None, pick: int, rounds: int) -> None:
        """Jobs of both queues in one transaction, and one that waits is cancelled in the same one."""
        specs = [
            JobSpec(request, ("program",), priority=priority, walltime=60, max_claiming_tries=claims)
            for request, priority in some
            if self.is_possible(request)
        ]
        first = len(self.world.jobs) + 1
        jobs = [Job(ident, spec, self.world.now) for ident, spec in enumerate(specs, first)]
        self.world.programs |= {job.id: Program() for job in jobs}
        waiting = self.some(JobState.QUEUED)
        cancelled = [JobCancelled(waiting[pick % len(waiting)])] if waiting else []
        self.world.step([*cancelled, *(JobSubmitted(job) for job in jobs)])
        self.all_goes_well(rounds)

    def some(self, *states: JobState) -> list[JobId]:
        return [job.id for job in self.world.queries.jobs() if job.state in states]

    @precondition(lambda self: self.world.queries.jobs())
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        jobs = self.some(*JobState)
        self.world.step([JobCancelled(jobs[pick % len(jobs)])])

    @precondition(lambda self: self.some(JobState.QUEUED))
    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        jobs = self.some(JobState.QUEUED)
        self.world.step([JobHeld(jobs[pick % len(jobs)])])

    @precondition(lambda self: self.some(JobState.HELD))
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        jobs = self.some(JobState.HELD)
        self.world.step([JobReleased(jobs[pick % len(jobs)])])

    @precondition(lambda self: self.some(JobState.QUEUED, JobState.HELD))
    @rule(pick=picks, priority=st.sampled_from(Priority))
    def change_priority(self, pick: int, priority: Priority) -> None:
        jobs = self.some(JobState.QUEUED, JobState.HELD)
        self.world.step([JobPriorityChanged(jobs[pick % len(jobs)], priority)])

    # Local users

    @rule(name=names, size=sizes)
    def local_user_comes(self, name: str, size: int) -> None:
        self.users[name].append(self.world.sites[name].local_user(min(size, SIZES[name])))

    @precondition(lambda self: any(self.users.values()))
    @rule(name=names)
    def local_user_leaves(self, name: str) -> None:
        if self.users[name]:
            self.world.sites[name].local_user_leaves(self.users[name].pop(0))

    @rule(name=names, size=sizes, fault=st.sampled_from(["job", "limit", "limit", "site"]))
    def resource_manager_refuses(self, name: str, size: int, fault: str) -> None:
        """All components of so many nodes or more, until further notice."""
        self.world.sites[name].refuses = lambda asked: fault if asked >= size else ""

    @rule(name=names)
    def resource_manager_takes_all(self, name: str) -> None:
        self.world.sites[name].refuses = lambda asked: ""

    # What happens on nodes

    def components(self, *phases: str) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.in_phase(*phases)]

    def startable(self) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.startable()]

    def unseen(self) -> list[tuple[Site, Token]]:
        """Components of sites whose agent is away."""
        return [(site, token) for site, token in self.components(*LIVE, "delivering", "ended") if not site.connected]

    @precondition(lambda self: self.startable())
    @rule(pick=picks)
    def runners_report(self, pick: int) -> None:
        site, token = pick_of(self.startable(), pick)
        site.runners_report(token)

    def stages(self) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.stages]

    @precondition(lambda self: self.stages())
    @rule(pick=picks, staged=st.sampled_from([1, 50, STAGE_SIZE]))
    def files_arrive(self, pick: int, staged: int) -> None:
        site, token = pick_of(self.stages(), pick)
        site.stage(token, staged)

    @precondition(lambda self: self.stages())
    @rule(pick=picks, fault=st.sampled_from(["site", "source", "file"]), rounds=rounds)
    def transfer_fails(self, pick: int, fault: StageFault, rounds: int) -> None:
        site, token = pick_of(self.stages(), pick)
        site.stage(token, 10, "broken pipe", fault, "file")
        self.all_goes_well(rounds)

    @precondition(lambda self: [(s, t) for s, t in self.stages() if not s.connected])
    @rule(pick=picks)
    def files_vanish(self, pick: int) -> None:
        """An agent comes back and knows nothing of them."""
        site, token = pick_of([(s, t) for s, t in self.stages() if not s.connected], pick)
        del site.stages[token]

    @rule(sites=st.lists(names, unique=True, max_size=2))
    def replicas_change(self, sites: list[str]) -> None:
        self.world.step([ReplicasChanged("file", tuple(sites))])

    @precondition(lambda self: self.components("running"))
    @rule(pick=picks, code=st.sampled_from([0, 0, 0, 137]))
    def program_exits(self, pick: int, code: int) -> None:
        site, token = pick_of(self.components("running"), pick)
        if site.runners[token].exit_code is None:
            site.program_exits(token, code)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=picks, rounds=rounds)
    def component_breaks(self, pick: int, rounds: int) -> None:
        site, token = pick_of(self.components(*LIVE), pick)
        site.fails(token, "node lost")
        self.all_goes_well(rounds)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=picks)
    def component_ends(self, pick: int) -> None:
        site, token = pick_of(self.components(*LIVE), pick)
        site.ends(token)

    @precondition(lambda self: self.components("delivering"))
    @rule(pick=picks)
    def output_arrives(self, pick: int) -> None:
        site, token = pick_of(self.components("delivering"), pick)
        site.delivered(token)

    @precondition(lambda self: self.unseen())
    @rule(pick=picks)
    def component_vanishes(self, pick: int) -> None:
        """Only while the agent is away: one that is there would tell."""
        site, token = pick_of(self.unseen(), pick)
        site.vanishes(token)

    # Agents and the network

    @rule(name=names, most=st.sampled_from([1, 2, None]))
    def deliver(self, name: str, most: int | None) -> None:
        self.world.deliver(name, most)

    @rule(name=names, most=st.sampled_from([1, None]))
    def obey(self, name: str, most: int | None) -> None:
        self.world.obey(name, most)

    @rule(name=names)
    def look(self, name: str) -> None:
        self.seen[name] = self.world.sites[name].look()

    @rule(name=names)
    def tell_what_was_seen(self, name: str) -> None:
        """The agent had looked at its cluster a while ago; meanwhile it may have told other things."""
        if name in self.seen:
            self.world.sites[name].report(self.seen.pop(name))

    @rule(name=names)
    def say_everything_again(self, name: str) -> None:
        site = self.world.sites[name]
        for token in [*site.runners]:
            site.tell(token)

    @rule(name=names, seconds=st.sampled_from([0.1, 6.0, 41.0]))
    def disconnect_or_connect(self, name: str, seconds: float) -> None:
        if self.world.sites[name].connected:
            self.seen.pop(name, None)
            self.world.disconnect(name)
            self.time_passes(seconds, at_once=False, rounds=0)
        else:
            self.world.connect(name)

    # Time, operators and the daemon

    @rule(seconds=st.sampled_from([0.1, 2.5, 5.0, 10.0, 30.0, 41.0]), at_once=st.booleans(), rounds=rounds)
    def time_passes(self, seconds: float, at_once: bool, rounds: int) -> None:
        """The daemon wakes up when it must, or, being busy, late."""
        self.all_goes_well(rounds)
        world, end = self.world, self.world.now + seconds
        while not at_once and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= end:
            world.now = max(world.now, wakeup)
            world.step()
        world.now = end
        world.step()

    @rule(times=st.integers(1, 2))
    def scan(self, times: int) -> None:
        self.world.step([PeriodicScan()] * times)
        laws.check_reservation(self.world)
        if times == self.world.rules.high_scans_per_low:  # and so each queue was scanned
            laws.check_waiting(self.world)

    @rule(name=names)
    def drain_or_resume(self, name: str) -> None:
        cluster = self.world.queries.grid[name]
        self.world.step([ClusterResumed(name) if cluster.drained else ClusterDrained(name, "ops", "for a reason")])

    @rule(seconds=st.sampled_from([0.5, 3600.0]))
    def clock_goes_back(self, seconds: float) -> None:
        """The daemon's clock is set wrong for one step."""
        world = self.world
        world.now, now = max(0.0, world.now - seconds), world.now
        effects = world.scheduler.step([PeriodicScan()], world.now)
        world.now = now
        world.take_in(effects)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.world.step([ClusterCleared(name)])

    @rule()
    def restart(self) -> None:
        self.seen.clear()
        before = self.places()
        self.world.restart()
        assert self.places() == before

    def places(self) -> dict[JobId, tuple[int | None, int]]:
        """Where jobs stand in their queues, and how often they were tried."""
        queries = self.world.queries
        return {job.id: (queries.position(job.id), queries.tries(job.id)) for job in queries.jobs()}

    @invariant()
    def clusters_are_never_overbooked(self) -> None:
        """What the scheduler takes for free is free, once all promises are kept, as far as it has been told."""
        for cluster in self.world.queries.grid.clusters():
            site = self.world.sites[cluster.name]
            told = not site.stream and not site.inbox and site.connected and cluster.contact.connected
            if told and site.look() == site.last_report and cluster.available:
                promised = sum(size for token, size in cluster.live.items() if token not in site.held)
                assert cluster.available + promised <= site.idle

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.take_over()
        world.step([ReplicasChanged("file", ("north",))])
        self.mend()
        world.advance(150)
        self.who_waits_has_a_reason()
        for name, users in self.users.items():
            for user in users:
                world.sites[name].local_user_leaves(user)
        self.mend()
        for _ in range(3):
            for job in [job.id for job in world.queries.jobs() if job.state is JobState.HELD]:
                world.release(job)
            world.advance(100 + 40 * len(world.queries.jobs()))
        assert not world.queries.jobs(), "with everybody well and everything free, some still wait"
        laws.check_quiet(world)
        assert all(site.idle == site.total for site in world.sites.values())
        assert all(cluster.available == cluster.total for cluster in world.queries.grid.clusters())

    def mend(self) -> None:
        """What was broken is taken away by its resource manager, agents come back, operators see to their clusters."""
        world = self.world
        for name, site in world.sites.items():
            for token, runner in list(site.runners.items()):
                if runner.error or runner.exit_code is not None:
                    site.ends(token)
                site.delivered(token)
            site.delivers_long = False
            if not site.connected:
                world.connect(name)
            site.refuses = lambda asked: ""
        world.settle()
        world.step([ClusterCleared(name) for name in world.sites])
        world.step([ClusterResumed(name) for name in world.sites])
        world.settle()

    def who_waits_has_a_reason(self) -> None:
        world = self.world
        world.step([PeriodicScan()] * world.rules.high_scans_per_low)
        for job in world.queries.jobs():
            if job.state is JobState.QUEUED:
                assert world.queries.waiting_reason(job)
                if world.rules.queue == "scan":
                    view = world.queries.view(job.spec.priority)
                    answer = world.queries.evaluate(job.spec, view)
                    assert isinstance(answer, Refusal), "it waits though it would fit"


Grid.TestCase.settings = settings(
    max_examples=MANY or 500, stateful_step_count=60, deadline=None, derandomize=not MANY, database=None
)
TestGrid = Grid.TestCase
