"""Where files are: what is made of it, whatever changes in whatever order, is what a plain copy would be."""

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.request import InputFile
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus, ReplicaSites, Sites

NAMES = st.sampled_from([f"file-{number}" for number in range(12)])
SITES = st.sampled_from([(), ("north",), ("north", "south")])
CHANGES = st.lists(st.dictionaries(NAMES, SITES, max_size=4), max_size=40)


@given(CHANGES, st.sets(NAMES))
def test_each_value_is_what_a_copy_would_be_and_stays_so(changes: list[dict[str, Sites]], wanted: set[str]) -> None:
    plain: dict[str, Sites] = {}
    made, copies = [ReplicaSites()], [plain]
    for change in changes:
        plain = {**plain, **change}
        made.append(made[-1].changed(change))
        copies.append(plain)
    made.append(made[-1].without_missing(wanted))
    copies.append({name: sites for name, sites in plain.items() if sites or name in wanted})
    for sites, copy in zip(made, copies, strict=True):
        assert dict(sites) == copy
        assert len(sites) == len(copy)
        assert all((f"file-{number}" in sites) is (f"file-{number}" in copy) for number in range(12))
        assert sites.get("no file") is None


def test_a_view_keeps_what_it_was_made_of() -> None:
    grid = GridStatus([ClusterStatus("north")])
    grid.set_replicas({f"file-{number}": ("north",) for number in range(100)})
    before = grid.view()
    for number in range(100):
        grid.set_replicas({f"file-{number}": ()})
    assert {before.sites_of(InputFile(f"file-{number}")) for number in range(100)} == {("north",)}
    assert {grid.view().sites_of(InputFile(f"file-{number}")) for number in range(100)} == {()}
