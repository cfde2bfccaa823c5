"""Incrementally changed replica locations equal a complete copy."""

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.request import InputFile
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus, ReplicaSites, Sites

NAMES = st.sampled_from([f"file-{number}" for number in range(12)])
SITES = st.sampled_from([(), ("north",), ("north", "south")])
CHANGES = st.lists(st.dictionaries(NAMES, SITES, max_size=4), max_size=40)


@given(CHANGES, st.sets(NAMES))
def test_replica_sites_equal_copy_after_each_change(
    changes: list[dict[str, Sites]], referenced_names: set[str]
) -> None:
    plain: dict[str, Sites] = {}
    versions, copies = [ReplicaSites()], [plain]
    for change in changes:
        plain = {**plain, **change}
        versions.append(versions[-1].changed(change))
        copies.append(plain)
    versions.append(versions[-1].without_missing(referenced_names))
    copies.append({name: sites for name, sites in plain.items() if sites or name in referenced_names})
    for sites, copy in zip(versions, copies, strict=True):
        assert dict(sites) == copy
        assert len(sites) == len(copy)
        assert all((f"file-{number}" in sites) is (f"file-{number}" in copy) for number in range(12))
        assert sites.get("no file") is None


def test_view_keeps_replica_sites_of_its_creation() -> None:
    grid = GridStatus([ClusterStatus("north")])
    grid.set_replicas({f"file-{number}": ("north",) for number in range(100)})
    old_view = grid.view()
    for number in range(100):
        grid.set_replicas({f"file-{number}": ()})
    assert {old_view.sites_of(InputFile(f"file-{number}")) for number in range(100)} == {("north",)}
    assert {grid.view().sites_of(InputFile(f"file-{number}")) for number in range(100)} == {()}
