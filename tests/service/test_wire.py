"""A command tells each component's program in the words of the cluster that runs it."""

from dataclasses import replace

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest
from koalapy.scheduling.commands import OpenBarrier
from koalapy.service.wire import message

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
    return message(OpenBarrier("north", "7.1.0"), job, 3, 1, PROFILES)


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
