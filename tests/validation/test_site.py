"""Requirements on clusters besides nodes: folders, and a common series of Open MPI."""

import pytest

from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.profile import ClusterProfile, Mpi, MpiSeries
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.validation.limits import ClusterLimits
from tests.policies.grids import fixed, nonfixed
from tests.validation.submissions import GRID, UNKNOWN, check_rejection, check_spec, make_spec, rejection_of

MIXED = (
    ClusterLimits("east", 2, ClusterProfile(scratch="/s", home="/h")),
    ClusterLimits("north", 4, ClusterProfile(scratch="/s")),
    ClusterLimits("south", 3, ClusterProfile(mpi=Mpi(MpiSeries.FOUR))),
)
NO_COMMON_SERIES = (
    "fits on the grid, but not on clusters that may share a job (north 4, east 2; south 3); "
    "east and north have Open MPI 5, south 4: a job runs under one series"
)
SERIES_HINT = "name clusters of one series, or use the launcher processes"


def folder_hint(folder: str) -> str:
    return f"set {folder} in the cluster's configuration, or write {{{{{folder}}}}} for the text itself"


WRONG_PLACES = [
    (
        make_spec(fixed((1, "north"), (1, "south"))),
        "request.components[1].cluster is south, but north has Open MPI 5, south 4: a job runs under one series",
        SERIES_HINT,
    ),
    (
        make_spec(fixed((1, "north")), workdir="{home}/x"),
        "workdir needs {home}, but cluster north has no home folder",
        folder_hint("home"),
    ),
    (
        make_spec(fixed((1, "north"), (1, "south")), ("a", "{scratch}"), launcher=Launcher.PROCESSES),
        "command[1] needs {scratch}, but cluster south has no scratch folder",
        folder_hint("scratch"),
    ),
    (
        make_spec(FixedRequest((ComponentRequest(1, "south", output="{scratch}"),))),
        "request.components[0].output needs {scratch}, but cluster south has no scratch folder",
        folder_hint("scratch"),
    ),
    (
        make_spec(FlexibleRequest(7)),
        f"request.total_size {NO_COMMON_SERIES}",
        "ask for less, or use the launcher processes",
    ),
    (
        make_spec(nonfixed(4, 3)),
        f"request.components {NO_COMMON_SERIES}",
        "ask for less, or use the launcher processes",
    ),
]


@pytest.mark.parametrize(("wrong", "message", "hint"), WRONG_PLACES)
def test_check_of_job_that_no_cluster_can_run_is_rejected(wrong: JobSpec, message: str, hint: str) -> None:
    check_rejection(f"{message}; {hint}", wrong, MIXED)


def test_check_home_site_must_be_usable_by_owner() -> None:
    check_spec(make_spec(FlexibleRequest(7), home_site="south"), GRID)
    unknown = rejection_of(make_spec(FlexibleRequest(7), home_site="sout"))
    assert (unknown.field, unknown.value) == ("home_site", "sout")
    assert (unknown.message, unknown.hint) == (
        "home_site is sout, and there is no such cluster",
        "did you mean south? known: north, south",
    )
    accounts = Accounts(Users({"ada": User({"north": "ada"})}), {"south": Domain("mapped")})
    closed = rejection_of(make_spec(FlexibleRequest(2), owner="ada", home_site="south"), GRID, accounts)
    assert closed.message == "home_site is south, but ada has no account on south"
    check_spec(make_spec(FlexibleRequest(2), owner="ada", home_site="north"), GRID, accounts)


def test_check_with_folder_that_no_cluster_has_is_rejected() -> None:
    for clusters in (GRID, UNKNOWN):
        error = rejection_of(make_spec(nonfixed(1), ("sh", "-c", "cd {scratch}")), clusters)
        assert (error.field, error.value) == ("command[2]", "cd {scratch}")
        assert error.message == "command[2] needs {scratch}, and no cluster has a scratch folder"


def test_check_of_fit_names_clusters_without_folders() -> None:
    error = rejection_of(make_spec(FlexibleRequest(7), ("{scratch}",)), MIXED)
    assert error.field == "request.total_size"
    assert error.message == (
        "request.total_size is 7, but the whole grid has 6 nodes (north 4, east 2); cluster south has no scratch folder"
    )


@pytest.mark.parametrize(
    "good",
    [
        make_spec(fixed((1, "north"), (1, "south")), launcher=Launcher.PROCESSES),
        make_spec(fixed((1, "north"), (1, "east")), ("{scratch}",)),
        make_spec(FlexibleRequest(6)),
        make_spec(FlexibleRequest(6), ("{scratch}",)),
        make_spec(FlexibleRequest(2), ("{home}",)),
        make_spec(FlexibleRequest(9), launcher=Launcher.PROCESSES),
        make_spec(FlexibleRequest(2), ("${scratch}", "{{home}}", "{cluster}")),
        make_spec(nonfixed(4, 2)),
        make_spec(nonfixed(3)),
    ],
)
def test_check_of_job_that_some_clusters_can_run_is_accepted(good: JobSpec) -> None:
    check_spec(good, MIXED)
