"""What must hold at every step, whatever happens: semantics 2 to 6 and 13."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.job import (
    TRANSITIONS,
    Attempt,
    Component,
    ComponentState,
    Job,
    JobId,
    JobState,
    Launcher,
    Priority,
    TimelineEntry,
    Token,
    format_token,
    parse_token,
)
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FixedRequest, FlexibleRequest
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import Effects, OpenBarrier, SubmitComponent
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.reservation import is_promised
from koalapy.validation.submission import check

if TYPE_CHECKING:
    from tests.scheduler.world import World

Gang = tuple[JobId, int]
NOT_CLAIMED = re.compile(r"not claimed in (\d+) tries: no room on (.*?)(?: before its start time)?")


class Gangs:
    """Every attempt there ever was: the components that were started, and those of them that were claimed."""

    def __init__(self) -> None:
        self.tokens: defaultdict[Gang, set[Token]] = defaultdict(set)
        self.replaced: set[Gang] = set()
        self.claimed: defaultdict[Gang, set[Token]] = defaultdict(set)
        self.opened: set[Gang] = set()


def check_effects(world: "World", effects: Effects) -> None:
    """One step's effects, before they are written."""
    for job in effects.jobs.values():
        _state_changes_are_told(world.jobs.get(job.id), job, effects)
        assert job.claiming_tries >= 0
    gangs = world.gangs
    for entry in effects.timeline:
        assert entry.job in effects.jobs or entry.job in world.jobs
        if entry.event == "ending" and entry.reason.startswith("walltime of"):
            _did_not_end_in_time(world, effects.jobs[entry.job])
        if entry.event in ("ending", "failed") and (tried := NOT_CLAIMED.fullmatch(entry.reason)):
            assert effects.jobs[entry.job].claiming_tries >= int(tried[1])
            clusters = [world.queries.grid[name] for name in tried[2].split(", ")]
            assert any(c.is_in_reach and c.drained is None for c in clusters), "nobody was faster"
        if entry.event == "claimed":
            gangs.claimed[entry.job, entry.generation].add(_token(world, effects, entry))
        if entry.event == "preempted":
            assert makes_room(world, world.jobs[entry.job]), "it was promised that nobody preempts it"
        if entry.event == "reclaimed" and entry.job in world.jobs:  # else it came, and was placed, in this very step
            _was_a_guest(world, world.jobs[entry.job])
        if entry.event == "ending" and entry.reason.startswith("every cluster that could take it"):
            _no_other_cluster_could_take(world, effects.jobs[entry.job])
        if entry.event == "re-placed":
            gangs.replaced.add((entry.job, entry.generation))
    submits = _by_gang(c.token for c in effects.commands if isinstance(c, SubmitComponent))
    for gang, tokens in submits.items():
        job = effects.jobs[gang[0]]
        assert job.attempt is not None
        assert job.generation == gang[1], "a component of an earlier attempt is started"
        assert len(tokens) == len(set(tokens)), "each once"
        assert not gangs.tokens[gang] & set(tokens), "a component is started once"
        assert gang not in gangs.opened, "nothing is started after the barrier"
        gangs.tokens[gang] |= set(tokens)
        submitted = {c.cluster for c in job.attempt.components if job.token(c.index) in tokens}
        # Of an attempt that ends, another component may have been refused after these were submitted: all are stopped.
        refusing = job.barred_clusters(world.now) if job.ending is None else frozenset()
        assert not submitted & refusing, "it is handed to a cluster that has refused it"
        _fits_request(job, job.attempt, replaced=gang in gangs.replaced)
        _is_where_its_home_site_lets_it(world, job, job.attempt)
    opens = _by_gang(c.token for c in effects.commands if isinstance(c, OpenBarrier))
    for gang, tokens in opens.items():
        attempt = effects.jobs[gang[0]].attempt
        assert attempt is not None
        assert sorted(tokens) == sorted(effects.jobs[gang[0]].token(c.index) for c in attempt.gang), "a subset starts"
        for component in attempt.gang:
            _has_its_files(world, effects.jobs[gang[0]], component)
        _barrier_may_open(world, gang, tokens)


def _token(world: "World", effects: Effects, entry: TimelineEntry) -> Token:
    """Of the component that an entry is about, whose attempt may be over by the end of the step."""
    known = [attempt for job, attempt in effects.attempts if job == entry.job]
    known += [job.attempt for jobs in (effects.jobs, world.jobs) if (job := jobs.get(entry.job)) and job.attempt]
    nonce = next(attempt.nonce for attempt in known if attempt.generation == entry.generation)
    assert entry.component is not None
    return format_token(entry.job, entry.generation, entry.component, nonce)


def _was_a_guest(world: "World", job: Job) -> None:
    """A job of which a site takes back its nodes is of another one, and makes room for those of high priority, too."""
    assert world.rules.sharing == "feasible"
    assert makes_room(world, job), "it was promised that nobody stops it"
    assert job.attempt is not None
    assert any(component.cluster != job.spec.home_site for component in job.attempt.components)


def _is_where_its_home_site_lets_it(world: "World", job: Job, attempt: Attempt) -> None:
    home, rules = job.spec.home_site, world.rules
    for component in attempt.gang if home else ():
        assert rules.sharing != "independent" or component.cluster == home
        speeds = [world.speeds.get(name, 1.0) for name in (component.cluster, home)]
        assert component.cluster == home or speeds[0] >= rules.speed_threshold * speeds[1]


def _no_other_cluster_could_take(world: "World", job: Job) -> None:
    """Check that a grid of the clusters that have not refused a failed job would not accept it."""
    limits = world.queries.limits()
    refused = {refusal.cluster for refusal in job.refusals}
    others = [cluster for cluster in limits.clusters if cluster.name not in refused]
    try:
        check(job.spec, replace(limits, clusters=others))
    except UsageError:
        return
    assert not others, "another cluster could have taken it"


def _did_not_end_in_time(world: "World", job: Job) -> None:
    """Of a job that is ended for its walltime: what really happened, however late anybody was told of it."""
    attempt, walltime = job.attempt, job.spec.walltime
    assert attempt is not None
    assert attempt.launched_at is not None
    assert walltime is not None
    telling = (attempt.head,) if job.spec.launcher is Launcher.OPENMPI else attempt.gang
    exits = [world.sites[c.cluster].exits.get(job.token(c.index)) for c in telling]
    codes = [exit[1] for exit in exits if exit is not None and exit[0] < attempt.launched_at + walltime]
    assert not any(codes), "the program had failed in time"
    assert len(codes) < len(telling), "the program had ended in time"


def _has_its_files(world: "World", job: Job, component: Component) -> None:
    if job.spec.has_stage(component.request_index):
        stage = world.sites[component.cluster].stages.get(job.stage_token(component))
        assert stage is not None, "its files were never ordered"
        assert stage.state == "done", "the transfers are not over"


def _by_gang(tokens: Iterable[Token]) -> dict[Gang, list[Token]]:
    gangs: dict[Gang, list[Token]] = defaultdict(list)
    for token in tokens:
        job, generation, *_ = parse_token(token)
        gangs[job, generation].append(token)
    return gangs


def _state_changes_are_told(before: Job | None, after: Job, effects: Effects) -> None:
    state = before.state if before else JobState.QUEUED
    for entry in effects.timeline:
        if entry.job == after.id:
            assert entry.state is state or entry.state in TRANSITIONS[state], f"{state} → {entry.state}"
            state = entry.state
    assert state is after.state, "a change of state without a timeline entry"


def _fits_request(job: Job, attempt: Attempt, *, replaced: bool) -> None:
    request = job.spec.request
    sizes = [c.size for c in attempt.gang]
    assert sum(sizes) == request.total_size
    if isinstance(request, FlexibleRequest) and request.split_options:
        assert sorted(sizes) in [sorted(option) for option in request.split_options]
    elif isinstance(request, FlexibleRequest):
        assert min(sizes) >= request.min_component_size
        assert request.max_components is None or len(sizes) <= request.max_components
        assert replaced or len({c.cluster for c in attempt.gang}) == len(sizes)
    else:
        asked = [(c.size, c.cluster) for c in request.components]
        fixed = isinstance(request, FixedRequest)
        assert asked == [(c.size, c.cluster if fixed else None) for c in attempt.gang]


def _barrier_may_open(world: "World", gang: Gang, tokens: list[Token]) -> None:
    """All or nothing, once, and with no earlier attempt of the job still running its program."""
    gangs = world.gangs
    assert set(tokens) <= gangs.claimed[gang] <= gangs.tokens[gang], "a component starts that is not claimed"
    assert gang not in gangs.opened, "the barrier opens twice"
    gangs.opened.add(gang)
    for token in tokens:
        assert any(token in site.claimed for site in world.sites.values()), f"{token} never had its nodes"
    for token in _programs(world):
        job, generation, *_ = parse_token(token)
        assert job != gang[0] or generation == gang[1], f"{token} still runs while attempt {gang[1]} starts"


def check_live_attempts(world: "World") -> None:
    """Two attempts of a job never run at once, whatever their clusters hear of the daemon (semantics 5)."""
    live: dict[JobId, Token] = {}
    for token in _programs(world):
        job, generation, *_ = parse_token(token)
        other = live.setdefault(job, token)
        assert parse_token(other).generation == generation, f"{other} and {token} run at once"


def _programs(world: "World") -> Iterator[Token]:
    """The components whose program runs; but for those of clusters that an operator wrongly declared lost."""
    for site in world.sites.values():
        yield from (token for token in site.live_programs() if token not in world.declared_lost)


def check_counts(world: "World") -> None:
    """What the scheduler knows, after each step."""
    queries = world.queries
    active = {job.id: job for job in queries.jobs()}
    unfinished = {ident for ident, job in world.jobs.items() if not job.state.is_final}
    assert active.keys() == unfinished
    assert all(world.jobs[ident] == job for ident, job in active.items()), "a change was not handed out"
    assert queries.queued == sum(job.state is JobState.QUEUED for job in active.values())
    check_views(queries)
    wakeup = world.scheduler.next_wakeup()
    unfinished = world.scheduler.is_unfinished
    assert not (unfinished and world.clock is None), "it had all the time"
    assert unfinished or wakeup is None or wakeup > world.now, "something due was left undone"
    held: dict[str, dict[Token, int]] = {name: {} for name in world.sites}
    sending: dict[str, set[Token]] = {name: set() for name in world.sites}
    preemptible: dict[str, dict[Token, int]] = {name: {} for name in world.sites}
    guests: dict[str, set[Token]] = {name: set() for name in world.sites}
    for job in active.values():
        _job_is_sound(job, world.now)
        if job.state.is_active and job.attempt:
            for c in job.attempt.components:
                if c.state is ComponentState.DELIVERING:
                    sending[c.cluster].add(job.token(c.index))
                elif c.state not in (ComponentState.PLACED, ComponentState.ENDED):
                    held[c.cluster][job.token(c.index)] = c.size
                    if makes_room(world, job) and c.state is not ComponentState.STOPPING and c.warned_at is None:
                        preemptible[c.cluster][job.token(c.index)] = c.size
                        if job.spec.home_site != c.cluster and world.rules.sharing == "feasible":
                            guests[c.cluster].add(job.token(c.index))
    for cluster in queries.grid.clusters():
        assert cluster.live == held[cluster.name], "the cluster's status and the jobs disagree on who has nodes"
        assert cluster.delivering == sending[cluster.name], (
            "the cluster's status and the jobs disagree on who still sends"
        )
        awaiting = sum(size for token, size in cluster.live.items() if not cluster.holds(token))
        assert cluster.idle == max(0, cluster.reported_idle - awaiting), "who has its nodes, and who waits for them"
        about_to_end = {token: cluster.live[token] for token in cluster.about_to_end}
        assert not about_to_end.keys() & cluster.preemptible_components.keys()
        making_room = {**cluster.preemptible_components, **about_to_end}
        assert making_room == preemptible[cluster.name], "who makes room for others is another"
        assert cluster.preemptible == sum(cluster.preemptible_components.values())
        assert cluster.reclaimable_components.keys() == guests[cluster.name] - cluster.about_to_end.keys()
        assert cluster.reclaimable == sum(cluster.reclaimable_components.values())
        if cluster.reported:
            counts = cluster.used + cluster.idle + cluster.background + cluster.down
            assert counts == cluster.total, "a node is two things, or nothing"
        forgotten = sum(cluster.live.get(token, 0) for token in world.forgotten)
        assert cluster.used - cluster.leaving - forgotten <= world.sites[cluster.name].total, "a node is promised twice"
        assert cluster.available == 0 or cluster.available + cluster.used <= cluster.total - cluster.background


def makes_room(world: "World", job: Job) -> bool:
    """Whether a job that has nodes gives them to one of high priority."""
    if job.spec.priority is Priority.HIGH or job.ending is not None or job.attempt is None:
        return False
    patience = world.rules.low_patience
    return patience is None or job.attempt.placed_at - job.submitted_at < patience or job.spec.internal


def check_views(queries: Queries) -> None:
    """Views that are made of the ones before are as if they were made recomputation."""
    grid = queries.grid

    def left_to(priority: Priority) -> GridView:
        return grid.view(lambda cluster: cluster.available - queries.kept(cluster.name, priority))

    def own(cluster: ClusterStatus) -> int:
        # Where nodes are kept for nobody who waits, nobody looks.
        return cluster.available - cluster.reserved_for_others(queries.reservation)

    def with_preemption(cluster: ClusterStatus) -> int:
        room = cluster.expected + cluster.preemptible - cluster.reserved_for_others()
        return room if cluster.limit is None else min(room, cluster.limit.size - 1)

    for view, anew in (
        (grid.view(), grid.view(lambda cluster: cluster.available)),
        (queries.view(Priority.LOW), left_to(Priority.LOW)),
        (queries.view(Priority.HIGH), left_to(Priority.HIGH)),
        (queries.own_view(), grid.view(own) if queries.reservation is not None else queries.own_view()),
        (queries.view_with_preemption(), grid.view(with_preemption)),
    ):
        assert view == anew
        assert view.links is recomputation.links
        assert view.replicas is recomputation.replicas
        assert view.by_idle == recomputation.by_idle
        assert view.by_speed == recomputation.by_speed
        assert view.usable_idle == recomputation.usable_idle


def _job_is_sound(job: Job, now: float) -> None:
    if job.retry_at is not None:
        assert job.state is JobState.QUEUED or job.ending is not None, "it is not to be tried again"
        assert job.ending is not None or job.retry_at > now, "its pause is over, and it is not in its queue"
    if not job.state.is_active:
        assert job.ending is None
        return
    assert job.attempt is not None
    assert job.attempt.generation == job.generation
    states = {c.state for c in job.attempt.gang}
    if job.state is JobState.PLACED:
        assert states == {ComponentState.PLACED}
        assert job.attempt.claim_at is not None
        assert job.attempt.claim_at > now, "it is not claimed for though its time has come"
    if job.ending is None:
        assert not states & {ComponentState.STOPPING}, "a component is being stopped for no reason"
        transferred = not any(c.awaits_files for c in job.attempt.gang)
        if job.attempt.barrier_at is None and job.state is JobState.CLAIMING and transferred:
            assert states != {ComponentState.CLAIMED}, "all are in and the barrier is shut"
    else:
        assert {c.state for c in job.attempt.components} != {ComponentState.ENDED}, (
            "nothing is left of the attempt and the job does not go on"
        )


def check_waiting(world: "World") -> None:
    """Nobody waits whom a scan of all queues would place: see the table in docs/scheduling.md.

    But for those whose policies go by predictions, which change while nothing happens.
    """
    queries, rules = world.queries, world.rules
    refused: set[object] = set()
    for job in _whose_turn_it_is(world):
        high, kept = job.spec.priority is Priority.HIGH, queries.reservation == job.id
        if (high, kept, _shape(job)) in refused or queries.policies.capabilities(job.spec.policy).learns:
            continue
        views = [queries.own_view() if kept else queries.view(job.spec.priority)]
        if high and rules.preemption == "placement":
            views.append(queries.view_with_preemption())
        if (home := queries.view_at_home(job.spec, everything=kept)) is not None:
            assert [(c.name, c.idle) for c in home] == [(job.spec.home_site, _taken_back(world, job, kept))]
            views.append(home)
        for view in views:
            answer = queries.evaluate(job.spec, view, queries.barred(job))
            assert isinstance(answer, Refusal), f"job {job.id} waits, and would be placed: {answer}"
        refused.add((high, kept, _shape(job)))


def _taken_back(world: "World", job: Job, kept: bool) -> int:
    """What a job may have at home: all but what its own and jobs of high priority have there, or is kept for others."""
    queries, cluster = world.queries, world.queries.grid[job.spec.home_site]
    room = cluster.expected + sum(cluster.reclaimable_components.values()) - cluster.reserved_for_others()
    room = room if cluster.limit is None else min(room, cluster.limit.size - 1)
    low = job.spec.priority is Priority.LOW and not kept
    return max(0, room - (queries.kept(cluster.name, Priority.LOW) - cluster.reserved_for_others() if low else 0))


def _shape(job: Job) -> tuple[object, ...]:
    """What the answers to jobs depend on."""
    refused = tuple((refusal.cluster, refusal.until) for refusal in job.refusals)
    return job.spec.policy, job.spec.request, job.spec.owner, job.spec.home_site, refused


def _whose_turn_it_is(world: "World") -> Iterator[Job]:
    """All whom no limit keeps waiting; in the modes head and fcfs the first of each queue.

    Whom nodes are kept for is always tried.
    """
    everybody = [job for job in world.queries.jobs() if job.is_in_queue and world.queries.over_limit(job.spec) is None]
    heads = set[object]()
    for job in sorted(everybody, key=lambda job: place_of(world, job)):
        queue = job.spec.priority, section_of(world, job)
        if world.rules.queue == "scan" or queue not in heads or job.id == world.queries.reservation:
            yield job
        never_fits = world.rules.queue != "scan" and world.queries.policy_calls.refusal_on_empty_grid(
            job.spec, assume_links=False
        )
        if not never_fits:
            heads.add(queue)


def section_of(world: "World", job: Job) -> int:
    """Which queue it waits in: where home sites have their own, in the order of their names, those without one last."""
    sites = [] if world.rules.sharing == "ordinary" else sorted(world.sites)
    return sites.index(job.spec.home_site) if job.spec.home_site in sites else len(sites)


def place_of(world: "World", job: Job) -> tuple[int, int, int]:
    """What jobs of a priority are ordered by; who was put before all others stands there whatever its width."""
    is_first = job.queue_seq < 0 or world.rules.queue_order != "narrowest-first"
    return section_of(world, job), 0 if is_first else job.spec.request.total_size, job.queue_seq


def check_nobody_passed(world: "World", effects: Effects) -> None:
    """After a step that left something to the next: whoever was placed in it has passed nobody who would be placed.

    But those who have waited for so long that nodes may have been kept for them: they are the first to be tried.
    """
    if world.rules.queue != "scan" or not world.rules.event_driven:
        return
    queries = world.queries
    concerned = {entry.job for entry in effects.timeline}
    placed = [effects.jobs[entry.job] for entry in effects.timeline if entry.event == "placed"]
    placed = [job for job in placed if job.placement_tries <= world.rules.aging_tries or not world.rules.aging]
    refused: set[object] = set()
    for priority in Priority:
        view = queries.view(priority)
        for job in queries.jobs():
            # Where sites have queues of their own, a job is placed before guests that come to its home site.
            behind = [place_of(world, one) for one in placed if one.spec.priority is priority]
            behind = [place for place in behind if place[0] == section_of(world, job)]
            last = max(behind, default=(0, 0, 0))
            passed = job.is_in_queue and job.spec.priority is priority and place_of(world, job) < last
            if not passed or job.id in concerned or (priority, _shape(job)) in refused:
                continue
            if not queries.policies.capabilities(job.spec.policy).learns and queries.over_limit(job.spec) is None:
                answer = queries.evaluate(job.spec, view, queries.barred(job))
                assert isinstance(answer, Refusal), f"job {job.id} was passed, and would be placed: {answer}"
                refused.add((priority, _shape(job)))


def check_reservation(world: "World") -> None:
    """After a scan nodes are kept for the oldest that was promised its turn or has failed enough scans, and could be
    placed at all, within what resource managers take of us now; or for one of those whose turn it was before that."""
    queries, rules = world.queries, world.rules

    def room(cluster: ClusterStatus) -> int:
        free = cluster.total - cluster.background - cluster.down - cluster.doubted
        return min(free, cluster.limit.size - 1) if cluster.limit else free

    empty = queries.grid.view(room)

    def was_promised(job: Job) -> bool:
        return is_promised(job, rules, world.now)

    def has_aged(job: Job) -> bool:
        return rules.aging and queries.tries(job.id) >= rules.aging_tries

    kinds = [(Priority.LOW, was_promised), *((priority, has_aged) for priority in Priority)]
    for priority, has_waited in kinds:
        waiting = [job for job in world.jobs.values() if job.is_in_queue and job.spec.priority is priority]
        met: set[object] = set()
        is_oldest = True
        for job in sorted(waiting, key=lambda job: job.queue_seq):
            if _shape(job) in met or not has_waited(job):
                continue  # an older one of its shape stands for it, or it has its turn later
            met.add(_shape(job))
            if queries.policies.capabilities(job.spec.policy).learns:
                return  # predictions have changed since
            if queries.over_limit(job.spec) is not None:
                continue  # nodes that are kept would be of no use to it
            if isinstance(queries.evaluate(job.spec, empty, queries.barred(job)), Placement):
                if queries.reservation == job.id:
                    assert is_oldest or job.id in world.reserved_jobs
                    return
                is_oldest = False
        assert is_oldest, "nodes are kept for none of those who have waited long"
    assert queries.reservation is None


def check_quiet(world: "World") -> None:
    """When everything had time to be answered: nobody holds what is not theirs, and every command was carried out."""
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
