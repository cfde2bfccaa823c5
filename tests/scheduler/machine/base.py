"""Shared parts of the state machine: parameters, the simulated environment and its usual steps."""

import os
from functools import partial
from itertools import count
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from koalapy.model.cluster import NO_RELAYS, ClusterView, GridView, Link, LinkUse, Relays, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.job import NO_LEASE, JobId, JobState, Token
from koalapy.model.job_spec import ClaimingMode, JobSpec
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.placement import Placement
from koalapy.model.reports import ClusterReport
from koalapy.policies.knowledge import Knowledge
from koalapy.scheduler import grid
from koalapy.scheduler.rules import MIN_FACTOR, MIN_SECONDS, Rules
from tests.scheduler.leftovers import FIRST_JOB, container_sizes
from tests.scheduler.sites import STAGE_SIZE, Site
from tests.scheduler.world import World

EXAMPLE_COUNT = int(os.environ.get("KOALA_TEST_EXAMPLES", "0"))
LIVE = ("waiting", "claimed", "running")
CLUSTER_SIZES = {"north": 4, "south": 3, "west": 2}
SPEEDS = {"north": 1.0, "south": 2.0, "west": 1.0}
LINKS = {(one, other): Link(0.001, 100.0) for one in CLUSTER_SIZES for other in CLUSTER_SIZES if one < other}
UPLINKS = dict.fromkeys(CLUSTER_SIZES, Uplink(100.0))
"""Measured bandwidth of the clusters' uplinks."""
WHOLE_GRID = GridView(tuple(ClusterView(name, total, total) for name, total in CLUSTER_SIZES.items()), uplinks=UPLINKS)
MAX_OPEN_JOBS = 40
"""Number of unfinished jobs above which no job is submitted."""
FOR_EVER = 1e6
LEASE = 9.0
"""Lease in seconds: components of a silent cluster have certainly ended before 41 s."""

cluster_names = st.sampled_from(list(CLUSTER_SIZES))
indexes = st.integers(0, 7)
cycle_counts = st.sampled_from([4, 4, 3, 2, 1, 0])
"""Number of usual steps after a rule; four bring a job to run."""

usual_rules = st.fixed_dictionaries(
    {
        "queue": st.sampled_from(["scan", "scan", "head", "fcfs"]),
        "queue_order": st.sampled_from(["fcfs", "narrowest-first"]),
        "sharing": st.sampled_from(["ordinary", "feasible", "feasible", "independent"]),
        "speed_threshold": st.sampled_from([0.0, 0.0, 1.0]),
        "reclaimed_position": st.sampled_from(["place", "front"]),
        "event_driven": st.booleans(),
        "high_scans_per_low": st.sampled_from([2, 2, 1, 3]),
        "max_restarts": st.sampled_from([None, 1]),
        "plan_after": st.sampled_from([None, 0.0, 0.0, 41.0]),
        "default_walltime": st.sampled_from([None, 60.0]),
        "max_claiming_tries": st.sampled_from([None, None, 4, 1]),
        "restart_pause": st.sampled_from([0.0, 5.0]),
        "claiming": st.sampled_from(ClaimingMode),
        "claim_threshold": st.sampled_from([0.0, 0.5, 1.0]),
        "claim_factor": st.sampled_from([0.75, 0.3]),
        "preemption": st.sampled_from(["placement", "placement", "claiming", "never"]),
        "preemption_order": st.sampled_from(["least-harm", "least-harm", "jst"]),
        "keeps_for_restart": st.booleans(),
        "probation": st.booleans(),
        "error_threshold": st.sampled_from([3, 3, 1]),
        "probation_pause": st.just(20.0),
        "probation_pause_max": st.just(60.0),
        "claim_grace": st.just(10.0),
        "barrier_timeout": st.just(30.0),
        "unreachable_after": st.just(5.0),
        "scan_interval": st.just(15.0),
    }
)
short_pauses = st.sampled_from([MIN_SECONDS, MIN_SECONDS, 5.0])
extreme_rules = st.fixed_dictionaries(
    {
        "queue": st.sampled_from(["scan", "head", "fcfs"]),
        "claiming": st.sampled_from(ClaimingMode),
        "claim_threshold": st.sampled_from([0.0, 1.0]),
        "claim_factor": st.sampled_from([MIN_FACTOR, 0.99]),
        "claim_factor_min": st.just(MIN_FACTOR),
        "claim_factor_step": st.sampled_from([0.0, 0.99]),
        "claim_epsilon": st.sampled_from([MIN_SECONDS, FOR_EVER]),
        "claim_grace": st.sampled_from([MIN_SECONDS, 10.0, FOR_EVER]),
        "barrier_timeout": st.sampled_from([MIN_SECONDS, 30.0, FOR_EVER]),
        "unreachable_after": short_pauses,
        "probation_pause": short_pauses,
        "probation_pause_max": short_pauses,
        "restart_pause": st.sampled_from([0.0, MIN_SECONDS, 5.0]),
        "restart_pause_max": st.sampled_from([0.0, 60.0]),
        "high_scans_per_low": st.sampled_from([1, 1000]),
        "max_restarts": st.sampled_from([None, 0]),
        "plan_after": st.sampled_from([0.0, FOR_EVER]),
        "default_walltime": st.sampled_from([MIN_SECONDS, FOR_EVER]),
        "max_placement_tries": st.sampled_from([None, 1]),
        "max_claiming_tries": st.sampled_from([None, 1]),
        "placement_queue_limit": st.sampled_from([1, 100]),
        "error_threshold": st.just(1),
        "assumed_bandwidth": st.sampled_from([1e-9, 1e300]),
        "event_driven": st.booleans(),
    }
)
"""Rules at their limits, with which jobs may never run."""
owners_limits = st.sampled_from(
    [
        None,
        None,
        LimitSettings(UserLimits(nodes=4)),
        LimitSettings(UserLimits(queued_jobs=3), {"cy": UserLimits(nodes=0)}, {"lab": UserLimits(nodes=5)}),
        LimitSettings(UserLimits(node_hours_per_day=0.5), groups={"lab": UserLimits(nodes=6)}),
    ]
)


class Machine(RuleBasedStateMachine):
    """The simulated environment and its usual steps."""

    world_class: type[World] = World
    world: World

    @initialize(
        rules=st.one_of(usual_rules, usual_rules, usual_rules, extreme_rules),
        now=st.sampled_from([0.0, 1.7e9 + 0.3]),
        limits=owners_limits,
        touches=st.sampled_from([1, 5, 1000]),
        budget=st.sampled_from([None, None, MIN_SECONDS, 4.0]),
        lease=st.sampled_from([LEASE, LEASE, LEASE, MIN_SECONDS, 100.0, NO_LEASE]),
        relays=st.sampled_from([NO_RELAYS, Relays(30), Relays(60, {("north", "south"): LinkUse.RELAYED})]),
    )
    def begin(
        self,
        rules: dict[str, Any],
        now: float,
        limits: LimitSettings | None,
        touches: int,
        budget: float | None,
        lease: float,
        relays: Relays,
    ) -> None:
        """Create the environment. ``budget`` is the number of clock reads within which a step queue_positions jobs."""
        nonces = count(1)
        grid.MAX_TOUCHES = touches
        self.world = self.world_class(
            CLUSTER_SIZES,
            Rules(**rules, step_budget=budget or 1.0),
            manual=True,
            now=now,
            links=LINKS,
            speeds=SPEEDS,
            nonces=lambda: f"{next(nonces):x}",
            limits=Limits(limits, lambda owner: ("lab",) if owner in ("bob", "cy") else ()) if limits else None,
            first_job=FIRST_JOB,
            clock=partial(next, count(1.0)) if budget else None,
            lease=lease,
            relays=relays,
        )
        self.is_extreme = MIN_FACTOR in (rules["claim_factor"], rules.get("claim_factor_min"))
        for site in self.world.sites.values():
            site.delays_delivery = True
        self.users: dict[str, list[str]] = {name: [] for name in CLUSTER_SIZES}
        self.old_reports: dict[str, ClusterReport] = {}
        self.initial_sizes = container_sizes(self.world.scheduler)

    # Usual steps

    def run_usual_steps(self, rounds: int) -> None:
        """Carry out commands, start, stage, report and deliver, several times."""
        for _ in range(rounds):
            for name, site in self.world.sites.items():
                self.world.run_commands(name)
                for token in site.startable():
                    site.report_claimed(token)
                for token in list(site.stages):
                    site.update_stage(token, STAGE_SIZE)
                if site.connected:
                    site.send_report()
                self.world.deliver(name)

    # Queries of stored jobs; a job read from the scheduler could no longer be changed in place.

    def jobs_in(self, *states: JobState) -> list[JobId]:
        return [job.id for job in self.world.jobs.values() if job.state in states and not job.state.is_final]

    def components(self, *phases: str) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.in_phase(*phases)]

    def stages(self) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.stages]

    def is_possible(self, spec: JobSpec) -> bool:
        """Return whether the empty grid could place it, on the clusters that its home site permits."""
        try:
            policy: Any = self.world.policies.resolve(spec.policy, spec.request, spec.policy_options)
        except UsageError:
            return False
        if spec.policy == "resource-matching":
            policy = policy.informed(Knowledge(bandwidth=spec.per_node_bandwidth or 0.0))
        home, rules = spec.home_site, self.world.rules
        is_open = {name for name in CLUSTER_SIZES if not home or SPEEDS[name] >= rules.speed_threshold * SPEEDS[home]}
        view = WHOLE_GRID.select_clusters(frozenset({home} if home and rules.sharing == "independent" else is_open))
        return isinstance(policy.place(spec.request, view), Placement)


def component_at(components: list[tuple[Site, Token]], index: int) -> tuple[Site, Token]:
    return components[index % len(components)]
