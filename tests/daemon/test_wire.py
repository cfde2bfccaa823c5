"""Command messages with paths and settings of the receiving cluster."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from koalapy.daemon.agents.wire import CommandMessages, FindRelay, is_replica_needed
from koalapy.daemon.network.relays import JobRelay
from koalapy.model.dependency import parse_result_input
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
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
from koalapy.protocol.frames import command_frames
from koalapy.protocol.messages import Open, PlanNode, Probe, from_daemon
from koalapy.relay.attempts import AttemptPlan
from koalapy.scheduler.effects import OpenBarrier, StageComponent, StopComponent, SubmitComponent
from koalapy.scheduler.ledger import live

PROFILES = {
    "north": ClusterProfile(2, "/scratch", "/home/ada"),
    "south": ClusterProfile(1, "/lustre", None, {"/home/ada": "/users/ada"}),
}
PLACED = (
    Component(0, "north", 1, ComponentState.CLAIMED, request_index=0, hosts=("n1",)),
    Component(1, "south", 2, ComponentState.CLAIMED, request_index=1, hosts=("s1", "s2")),
)


def make_job(spec: JobSpec | None = None, placed: Sequence[Component] = PLACED, generation: int = 1) -> Job:
    spec = spec or JobSpec(FlexibleRequest(3), ("true",))
    attempt = Attempt(generation, tuple(placed), 0.0)
    return Job(7, spec, 0.0, JobState.STARTING, generation=generation, attempt=attempt)


def open_message(spec: JobSpec) -> dict[str, object]:
    job = make_job(spec)
    command = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(OpenBarrier("north", "7.1.0"), job, 3)
    (message,) = json.loads(next(command_frames([command])))
    return dict(message)


def plan_contexts(spec: JobSpec, field: str) -> list[object]:
    contexts = open_message(spec)["contexts"]
    assert isinstance(contexts, list)
    return [context[field] for context in contexts]


def test_submit_message_is_mapped_to_each_cluster() -> None:
    command = ("/home/ada/prog", "--tmp={scratch}/{job}", "on {cluster}", '{"json": "{{job}}"}')
    spec = JobSpec(FlexibleRequest(3), command, workdir="/home/ada/runs", output="{scratch}/%j-%c.out")
    assert plan_contexts(spec, "command") == [
        ["/home/ada/prog", "--tmp=/scratch/7", "on north", '{"json": "{job}"}'],
        ["/users/ada/prog", "--tmp=/lustre/7", "on south", '{"json": "{job}"}'],
    ]
    assert plan_contexts(spec, "workdir") == ["/home/ada/runs", "/users/ada/runs"]
    assert plan_contexts(spec, "workdir_optional") == [False, False]
    assert plan_contexts(replace(spec, workdir_optional=True), "workdir_optional") == [True, True]
    assert plan_contexts(spec, "output") == ["/scratch/7-north.out", "/lustre/7-south.out"]
    assert plan_contexts(spec, "error") == [None, None]


def test_script_is_sent_to_the_head_component_only() -> None:
    job = make_job(JobSpec(FlexibleRequest(3), ("job.sh",), script="#!/bin/sh"))
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts())
    for barrier, script in ((OpenBarrier("north", "7.1.0"), ""), (OpenBarrier("south", "7.1.1"), "#!/bin/sh")):
        (message,) = from_daemon.validate_json(next(command_frames([commands.build_message(barrier, job, 3)])))
        assert isinstance(message, Open)
        assert (message.is_script, message.script, message.head) == (True, script, "7.1.1")


def test_contexts_have_own_command_and_output() -> None:
    components = (ComponentRequest(1, command=("{cluster}",)), ComponentRequest(2, output="/home/ada/%j"))
    spec = JobSpec(NonFixedRequest(components), ("true",))
    assert plan_contexts(spec, "command") == [["north"], ["true"]]
    assert plan_contexts(spec, "output") == [None, "/users/ada/7"]
    assert plan_contexts(spec, "workdir") == [None, None]


def test_processes_per_node_default_to_those_of_cluster() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",))

    def slots(spec: JobSpec) -> list[int]:
        nodes = open_message(spec)["nodes"]
        assert isinstance(nodes, list)
        return [node["slots"] for node in nodes]

    assert slots(spec) == [2, 1, 1]
    assert slots(replace(spec, processes_per_node=8)) == [8, 8, 8]
    assert slots(replace(spec, cpus_per_rank=2)) == [1, 1, 1], "as many as fit, but at least one"
    assert slots(replace(spec, processes_per_node=8, cpus_per_rank=2)) == [8, 8, 8]
    assert slots(replace(spec, cores=6, share=True)) == [6, 6, 6], "one for each of its cores"
    assert slots(replace(spec, cores=6, cpus_per_rank=3, share=True)) == [2, 2, 2]
    assert slots(replace(spec, cores=6, processes_per_node=1, share=True)) == [1, 1, 1]


@pytest.mark.parametrize(("cpus_per_rank", "plan"), [(None, {}), (4, {"cpus_per_rank": 4})])
def test_plan_has_processors_only_of_jobs_that_request_them(cpus_per_rank: int | None, plan: dict[str, int]) -> None:
    message = open_message(JobSpec(FlexibleRequest(3), ("true",), cpus_per_rank=cpus_per_rank))
    assert {name: value for name, value in message.items() if name == "cpus_per_rank"} == plan


def test_plan_is_built_once_for_all_components() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), environment=(("A", "\udc80"),))
    job = make_job(spec)
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts())
    barriers = [OpenBarrier("north", "7.1.0"), OpenBarrier("south", "7.1.1")]
    messages = [commands.build_message(command, job, 3) for command in barriers]
    assert messages[0]["plan"] is messages[1]["plan"]
    assert [command["token"] for command in messages] == ["7.1.0", "7.1.1"]
    probe = Probe(sequence=1, look=True)
    heard = from_daemon.validate_json(next(command_frames([*messages, probe])))
    assert isinstance(heard[0], Open)
    assert isinstance(heard[1], Open)
    contexts = heard[0].contexts
    assert [(command.token, command.job, command.head) for command in heard[:2]] == [
        ("7.1.0", 7, "7.1.1"),
        ("7.1.1", 7, "7.1.1"),
    ]
    assert (heard[0].nodes, heard[1].contexts, heard[2]) == (heard[1].nodes, contexts, probe)
    assert contexts[0]["environment"] == {"A": "?"}, "what no frame can hold costs nobody the connection"


def job_of_many_components(components: int, clusters: Sequence[str]) -> Job:
    """Return a job with components of one node, dealt to the clusters in turn."""
    placed = tuple(
        Component(index, clusters[index % len(clusters)], 1, ComponentState.CLAIMED, hosts=(f"n{index}",))
        for index in range(components)
    )
    spec = JobSpec(NonFixedRequest((ComponentRequest(1),) * components), ("true",))
    return make_job(spec, placed)


def build_opens(job: Job, find_relay: FindRelay = lambda *_: None) -> list[dict[str, Any]]:
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts(), find_relay=find_relay)
    components = live(job).components
    orders = [OpenBarrier(component.cluster, job.token(component.index)) for component in components]
    return [commands.build_message(order, job, ident) for ident, order in enumerate(orders, 1)]


def count_lines(action: Callable[[], object]) -> int:
    """Return the number of lines of Python that an action executes."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("relayed", [False, True])
def test_openings_of_twice_as_many_components_take_twice_the_steps(relayed: bool) -> None:
    def find_relay(job: Job, nodes: Sequence[PlanNode]) -> JobRelay:
        heads = {name: {} for name in PROFILES}
        plan = AttemptPlan("7.1", b"key", [(node["cluster"], [(1, 2)]) for node in nodes], heads)
        return JobRelay({"attempt": "7.1", "pairs": [], "bases": []}, plan)

    jobs = [job_of_many_components(components, ("north", "south")) for components in (100, 200)]
    fewer, more = (count_lines(lambda: build_opens(job, *([find_relay] if relayed else []))) for job in jobs)  # noqa: B023
    assert more < 2.2 * fewer


def test_frame_of_joined_openings_has_the_plan_once() -> None:
    opens = build_opens(job_of_many_components(4, ("north",)))
    opens[1]["script"] = "#!/bin/sh"
    stop = {"type": "stop", "id": 9, "epoch": 1, "token": "6.1.0", "reason": "r"}
    other_job = build_opens(replace(job_of_many_components(1, ("north",)), id=8))
    batch = [*opens[:3], stop, opens[3], *other_job]
    (frame,), (separate,) = list(command_frames(batch, joins_opens=True)), list(command_frames(batch))
    assert (frame.count('"contexts"'), separate.count('"contexts"')) == (3, 5)
    split = [each for message in from_daemon.validate_json(frame) for each in split_opens(message)]
    assert split == from_daemon.validate_json(separate), "in the same order"


def split_opens(message: Any) -> list[Any]:
    return list(message.split()) if isinstance(message, Open) else [message]


def test_stop_message_has_warning_signal() -> None:
    warning = StopWarning(WarningSignal.USR1, 30.0)
    spec = JobSpec(FlexibleRequest(3), ("true",), warning=warning)
    assert "warning" not in open_message(spec), "nothing but its walltime ends by the clock"
    assert open_message(replace(spec, walltime=100.0))["warning"] == {"signal": "USR1", "after": 70.0, "grace": 30.0}
    assert "warning" not in open_message(replace(spec, warning=None, walltime=100.0))
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts())
    messages = [
        commands.build_message(StopComponent("north", "7.1.0", "r", warning=each), None, 3) for each in (None, warning)
    ]
    assert [(each["signal"], each["grace"]) for each in messages] == [("", 0.0), ("USR1", 30.0)]


def test_stage_message_has_sources_and_checksums() -> None:
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
        result_inputs=(parse_result_input("3:log/err"), parse_result_input("3:out:as=in")),
    )
    placed = (
        replace(PLACED[0], staging_since=1.0),
        replace(PLACED[1], superseded=True, staging_since=1.0),
        replace(PLACED[1], index=2, replaces=1, staging_since=1.0, sources=("files", "south")),
    )
    job = make_job(spec, placed)
    commands = CommandMessages(1, PROFILES, catalogue, Accounts())
    message = commands.build_message(StageComponent("south", "7.1.1"), job, 3)
    assert message["bundle"] == {"id": "f" * 64, "size": 9}
    assert message["result_names"] == ["err", "in"]
    survey, world = message["files"]
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


def test_stage_of_moved_component_becomes_unstage() -> None:
    job = make_job(generation=2)
    for token in ("7.1.0", "7.2.1"):
        message = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(
            StageComponent("north", token), job, 3
        )
        assert (message["type"], message["token"]) == ("unstage", token)


OWNED = Accounts(
    Users({"ada": User({"north": "a.lovelace"})}), {"north": Domain("mapped"), "south": Domain("own", "bob")}
)


def test_submit_message_names_account_of_owner() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), owner="ada")
    job = make_job(spec)
    message = CommandMessages(1, PROFILES, Catalogue(), OWNED).build_message(SubmitComponent("north", "7.1.0"), job, 3)
    assert (message["type"], message["local_user"]) == ("submit", "a.lovelace")
    message = CommandMessages(1, PROFILES, Catalogue(), Accounts()).build_message(
        SubmitComponent("north", "7.1.0"), job, 3
    )
    assert (message["type"], message["local_user"]) == ("submit", "")


@pytest.mark.parametrize(("walltime", "limit"), [(None, None), (100.0, 160.0)])
def test_submit_in_reservation_leaves_its_end_to_the_agent(walltime: float | None, limit: float | None) -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), reservation="r1", deadline=119.0, walltime=walltime)
    placed = [replace(component, submitted_at=10.0) for component in PLACED]
    commands = CommandMessages(1, PROFILES, Catalogue(), Accounts(), find_site_name=lambda _: "koala-0123456789ab-7")
    message = commands.build_message(SubmitComponent("north", "7.1.0"), make_job(spec, placed), 3)
    assert (message["reservation"], message["walltime"]) == ("koala-0123456789ab-7", limit)


def test_submit_of_container_job_to_agent_that_may_ignore_it_becomes_stop() -> None:
    spec = JobSpec(FlexibleRequest(3), ("true",), container="/images/solver.sif")
    job = make_job(spec)
    for is_old, kind in ((True, "stop"), (False, "submit")):
        commands = CommandMessages(
            1, PROFILES, Catalogue(), Accounts(), may_ignore_containers={"north": is_old}.__getitem__
        )
        message = commands.build_message(SubmitComponent("north", "7.1.0"), job, 3)
        assert message["type"] == kind
        assert is_old is (message.get("reason") == "the agent of north is too old to run container images: update it")


@pytest.mark.evidence("U16")
def test_submit_after_lost_permission_becomes_stop() -> None:
    commands = CommandMessages(1, PROFILES, Catalogue(), OWNED)
    spec = JobSpec(FlexibleRequest(3), ("true",), owner="eve")
    job = make_job(spec)
    message = commands.build_message(SubmitComponent("north", "7.1.0"), job, 3)
    assert (message["type"], message["reason"]) == ("stop", "eve has no account on north")
    message = commands.build_message(SubmitComponent("south", "7.1.1"), job, 3)
    assert (message["type"], message["reason"]) == ("stop", "south is bob's own")
    assert commands.build_message(StageComponent("north", "7.1.0"), job, 3)["type"] == "unstage"


@pytest.mark.evidence("G4")
def test_is_replica_needed_checks_jobs_and_source() -> None:
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
    queries = [
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
    assert [entry for entry in queries if is_replica_needed(jobs, *entry, catalogue)] == queries[:3]
