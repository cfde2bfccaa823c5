"""Clusters that allow only certain others in their jobs (``coallocate_with``), or no scripts of others."""

from contextlib import suppress
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.config.settings import Settings
from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.placement import Placement, Refusal
from koalapy.model.profile import MAX_SETS, ClusterProfile, Mpi, MpiSeries, find_largest_sets, may_share_job
from koalapy.model.request import FixedRequest, Request
from koalapy.model.users import Accounts
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission
from tests.policies.grids import NAMES, grid, grids
from tests.scheduler.requests import fixed, flexible, nonfixed

allowed = st.none() | st.sets(st.sampled_from(NAMES)).map(lambda names: tuple(sorted(names)))
drawn_profiles = st.fixed_dictionaries(
    {
        name: st.builds(
            lambda names, series, scripts, scratch: ClusterProfile(
                mpi=Mpi(series), coallocate_with=names, accepts_scripts=scripts, scratch=scratch
            ),
            allowed,
            st.sampled_from(MpiSeries),
            st.sampled_from([None, True, False]),
            st.sampled_from([None, "/s"]),
        )
        for name in NAMES
    }
)
drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 8)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), min_size=1).map(lambda sizes: fixed(**sizes)),
)
Profiles = dict[str, ClusterProfile]


scripts = st.sampled_from(["", "#!/bin/sh"])
commands = st.sampled_from([("true",), ("{scratch}",)])


def allows_pairwise(names: frozenset[str], profiles: Profiles, launcher: Launcher, script: str = "") -> bool:
    """Apply the rule to each pair, independent of the implementation."""
    for first, second in combinations(sorted(names), 2):
        for a, b in ((first, second), (second, first)):
            if profiles[a].coallocate_with is not None and b not in (profiles[a].coallocate_with or ()):
                return False
            if script and profiles[a].accepts_scripts is False:
                return False
        if launcher is Launcher.OPENMPI and profiles[first].mpi.series != profiles[second].mpi.series:
            return False
    return True


def policies_for(request: Request) -> list[str]:
    registry, names = builtin_policies(), []
    for name in registry.names():
        with suppress(UsageError):
            registry.resolve(name, request)
            names.append(name)
    return names


@pytest.mark.evidence("P7")
@given(drawn_requests, grids(), drawn_profiles, st.sampled_from(Launcher), scripts, commands, st.data())
def test_placement_has_only_eligible_clusters_that_allow_each_other(
    request: Request,
    view: GridView,
    profiles: Profiles,
    launcher: Launcher,
    script: str,
    command: tuple[str],
    data: st.DataObject,
) -> None:
    policy_name = data.draw(st.sampled_from(["", *policies_for(request)]))
    spec = JobSpec(request, command, launcher=launcher, policy=policy_name, script=script)
    question = PolicyQuestion(builtin_policies().resolve(spec.policy, request), spec, Eligibility(profiles, Accounts()))
    answer = question.place(view)
    if isinstance(answer, Placement):
        names = frozenset(c.cluster for c in answer.components)
        assert allows_pairwise(names, profiles, launcher, script)
        assert command == ("true",) or all(profiles[name].scratch for name in names)
    else:
        assert question.explain(view) or not list(view)


@given(st.sets(st.sampled_from(NAMES), min_size=1), grids(), drawn_profiles, st.sampled_from(Launcher), scripts)
def test_eligibility_equals_pairwise_permission(
    names: set[str], view: GridView, profiles: Profiles, launcher: Launcher, script: str
) -> None:
    """Claims use this check for the new cluster of a component."""
    spec = JobSpec(flexible(1), ("true",), launcher=launcher, script=script)
    expected = allows_pairwise(frozenset(names), profiles, launcher, script)
    assert Eligibility(profiles, Accounts()).may_run_on(spec, frozenset(names), view) == expected


@given(drawn_requests, grids(), drawn_profiles, st.sampled_from(Launcher), scripts, commands)
def test_submission_placeable_request_is_accepted(
    request: Request, view: GridView, profiles: Profiles, launcher: Launcher, script: str, command: tuple[str]
) -> None:
    launcher = Launcher.OPENMPI if script else launcher
    empty = grid(**{cluster.name: cluster.total for cluster in view})
    limits = Limits([ClusterLimits(c.name, c.total, profiles[c.name]) for c in empty], builtin_policies())
    spec = JobSpec(request, ("true",), launcher=launcher, script=script)
    answer = PolicyQuestion(builtin_policies().resolve("", request), spec, Eligibility(profiles, Accounts())).place(
        empty
    )
    if isinstance(answer, Placement):
        check_submission(spec, limits)
    elif isinstance(request, FixedRequest) and not allows_pairwise(
        frozenset(c.cluster or "" for c in request.components), profiles, launcher, script
    ):
        with pytest.raises(UsageError) as error:
            check_submission(spec, limits)
        assert error.value.field


@given(drawn_profiles, st.booleans())
def test_largest_sets_are_maximal_allowed_sets(profiles: Profiles, one_series: bool) -> None:
    launcher = Launcher.OPENMPI if one_series else Launcher.PROCESSES
    subsets = [frozenset(names) for size in range(1, len(NAMES) + 1) for names in combinations(NAMES, size)]
    allowed = [names for names in subsets if allows_pairwise(names, profiles, launcher)]
    expected = {names for names in allowed if not any(names < larger for larger in allowed)}
    largest_sets = list(find_largest_sets(profiles, one_series=one_series))
    assert (len(largest_sets), set(largest_sets)) == (len(expected), expected)


def test_pair_needs_permission_of_both_clusters() -> None:
    profiles = {"a": ClusterProfile(coallocate_with=("b",)), "b": ClusterProfile(), "c": ClusterProfile()}
    assert may_share_job("a", "b", profiles)
    assert not may_share_job("a", "c", profiles)
    assert not may_share_job("c", "a", profiles)
    assert may_share_job("a", "a", profiles)


def test_fixed_request_with_incompatible_clusters_is_rejected() -> None:
    limits = Limits(
        [ClusterLimits("north", 4, ClusterProfile(coallocate_with=())), ClusterLimits("south", 4)], builtin_policies()
    )
    for launcher in Launcher:
        with pytest.raises(UsageError) as error:
            check_submission(JobSpec(fixed(north=1, south=1), ("true",), launcher=launcher), limits)
        assert error.value.field == "request.components[1].cluster"
        assert "is south, but coallocate_with keeps north and south apart" in error.value.message
        assert error.value.hint == "name clusters that allow each other in coallocate_with"


def test_request_larger_than_allowed_sets_is_rejected() -> None:
    limits = Limits(
        [ClusterLimits("north", 4, ClusterProfile(coallocate_with=())), ClusterLimits("south", 3)], builtin_policies()
    )
    with pytest.raises(UsageError) as error:
        check_submission(JobSpec(flexible(5), ("true",)), limits)
    assert error.value.field == "request.total_size"
    assert "not on clusters that may share a job (north 4; south 3); coallocate_with keeps" in error.value.message


def test_explanation_names_clusters_that_may_share_job() -> None:
    profiles = {
        "east": ClusterProfile(),
        "north": ClusterProfile(coallocate_with=("south",)),
        "south": ClusterProfile(coallocate_with=("north",)),
    }
    spec, view = JobSpec(flexible(5), ("true",)), grid(east=4, north=1, south=2)
    eligibility, policy = Eligibility(profiles, Accounts()), builtin_policies().resolve("", flexible(5))
    answer = PolicyQuestion(policy, spec, eligibility).place(view)
    assert isinstance(answer, Refusal)
    assert "coallocate_with keeps east and north, east and south apart" in answer.summary
    reasons = {reason.cluster: reason.reason for reason in PolicyQuestion(policy, spec, eligibility).explain(view)}
    assert reasons["east"].endswith("; no cluster may share a job with it")
    assert reasons["north"].endswith("; only south may share a job with it")


def test_setting_with_unknown_cluster_is_rejected() -> None:
    settings = Settings(clusters={"north": {"coallocate_with": ["sout"]}, "south": {}})  # type: ignore[arg-type]
    with pytest.raises(UsageError) as error:
        settings.check_coallocation()
    assert error.value.field == "clusters.north.coallocate_with[0]"


def test_setting_with_too_many_sets_is_rejected() -> None:
    """Six pairs that exclude each other give 2^6 = 64 sets; another pair doubles them."""

    def pairs(count: int) -> Settings:
        names = [f"c{number:02}" for number in range(2 * count)]
        clusters = {
            name: {"coallocate_with": [partner for i, partner in enumerate(names) if i // 2 != n // 2]}
            for n, name in enumerate(names)
        }
        return Settings(clusters=clusters)  # type: ignore[arg-type]

    pairs(6).check_coallocation()
    with pytest.raises(UsageError, match=f"more than {MAX_SETS} sets"):
        pairs(7).check_coallocation()
