"""Every state name of Slurm has a mapping, and an unknown one never counts as an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.port import LrmJob, LrmJobState
from koalapy.agent.lrm.slurm.adapter import make_snapshot
from koalapy.agent.lrm.slurm.answers import SlurmNode
from koalapy.agent.lrm.slurm.offer import Offer, Partition
from koalapy.agent.lrm.slurm.states import job_end, job_state, node_state

# squeue(1), "JOB STATE CODES", and the state flags of later releases
JOB_STATES = {
    LrmJobState.QUEUED: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING",
    LrmJobState.RUNNING: "RUNNING COMPLETING CONFIGURING SUSPENDED STOPPED SIGNALING RESIZING POWER_UP_NODE",
    LrmJobState.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL BOOT_FAIL PREEMPTED DEADLINE OUT_OF_MEMORY "
    "REVOKED LAUNCH_FAILED RECONFIG_FAIL STAGE_OUT",
    LrmJobState.UNKNOWN: "NONSENSE UPDATE_DB",
}


@pytest.mark.parametrize(
    ("name", "state"), [(state_name, state) for state, all in JOB_STATES.items() for state_name in all.split()]
)
def test_job_state_of_each_word(name: str, state: LrmJobState) -> None:
    assert job_state({name}) is state


@pytest.mark.parametrize(
    ("state_names", "state"),
    [
        ("COMPLETED COMPLETING", LrmJobState.RUNNING),
        ("RUNNING CONFIGURING", LrmJobState.RUNNING),
        ("PENDING REQUEUED", LrmJobState.QUEUED),
        ("CANCELLED UPDATE_DB", LrmJobState.ENDED),
        ("", LrmJobState.UNKNOWN),
    ],
)
def test_job_state_of_several_words(state_names: str, state: LrmJobState) -> None:
    assert job_state(set(state_names.split())) is state


@given(st.sets(st.text(max_size=12)))
def test_job_state_of_unknown_words_is_not_ended(names: set[str]) -> None:
    known_words = {name for all in JOB_STATES.values() for name in all.split()}
    if not names & known_words:
        assert job_state(names) is LrmJobState.UNKNOWN


@pytest.mark.parametrize(
    ("state_name", "code", "signal", "reason", "expected"),
    [
        ("COMPLETED", 0, 0, "None", (0, False, "")),
        ("FAILED", 7, 0, "NonZeroExitCode", (7, False, "")),
        ("FAILED", 127, 0, "NonZeroExitCode", (127, False, "")),
        ("FAILED", 137, 0, "NonZeroExitCode", (137, True, "killed by signal 9")),
        ("FAILED", 0, 9, "RaisedSignal:9(Killed)", (None, True, "killed by signal 9; RaisedSignal:9(Killed)")),
        ("FAILED", 0, 0, "JobLaunchFailure", (None, True, "JobLaunchFailure")),
        ("FAILED", 0, 0, "None", (None, True, "Slurm gives no reason")),
        ("TIMEOUT", 0, 15, "TimeLimit", (None, False, "walltime exceeded")),
        ("TIMEOUT", 0, 0, "TimeLimit", (None, False, "walltime exceeded")),
        ("CANCELLED", 143, 0, "None", (143, True, "cancelled in Slurm, and not by koalapy")),
        ("NODE_FAIL", 0, 0, "NodeDown", (None, True, "a node failed")),
        ("OUT_OF_MEMORY", 0, 9, "OutOfMemory", (None, False, "memory limit exceeded")),
        ("OUT_OF_MEMORY", 0, 0, "OutOfMemory", (None, False, "memory limit exceeded")),
        ("PREEMPTED", 0, 15, "None", (None, True, "preempted by another job (killed by signal 15)")),
        ("BOOT_FAIL", 0, 0, "None", (None, True, "a node did not boot")),
    ],
)
def test_job_end_of_states(
    state_name: str, code: int, signal: int, reason: str, expected: tuple[int | None, bool, str]
) -> None:
    end = job_end({state_name}, code, signal, reason, cancelled_by_us=False)
    assert (end.exit_code, end.lost, end.reason) == expected


@pytest.mark.parametrize(
    ("state_name", "exceeded"),
    [("OUT_OF_MEMORY", "memory"), ("TIMEOUT", "walltime"), ("DEADLINE", "walltime"), ("NODE_FAIL", ""), ("FAILED", "")],
)
def test_job_end_names_the_limit_that_was_exceeded(state_name: str, exceeded: str) -> None:
    assert job_end({state_name}, 0, 9, "", cancelled_by_us=False).exceeded == exceeded


def test_job_end_of_own_cancellation_is_not_lost() -> None:
    end = job_end({"CANCELLED"}, 0, 15, "None", cancelled_by_us=True)
    assert (end.exit_code, end.lost, end.reason) == (None, False, "cancelled")
    never_started = job_end({"CANCELLED"}, 0, 0, "Priority", cancelled_by_us=True)
    assert (never_started.exit_code, never_started.lost) == (None, False)


@pytest.mark.parametrize(
    ("state_names", "state"),
    [
        ("IDLE", "idle"),
        ("IDLE PLANNED", "planned"),
        ("IDLE CLOUD POWERED_DOWN", "idle"),
        ("IDLE CLOUD POWERED_DOWN PLANNED", "planned"),
        ("IDLE REBOOT_REQUESTED", "busy"),
        ("ALLOCATED REBOOT_REQUESTED", "busy"),
        ("DOWN REBOOT_ISSUED", "down"),
        ("IDLE NOT_RESPONDING POWERING_UP", "busy"),
        ("IDLE POWERING_UP", "busy"),
        ("IDLE DRAIN POWERING_UP", "down"),
        ("ALLOCATED NOT_RESPONDING POWERING_UP", "busy"),
        ("DOWN POWERED_DOWN NOT_RESPONDING", "down"),
        ("IDLE POWER_DOWN", "down"),
        ("ALLOCATED", "busy"),
        ("MIXED", "busy"),
        ("IDLE COMPLETING", "busy"),
        ("IDLE RESERVED", "busy"),
        ("DOWN", "down"),
        ("IDLE DRAIN", "down"),
        ("ALLOCATED DRAIN", "down"),
        ("IDLE NOT_RESPONDING", "down"),
        ("IDLE MAINTENANCE", "down"),
        ("IDLE POWERING_DOWN", "down"),
        ("IDLE FAIL", "down"),
        ("UNKNOWN", "down"),
        ("FUTURE", "down"),
        ("MYSTERY", "down"),
        ("IDLE MYSTERY", "down"),
        ("IDLE EXTERNAL", "down"),
        ("EXTERNAL", "down"),
        ("ALLOCATED EXTERNAL", "busy"),
        ("IDLE POWER_UP", "busy"),
        ("IDLE DYNAMIC_NORM", "idle"),
        ("IDLE CLOUD RESUME", "idle"),
        ("", "down"),
    ],
)
def test_node_state_of_words(state_names: str, state: str) -> None:
    assert node_state(set(state_names.split())) == state


@pytest.mark.parametrize(
    ("state_names", "state"),
    [
        ("IDLE RESERVED", "idle"),
        ("IDLE MAINTENANCE RESERVED", "idle"),
        ("IDLE PLANNED RESERVED", "planned"),
        ("ALLOCATED RESERVED", "busy"),
        ("IDLE DRAIN RESERVED", "down"),
        ("DOWN RESERVED", "down"),
    ],
)
def test_node_state_in_own_reservation(state_names: str, state: str) -> None:
    assert node_state(set(state_names.split()), reserved=True) == state


@given(st.sets(st.text(min_size=1, max_size=12)))
def test_node_state_with_unknown_word_is_never_idle(unknown: set[str]) -> None:
    known_words = "PLANNED CLOUD POWERED_DOWN DYNAMIC_NORM DYNAMIC_FUTURE RESUME UNDRAIN REBOOT_CANCELED IDLE"
    if unknown - set(known_words.split()):
        assert node_state({"IDLE"} | unknown) not in ("idle", "planned")


WORDS = ["ALLOCATED", "COMPLETING", "DOWN", "DRAIN", "IDLE", "MIXED", "NONSENSE", "PLANNED"]
NODES = st.integers(1, 6).flatmap(
    lambda count: st.tuples(*(st.sets(st.sampled_from(WORDS), max_size=3) for _ in range(count)))
)
JOBS = st.lists(st.tuples(st.sampled_from(LrmJobState), st.lists(st.integers(0, 7), max_size=4)), max_size=4)


@given(NODES, JOBS, st.integers(0, 8))
def test_snapshot_counts_each_node_once(
    node_flags: tuple[set[str], ...], held_jobs: list[tuple[LrmJobState, list[int]]], requested: int
) -> None:
    nodes = [
        SlurmNode(f"n{index}", words=frozenset(entry), partitions=frozenset({"main"}))
        for index, entry in enumerate(node_flags)
    ]
    jobs = [LrmJob(str(i), "koala-a", state, tuple(f"n{n}" for n in on)) for i, (state, on) in enumerate(held_jobs)]
    snapshot = make_snapshot(nodes, jobs, Offer((Partition("main"),)), requested)
    holding = (LrmJobState.RUNNING, LrmJobState.UNKNOWN)
    held_nodes = {node for job in jobs if job.state in holding for node in job.nodes}
    assert min(snapshot.idle, snapshot.background, snapshot.down) >= 0
    counted = snapshot.idle + snapshot.withheld + snapshot.background + snapshot.down
    assert snapshot.total - counted == len(held_nodes & {node.name for node in nodes})
