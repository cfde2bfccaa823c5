"""Agents and the network, time, operators, and the daemon itself."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.cluster import Link
from koalapy.model.job import JobId
from koalapy.scheduler.events import (
    AgentFailed,
    ClusterCleared,
    ClusterDrained,
    ClusterResumed,
    LinkMeasured,
    PeriodicScan,
    ReplicasChanged,
)
from tests.scheduler import invariants
from tests.scheduler.machine.base import Machine, names, rounds


class Operations(Machine):
    """Everything between the daemon and the clusters, and whoever runs it."""

    # Agents and the network

    @rule(name=names, most=st.sampled_from([1, 2, None]))
    def deliver(self, name: str, most: int | None) -> None:
        self.world.deliver(name, most)

    @rule(most=st.sampled_from([2, None]))
    def deliver_together(self, most: int | None) -> None:
        """What all agents have told, in one transaction."""
        self.world.deliver_from_all_sites(most)

    @rule(name=names, most=st.sampled_from([1, None]))
    def run_commands(self, name: str, most: int | None) -> None:
        self.world.run_commands(name, most)

    @rule(name=names)
    def current_report(self, name: str) -> None:
        self.seen[name] = self.world.sites[name].current_report()

    @rule(name=names)
    def tell_what_was_seen(self, name: str) -> None:
        """The agent had looked at its cluster a while ago; meanwhile it may have told other things."""
        if name in self.seen:
            self.world.sites[name].send_report(self.seen.pop(name))

    @rule(name=names)
    def say_everything_again(self, name: str) -> None:
        site = self.world.sites[name]
        for token in [*site.runners]:
            site.report_component(token)

    @rule(name=names, seconds=st.sampled_from([0.1, 6.0, 41.0]))
    def disconnect_or_connect(self, name: str, seconds: float) -> None:
        if self.world.sites[name].connected:
            self.seen.pop(name, None)
            self.world.disconnect(name)
            self.time_passes(seconds, at_once=False, rounds=0)
        else:
            self.world.connect(name)

    @rule(name=names)
    def agent_fails(self, name: str) -> None:
        if not self.world.sites[name].connected:
            self.world.step([AgentFailed(name, "it cannot be started")])

    @rule(
        one=names,
        other=names,
        link=st.sampled_from([Link(0.01, 50.0), Link(0.0001, 1e9), Link(unreachable=True), Link(bandwidth=200.0)]),
    )
    def link_is_measured(self, one: str, other: str, link: Link) -> None:
        if one != other:
            self.world.step([LinkMeasured(one, other, link)])

    @rule(sites=st.lists(names, unique=True, max_size=2))
    def replicas_change(self, sites: list[str]) -> None:
        self.world.step([ReplicasChanged("file", tuple(sites))])

    # Time

    @rule(seconds=st.sampled_from([0.1, 2.5, 5.0, 10.0, 30.0, 41.0]), at_once=st.booleans(), rounds=rounds)
    def time_passes(self, seconds: float, at_once: bool, rounds: int) -> None:
        """The daemon wakes up when it must, or, being busy, late."""
        self.run_usual_steps(rounds)
        world, end = self.world, self.world.now + seconds
        while not at_once and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= end:
            world.now = max(world.now, wakeup)
            world.step()
        world.now = end
        world.step()

    @rule(looks=st.booleans())
    def somebody_looks_or_nobody(self, looks: bool) -> None:
        """Whom nobody looks at may change in place."""
        self.world.strict = looks

    @rule(seconds=st.sampled_from([4000.0, 90000.0]), rounds=rounds)
    def a_night_passes(self, seconds: float, rounds: int) -> None:
        """The daemon sleeps for hours; walltimes are over, and what was used a day ago is forgotten."""
        self.time_passes(seconds, at_once=True, rounds=rounds)

    @precondition(lambda self: self.world.scheduler.is_unfinished)
    @rule(steps=st.sampled_from([1, 1, 2, None]))
    def daemon_goes_on(self, steps: int | None) -> None:
        """With what the budget of a step has left."""
        if steps is None:
            self.world.finish()
        else:
            for _ in range(steps):
                self.world.step()

    @rule(times=st.integers(1, 2))
    def scan(self, times: int) -> None:
        self.world.step([PeriodicScan()] * times)
        self.world.finish()
        invariants.check_reservation(self.world)
        if times == self.world.rules.high_scans_per_low:  # and so each queue was scanned
            invariants.check_waiting(self.world)

    @rule(seconds=st.sampled_from([0.5, 3600.0]))
    def clock_goes_back(self, seconds: float) -> None:
        """The daemon's clock is set wrong for one step."""
        world = self.world
        world.now, now = max(0.0, world.now - seconds), world.now
        effects = world.scheduler.step([PeriodicScan()], world.now)
        world.now = now
        world.apply_effects(effects)

    # Operators

    @rule(name=names, requeue=st.sampled_from([False, False, True]))
    def drain_or_resume(self, name: str, requeue: bool) -> None:
        """Where it is drained already its jobs may be wanted to leave all the same."""
        drained = ClusterDrained(name, "ops", "for a reason", requeue)
        is_drained = self.world.queries.grid[name].drained is not None
        self.world.step([ClusterResumed(name) if is_drained and not requeue else drained])

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.world.step([ClusterCleared(name)])

    @rule()
    def restart(self) -> None:
        """The daemon dies, and another takes over with what was written."""
        self.seen.clear()
        before = self.places()
        self.world.restart()
        assert self.places() == before

    def places(self) -> dict[JobId, tuple[int | None, int]]:
        """Where jobs stand in their queues, and how often they were tried."""
        queries = self.world.queries
        return {job.id: (queries.position(job.id), queries.tries(job.id)) for job in queries.jobs()}
