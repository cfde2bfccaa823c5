"""Invariants of every scheduler step: semantics 2 to 6 and 13."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from koalapy.model.bounds import MAX_NODES
from koalapy.model.cluster import GridView
from koalapy.model.dependency import Dependency
from koalapy.model.errors import UsageError
from koalapy.model.job import (
    ARRAY_TRANSITIONS,
    TRANSITIONS,
    Attempt,
    Component,
    ComponentState,
    Job,
    JobId,
    JobState,
    TimelineEntry,
    Token,
    format_token,
    parse_token,
)
from koalapy.model.job_sizes import is_barred
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FixedRequest, FlexibleRequest
from koalapy.scheduler.attempts.facts import awaits_relays
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Effects, OpenBarrier, SubmitComponent
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.start_conditions import find_missed_deadline
from koalapy.validation.submission import check_submission

if TYPE_CHECKING:
    from tests.scheduler.world import World

AttemptKey = tuple[JobId, int]
FOR_EVER = 10**9
FOR_JOB = re.compile(r" for job (\d+) ")
NOT_CLAIMED = re.compile(r"not claimed in (\d+) tries: no room on (.*?)(?: before its start time)?")


class AttemptHistory:
    """All attempts so far, with their submitted, replaced and claimed components and opened barriers."""

    def __init__(self) -> None:
        self.tokens: defaultdict[AttemptKey, set[Token]] = defaultdict(set)
        self.replaced: set[AttemptKey] = set()
        self.claimed: defaultdict[AttemptKey, set[Token]] = defaultdict(set)
        self.opened: set[AttemptKey] = set()


def check_effects(world: "World", effects: Effects) -> None:
    """Check the effects of one step before they are stored."""
    for job in effects.jobs.values():
        _check_state_changes(world.jobs.get(job.id), job, effects)
        assert job.claiming_tries >= 0
    gangs = world.gangs
    for entry in effects.timeline:
        assert entry.job in effects.jobs or entry.job in world.jobs
        if entry.event == "ending" and entry.reason.startswith("walltime of"):
            _check_walltime_was_over(world, effects.jobs[entry.job])
        if entry.event in ("ending", "failed") and (tried := NOT_CLAIMED.fullmatch(entry.reason)):
            assert effects.jobs[entry.job].claiming_tries >= int(tried[1])
            clusters = [world.queries.grid[name] for name in tried[2].split(", ")]
            assert any(c.is_in_reach and c.drained is None for c in clusters), "no usable cluster had idle nodes"
        if entry.event == "placed":
            _check_start_conditions(world, effects, entry.job)
        if entry.event == "failed" and entry.reason.startswith("dependency: "):
            _check_failed_dependency(world, effects, entry.job)
        if entry.event == "claimed":
            gangs.claimed[entry.job, entry.generation].add(_token(world, effects, entry))
        if entry.event == "preempted":
            before, after = world.jobs[entry.job], effects.jobs[entry.job]
            was_placed_now = entry.generation != before.generation or before.attempt is None
            is_allowed = after.spec.priority is Priority.LOW if was_placed_now else is_preemptible(before)
            assert is_allowed, "the job is protected from preemption"
        if entry.event == "reclaimed" and entry.job in world.jobs:  # else it was submitted and placed in this step
            _check_reclaimed_job(world, world.jobs[entry.job])
        if entry.event == "ending" and entry.reason.startswith("every cluster that could take it"):
            _check_no_cluster_remains(world, effects.jobs[entry.job])
        if entry.event == "re-placed":
            gangs.replaced.add((entry.job, entry.generation))
    _check_claims_lead_to_starts(effects, ends_in_vain=world.rules.preemption == "claiming")
    submits = _group_by_attempt(c.token for c in effects.commands if isinstance(c, SubmitComponent))
    for gang, tokens in submits.items():
        job = effects.jobs[gang[0]]
        assert job.attempt is not None
        assert job.generation == gang[1], "a component of an earlier attempt is started"
        assert len(tokens) == len(set(tokens)), "each once"
        assert not gangs.tokens[gang] & set(tokens), "a component is started once"
        assert gang not in gangs.opened, "nothing is started after the barrier"
        gangs.tokens[gang] |= set(tokens)
        submitted = {(c.cluster, c.size) for c in job.attempt.components if job.token(c.index) in tokens}
        # In an attempt that ends, another component may have been rejected after these were submitted: all are stopped.
        barred = job.barred_sizes(world.now) if job.ending is None else frozenset()
        assert not any(is_barred(barred, *each) for each in submitted), "a cluster has rejected it with this size"
        _check_fits_request(job, job.attempt, replaced=gang in gangs.replaced)
        _check_home_site(world, job, job.attempt)
    opens = _group_by_attempt(c.token for c in effects.commands if isinstance(c, OpenBarrier))
    for gang, tokens in opens.items():
        attempt = effects.jobs[gang[0]].attempt
        assert attempt is not None
        assert sorted(tokens) == sorted(effects.jobs[gang[0]].token(c.index) for c in attempt.gang), "a subset starts"
        for component in attempt.gang:
            _check_files_are_staged(world, effects.jobs[gang[0]], component)
        _check_barrier_may_open(world, gang, tokens)


def _check_claims_lead_to_starts(effects: Effects, *, ends_in_vain: bool) -> None:
    """Check that placement and claiming agree on the nodes of a job, and that no job ends in vain for another.

    ``ends_in_vain``: jobs may be preempted in the last try of a claim, as in the paper.
    """
    placed = {(entry.job, entry.generation) for entry in effects.timeline if entry.event == "placed"}
    given_up = {
        (entry.job, entry.generation)
        for entry in effects.timeline
        if entry.event == "ending" and entry.reason.startswith("claim-failed: no room on ")
    }
    assert not placed & given_up, "a claim lacks the nodes that its placement has found in the same step"
    later_failures = set[JobId]()  # of entries after the present one: a job may be placed anew after a failed claim
    for entry in reversed(effects.timeline):
        if (entry.job, entry.generation) in given_up and entry.event == "ending":
            later_failures.add(entry.job)
        if entry.event == "reclaimed" or (entry.event == "preempted" and not ends_in_vain):
            match = FOR_JOB.search(entry.reason)
            assert match is None or int(match[1]) not in later_failures, "a job was ended for a claim that has failed"


def _check_start_conditions(world: "World", effects: Effects, job_id: JobId) -> None:
    """Check that a job is placed once its dependencies hold, not before its begin and not after its latest start."""
    job = effects.jobs[job_id]
    array = None if job.array_job is None else effects.jobs.get(job.array_job) or world.jobs[job.array_job]
    spec = job.spec if array is None else array.spec
    for clause in spec.after:
        assert any(_dependency_holds(world, effects, d) for d in clause), "it is placed before its condition holds"
    assert spec.begin is None or spec.begin <= world.now, "it is placed before its begin"
    assert not find_missed_deadline(spec, world.rules, world.now), "it is placed though it cannot meet its deadline"


def _check_failed_dependency(world: "World", effects: Effects, job_id: JobId) -> None:
    """Check that one clause of a job that failed for its dependencies can never hold."""
    clauses = effects.jobs[job_id].spec.after
    ended = [[d for d in clause if _state_of(world, effects, d.job).is_final] for clause in clauses]
    assert any(
        len(over) == len(clause) and not any(_dependency_holds(world, effects, d) for d in clause)
        for clause, over in zip(clauses, ended, strict=True)
    ), "each of its dependencies holds or still may"


def _dependency_holds(world: "World", effects: Effects, dependency: Dependency) -> bool:
    state = _state_of(world, effects, dependency.job)
    return state.is_final and dependency.condition.holds_after(succeeded=state is JobState.SUCCEEDED)


def _state_of(world: "World", effects: Effects, job_id: JobId) -> JobState:
    return (effects.jobs.get(job_id) or world.jobs[job_id]).state


def _token(world: "World", effects: Effects, entry: TimelineEntry) -> Token:
    """Return the token of an entry's component. Its attempt may end in this step."""
    attempts = [attempt for job, attempt in effects.attempts if job == entry.job]
    attempts += [job.attempt for jobs in (effects.jobs, world.jobs) if (job := jobs.get(entry.job)) and job.attempt]
    nonce = next(attempt.nonce for attempt in attempts if attempt.generation == entry.generation)
    assert entry.component is not None
    return format_token(entry.job, entry.generation, entry.component, nonce)


def _check_reclaimed_job(world: "World", job: Job) -> None:
    """Check that a job with reclaimed nodes is preemptible and runs outside its home site."""
    assert world.rules.sharing == "feasible"
    assert is_preemptible(job), "the job is protected from preemption"
    assert job.attempt is not None
    assert any(component.cluster != job.spec.home_site for component in job.attempt.components)


def _check_home_site(world: "World", job: Job, attempt: Attempt) -> None:
    home, rules = job.spec.home_site, world.rules
    for component in attempt.gang if home else ():
        assert rules.sharing != "independent" or component.cluster == home
        speeds = [world.speeds.get(name, 1.0) for name in (component.cluster, home)]
        assert component.cluster == home or speeds[0] >= rules.speed_threshold * speeds[1]


def _check_no_cluster_remains(world: "World", job: Job) -> None:
    """Check that a grid of the clusters that have not rejected a failed job would not accept it."""
    limits = world.queries.limits()
    if any((refusal.least, refusal.most) != (1, MAX_NODES) for refusal in job.refusals):
        return
    rejecting_clusters = {refusal.cluster for refusal in job.refusals}
    remaining_clusters = [cluster for cluster in limits.clusters if cluster.name not in rejecting_clusters]
    try:
        check_submission(job.spec, replace(limits, clusters=remaining_clusters))
    except UsageError:
        return
    assert not remaining_clusters, "another cluster could have taken it"


def _check_walltime_was_over(world: "World", job: Job) -> None:
    """Check that a job ended for its walltime really exceeded it, by the actual exit times of its programs."""
    attempt, walltime = job.attempt, job.spec.walltime
    assert attempt is not None
    assert attempt.launched_at is not None
    assert walltime is not None
    deciding_components = (attempt.head,) if job.spec.launcher is Launcher.OPENMPI else attempt.gang
    exits = [world.sites[c.cluster].exits.get(job.token(c.index)) for c in deciding_components]
    codes = [exit[1] for exit in exits if exit is not None and exit[0] < attempt.launched_at + walltime]
    assert not any(codes), "the program had failed in time"
    assert len(codes) < len(deciding_components), "the program had ended in time"


def _check_files_are_staged(world: "World", job: Job, component: Component) -> None:
    if job.spec.has_stage(component.request_index):
        stage = world.sites[component.cluster].stages.get(job.stage_token(component))
        assert stage is not None, "its files were never staged"
        assert stage.state == "done", "the transfers are not over"


def _group_by_attempt(tokens: Iterable[Token]) -> dict[AttemptKey, list[Token]]:
    gangs: dict[AttemptKey, list[Token]] = defaultdict(list)
    for token in tokens:
        job, generation, *_ = parse_token(token)
        gangs[job, generation].append(token)
    return gangs


def _check_state_changes(old_job: Job | None, job: Job, effects: Effects) -> None:
    state = old_job.state if old_job else JobState.QUEUED
    for entry in effects.timeline:
        if entry.job == job.id:
            transitions = TRANSITIONS if job.tasks is None else ARRAY_TRANSITIONS
            assert entry.state is state or entry.state in transitions[state], f"{state} → {entry.state}"
            state = entry.state
    assert state is job.state, "a change of state without a timeline entry"


def _check_fits_request(job: Job, attempt: Attempt, *, replaced: bool) -> None:
    request = job.spec.request
    sizes = [c.size for c in attempt.gang]
    assert sum(sizes) == request.total_size
    if isinstance(request, FlexibleRequest) and request.split_options:
        assert sorted(sizes) in [sorted(option) for option in request.split_options]
    elif isinstance(request, FlexibleRequest):
        assert min(sizes) >= request.min_component_size
        assert request.max_components is None or len(sizes) <= request.max_components
        assert replaced or len({(c.cluster, c.node_class) for c in attempt.gang}) == len(sizes)
    else:
        requested = [(c.size, c.cluster) for c in request.components]
        fixed = isinstance(request, FixedRequest)
        assert requested == [(c.size, c.cluster if fixed else None) for c in attempt.gang]


def _check_barrier_may_open(world: "World", gang: AttemptKey, tokens: list[Token]) -> None:
    """Check that the barrier opens once, for all claimed components, while no earlier attempt of the job runs."""
    gangs = world.gangs
    assert set(tokens) <= gangs.claimed[gang] <= gangs.tokens[gang], "a component starts that is not claimed"
    assert gang not in gangs.opened, "the barrier opens twice"
    gangs.opened.add(gang)
    for token in tokens:
        assert any(token in site.claimed for site in world.sites.values()), f"{token} never had its nodes"
    for token in _running_programs(world):
        job, generation, *_ = parse_token(token)
        assert job != gang[0] or generation == gang[1], f"{token} still runs while attempt {gang[1]} starts"


def check_live_attempts(world: "World") -> None:
    """Check that two attempts of a job never run at once (semantics 5)."""
    live: dict[JobId, Token] = {}
    for token in _running_programs(world):
        job, generation, *_ = parse_token(token)
        first_token = live.setdefault(job, token)
        assert parse_token(first_token).generation == generation, f"{first_token} and {token} run at once"


def _running_programs(world: "World") -> Iterator[Token]:
    """Yield the components with a running program, except on clusters that an operator declared lost."""
    for site in world.sites.values():
        yield from (token for token in site.live_programs() if token not in world.declared_lost)


def check_counts(world: "World") -> None:
    """Check the scheduler's counts and cluster states after a step."""
    queries = world.queries
    active = {job.id: job for job in queries.jobs()}
    unfinished = {job_id for job_id, job in world.jobs.items() if not job.state.is_final}
    assert active.keys() == unfinished
    assert all(world.jobs[job_id] == job for job_id, job in active.items()), "a changed job is missing in the effects"
    queued = [job for job in active.values() if job.state is JobState.QUEUED]
    assert queries.queued == sum(job.tasks is None or job.may_start_task for job in queued)
    check_arrays(world)
    check_streams(world)
    check_kept_nodes(world)
    check_views(queries)
    wakeup = world.scheduler.next_wakeup()
    unfinished = world.scheduler.is_unfinished
    assert not (unfinished and world.clock is None), "a step without a time budget left jobs untried"
    assert unfinished or wakeup is None or wakeup > world.now, "an event that was due was not processed"
    node_counts: dict[str, dict[Token, int]] = {name: {} for name in world.sites}
    sending: dict[str, set[Token]] = {name: set() for name in world.sites}
    preemptible: dict[str, dict[Token, int]] = {name: {} for name in world.sites}
    guests: dict[str, set[Token]] = {name: set() for name in world.sites}
    for job in active.values():
        _check_job(job, world)
        if job.state.is_waiting:
            _check_waiting_job(world, job)
        if job.state.is_active and job.attempt:
            for c in job.attempt.components:
                if c.state is ComponentState.DELIVERING:
                    sending[c.cluster].add(job.token(c.index))
                elif c.state not in (ComponentState.PLACED, ComponentState.ENDED):
                    node_counts[c.cluster][job.token(c.index)] = c.size
                    status, token = queries.grid[c.cluster], job.token(c.index)
                    # Those that got parts of nodes are never preempted, even if the site no longer shares.
                    kept = token not in {**status.nodes.preemptible_components, **status.nodes.about_to_end}
                    frees_nodes = not job.spec.reservation and not (
                        job.spec.share and (status.last_report.shares or kept)
                    )
                    is_stopping = c.state is ComponentState.STOPPING or c.warned_at is not None
                    if is_preemptible(job) and frees_nodes and not is_stopping:
                        preemptible[c.cluster][job.token(c.index)] = c.size
                        if job.spec.home_site != c.cluster and world.rules.sharing == "feasible":
                            guests[c.cluster].add(job.token(c.index))
    for cluster in queries.grid.clusters():
        assert cluster.nodes.live == node_counts[cluster.name], (
            "the cluster's status and the jobs disagree on held nodes"
        )
        assert cluster.nodes.delivering == sending[cluster.name], (
            "the cluster's status and the jobs disagree on deliveries"
        )
        awaiting = sum(
            size
            for token, size in cluster.nodes.live.items()
            if not cluster.nodes.holds(token) and not active[parse_token(token).job].spec.reservation
        )
        assert cluster.nodes.idle == max(0, cluster.last_report.idle - awaiting), (
            "idle nodes do not match the components that wait for nodes"
        )
        about_to_end = {token: cluster.nodes.live[token] for token in cluster.nodes.about_to_end}
        assert not about_to_end.keys() & cluster.nodes.preemptible_components.keys()
        making_room = {**cluster.nodes.preemptible_components, **about_to_end}
        assert making_room == preemptible[cluster.name], "the preemptible components differ"
        assert cluster.nodes.preemptible == sum(cluster.nodes.preemptible_components.values())
        assert cluster.nodes.reclaimable_components.keys() == guests[cluster.name] - cluster.nodes.about_to_end.keys()
        assert cluster.nodes.reclaimable == sum(cluster.nodes.reclaimable_components.values())
        if cluster.nodes.reported:
            counts = (
                cluster.nodes.used
                + cluster.nodes.idle
                + cluster.last_report.background
                + cluster.last_report.withheld
                + cluster.last_report.down
            )
            assert counts == cluster.last_report.total, "the node counts do not add up to the total"
        forgotten = sum(cluster.nodes.live.get(token, 0) for token in world.forgotten)
        assert cluster.nodes.used - cluster.nodes.leaving - forgotten <= world.sites[cluster.name].total, (
            "a node is promised twice"
        )
        others = cluster.last_report.background + cluster.last_report.withheld
        assert (
            cluster.nodes.available == 0
            or cluster.nodes.available + cluster.nodes.used <= cluster.last_report.total - others
        )


def check_streams(world: "World") -> None:
    """Check that live attempts never need more streams over relays than the hub has."""
    attempts = [job.attempt for job in world.queries.jobs() if job.is_placed and job.attempt is not None]
    reserved = sum(attempt.streams for attempt in attempts)
    assert world.queries.grid.reserved_streams == reserved
    assert reserved <= world.relays.streams


def check_kept_nodes(world: "World") -> None:
    """Check that nodes are kept only for jobs that wait for another attempt, and only those that they had."""
    kept = world.queries.queues.kept
    released = Counter[str]()
    for job_id in kept.restarting_jobs():
        job = world.jobs[job_id]
        assert job.state is JobState.QUEUED or job.ending is JobState.QUEUED, "nodes are kept for a job that runs"
        assert job.attempt is not None
        assert job.attempt.end_reason.startswith(("infrastructure-failure: ", "transfer-failure: "))
        for component in job.attempt.gang:
            released[component.cluster] += component.size if component.has_ended else 0
    for name in world.sites:
        assert kept[name] == released[name], "other nodes are kept than were released"


def check_arrays(world: "World") -> None:
    """Check that each array counts its tasks, starts each index at most once, and keeps within its limit."""
    tasks_of: defaultdict[JobId, list[Job]] = defaultdict(list)
    for job in world.jobs.values():
        if job.array_job is not None:
            tasks_of[job.array_job].append(job)
    for array in [job for job in world.jobs.values() if job.tasks is not None]:
        tasks, indices, started = array.tasks, array.spec.array, tasks_of[array.id]
        assert tasks is not None
        assert indices is not None
        assert [task.array_index for task in started] == [indices.index_at(task.id - array.id - 1) for task in started]
        states = Counter(task.state for task in started)
        live = sum(count for state, count in states.items() if not state.is_final)
        assert tasks.live == live, "the array has another number of unfinished tasks"
        assert tasks.succeeded == states[JobState.SUCCEEDED]
        never_started = tasks.size - len(started) - tasks.waiting
        assert tasks.failed + tasks.cancelled == (
            states[JobState.FAILED] + states[JobState.CANCELLED] + never_started
        ), "a task is neither started nor waiting nor counted as ended"
        assert not any(tasks.is_pending(task.id - array.id - 1) for task in started), "a started task waits"
        assert indices.limit is None or live <= indices.limit, "more tasks run at once than the limit allows"
        assert array.state.is_final == tasks.is_over
        assert array.state is not JobState.SUCCEEDED or tasks.succeeded == tasks.size


def is_preemptible(job: Job) -> bool:
    """Return whether a job with nodes can be preempted by one of high priority."""
    return job.spec.priority is Priority.LOW and job.ending is None and job.attempt is not None


def check_views(queries: Queries) -> None:
    """Check that incrementally updated views equal recomputed ones."""
    grid, plan, kept = queries.grid, queries.queues.plan, queries.queues.kept

    def view_for(priority: Priority, is_late: bool) -> GridView:
        def left(cluster: ClusterStatus) -> int:
            withheld = kept[cluster.name] if priority is Priority.LOW else 0
            return plan.limit(priority, is_late, cluster, cluster.nodes.available - withheld)

        def hides_parts(cluster: ClusterStatus) -> bool:
            is_planned = plan.limit(priority, is_late, cluster, FOR_EVER) < FOR_EVER
            return is_planned or left(cluster) < cluster.nodes.available

        view = grid.cached_view(left, hides_parts=hides_parts).view()
        return grid.with_current_links(view, plan.streams_left_to(priority, is_late))

    views = [(plan.view(priority, late), view_for(priority, late)) for priority in Priority for late in (False, True)]
    for view, recomputed in ((grid.view(), grid.view(lambda cluster: cluster.nodes.available)), *views):
        assert view == recomputed
        assert view.links is recomputed.links
        assert view.replicas is recomputed.replicas
        assert view.by_idle == recomputed.by_idle
        assert view.by_speed == recomputed.by_speed
        assert view.usable_idle == recomputed.usable_idle


def _check_waiting_job(world: "World", job: Job) -> None:
    """Check that a waiting job is deferred only as long as it must be, and can still meet its deadline."""
    assert not find_missed_deadline(job.spec, world.rules, world.now), "it waits though it cannot meet its deadline"
    for clause in job.awaits:
        assert clause, "nothing is left that could end its wait"
        assert all(not world.jobs[d.job].state.is_final for d in clause), "it waits for a job that has ended"
    if job.state is JobState.QUEUED and job.is_deferred:
        assert job.awaits or (job.spec.begin is not None and job.spec.begin > world.now), "it waits for nothing"


def _check_job(job: Job, world: "World") -> None:
    now = world.now
    if job.retry_at is not None:
        assert job.state is JobState.QUEUED or job.ending is not None, "a job that is not waiting has a retry time"
        assert job.ending is not None or job.retry_at > now, "its pause is over but it is not in its queue"
    if job.tasks is not None:
        assert job.attempt is None
        assert job.state is JobState.RUNNING or (job.ending is None and job.tasks.pending)
        return
    if not job.state.is_active:
        assert job.ending is None
        return
    assert job.attempt is not None
    assert job.attempt.generation == job.generation
    states = {c.state for c in job.attempt.gang}
    if job.state is JobState.PLACED:
        assert states == {ComponentState.PLACED}
        assert job.attempt.claim_at is not None
        assert job.attempt.claim_at > now, "its claim is overdue"
    if job.ending is None:
        assert not states & {ComponentState.STOPPING}, "a component is being stopped for no reason"
        is_awaited = any(c.awaits_files for c in job.attempt.gang) or awaits_relays(job, world.queries.grid)
        if job.attempt.barrier_at is None and job.state is JobState.CLAIMING and not is_awaited:
            assert states != {ComponentState.CLAIMED}, "all components are claimed but the barrier is closed"
    else:
        assert {c.state for c in job.attempt.components} != {ComponentState.ENDED}, (
            "all components have ended but the attempt has not"
        )


def check_waiting(world: "World") -> None:
    """Check that a scan of all queues would place no waiting job: see the table in docs/scheduling.md.

    Skip policies that use predictions, which change over time.
    """
    queries = world.queries
    rejected_shapes: set[object] = set()
    for job in _jobs_at_turn(world):
        is_planned, priority = queries.planned_job == job.id, job.spec.priority
        if (priority, is_planned, _shape(job)) in rejected_shapes or queries.policies.capabilities(
            job.spec.policy
        ).learns:
            continue
        offer = queries.offer(job.spec, job)
        preempting, home = offer.with_preemption(job.spec), offer.at_home(job.spec)
        preempts = priority is Priority.HIGH and not job.spec.share and world.rules.preemption == "placement"
        assert (preempting is not None) == preempts
        for view in filter(None, (offer.view, preempting, home)):
            answer = queries.questions.ask(job.spec, view, job.barred_sizes(queries.now))
            assert isinstance(answer, Refusal), f"job {job.id} waits, and would be placed: {answer}"
        rejected_shapes.add((priority, is_planned, _shape(job)))


def _shape(job: Job) -> tuple[object, ...]:
    """Return everything that a placement answer depends on, apart from the grid."""
    refused = tuple((refusal.cluster, refusal.until) for refusal in job.refusals)
    spec = job.spec
    return (
        spec.policy,
        spec.request,
        spec.walltime,
        spec.owner,
        spec.home_site,
        spec.links,
        spec.processes_per_node,
        refused,
    )


def _jobs_at_turn(world: "World") -> Iterator[Job]:
    """Yield waiting jobs within their limits; in the modes head and fcfs only the first of each queue.

    The job with the planned start is always yielded.
    """
    candidates = [job for job in world.queries.jobs() if job.is_in_queue and world.queries.over_limit(job.spec) is None]
    passed_heads = set[object]()
    for job in sorted(candidates, key=lambda job: queue_position(world, job)):
        queue = job.spec.priority, section_of(world, job)
        if world.rules.queue == "scan" or queue not in passed_heads or job.id == world.queries.planned_job:
            yield job
        never_fits = world.rules.queue != "scan" and world.queries.questions.refusal_on_empty_grid(
            job.spec, assume_links=False
        )
        if not never_fits:
            passed_heads.add(queue)


def section_of(world: "World", job: Job) -> int:
    """Return the index of a job's queue: that of its home site in alphabetical order, or the last one."""
    sites = [] if world.rules.sharing == "ordinary" else sorted(world.sites)
    return sites.index(job.spec.home_site) if job.spec.home_site in sites else len(sites)


def queue_position(world: "World", job: Job) -> tuple[int, int, int]:
    """Return the sort key of jobs of one priority. A job moved to the front stays there whatever its width."""
    is_first = job.queue_seq < 0 or world.rules.queue_order != "narrowest-first"
    return section_of(world, job), 0 if is_first else job.spec.request.total_size, job.queue_seq


def check_no_job_passed(world: "World", effects: Effects) -> None:
    """Check after an unfinished step that placed jobs have passed no job that would be placed.

    Skip jobs that may have had the planned start: they are tried first.
    """
    if world.rules.queue != "scan" or not world.rules.event_driven:
        return
    queries = world.queries
    changed_jobs = {entry.job for entry in effects.timeline if entry.event != "planned"}
    placed = [effects.jobs[entry.job] for entry in effects.timeline if entry.event == "placed"]
    placed = [job for job in placed if job.id not in world.planned_jobs]
    rejected_shapes: set[object] = set()
    for priority in Priority:
        for job in queries.jobs():
            # With queues per site, a job is placed before guests that come to its home site.
            later_positions = [
                queue_position(world, placed_job) for placed_job in placed if placed_job.spec.priority is priority
            ]
            later_positions = [place for place in later_positions if place[0] == section_of(world, job)]
            last_position = max(later_positions, default=(0, 0, 0))
            was_passed = (
                job.is_in_queue and job.spec.priority is priority and queue_position(world, job) < last_position
            )
            if not was_passed or job.id in changed_jobs or (priority, _shape(job)) in rejected_shapes:
                continue
            if not queries.policies.capabilities(job.spec.policy).learns and queries.over_limit(job.spec) is None:
                answer = queries.questions.ask(job.spec, queries.offer(job.spec).view, job.barred_sizes(queries.now))
                assert isinstance(answer, Refusal), f"job {job.id} was passed, and would be placed: {answer}"
                rejected_shapes.add((priority, _shape(job)))


def check_plan(world: "World") -> None:
    """Check after a scan that the right job has the planned start.

    It is the longest waiting job of the highest priority, of those that fit the empty grid within the current limits of
    resource managers, or a job that had the plan before. No job has it while a placed job has yet to request the nodes
    that were planned for it. A plan stays while one of its clusters is out of contact for a moment.
    """
    queries, plan_after = world.queries, world.rules.plan_after
    if plan_after is None or not world.rules.plans_starts:
        assert queries.planned_job is None
        return
    if queries.queues.plan.awaits_reports:
        return

    def capacity(cluster: ClusterStatus) -> int:
        free = (
            cluster.last_report.total
            - cluster.last_report.background
            - cluster.last_report.withheld
            - cluster.last_report.down
            - cluster.nodes.doubted
        )
        return min(free, cluster.health.limit.size - 1) if cluster.health.limit else free

    empty = queries.grid.view(capacity)
    if queries.queues.plan.holder != queries.planned_job:
        return
    for priority in Priority:
        waiting = [job for job in world.jobs.values() if job.is_in_queue and job.spec.priority is priority]
        checked_shapes: set[object] = set()
        is_oldest = True
        since = {job.id: queries.queues[priority].entry_of(job.id).waits_since for job in waiting}
        for job in sorted(waiting, key=lambda job: (since[job.id], job.queue_seq)):
            if _shape(job) in checked_shapes or world.now - since[job.id] < plan_after or job.spec.internal:
                continue  # represented by an older job of the same shape, or not old enough
            checked_shapes.add(_shape(job))
            if queries.policies.capabilities(job.spec.policy).learns:
                return  # predictions have changed since the scan
            if queries.over_limit(job.spec) is not None:
                continue  # its limit prevents it from using planned nodes
            if isinstance(queries.questions.ask(job.spec, empty, job.barred_sizes(queries.now)), Placement):
                if queries.planned_job == job.id:
                    assert is_oldest or job.id in world.planned_jobs
                    return
                is_oldest = False
        assert is_oldest, "no job that has waited long has a planned start"
    assert queries.planned_job is None


def check_nothing_remains(world: "World") -> None:
    """Check that all commands were carried out and no resource outlives its job or attempt."""
    assert not world.outbox
    for site in world.sites.values():
        for token in site.runners:
            job, generation, *_ = parse_token(token)
            assert world.jobs[job].state.is_active, f"{token} outlives its job"
            assert world.jobs[job].generation == generation, f"{token} outlives its attempt"
        for token in site.stages:
            job, generation, rank, _ = parse_token(token)
            assert world.jobs[job].state.is_active, f"the files of {token} outlive its job"
            assert world.jobs[job].generation == generation, f"the files of {token} outlive its attempt"
            attempt = world.jobs[job].attempt
            assert attempt is not None
            assert site.name in {c.cluster for c in attempt.gang if c.rank == rank}, f"{token} went elsewhere"
        assert site.held.keys() <= site.runners.keys() | site.local_users.keys()
