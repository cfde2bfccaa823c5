"""Derive facts from the components of a job's live attempt, without changing anything."""

from itertools import combinations

from koalapy.model.cluster import LinkPath, LinkUse
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.request import StopWarning
from koalapy.model.wording import format_list, format_time
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.rules import Rules

INFRASTRUCTURE_FAILURE = "infrastructure-failure"
TRANSFER_FAILURE = "transfer-failure"
"""The first words of the reason of an attempt that failed without a fault of its program."""
MIN_MEASURED_SECONDS = 0.5
"""Seconds after which the speed of a transfer predicts its end."""


def filter_of(spec: JobSpec, component: Component) -> NodeFilter:
    """Return which nodes of its cluster a component may get."""
    requirement = spec.node_requirement(component.request_index)
    of_nodes = requirement and requirement.of_nodes
    return NodeFilter(component.node_class, of_nodes) if component.node_class or of_nodes else ANY_NODE


def reporting_components(job: Job) -> tuple[Component, ...]:
    """Return the components that report an exit code: only the head with Open MPI, otherwise all."""
    attempt = live(job)
    return (attempt.head,) if job.spec.launcher is Launcher.OPENMPI else attempt.gang


def program_result(job: Job) -> int | None:
    """Return the program's exit code once it is certain: the first failure, or 0 when all have reported 0;
    else None."""
    codes = [c.exit_code for c in reporting_components(job)]
    failed = next((code for code in codes if code), None)
    if failed is not None:
        return failed
    return 0 if all(code == 0 for code in codes) else None


def is_launched(job: Job) -> bool:
    """Return whether the program runs, or has ended, on all components that report."""
    return all(c.state is ComponentState.RUNNING or c.exit_code is not None for c in reporting_components(job))


def is_program_over(job: Job, grid: GridStatus) -> bool:
    """Return whether a job's program has ended, even if its exit code still follows its output."""
    return all(
        c.exit_code is not None or job.token(c.index) in grid[c.cluster].nodes.exited for c in reporting_components(job)
    )


def walltime_ends(job: Job) -> float | None:
    """Return when a job's walltime passes; None before the launch and without a walltime."""
    launched, walltime = live(job).launched_at, job.spec.walltime
    return None if launched is None or walltime is None else launched + walltime


def warning_of(job: Job, rules: Rules) -> StopWarning | None:
    """Return the warning for a job that is stopped now; None if it runs nowhere or requested none."""
    warning = job.spec.warning
    if warning is None or live(job).launched_at is None:
        return None
    return StopWarning(warning.signal, min(warning.grace, rules.warning_max))


def unclaimed(job: Job) -> list[Component]:
    """Return the components that have a cluster but have not been submitted to it."""
    return [component for component in live(job).gang if component.state is ComponentState.PLACED]


def link_demand(job: Job, component: Component) -> float:
    """Return the bytes per second that a component exchanges with other clusters (semantics 7)."""
    per_node = job.spec.per_node_bandwidth
    if not per_node:
        return 0.0
    gang = live(job).gang
    total, same_cluster = sum(c.size for c in gang), sum(c.size for c in gang if c.cluster == component.cluster)
    return component.size * per_node * (total - same_cluster) / (total - 1) if total > same_cluster else 0.0


def unknown_reason(job: Job, now: float) -> str:
    """Return, in one line, why a job's state is unknown and until when."""
    unknown = [c for c in live(job).components if c.unknown_since is not None and not c.has_ended]
    clusters = sorted({component.cluster for component in unknown})
    away = f"{format_list(clusters, separator=' and ')} {'is' if len(clusters) == 1 else 'are'} out of reach"
    if live(job).barrier_at is None:
        return f"{away}, before its program was started there"
    lasting = sorted({component.cluster for component in unknown if component.lost_at is None})
    if lasting:
        return f"{away}, where it may still run: tried again once that is over (koala clusters lost {lasting[0]})"
    until = format_time(max(component.lost_at or now for component in unknown), now, exact=True)
    return f"{away}, where it may still run: tried again at {until} UTC, when that is certainly over"


def derived_state(job: Job) -> JobState:
    """Return the job state that follows from the components."""
    attempt = live(job)
    if any(c.unknown_since is not None for c in attempt.gang if not c.has_ended):
        return JobState.UNKNOWN
    if attempt.barrier_at is None:
        return JobState.CLAIMING
    return JobState.STARTING if attempt.launched_at is None else JobState.RUNNING


def awaits_relays(job: Job, grid: GridStatus) -> bool:
    """Return whether a relay that a job needs is not ready, as after the restart of an agent."""
    relays = grid.relays
    clusters = sorted({component.cluster for component in live(job).gang})
    if not relays.streams or len(clusters) == 1 or job.spec.launcher is not Launcher.OPENMPI:
        return False
    if job.spec.links is LinkUse.DIRECT or relays.ready.issuperset(clusters):
        return False
    view = grid.view()
    paths = (view.path_between(*pair, job.spec.links) for pair in combinations(clusters, 2))
    return LinkPath.NONE in paths


def expected_end_of_transfers(attempt: Attempt, now: float) -> float | None:
    """Return when all transfers will be complete at their measured speed; None without measurements."""
    ends = []
    for component in attempt.gang:
        if component.staging_since is None or component.staged_at is not None:
            continue
        passed, staged, size = now - component.staging_since, component.staged, component.stage_size
        if passed >= MIN_MEASURED_SECONDS and 0 < staged < size:
            ends.append(now + passed * (size - staged) / staged)
    return max(ends, default=None)


def only_awaits_files(job: Job) -> bool:
    """Return whether all nodes of a job have reported, and its program waits only for input files."""
    gang = live(job).gang
    are_claimed = all(c.state is ComponentState.CLAIMED and c.unknown_since is None for c in gang)
    return are_claimed and any(c.awaits_files for c in gang)


def find_overdue_transfer(job: Job, grid: GridStatus, slowest: float, now: float) -> Component | None:
    """Return a component whose input files have not arrived in time, though all nodes of its job have reported.

    Nodes wait for a transfer as long as it took before they reported, or as it takes at the bandwidth ``slowest``, and
    at least the limit of its cluster.
    """
    claimed_at = max(c.claimed_at or now for c in live(job).gang)
    bundle = 0 if job.spec.bundle is None else job.spec.bundle.size
    for component in (c for c in live(job).gang if c.awaits_files):
        size = bundle + sum(file.size for file in job.spec.inputs_of(component.request_index))
        staged_s = claimed_at - (component.staging_since or claimed_at)
        if now >= claimed_at + max(grid[component.cluster].profile.node_start_limit, staged_s, size / slowest):
            return component
    return None
