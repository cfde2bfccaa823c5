"""Rules of agents, the network, time, operators and the daemon."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.cluster import Link
from koalapy.model.job import JobId
from koalapy.scheduler.attempts.contact import RETURN_TIME
from koalapy.scheduler.events import (
    AgentFailed,
    ClusterCleared,
    ClusterDrained,
    ClusterResumed,
    LinkMeasured,
    PeriodicScan,
    RelayChanged,
    ReplicasChanged,
)
from koalapy.scheduler.state import Deadline
from tests.scheduler import invariants
from tests.scheduler.machine.base import Machine, cluster_names, cycle_counts


class Operations(Machine):
    """Agents, network, time, operators and daemon restarts."""

    # Agents and the network

    @rule(name=cluster_names, limit=st.sampled_from([1, 2, None]))
    def deliver(self, name: str, limit: int | None) -> None:
        self.world.deliver(name, limit)

    @rule(limit=st.sampled_from([2, None]))
    def deliver_together(self, limit: int | None) -> None:
        """Deliver the messages of all agents in one transaction."""
        self.world.deliver_from_all_sites(limit)

    @rule(name=cluster_names, limit=st.sampled_from([1, None]))
    def run_commands(self, name: str, limit: int | None) -> None:
        self.world.run_commands(name, limit)

    @rule(name=cluster_names)
    def make_report(self, name: str) -> None:
        self.old_reports[name] = self.world.sites[name].current_report()

    @rule(name=cluster_names)
    def send_old_report(self, name: str) -> None:
        """Send an old report after newer messages."""
        if name in self.old_reports:
            self.world.sites[name].send_report(self.old_reports.pop(name))

    @rule(name=cluster_names)
    def repeat_all_statuses(self, name: str) -> None:
        site = self.world.sites[name]
        for token in [*site.runners]:
            site.report_component(token)

    @rule(name=cluster_names, seconds=st.sampled_from([0.1, 6.0, 41.0]))
    def toggle_connection(self, name: str, seconds: float) -> None:
        if self.world.sites[name].connected:
            self.old_reports.pop(name, None)
            self.world.disconnect(name)
            self.advance_clock(seconds, at_once=False, rounds=0)
        else:
            self.world.connect(name)

    @rule(name=cluster_names)
    def fail_agent(self, name: str) -> None:
        if not self.world.sites[name].connected:
            self.world.step([AgentFailed(name, "it cannot be started")])

    @rule(
        source=cluster_names,
        destination=cluster_names,
        link=st.sampled_from([Link(0.01, 50.0), Link(0.0001, 1e9), Link(unreachable=True), Link(bandwidth=200.0)]),
    )
    def measure_link(self, source: str, destination: str, link: Link) -> None:
        if source != destination:
            self.world.step([LinkMeasured(source, destination, link)])

    @rule(name=cluster_names, is_ready=st.booleans(), relayed_only=st.sampled_from([False, False, True]))
    def change_relay(self, name: str, is_ready: bool, relayed_only: bool) -> None:
        self.world.step([RelayChanged(name, is_ready, relayed_only)])

    @rule(sites=st.lists(cluster_names, unique=True, max_size=2))
    def change_replicas(self, sites: list[str]) -> None:
        self.world.step([ReplicasChanged("file", tuple(sites))])

    # Time

    @rule(seconds=st.sampled_from([0.1, 2.5, 5.0, 10.0, 30.0, 41.0]), at_once=st.booleans(), rounds=cycle_counts)
    def advance_clock(self, seconds: float, at_once: bool, rounds: int) -> None:
        """Advance the clock; the daemon wakes up in time, or late if it is busy."""
        self.run_usual_steps(rounds)
        world, end = self.world, self.world.now + seconds
        while not at_once and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= end:
            world.now = max(world.now, wakeup)
            world.step()
        world.now = end
        world.step()

    @rule(is_strict=st.booleans())
    def set_strict(self, is_strict: bool) -> None:
        """Toggle the strict checks, without which jobs may change in place."""
        self.world.strict = is_strict

    @rule(seconds=st.sampled_from([4000.0, 90000.0]), rounds=cycle_counts)
    def advance_by_hours(self, seconds: float, rounds: int) -> None:
        """Advance the clock by hours: walltimes pass and used node-hours expire."""
        self.advance_clock(seconds, at_once=True, rounds=rounds)

    @precondition(lambda self: self.world.scheduler.is_unfinished)
    @rule(steps=st.sampled_from([1, 1, 2, None]))
    def continue_step(self, steps: int | None) -> None:
        """Continue an unfinished step."""
        if steps is None:
            self.world.finish()
        else:
            for _ in range(steps):
                self.world.step()

    @rule(times=st.integers(1, 2))
    def scan(self, times: int) -> None:
        self.world.step([PeriodicScan()] * times)
        self.world.finish()
        invariants.check_plan(self.world)
        if times == self.world.rules.high_scans_per_low:  # each queue was scanned
            invariants.check_waiting(self.world)

    @rule(seconds=st.sampled_from([0.5, 3600.0]))
    def set_clock_back(self, seconds: float) -> None:
        """Set the daemon's clock back for one step."""
        world = self.world
        world.now, now = max(0.0, world.now - seconds), world.now
        effects = world.scheduler.step([PeriodicScan()], world.now)
        world.now = now
        world.apply_effects(effects)

    # Operators

    @rule(name=cluster_names, requeue=st.sampled_from([False, False, True]))
    def drain_or_resume(self, name: str, requeue: bool) -> None:
        """Drain or resume a cluster; draining a drained one may requeue its jobs."""
        drained = ClusterDrained(name, "ops", "for a reason", requeue)
        is_drained = self.world.queries.grid[name].drained is not None
        self.world.step([ClusterResumed(name) if is_drained and not requeue else drained])

    @rule(name=cluster_names)
    def withdraw_drains(self, name: str) -> None:
        self.world.step([ClusterResumed(name, planned=True)])

    @rule(
        name=cluster_names,
        begins=st.sampled_from([1.0, 100.0, 5000.0]),
        lasts=st.sampled_from([1.0, 100.0, None]),
        requeue=st.booleans(),
    )
    def plan_drain(self, name: str, begins: float, lasts: float | None, requeue: bool) -> None:
        """Drain a cluster from a time on, which withholds its nodes from jobs that would run then."""
        begins_at = self.world.now + begins
        ends_at = None if lasts is None else begins_at + lasts
        self.world.step([ClusterDrained(name, "ops", "for a time", requeue, begins_at, ends_at)])

    @rule(name=cluster_names)
    def clear(self, name: str) -> None:
        self.world.step([ClusterCleared(name)])

    @rule()
    def restart(self) -> None:
        """Restart the daemon from its stored state; queue positions and tries stay.

        A barrier or a launch is not missed before the agents had time to connect.
        """
        self.old_reports.clear()
        positions, deadlines, now = self.queue_positions(), self.attempt_deadlines(), self.world.now
        self.world.restart()
        assert self.queue_positions() == positions
        connected_by = now + max(RETURN_TIME, self.world.rules.unreachable_after)
        for key, due_at in self.attempt_deadlines().items():
            # A deadline that is missing was due, and waits for its cluster's confirmation.
            awaits_agents = key[2] in (Deadline.BARRIER, Deadline.LAUNCH)
            latest = max(deadlines.get(key, now), connected_by if awaits_agents else now)
            assert due_at <= latest, f"the restart has postponed {key}"

    def attempt_deadlines(self) -> dict[tuple[JobId, int, str, int], float]:
        """Return the first deadline of each kind of the live attempts, without those set by each contact."""
        kinds = (Deadline.STOP, Deadline.LAUNCH, Deadline.BARRIER, Deadline.WALLTIME, Deadline.DEADLINE)
        timers = getattr(self.world.scheduler, "_scheduler", self.world.scheduler)._state.timers
        return {
            (timer.job, timer.generation, timer.kind, timer.component): timer.at
            for timer in sorted(timers._heap, reverse=True)
            if timer.kind in kinds and timer.seq not in timers._void
        }

    def queue_positions(self) -> dict[JobId, tuple[int | None, int]]:
        """Return position and tries of each job."""
        queries = self.world.queries
        return {job.id: (queries.position(job.id), queries.tries(job.id)) for job in queries.jobs()}
