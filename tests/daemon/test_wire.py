"""A command tells each component's program in the words of the cluster that runs it."""

import json
from dataclasses import replace

import pytest

from koalapy.daemon.agents.wire import CommandMessages, is_replica_needed
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.profile import ClusterProfile
from koalapy.model.replica import Catalogue, Part, Replica
from koalapy.model.request import (
    Bundle,
    ComponentRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    StopWarning,
    WarningSignal,
)
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.protocol.messages import Open, Probe, command_frames, from_daemon
from koalapy.scheduler.effects import OpenBarrier, StageComponent, StopComponent, SubmitComponent

PROFILES = {
    "north": ClusterProfile(2, "/scratch", "/home/ada"),
    "south": ClusterProfile(1, "/lustre", None, {"/home/ada": "/users/ada"}),
}
PLACED = (
    Component(0, "north", 1, ComponentState.CLAIMED, request_index=0, hosts=("n1",)),
    Component(1, "south", 2, ComponentState.CLAIMED, request_index=1, hosts=("s1", "s2")),
)


def opened(spec: JobSpec) -> dict[str, object]:
    job = Job(7, spec, 0.0, JobState.STARTING, generation=1, attempt=Attempt(1, PLACED, 0.0))
    command = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(OpenBarrier("north", "7.1.0"), job, 3)
    (told,) = json.loads(next(command_frames([command])))
    return dict(told)


def contexts(spec: JobSpec, field: str) -> list[object]:
    found = opened(spec)["contexts"]
    assert isinstance(found, list)
    return [context[field] for context in found]


def test_one_request_in_the_words_of_each_cluster() -> None:
    command = ("/home/ada/prog", "--tmp={scratch}/{job}", "on {cluster}", '{"json": "{{job}}"}')
    spec = JobSpec(FlexibleRequest(3), command, workdir="/home/ada/runs", output="{scratch}/{job}.out")
    assert contexts(spec, "command") == [
        ["/home/ada/prog", "--tmp=/scratch/7", "on north", '{"json": "{job}"}'],
        ["/users/ada/prog", "--tmp=/lustre/7", "on south", '{"json": "{job}"}'],
    ]
    assert contexts(spec, "workdir") == ["/home/ada/runs", "/users/ada/runs"]
    assert contexts(spec, "workdir_optional") == [False, False]
    assert contexts(replace(spec, workdir_optional=True), "workdir_optional") == [True, True]
    assert contexts(spec, "output") == ["/scratch/7.out", "/lustre/7.out"]


def test_components_with_their_own_command_and_output() -> None:
    own = (ComponentRequest(1, command=("{cluster}",)), ComponentRequest(2, output="/home/ada/{job}"))
    spec = JobSpec(NonFixedRequest(own), ("true",))
    assert contexts(spec, "command") == [["north"], ["true"]]
    assert contexts(spec, "output") == [None, "/users/ada/7"]
    assert contexts(spec, "workdir") == [None, None]


def test_processes_per_node_are_the_jobs_or_else_the_clusters() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",))

    def slots(spec: JobSpec) -> list[int]:
        nodes = opened(spec)["nodes"]
        assert isinstance(nodes, list)
        return [node["slots"] for node in nodes]

    assert slots(spec) == [2, 1, 1]
    assert slots(replace(spec, processes_per_node=8)) == [8, 8, 8]


def test_the_plan_is_made_once_for_all_components() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), environment=(("A", "\udc80"),))
    job = Job(7, spec, 0.0, JobState.STARTING, generation=1, attempt=Attempt(1, PLACED, 0.0))
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts())
    barriers = [OpenBarrier("north", "7.1.0"), OpenBarrier("south", "7.1.1")]
    told = [commands.build_message(each, job, 3) for each in barriers]
    assert told[0]["plan"] is told[1]["plan"]
    assert [each["token"] for each in told] == ["7.1.0", "7.1.1"]
    probe = Probe(sequence=1, look=True)
    heard = from_daemon.validate_json(next(command_frames([*told, probe])))
    assert isinstance(heard[0], Open)
    assert isinstance(heard[1], Open)
    contexts = heard[0].contexts
    assert [(each.token, each.job, each.head) for each in heard[:2]] == [("7.1.0", 7, "7.1.1"), ("7.1.1", 7, "7.1.1")]
    assert (heard[0].nodes, heard[1].contexts, heard[2]) == (heard[1].nodes, contexts, probe)
    assert contexts[0]["environment"] == {"A": "?"}, "what no frame can hold costs nobody the connection"


def test_who_is_to_be_warned_is_told_how() -> None:
    warning = StopWarning(WarningSignal.USR1, 30.0)
    spec = JobSpec(FlexibleRequest(3), ("true",), warning=warning)
    assert "warning" not in opened(spec), "nothing but its walltime ends by the clock"
    assert opened(replace(spec, walltime=100.0))["warning"] == {"signal": "USR1", "after": 70.0, "grace": 30.0}
    assert "warning" not in opened(replace(spec, warning=None, walltime=100.0))
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts())
    told = [
        commands.build_message(StopComponent("north", "7.1.0", "r", warning=each), None, 3) for each in (None, warning)
    ]
    assert [(each["signal"], each["grace"]) for each in told] == [("", 0.0), ("USR1", 30.0)]


def test_a_stage_is_told_where_its_files_are_and_what_they_must_be() -> None:
    parts = (Part("a", 30, "sum-a"), Part("b", 40, "sum-b"))
    catalogue = Catalogue(
        [
            Replica("sky/survey", "files", "/data/survey", 70, "sum", parts),
            Replica("map", "south", "/r/map.bin", 5, "sum-m"),
        ]
    )
    inputs = (InputFile("sky/survey", 40, distribution="partitioned", part="b"), InputFile("map", 5, target="world"))
    spec = JobSpec(
        NonFixedRequest((ComponentRequest(1), ComponentRequest(2, inputs=inputs))),
        ("true",),
        bundle=Bundle("f" * 64, 9, 1),
        collect=("*.out",),
    )
    placed = (
        replace(PLACED[0], staging_since=1.0),
        replace(PLACED[1], superseded=True, staging_since=1.0),
        replace(PLACED[1], index=2, replaces=1, staging_since=1.0, sources=("files", "south")),
    )
    job = Job(7, spec, 0.0, JobState.CLAIMING, generation=1, attempt=Attempt(1, placed, 0.0))
    commands = CommandMessages(1, PROFILES, catalogue, Accounts())
    told = commands.build_message(StageComponent("south", "7.1.1"), job, 3)
    assert told["bundle"] == {"id": "f" * 64, "size": 9}
    survey, world = told["files"]
    assert (survey["source"], survey["path"], survey["part"]) == ("files", "/data/survey", "b")
    assert (survey["target"], survey["size"], survey["checksum"]) == ("survey", 40, "sum-b")
    assert (world["source"], world["path"], world["target"], world["checksum"]) == (
        "south",
        "/r/map.bin",
        "world",
        "sum-m",
    )
    submit = commands.build_message(SubmitComponent("south", "7.1.2"), job, 4)
    assert (submit["token"], submit["stage"], submit["collect"]) == ("7.1.2", "7.1.1", ["*.out"])

    catalogue.remove("sky/survey", "files")
    survey, _ = commands.build_message(StageComponent("south", "7.1.1"), job, 5)["files"]
    assert (survey["path"], survey["checksum"]) == ("", ""), "the agent will tell that it is gone"


def test_a_stage_that_went_elsewhere_within_the_step_is_taken_back() -> None:
    job = Job(
        7, JobSpec(FlexibleRequest(3), ("true",)), 0.0, JobState.CLAIMING, generation=2, attempt=Attempt(2, PLACED, 0.0)
    )
    for token in ("7.1.0", "7.2.1"):
        told = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(
            StageComponent("north", token), job, 3
        )
        assert (told["type"], told["token"]) == ("unstage", token)


OWNED = Accounts(
    Users({"ada": User({"north": "a.lovelace"})}), {"north": Domain("mapped"), "south": Domain("own", "bob")}
)


def test_a_submission_names_the_account_of_the_jobs_owner() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), owner="ada")
    job = Job(7, spec, 0.0, JobState.CLAIMING, generation=1, attempt=Attempt(1, PLACED, 0.0))
    told = CommandMessages(1, PROFILES, Catalogue(), OWNED).build_message(SubmitComponent("north", "7.1.0"), job, 3)
    assert (told["type"], told["local_user"]) == ("submit", "a.lovelace")
    told = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(
        SubmitComponent("north", "7.1.0"), job, 3
    )
    assert (told["type"], told["local_user"]) == ("submit", "")


@pytest.mark.evidence("U16")
def test_what_was_placed_before_its_owner_lost_the_account_is_not_submitted() -> None:
    commands = CommandMessages(1, PROFILES, Catalogue(), OWNED)
    spec = JobSpec(FlexibleRequest(3), ("true",), owner="eve")
    job = Job(7, spec, 0.0, JobState.CLAIMING, generation=1, attempt=Attempt(1, PLACED, 0.0))
    told = commands.build_message(SubmitComponent("north", "7.1.0"), job, 3)
    assert (told["type"], told["reason"]) == ("stop", "eve has no account on north")
    told = commands.build_message(SubmitComponent("south", "7.1.1"), job, 3)
    assert (told["type"], told["reason"]) == ("stop", "south is bob's own")
    assert commands.build_message(StageComponent("north", "7.1.0"), job, 3)["type"] == "unstage"


@pytest.mark.evidence("G4")
def test_what_is_brought_is_what_a_job_there_is_to_have_from_that_site() -> None:
    catalogue = Catalogue(
        [
            Replica("sky", "files", "/data/sky", 70, "sum", (Part("a", 30, "sum-a"), Part("b", 40, "sum-b"))),
            Replica("map", "files", "/data/map", 5, "sum-m"),
            Replica("map", "south", "/r/map", 5, "sum-m"),
            Replica("other", "files", "/data/other", 5, "sum-o"),
        ]
    )
    inputs = (InputFile("sky", 40, part="b"), InputFile("map", 5))
    spec = JobSpec(NonFixedRequest((ComponentRequest(1), ComponentRequest(2, inputs=inputs))), ("true",))
    placed = (PLACED[0], replace(PLACED[1], staging_since=1.0, sources=("files", "south")))
    jobs = [
        Job(6, spec, 0.0, JobState.QUEUED),
        Job(7, spec, 0.0, JobState.CLAIMING, generation=1, attempt=Attempt(1, placed, 0.0)),
    ]
    asked = [
        ("south", "files", "/data/sky"),
        ("south", "files", "/data/sky/b"),
        ("south", "south", "/r/map"),
        ("south", "files", "/data/sky/a"),
        ("south", "files", "/data/map"),
        ("south", "files", "/data/other"),
        ("south", "files", "/data"),
        ("south", "files", "/data/sky/../secret"),
        ("north", "files", "/data/sky"),
    ]
    assert [each for each in asked if is_replica_needed(jobs, *each, catalogue)] == asked[:3]
