"""Classes of nodes, as configured or by features and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.node_classes import (
    MAX_CLASSES,
    MAX_NAME_LENGTH,
    KnownNode,
    NodeClassSettings,
    NodeGroups,
    NodePart,
    group_nodes,
)
from koalapy.model.node_requirement import Gpus
from koalapy.model.reports import MAX_LINES, NodeClassReport

GIB = 1 << 30


def make_node(name: str, *features: str, memory: int | None = None, weight: int = 1) -> KnownNode:
    return KnownNode(name, memory, frozenset(features), weight)


def describe_groups(groups: NodeGroups) -> dict[str, list[str]]:
    return {group.name: sorted(group.nodes) for group in groups.groups}


def test_group_nodes_that_are_equal_returns_unnamed_group() -> None:
    (group,) = group_nodes([make_node("n1", memory=63 * GIB), make_node("n2", memory=62 * GIB)], {}).groups
    assert (group.name, group.memory) == ("", 62 * GIB)


def test_joined_classes_have_only_what_all_nodes_have() -> None:
    nodes = [
        KnownNode(f"n{i}", features=frozenset({"ib", f"r{i}"}), cores=8 + i, gpus=(Gpus(1 + i % 2),)) for i in range(70)
    ]
    (group,) = group_nodes(nodes, {}).groups
    assert (group.cores, group.gpus, group.features) == (8, (Gpus(1),), ("ib",))


def test_configured_properties_are_added_to_reported_ones() -> None:
    settings = NodeClassSettings(feature="ib", cores=4, gpus={"h100": 1}, features=["ssd"], memory=7)
    nodes = [KnownNode("n1", 9, frozenset({"ib"}), 1, 8, (Gpus(2, "a100"),), frozenset({"main"}))]
    (group,) = group_nodes(nodes, {"fast": settings}).groups
    assert (group.memory, group.cores, group.features) == (7, 4, ("ib", "ssd"))
    assert group.gpus == (Gpus(2, "a100"), Gpus(1, "h100"))


def test_group_nodes_prefers_configured_classes() -> None:
    nodes = [
        make_node("n1.site", "gpu"),
        make_node("n2", "gpu"),
        make_node("n3"),
        make_node("n4"),
        make_node("n5", memory=GIB),
    ]
    groups = group_nodes(
        nodes,
        {
            "mine": NodeClassSettings(hosts="n[1,3]", power=3.0, memory=7),
            "gpu": NodeClassSettings(feature="gpu"),
            "none": NodeClassSettings(feature="tape"),
        },
    )
    assert describe_groups(groups) == {"mine": ["n1.site", "n3"], "gpu": ["n2"], "other": ["n4"], "1.07GB": ["n5"]}
    assert groups.notices == ("of the class none it has 0 nodes: see the cluster's node_classes",)
    mine, gpu = groups.groups[:2]
    assert (mine.power, mine.memory, gpu.power, gpu.memory) == (3.0, 7, None, None)
    assert gpu.feature == "", "another class has such nodes, too: the feature alone does not choose these"
    assert group_nodes(nodes, {"gpu": NodeClassSettings(feature="gpu")}).groups[0].feature == "gpu"


def test_group_nodes_with_too_few_nodes_adds_notice() -> None:
    groups = group_nodes(
        [make_node("n1"), make_node("n2")], {"fast": NodeClassSettings(nodes=3), "slow": NodeClassSettings(nodes=1)}
    )
    assert describe_groups(groups) == {"fast": ["n1", "n2"]}
    assert [notice[:34] for notice in groups.notices] == [
        "of the class fast it has 2 nodes: ",
        "of the class slow it has 0 nodes: ",
    ]


def test_group_nodes_limits_length_of_names() -> None:
    features = [f"a-feature-with-a-long-name-{number}" for number in range(100)]
    groups = group_nodes(
        [make_node("n1", *features), make_node("n2", *features, "b"), make_node("n3", *features, "c")], {}
    )
    assert len(groups.groups) == 3
    assert max(len(group.name) for group in groups.groups) <= MAX_NAME_LENGTH + 2


def test_report_with_too_many_parts_has_the_largest() -> None:
    count = MAX_LINES + 5
    nodes = [KnownNode(f"n{number}", 8 * GIB, cores=8) for number in range(count)]
    used = {node.name: NodePart(1, (number + 1) << 20) for number, node in enumerate(nodes)}
    (report,) = group_nodes(nodes, {}).report(lambda _: 0, used)
    assert min(part.memory or 0 for part in report.parts) == 8 * GIB - (MAX_LINES << 20)
    adapter = TypeAdapter(NodeClassReport)
    assert adapter.validate_json(adapter.dump_json(report)) == report


def test_group_nodes_with_too_many_classes_joins_them() -> None:
    many = [make_node(f"n{number}", f"rack{number}", memory=GIB) for number in range(MAX_CLASSES + 1)]
    (group,) = group_nodes(many, {}).groups
    assert (group.name, len(group.nodes)) == ("", MAX_CLASSES + 1)


NODES = st.lists(
    st.builds(
        KnownNode,
        st.sampled_from([f"n{number}" for number in range(9)]),
        st.sampled_from([None, GIB, 2 * GIB, 64 * GIB]),
        st.frozensets(st.sampled_from(["a", "b", "c"])),
        st.integers(1, 3),
    ),
    unique_by=lambda entry: entry.name,
)
CONFIGURED = st.dictionaries(
    st.sampled_from(["x", "y", "a", "other"]),
    st.one_of(
        st.builds(NodeClassSettings, nodes=st.integers(1, 4)),
        st.builds(NodeClassSettings, feature=st.sampled_from(["a", "b"])),
        st.builds(NodeClassSettings, hosts=st.sampled_from(["n[1-3]", "n5,n7"])),
    ),
)


@given(NODES, CONFIGURED)
def test_group_nodes_puts_each_node_into_one_class(
    nodes: list[KnownNode], configured: dict[str, NodeClassSettings]
) -> None:
    groups = group_nodes(nodes, configured).groups
    node_names = [name for group in groups for name in group.nodes]
    assert sorted(node_names) == (sorted(node.name for node in nodes) if groups else [])
    assert len({group.name for group in groups}) == len(groups)
    assert all(group.nodes for group in groups)
    assert len(groups) == 1 or all(group.name for group in groups)
    for group in groups:
        if group.feature:
            assert {node.name for node in nodes if group.feature in node.features} == group.nodes
    assert group_nodes(list(nodes), configured).groups == groups, "the same each time"


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"fast": {}}, "give one of nodes, feature and hosts"),
        ({"fast": {"nodes": 1, "feature": "x"}}, "give one of nodes, feature and hosts"),
        ({"fast": {"feature": "a&b"}}, "pattern"),
        ({"fast": {"nodes": 0}}, "greater than or equal to 1"),
        ({"fast": {"nodes": 1, "power": 0}}, "greater than 0"),
        ({"fast": {"nodes": 1, "memory": "64GB"}}, ""),
        ({"fast": {"nodes": 1, "memory": "64"}}, "give 64GB or 64MB"),
        ({"fast": {"nodes": 1, "memory": 64}}, "give 64GB or 64MB"),
        ({"fast": {"nodes": 1, "memory": "64Gbit"}}, "give a number with a unit"),
        ({"fast": {"hosts": "n[1-"}}, "not a list of host names"),
        ({"fast": {"nodes": 1, "features": ["a&b"]}}, "pattern"),
        ({"fast": {"nodes": 1, "gpus": {"a b": 1}}}, "pattern"),
        ({"fast": {"nodes": 1, "gpus": {"a100": 0}}}, "greater than or equal to 1"),
        ({"fast": {"nodes": 1, "cores": 0}}, "greater than or equal to 1"),
        ({"": {"nodes": 1}}, "pattern"),
        ({"a b": {"nodes": 1}}, "pattern"),
    ],
)
def test_settings_of_wrong_class_are_rejected(section: dict[str, object], problem: str) -> None:
    settings = TypeAdapter(SiteSettings)
    if not problem:
        settings.validate_python({"node_classes": section})
        return
    with pytest.raises(ValidationError, match=problem):
        settings.validate_python({"node_classes": section})


def test_memory_of_class_accepts_units() -> None:
    settings = TypeAdapter(SiteSettings).validate_python({"node_classes": {"big": {"nodes": 1, "memory": "1.5GiB"}}})
    assert settings.node_classes["big"].memory == 3 << 29


@pytest.mark.evidence("J13")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "local"}, ""),
        ({"kind": "slurm", "identity": "own"}, ""),
        ({"kind": "slurm", "identity": "mapped"}, ""),
        ({"kind": "slurm"}, "share needs the identity mapped or own"),
        ({"kind": "sge", "identity": "mapped"}, "only for clusters of the kinds slurm and local, and not for sge"),
    ],
)
def test_site_shares_nodes_only_where_users_are_kept_apart(settings: dict[str, object], problem: str) -> None:
    adapter = TypeAdapter(SiteSettings)
    assert not adapter.validate_python(settings).share
    if not problem:
        assert adapter.validate_python(settings | {"share": True}).share
        return
    with pytest.raises(ValidationError, match=problem):
        adapter.validate_python(settings | {"share": True})
