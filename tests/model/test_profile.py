"""Folders, paths and placeholders of a cluster in commands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import ClusterProfile, describe_missing_folders, describe_series_conflict, job_folders
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest

SOUTH = ClusterProfile(
    scratch="/lustre/tmp",
    home="/users/ada",
    paths={"/data": "/lustre/data", "/data/big/": "/archive/", "/opt/sw": "/apps"},
)


def map_argument(text: str, profile: ClusterProfile = SOUTH) -> str:
    return profile.map_command([text], "south", 7)[0]


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("{scratch}/a", "/lustre/tmp/a"),
        ("{home}", "/users/ada"),
        ("out-{cluster}-{job}.txt", "out-south-7.txt"),
        ("cd {scratch} && ls {home}; {scratch}", "cd /lustre/tmp && ls /users/ada; /lustre/tmp"),
        ("{{scratch}}", "{scratch}"),
        ("{{job}} {job}", "{job} 7"),
    ],
)
def test_map_command_replaces_placeholders(text: str, here: str) -> None:
    assert map_argument(text) == here
    assert SOUTH.map_path(text, "south", 7) == here


@pytest.mark.parametrize(
    "text",
    [
        "for f in {a,b}; do echo ${f} $(id) ${home} ${scratch:-/tmp}; done",
        "awk '{ print $1 }' {}",
        json.dumps({"scratch": {"job": 1}, "list": [{}]}),
        "{{ template }} {Scratch} { scratch } {scratch",
        "${{home}}",
        "f'{x:>{width}}'",
        "{}{{}}{{{}}}",
    ],
)
def test_map_command_keeps_other_braces(text: str) -> None:
    assert map_argument(text) == text


def test_map_command_without_folder_keeps_placeholder() -> None:
    assert map_argument("{scratch} {home} {cluster}", ClusterProfile()) == "{scratch} {home} south"


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("/data", "/lustre/data"),
        ("/data/x y", "/lustre/data/x y"),
        ("/data/big/x", "/archive/x"),
        ("/data/big", "/archive"),
        ("/data/bigger", "/lustre/data/bigger"),
        ("/database", "/database"),
        ("data/x", "data/x"),
        ("/data/{job}/o", "/lustre/data/7/o"),
        ("/opt/sw/../x", "/apps/../x"),
    ],
)
def test_map_path_uses_longest_folder_prefix(path: str, here: str) -> None:
    assert SOUTH.map_path(path, "south", 7) == here


def test_map_path_supports_root_folder() -> None:
    assert ClusterProfile(paths={"/": "/net/home1"}).map_path("/a", "south", 1) == "/net/home1/a"
    assert ClusterProfile(paths={"/a": "/"}).map_path("/a/b", "south", 1) == "/b"
    assert ClusterProfile(paths={"/a": "/"}).map_path("/a", "south", 1) == "/"


def test_map_path_of_cluster_folder_is_not_mapped_again() -> None:
    profile = ClusterProfile(scratch="/data/tmp", paths={"/data": "/elsewhere"})
    assert profile.map_path("{scratch}/x", "south", 1) == "/data/tmp/x"


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("/data/in", "/lustre/data/in"),
        ("--in=/data/x", "--in=/lustre/data/x"),
        ("if=/data/x", "if=/lustre/data/x"),
        ("-I/data/x", "-I/data/x"),
        ("/data/prog /data/in", "/data/prog /data/in"),
        ("/data/prog;x", "/data/prog;x"),
        ("ls /data", "ls /data"),
        ("http://data/x", "http://data/x"),
    ],
)
def test_map_command_maps_only_whole_path_arguments(text: str, here: str) -> None:
    assert map_argument(text) == here


@given(st.lists(st.text(max_size=20)))
def test_map_command_without_placeholders_changes_nothing(texts: list[str]) -> None:
    plain = [text.replace("{", "(") for text in texts]
    assert ClusterProfile().map_command(plain, "south", 7) == plain


def test_job_folders_are_those_in_effective_texts() -> None:
    spec = JobSpec(FlexibleRequest(2), ("sh", "-c", "cd {scratch}"), workdir="{home}")
    assert job_folders(spec) == {"scratch", "home"}
    assert job_folders(JobSpec(FlexibleRequest(2), ("{{scratch}}", "${scratch}", "{cluster}"))) == frozenset()
    components = (ComponentRequest(1, command=("{home}",)), ComponentRequest(1, output="{scratch}/o"))
    assert job_folders(JobSpec(NonFixedRequest(components), ("true",))) == {"scratch", "home"}
    overridden = (ComponentRequest(1, "north", command=("true",), output="o"),)
    assert job_folders(JobSpec(FixedRequest(overridden), ("{home}",), output="{scratch}")) == frozenset()


def test_profile_conflicts_are_described() -> None:
    assert describe_missing_folders(["south"], {"scratch"}) == "cluster south has no scratch folder"
    assert (
        describe_missing_folders(["east", "south"], {"scratch", "home"})
        == "clusters east, south have no home folder or scratch folder"
    )
    assert (
        describe_series_conflict({"north": 5, "south": 4})
        == "north has Open MPI 5, south 4: a job runs under one series"
    )
    message = describe_series_conflict({"north": 5, "east": 4, "south": 4})
    assert message == "east and south have Open MPI 4, north 5: a job runs under one series"
