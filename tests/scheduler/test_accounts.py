"""Placement of jobs on clusters where their owner has an account, and the reasons given otherwise."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.placement import Placement, Refusal
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import Request
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.queue.eligibility import Demands, Eligibility
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from tests.policies.grids import NAMES, grid, grids, summary
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World
from tests.validation.submissions import GRID, make_spec, rejection_of

MAPPED = {
    "alice": User({"north": "alice", "south": "alice"}),
    "bob": User({"north": "bob"}),
    "carol": User({"north": "c"}),
}
ACCOUNTS = Accounts(Users(MAPPED, ["west"]), dict.fromkeys(("north", "south", "west"), Domain("mapped")))
ELIGIBILITY = Eligibility(dict.fromkeys(NAMES, ClusterProfile()), ACCOUNTS)


def evaluate_request(request: Request, view: GridView, owner: str) -> Placement | Refusal:
    job = JobSpec(request, ("true",), owner=owner)
    return PolicyQuestion(builtin_policies().resolve("", request), job, ELIGIBILITY).place(view)


def test_placement_uses_clusters_with_owner_account() -> None:
    view = grid(north=2, south=3)
    assert {c.cluster for c in evaluate_request(flexible(5), view, "alice").components} == {"north", "south"}  # type: ignore[union-attr]
    assert {c.cluster for c in evaluate_request(flexible(2), view, "bob").components} == {"north"}  # type: ignore[union-attr]
    reason = "needs 3 nodes; 2 are idle (north 2); its owner may not use south"
    assert summary(evaluate_request(flexible(3), view, "bob")) == reason
    assert summary(evaluate_request(fixed(north=1, south=1), view, "bob")) == "its owner may not use south"


def test_demands_of_owners_with_equal_clusters_are_equal() -> None:
    """Otherwise a scan would evaluate the policy for each owner."""
    demands = {o: ELIGIBILITY.demands(JobSpec(flexible(1), ("true",), owner=o)) for o in ("alice", "bob", "carol", "d")}
    assert demands["bob"] == demands["carol"] != demands["alice"] != demands["d"]
    north_only = Eligibility({"north": ClusterProfile()}, ACCOUNTS)
    assert north_only.demands(JobSpec(flexible(1), ("true",), owner="alice")) == Demands(closed=frozenset({"west"})), (
        "accounts exist for clusters outside the grid"
    )
    without_accounts = Eligibility(dict.fromkeys(NAMES, ClusterProfile()), Accounts())
    assert without_accounts.demands(JobSpec(flexible(1), ("true",), owner="alice")) == ()


requests = st.one_of(
    st.builds(flexible, st.integers(1, 8)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), min_size=1).map(lambda sizes: fixed(**sizes)),
)


@pytest.mark.evidence("U16", "C1")
@given(request=requests, view=grids(), owner=st.sampled_from(["alice", "bob", "dave", "dave@west", "dave@north"]))
def test_placement_avoids_clusters_without_owner_account(request: Request, view: GridView, owner: str) -> None:
    answer = evaluate_request(request, view, owner)
    job = JobSpec(request, ("true",), owner=owner)
    closed = ACCOUNTS.closed_to(owner)
    if isinstance(answer, Placement):
        assert closed.isdisjoint(component.cluster for component in answer.components)
        assert ELIGIBILITY.may_run_on(job, frozenset(c.cluster for c in answer.components), view)
    reasons = PolicyQuestion(builtin_policies().resolve("", request), job, ELIGIBILITY).explain(view)
    assert isinstance(answer, Refusal) or not reasons
    for name in closed & {reason.cluster for reason in reasons}:
        (reason,) = (reason for reason in reasons if reason.cluster == name)
        assert "account" in reason.reason or view.get(name) is None or str(view.get(name).state) in reason.reason  # type: ignore[union-attr]
    for closed_name, second_name in product(closed, NAMES):
        assert not ELIGIBILITY.may_run_on(job, frozenset({closed_name, second_name}), view)


def create_world() -> World:
    return World({"north": 4, "south": 4}, accounts=ACCOUNTS)


def test_waiting_reason_names_missing_account() -> None:
    grid = create_world()
    grid.sites["north"].add_local_user(3)
    grid.settle()
    job = grid.submit(flexible(2), owner="bob", launcher=Launcher.PROCESSES)
    assert grid.state(job) is JobState.QUEUED
    assert grid.queries.waiting_reason(grid.job(job)).endswith("; its owner may not use south")
    explanation = explain(grid.queries, grid.job(job), [], grid.now)
    assert [c.reason for c in explanation.clusters if c.cluster == "south"] == ["bob has no account on south"]
    dry_run = explain_submission(grid.queries, grid.job(job).spec, grid.now)
    assert [c.reason for c in dry_run.clusters if c.cluster == "south"] == ["bob has no account on south"]
    eligible_job = grid.submit(flexible(2), owner="alice", launcher=Launcher.PROCESSES)
    grid.advance(30)
    assert grid.state(eligible_job) is JobState.SUCCEEDED
    assert grid.state(job) is JobState.QUEUED


@pytest.mark.evidence("U16")
@pytest.mark.parametrize(
    ("owner", "request_", "field", "expected"),
    [
        ("bob", fixed(south=1), "request.components[0].cluster", "is south, but bob has no account on south"),
        ("dave", flexible(1), "owner", "owner is dave, who may use no cluster of this grid"),
        ("bob", flexible(5), "request.total_size", "; its owner may not use south"),
        ("bob", nonfixed(3, 3), "request.components", "; its owner may not use south"),
        ("alice@north", fixed(north=1), "owner", "alice@north, who may use no cluster"),
    ],
)
def test_submission_without_usable_account_is_rejected(
    owner: str, request_: Request, field: str, expected: str
) -> None:
    error = rejection_of(make_spec(request_, owner=owner), GRID, ACCOUNTS)
    assert (error.field, expected in error.message) == (field, True), error.message
    assert error.hint


def test_rejection_hint_names_accounts_setting() -> None:
    error = rejection_of(make_spec(fixed(south=1), owner="bob"), GRID, ACCOUNTS)
    assert isinstance(error, UsageError)
    assert error.hint == ("name north, or have the grid's administrators give bob an account in users.bob.accounts")
