"""Requirements on nodes in the simulated grid: where jobs are placed, and that claims are counted by class."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView, NodeClass, NodeClassPart
from koalapy.model.errors import UsageError
from koalapy.model.job import JobId, JobState, Token, parse_token
from koalapy.model.job_spec import ClaimingMode, JobSpec, Priority
from koalapy.model.node_requirement import Gpus, NodeFilter, NodeRequirement
from koalapy.model.reports import ClusterReport, NodeClassReport
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.rules import Rules
from koalapy.validation.submission import check_submission
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.sites import Site
from tests.scheduler.world import World

GB = 10**9
CLASSES = {
    "north": (
        NodeClassReport("small", 4, 4, cores=4, memory=16 * GB, partitions=("batch",)),
        NodeClassReport("big", 3, 3, cores=64, memory=512 * GB, features=("big", "ib"), partitions=("batch", "large")),
    ),
    "south": (
        NodeClassReport("plain", 3, 3, cores=4, memory=16 * GB, features=("ib",), partitions=("batch",)),
        NodeClassReport("gpu", 2, 2, cores=32, memory=64 * GB, gpus=(Gpus(2, "a100"),), partitions=("gpu",)),
    ),
}
SIZES = {name: sum(node_class.total for node_class in classes) for name, classes in CLASSES.items()}


class NodesSite(Site):
    """A site that gives each component nodes that it may get, from the first classes of its report."""

    filter_of: Callable[[Token], NodeFilter]
    classes: Mapping[str, tuple[NodeClassReport, ...]] = CLASSES

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes_held: dict[str, Counter[str]] = {}
        """Nodes by class of each component and local user."""

    @property
    def reported_classes(self) -> tuple[NodeClassReport, ...]:
        held = sum((self.nodes_held[name] for name in self.held), Counter[str]())
        return tuple(replace(c, idle=c.total - held[c.name]) for c in self.classes[self.name])

    def _next_to_start(self) -> str | None:
        """Return the first in the queue if nodes that it may get are idle, and choose these."""
        name = super()._next_to_start()
        if name is None:
            return None
        nodes = self.filter_of(name) if name in self.runners else NodeFilter()
        missing, chosen = self._size(name), Counter[str]()
        for node_class in self.reported_classes:
            if nodes.admits(as_class(node_class)):
                chosen[node_class.name] = min(missing, node_class.idle)
                missing -= chosen[node_class.name]
        if missing:
            return None
        self.nodes_held[name] = chosen
        return name

    def current_report(self) -> ClusterReport:
        return replace(super().current_report(), node_classes=self.reported_classes)


def as_class(report: NodeClassReport) -> NodeClass:
    return NodeClass(
        report.name,
        report.idle,
        memory=report.memory,
        total=report.total,
        cores=report.cores,
        gpus=report.gpus,
        features=report.features,
        partitions=report.partitions,
    )


class NodesWorld(World):
    """A simulated grid with classes of nodes. It checks that components hold only nodes that they may get."""

    def __init__(
        self,
        rules: Rules | None = None,
        sizes: Mapping[str, int] = SIZES,
        classes: Mapping[str, tuple[NodeClassReport, ...]] = CLASSES,
    ) -> None:
        self.site_class = type("ClassesSite", (NodesSite,), {"classes": classes})
        super().__init__(sizes, rules)
        for site in self.sites.values():
            assert isinstance(site, NodesSite)
            site.filter_of = self._filter_of

    def _filter_of(self, token: Token) -> NodeFilter:
        job, _, index, _ = parse_token(token)
        attempt = self.jobs[job].attempt
        assert attempt is not None
        component = attempt.components[index]
        requirement = self.jobs[job].spec.node_requirement(component.request_index)
        assert requirement is None or component.cluster not in requirement.exclude
        return NodeFilter(component.node_class, requirement and requirement.of_nodes)

    def nodes_of(self, job: JobId) -> dict[str, int]:
        """Return the nodes that a job holds, as ``cluster.class``."""
        counts = Counter[str]()
        for site in self.sites.values():
            assert isinstance(site, NodesSite)
            for token in self.tokens(job):
                if token in site.held:
                    counts += Counter({f"{site.name}.{name}": n for name, n in site.nodes_held[token].items()})
        return dict(counts)

    def check_nodes(self) -> None:
        """Check that components hold only nodes that they may get, and that counts by class are consistent."""
        for site in self.sites.values():
            assert isinstance(site, NodesSite)
            for name in site.held.keys() & site.runners.keys():
                admitted = {c.name for c in site.classes[site.name] if self._filter_of(name).admits(as_class(c))}
                assert {held for held, count in site.nodes_held[name].items() if count} <= admitted
            cluster = self.queries.grid[site.name]
            assert all(node_class.idle >= 0 for node_class in cluster.nodes.node_classes)
            if cluster.nodes.reported:
                assert sum(node_class.idle for node_class in cluster.nodes.node_classes) == cluster.nodes.available


@pytest.fixture
def world() -> NodesWorld:
    world = NodesWorld()
    world.advance(1)
    return world


NONFIXED_POLICIES = ["worst-fit", "close-to-files"]
FLEXIBLE_POLICIES = ["cluster-minimization", "resource-matching", "communication-aware", "larger-first"]
ADMITTED: list[tuple[dict[str, Any], int, set[str]]] = [
    ({"gpus": Gpus(1)}, 2, {"south.gpu"}),
    ({"gpus": Gpus(2, "a100")}, 1, {"south.gpu"}),
    ({"features": ("big",)}, 3, {"north.big"}),
    ({"cores": 32}, 2, {"north.big", "south.gpu"}),
    ({"memory": 100 * GB}, 2, {"north.big"}),
    ({"partition": "gpu"}, 2, {"south.gpu"}),
    ({"features": ("ib",), "exclude": ("north",)}, 3, {"south.plain"}),
    ({"cores": 8, "exclude": ("north",)}, 2, {"south.gpu"}),
]


@pytest.mark.parametrize(("required", "size", "admitted"), ADMITTED)
@pytest.mark.parametrize("policy", [*NONFIXED_POLICIES, *FLEXIBLE_POLICIES])
def test_policy_places_job_on_matching_nodes(
    world: NodesWorld, policy: str, required: dict[str, Any], size: int, admitted: set[str]
) -> None:
    request = nonfixed(size) if policy in NONFIXED_POLICIES else flexible(size)
    job = world.submit(request, policy=policy, **required)
    world.advance(2)
    assert world.state(job) is JobState.RUNNING
    nodes = world.nodes_of(job)
    assert set(nodes) <= admitted
    assert sum(nodes.values()) == size


def test_job_waits_for_matching_nodes_beside_idle_ones(world: NodesWorld) -> None:
    first, second = (world.submit(flexible(2), gpus=Gpus(1), run_time=20.0) for _ in range(2))
    other = world.submit(flexible(8), run_time=5.0)
    world.advance(2)
    assert [world.state(job) for job in (first, second, other)] == [JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    explanation = explain(world.queries, world.job(second), [], world.now)
    assert explanation.headline.endswith("; only nodes with 1 GPU count")
    reasons = {finding.cluster: finding.reason for finding in explanation.clusters}
    assert "north has no node with 1 GPU" in reasons["north"]
    assert "2 of its 5 nodes have 1 GPU" in reasons["south"]
    world.advance(30)
    assert world.state(second) is JobState.RUNNING


def test_fixed_request_gets_matching_nodes_on_each_cluster(world: NodesWorld) -> None:
    job = world.submit(fixed(north=2, south=3), features=("ib",))
    world.advance(2)
    assert world.nodes_of(job) == {"north.big": 2, "south.plain": 3}


@pytest.mark.parametrize("kind", ["fixed", "nonfixed"])
def test_components_with_different_requirements_get_their_nodes(world: NodesWorld, kind: str) -> None:
    components = (
        ComponentRequest(3, "south" if kind == "fixed" else None),
        ComponentRequest(2, "south" if kind == "fixed" else None, gpus=Gpus(2)),
        ComponentRequest(1, "north" if kind == "fixed" else None, features=("big",)),
    )
    request: Request = FixedRequest(components) if kind == "fixed" else NonFixedRequest(components)
    job = world.submit(request)
    world.advance(2)
    assert world.state(job) is JobState.RUNNING
    assert world.nodes_of(job)["south.gpu"] == 2
    assert world.nodes_of(job)["north.big"] >= 1
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [component.request_index for component in attempt.gang] == [0, 1, 2]


def test_high_priority_job_does_not_preempt_for_nodes_it_may_not_get(world: NodesWorld) -> None:
    low = world.submit(flexible(5), exclude=("north",), run_time=60.0)
    world.advance(2)
    high = world.submit(flexible(1), gpus=Gpus(1), priority=Priority.HIGH)
    world.advance(20)
    assert world.state(high) is JobState.QUEUED
    assert world.state(low) is JobState.RUNNING, "it is not known which of its nodes preemption frees"
    world.advance(60)
    assert world.state(high) is JobState.SUCCEEDED
    assert not world.reasons(low, "preempted")


def test_high_priority_job_preempts_where_all_nodes_serve(world: NodesWorld) -> None:
    low = world.submit(flexible(12), run_time=60.0)
    world.advance(2)
    high = world.submit(flexible(1), memory=GB, priority=Priority.HIGH)
    world.advance(5)
    assert world.state(high) is JobState.RUNNING
    assert world.reasons(low, "preempted")


def test_plan_keeps_matching_nodes() -> None:
    world = NodesWorld(Rules(plan_after=0, scan_interval=5.0))
    world.advance(1)
    narrow = world.submit(flexible(1), gpus=Gpus(1), run_time=20.0)
    world.advance(1)
    wide = world.submit(flexible(2), gpus=Gpus(1), run_time=5.0)
    world.advance(12)
    later = world.submit(flexible(1), gpus=Gpus(1), run_time=60.0)
    other = world.submit(flexible(1), run_time=5.0)
    world.advance(2)
    assert [world.state(job) for job in (narrow, wide, later, other)] == [
        JobState.RUNNING,
        JobState.QUEUED,
        JobState.QUEUED,
        JobState.RUNNING,
    ], "the free GPU node is kept for the wide job"
    world.advance(15)
    assert world.state(wide) in (JobState.RUNNING, JobState.SUCCEEDED)


def test_claim_counts_only_nodes_that_the_component_may_get() -> None:
    """Between placement and claim another job has got these nodes; other idle nodes of the cluster do not help."""
    world = NodesWorld(Rules(claiming=ClaimingMode.INCREMENTAL, assumed_bandwidth=100))
    world.advance(1)
    component = ComponentRequest(2, "north", features=("big",), inputs=(InputFile("f", 1600, ("south",)),))
    delayed = world.submit(FixedRequest((component,)))
    assert world.state(delayed) is JobState.PLACED
    other = world.submit(fixed(north=3), features=("big",), run_time=30)
    world.advance(14)
    assert world.nodes_of(other) == {"north.big": 3}
    assert world.commands(delayed) == []
    world.advance(60)
    assert world.state(delayed) is JobState.SUCCEEDED


def test_requirement_of_component_survives_daemon_restart(world: NodesWorld) -> None:
    job = world.submit(flexible(2), gpus=Gpus(1), run_time=60.0)
    world.restart()
    for name in SIZES:
        world.connect(name)
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    assert {c.name: c.idle for c in world.queries.grid["south"].nodes.node_classes} == {"plain": 3, "gpu": 0}


def rejection_of(world: NodesWorld, request: Request, **required: Any) -> str:
    with pytest.raises(UsageError) as error:
        check_submission(JobSpec(request, ("true",), **required), world.queries.limits())
    return f"{error.value.field} {error.value.message} | {error.value.hint}"


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        (
            {"gpus": Gpus(4, "a100")},
            "gpus gpus is a100:4, but no cluster has nodes with 4 GPUs a100 | "
            "nearest: south has 2 GPUs a100 on 2 nodes",
        ),
        (
            {"gpus": Gpus(1, "h100")},
            "gpus gpus is h100:1, but no cluster has nodes with 1 GPU h100 | did you mean a100? known: a100",
        ),
        (
            {"gpus": Gpus(1), "exclude": ("south",)},
            "gpus gpus is 1, but north has no node with 1 GPU | "
            "no other cluster reports GPUs; koala clusters show NAME shows what its nodes have",
        ),
        (
            {"cores": 128},
            "cores cores is 128, but no cluster has nodes with 128 cores | nearest: north has 64 cores on 3 nodes",
        ),
        (
            {"cpus_per_rank": 128},
            "cpus_per_rank cpus_per_rank is 128, but no node has more than 64 cores | give at most 64",
        ),
        (
            {"cpus_per_rank": 16, "processes_per_node": 8},
            "cpus_per_rank cpus_per_rank is 16, so 8 ranks need 128 cores of a node, "
            "but no node has more than 64 cores | give at most 8",
        ),
        (
            {"memory": 1000 * GB},
            "memory memory is 1000000000000, but no cluster has nodes with 1 TB of memory | "
            "nearest: north has 512 GB of memory on 3 nodes",
        ),
        (
            {"features": ("infiniband",)},
            "features features is ['infiniband'], but no cluster has nodes with feature infiniband | known: big, ib",
        ),
        (
            {"partition": "larg"},
            "partition partition is larg, but no cluster has nodes with partition larg | "
            "did you mean large? known: batch, gpu, large",
        ),
        (
            {"gpus": Gpus(1), "features": ("big",)},
            "gpus gpus is 1, but no cluster has nodes with 1 GPU and feature big together | "
            "nearest: north has no GPU on 3 nodes",
        ),
        (
            {"exclude": ("north", "south")},
            "exclude exclude has north, south, and no other cluster remains for the job | exclude fewer clusters",
        ),
    ],
)
def test_requirement_that_no_node_meets_is_rejected_with_nearest(
    world: NodesWorld, required: dict[str, Any], expected: str
) -> None:
    assert rejection_of(world, flexible(1), **required) == expected


def test_more_nodes_than_match_are_rejected(world: NodesWorld) -> None:
    text = rejection_of(world, flexible(3), gpus=Gpus(1))
    assert text.startswith("request.total_size request.total_size is 3, but the whole grid has 2 nodes (south 2)")
    assert "only nodes with 1 GPU count" in text
    text = rejection_of(world, fixed(north=4), features=("big",))
    assert text.startswith("request.components[0].size request.components[0].size is 4, but north has 3 nodes")
    request = FixedRequest((ComponentRequest(1, "north", gpus=Gpus(1)),))
    assert rejection_of(world, request).startswith("request.components[0].gpus"), "the component sets it"
    assert "north has no node with 1 GPU | north reports no GPUs; koala clusters show" in rejection_of(world, request)


def test_requirement_is_accepted_until_nodes_are_known() -> None:
    world = NodesWorld(sizes=SIZES)
    limits = world.queries.limits()
    world.restart()
    check_submission(JobSpec(flexible(1), ("true",), gpus=Gpus(4, "a100")), world.queries.limits())
    assert len(limits.clusters) == 2


@pytest.mark.parametrize(
    ("required", "field"),
    [
        ({"features": ("a&b",)}, "features[0]"),
        ({"features": ("ib", "x y")}, "features[1]"),
        ({"partition": "-p"}, "partition"),
        ({"partition": "a,b"}, "partition"),
        ({"account": "x;reboot"}, "account"),
        ({"qos": "--exclusive"}, "qos"),
        ({"exclude": ("n1,n2",)}, "exclude[0]"),
        ({"exclude": ("n[1-",)}, "exclude[0]"),
        ({"exclude": ("n1 -w n2",)}, "exclude[0]"),
        ({"exclude": ("-n",)}, "exclude[0]"),
        ({"account": "a" * 101}, "account"),
    ],
)
def test_hostile_name_is_rejected(world: NodesWorld, required: dict[str, Any], field: str) -> None:
    assert rejection_of(world, flexible(1), **required).startswith(f"{field} ")


def test_dry_run_counts_matching_nodes(world: NodesWorld) -> None:
    spec = JobSpec(flexible(2), ("true",), gpus=Gpus(1))
    assert explain_submission(world.queries, spec, world.now).headline == "would be placed at once on south (2 nodes)"
    world.submit(flexible(1), gpus=Gpus(1), run_time=60.0)
    world.advance(1)
    assert "only nodes with 1 GPU count" in explain_submission(world.queries, spec, world.now).headline


REQUIREMENTS = st.sampled_from(
    [
        {},
        {},
        {"gpus": Gpus(1)},
        {"features": ("ib",)},
        {"features": ("big",)},
        {"cores": 32},
        {"memory": 32 * GB},
        {"partition": "batch"},
        {"partition": "gpu"},
        {"exclude": ("south",)},
        {"memory": GB},
    ]
)
JOBS = st.lists(
    st.tuples(
        st.integers(1, 4),
        REQUIREMENTS,
        st.sampled_from(["", "worst-fit", "resource-matching", "components"]),
        st.sampled_from([Priority.LOW, Priority.LOW, Priority.HIGH]),
        st.integers(0, 12),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@given(JOBS)
def test_components_hold_only_matching_nodes_and_all_jobs_finish(
    jobs: list[tuple[int, dict[str, Any], str, Priority, int, int]],
) -> None:
    """Invariants of the simulated grid are checked at each step."""
    world = NodesWorld()
    world.advance(1)
    job_ids, users = [], list[tuple[Site, str]]()
    for size, required, policy, priority, pause, local in jobs:
        request: Request = flexible(size)
        if policy == "components":
            request = NonFixedRequest((ComponentRequest(size), ComponentRequest(1, **required)))
            policy, required = "", {}
        elif policy == "worst-fit":
            request = nonfixed(size, 1)
        spec = JobSpec(request, ("true",), policy=policy, **required)
        try:
            check_submission(spec, world.queries.limits())
        except UsageError:
            continue
        job_ids.append(world.submit(request, policy=policy, priority=priority, run_time=10.0, **required))
        if local:
            site = world.sites["south"]
            users.append((site, site.add_local_user(local)))
        for _ in range(pause):
            world.advance(1)
            world.check_nodes()
    for site, name in users:
        site.remove_local_user(name)
    for _ in range(9):
        world.advance(100)
        world.check_nodes()
    assert {world.state(job_id) for job_id in job_ids} <= {JobState.SUCCEEDED}
    for name, cluster in ((name, world.queries.grid[name]) for name in SIZES):
        assert {c.name: c.idle for c in cluster.nodes.node_classes} == {c.name: c.total for c in CLASSES[name]}


def test_view_with_only_matching_nodes_keeps_them_when_resized() -> None:
    view = ClusterView("south", 5, 5, node_classes=tuple(map(as_class, CLASSES["south"])))
    requirement = NodeRequirement(gpus=Gpus(1))
    matching = GridView((view,)).select_nodes(requirement).get("south")
    assert matching is not None
    assert (matching.total, matching.idle, [c.name for c in matching.node_classes]) == (2, 2, ["gpu"])
    assert matching.with_idle(1).node_classes[0].idle == 1
    assert GridView((view,)).select_nodes(NodeRequirement(memory=1)).get("south") is view


def test_nodes_selected_with_parts_cannot_be_selected_for_another_requirement() -> None:
    """The unused part of a partly used node is not known once it counts as an idle node of its class."""
    part = NodeClassPart("big", 1, cores=2)
    view = ClusterView("south", 2, 1, node_classes=(NodeClass("big", 1, cores=8, total=2),), parts=(part,))
    small, large = (NodeRequirement(cores=cores, share=True) for cores in (2, 8))
    selected = view.select_nodes(small)
    assert selected is not None
    assert (selected.idle, selected.with_idle(2).select_nodes(small)) == (2, selected)
    for changed in (selected, selected.with_idle(2), selected.without(small, 1)):
        with pytest.raises(ValueError, match="of south were selected for another requirement"):
            changed.select_nodes(large)
    whole = view.select_nodes(large)
    assert whole is not None
    assert (whole.idle, whole.parts) == (1, (part,)), "no part was counted: it may be selected again"
