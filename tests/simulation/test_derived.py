"""Recorded jobs are simulated as they came and ran, with a change and without."""

from dataclasses import replace

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobSpec, JobState
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin
from koalapy.record.beginning import Beginning, KnownCluster
from koalapy.scheduler.rules import Rules
from koalapy.simulation.derived import Compared, Derived, changed_rules, derive
from koalapy.simulation.replay import History, Nodes

BEGAN = 1000.0
CLUSTERS = (KnownCluster("north"), KnownCluster("south", speed=2.0))


def ran(ident: JobId, at: float, nodes: int, start: float, end: float | None, cluster: str = "north") -> Job:
    """A job that had its nodes from ``start`` to ``end``, in seconds since the record began."""
    component = Component(0, cluster, nodes, ComponentState.ENDED, submitted_at=BEGAN + at, claimed_at=BEGAN + at)
    over = None if end is None else BEGAN + end
    attempt = Attempt(1, (component,), BEGAN + at, barrier_at=BEGAN + start, ended_at=over)
    state = JobState.RUNNING if end is None else JobState.SUCCEEDED
    spec = JobSpec(FlexibleRequest(nodes), ("program",))
    return Job(ident, spec, BEGAN + at, state, generation=1, attempt=attempt, ended_at=over)


def history(*jobs: Job, others: tuple[Nodes, ...] = (Nodes(BEGAN, 4, 0),), ended: float = 100.0) -> History:
    begun = Beginning(Rules(), tuple(builtin().names()), CLUSTERS, now=BEGAN)
    nodes = {"north": list(others), "south": [Nodes(BEGAN, 4, 0)]}
    return History("1", "1", begun, ended=BEGAN + ended, jobs={job.id: job for job in jobs}, nodes=nodes)


def derived(of: History, policy: str = "", **changes: object) -> Derived:
    return derive(of, builtin(), policy=policy, changes=changes)


def only(found: Derived) -> Compared:
    (one,) = found.jobs
    return one


def test_a_job_runs_as_long_as_it_did_by_the_speed_of_where_it_is() -> None:
    one = only(derived(history(ran(1, 0.0, 2, 0.0, 30.0)), "fastest-one"))
    assert (one.recorded.gang, one.recorded.response) == ((("north", 2),), 30.0)
    assert (one.unchanged.gang, one.unchanged.response) == ((("north", 2),), 30.0)
    assert (one.changed.gang, one.changed.response) == ((("south", 2),), 15.0)
    assert one.is_elsewhere


def test_without_a_change_both_simulations_are_alike() -> None:
    found = derived(history(*(ran(number, number, 3, number, number + 20.0) for number in range(1, 9))))
    assert [job.unchanged for job in found.jobs] == [job.changed for job in found.jobs]
    assert found.elsewhere == 0


def test_nodes_that_others_had_are_theirs_again() -> None:
    """Both clusters are taken until 50: a job that comes at 10 waits as long."""
    others = (Nodes(BEGAN, 4, 4), Nodes(BEGAN + 20, 4, 3), Nodes(BEGAN + 50, 4, 0))
    of = history(ran(1, 10.0, 4, 50.0, 60.0), others=others)
    of.nodes["south"] = list(others)
    one = only(derived(of))
    assert one.recorded.waited == one.unchanged.waited == 40.0


def test_a_cluster_that_was_smaller_for_a_while_is_so_again() -> None:
    others = (Nodes(BEGAN, 2, 0), Nodes(BEGAN + 30, 4, 0))
    of = history(ran(1, 0.0, 4, 30.0, 60.0), others=others)
    del of.nodes["south"]
    assert only(derived(of)).unchanged.waited == 30.0


def test_who_was_there_already_comes_at_the_beginning_with_what_was_left() -> None:
    one = only(derived(history(ran(1, -500.0, 2, -400.0, 25.0))))
    assert (one.recorded.response, one.unchanged.response) == (25.0, 25.0)


def test_who_never_ran_is_counted_and_not_guessed() -> None:
    waits = replace(ran(2, 5.0, 2, 5.0, 6.0), attempt=None, state=JobState.QUEUED, ended_at=None)
    gone = replace(waits, id=3, state=JobState.CANCELLED, ended_at=BEGAN + 9)
    failed = replace(waits, id=4, state=JobState.FAILED, ended_at=BEGAN + 9)
    found = derived(history(ran(1, 0.0, 2, 0.0, 30.0), waits, gone, failed, ran(5, 1.0, 1, 1.0, None)))
    assert [job.job for job in found.jobs] == [1]
    assert found.left_out == {
        "had not run yet": 1,
        "cancelled before they ran": 1,
        "failed before they ran": 1,
        "not over in each of the three": 1,
    }


def test_who_is_refused_with_the_change_is_told_from_who_was_not_over() -> None:
    """Six nodes are in two clusters only, and best-fit places in one."""
    wide = replace(ran(2, 5.0, 6, 30.0, 60.0), spec=JobSpec(FlexibleRequest(6), ("program",)))
    found = derived(history(ran(1, 0.0, 2, 0.0, 30.0), wide), "best-fit")
    assert [job.job for job in found.jobs] == [1]
    assert found.left_out == {"refused with the change": 1}
    assert any(told.startswith("with the change job 2, for one, is refused: ") for told in found.remarks)
    assert derived(history(wide)).left_out == {}


def test_of_no_jobs_there_are_no_means() -> None:
    found = derived(history())
    assert found.means("changed") == {"wait": None, "response": None}


def test_where_no_cluster_was_heard_of_nothing_is_simulated() -> None:
    of = history(ran(1, -500.0, 2, -400.0, 25.0))
    of.nodes.clear()
    assert derived(of) == Derived((), {"no cluster was heard of": 1})


def test_a_rule_is_changed_by_its_name_within_its_bounds() -> None:
    assert changed_rules(Rules(), {"queue": "fcfs", "claim_grace": 3}) == Rules(queue="fcfs", claim_grace=3.0)
    for changes in ({"queu": "fcfs"}, {"queue": "none"}, {"claim_grace": 0}, {"claim_factor_min": 0.9}):
        with pytest.raises(UsageError) as raised:
            changed_rules(Rules(), changes)
        assert raised.value.field == f"rules.{next(iter(changes))}"
