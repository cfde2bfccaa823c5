"""Tables: order, pages by keyset, columns, CSV, and hostile addresses."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.client.client import Client
from koalapy.dashboard.charts import NodeCounts
from koalapy.dashboard.cluster_table import CLUSTERS
from koalapy.dashboard.tables import TableQuery, cut_page, matches_text
from koalapy.model.errors import UsageError
from tests.daemon.sites import Sites
from tests.daemon_in_process import ServedDaemon, daemon_in_thread
from tests.dashboard.people import Person, create_token

ROWS = st.dictionaries(st.integers(0, 99), st.one_of(st.none(), st.integers(-3, 3)), max_size=40)


def collect_pages(rows: dict[int, int | None], sort: str, limit: int, gone: Iterator[int]) -> list[int]:
    """Return the ids of all pages; after each page, one more of the ids ``gone`` is removed."""
    after, collected = "", list[int]()
    while True:
        query = TableQuery(sort, after=after, limit=limit)
        page, after = cut_page([(value, ident, ident) for ident, value in rows.items()], query, sort)
        collected += page
        if not after:
            return collected
        rows.pop(next(gone, -1), None)


@given(ROWS, st.sampled_from(["x", "-x"]), st.integers(1, 7), st.lists(st.integers(0, 99)))
def test_pages_contain_each_remaining_row_once(
    rows: dict[int, int | None], sort: str, limit: int, gone: list[int]
) -> None:
    original = dict(rows)
    collected = collect_pages(rows, sort, limit, iter(gone))
    assert len(collected) == len(set(collected))
    assert set(rows) <= set(collected) <= set(original)
    values = [original[ident] for ident in collected]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=sort == "-x")
    assert values == known + [None] * (len(values) - len(known)), "missing values are last"


POSITIONS = (
    "x",
    "[",
    "[1]",
    "[1,2,3]",
    '["a",1]',
    "[{},1]",
    "[[[1]],1]",
    "[null,[]]",
    "1",
    "null",
    '["a","b"]',
    "[" * 900,
)


@pytest.mark.parametrize("position", POSITIONS)
def test_invalid_position_is_rejected(position: str) -> None:
    with pytest.raises(UsageError, match="position"):
        cut_page([(1, 1, "row"), (2, 2, "row")], TableQuery(after=position), "x")


def test_text_filter_needs_every_word_in_any_case() -> None:
    assert matches_text("NORTH run", ["north", "Running"])
    assert not matches_text("north gone", ["north", "Running"])
    assert matches_text(" ", [])


@pytest.fixture(scope="module")
def olga(daemon: ServedDaemon) -> Iterator[Person]:
    """An operator, and waiting jobs of two users."""
    for owner, size, name, priority in (
        ("alice", 5, "=1+1", "low"),
        ("bob", 8, "b", "low"),
        ("alice", 7, "<i>", "high"),
        ("bob", 6, "B", "low"),
    ):
        body: dict[str, Any] = {"request": {"type": "flexible", "total_size": size}, "command": ["true"]}
        daemon.http.post(
            "/api/v1/jobs", json=body | {"owner": owner, "name": name, "priority": priority}
        ).raise_for_status()
    person = Person(daemon, create_token(daemon, "olga", "operator"))
    yield person
    person.close()


def column_of(person: Person, column: str, **query: Any) -> list[Any]:
    return [job[column] for job in person.get_json("/queue.json", **query)["jobs"]]


def test_jobs_are_in_queue_order_by_default_and_sorted_by_any_column(olga: Person) -> None:
    assert column_of(olga, "nodes") == [7, 5, 8, 6], "high priority is first"
    assert column_of(olga, "nodes", sort="nodes") == [5, 6, 7, 8]
    assert column_of(olga, "nodes", sort="-nodes") == [8, 7, 6, 5]
    assert column_of(olga, "name", sort="name") == ["<i>", "=1+1", "b", "B"]
    table = olga.get_json("/queue.json", sort="-nodes", limit=3)["table"]
    assert (table["shown"], table["total"]) == (3, 4)
    assert [job["nodes"] for job in olga.get_json(table["next"].replace("/queue?", "/queue.json?"))["jobs"]] == [5]
    assert olga.http.get("/queue?sort=state").status_code == 422
    assert olga.http.get("/queue?sort=nodes&q=state:any").status_code == 422
    assert olga.http.get("/queue?columns=secret").status_code == 422
    assert olga.http.get("/queue?limit=201").status_code == 422
    assert olga.http.get("/queue?after=[1,2]").status_code == 422


def test_jobs_of_other_users_have_no_place_in_order_of_private_fields(daemon: ServedDaemon, olga: Person) -> None:
    alice = Person(daemon, create_token(daemon, "alice"))
    assert column_of(alice, "name", sort="name") == ["<i>", "=1+1", "", ""]
    assert column_of(alice, "name", sort="-user")[2:] == ["", ""]
    alice.close()


def test_columns_and_order_are_in_all_links_and_in_csv(olga: Person) -> None:
    page = olga.get_page("/queue?columns=id&columns=name&sort=-id&q=user:alice")
    heading = page.partition("<thead>")[2].partition("</thead>")[0]
    assert heading.count("<th") == 3, "the box and two columns"
    assert 'aria-sort="descending"' in heading
    assert "columns=id&amp;columns=name" in heading
    text = olga.http.get("/queue.csv?columns=nodes&columns=name&sort=-nodes").text
    assert list(csv.reader(io.StringIO(text))) == [
        ["name", "nodes"],
        ["b", "8"],
        ["<i>", "7"],
        ["B", "6"],
        ["'=1+1", "5"],
    ]
    answer = olga.http.get("/queue.csv?q=user:alice")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="queue.csv"'
    assert len(answer.text.splitlines()) == 3


def test_no_unknown_nodes_are_0_in_csv_and_empty_on_the_page() -> None:
    column: Any = CLUSTERS.by_name["unknown"]
    row = SimpleNamespace(nodes=NodeCounts(idle=4))
    assert (column.getter(row), column.format(column.getter(row))) == (0, "")


def test_nodes_of_cluster_are_escaped_sorted_filtered_and_paged(tmp_path: Path) -> None:
    hostile = {"name": "<script>x</script>", "state": "down", "reason": '"><img src=x> fan', "node_class": "<b>"}
    others = [{"name": name, "state": state} for name, state in (("n10", "idle"), ("n2", "idle"), ("n3", "local"))]
    sites = Sites(nodes={"north": {"nodes": [*others, hostile], "age": 2.0}})
    with daemon_in_thread(tmp_path / "koala.db", sites, has_dashboard=True) as daemon:

        def names(query: str) -> list[str]:
            return [node["name"] for node in daemon.http.get(f"/clusters/north/nodes.json{query}").json()["nodes"]]

        assert names("") == ["<script>x</script>", "n3", "n2", "n10"], "nodes that are down are first, idle ones last"
        assert names("?sort=-node") == ["n10", "n3", "n2", "<script>x</script>"]
        assert names("?q=fan") == ["<script>x</script>"]
        assert names("?q=idle&limit=1") == ["n2"]
        view = daemon.http.get("/clusters/north/nodes.json?q=idle&limit=1").json()
        assert names("?" + view["table"]["next"].partition("?")[2]) == ["n10"]
        for path in ("/clusters/north", "/clusters/north/nodes"):
            page = daemon.http.get(path, headers={"Accept": "text/html"}).text
            assert "&lt;script&gt;x" in page
            assert "<script>x" not in page
            assert "<img" not in page
        assert "known" in daemon.http.get("/clusters/south/nodes.json").json()
        assert daemon.http.get("/clusters/nowhere/nodes").status_code == 404
        assert daemon.http.get("/clusters/north/nodes.csv?sort=node").text.count("\n") == 5
        path = "/api/v1/clusters/north/nodes"
        page = daemon.http.get(path, params={"state": ["idle", "down"], "limit": 2}).json()
        assert ([node["name"] for node in page["nodes"]], page["total"]) == (["n10", "n2"], 3)
        last = daemon.http.get(page["next"]).json()
        assert [(node["name"], node["reason"]) for node in last["nodes"]] == [(hostile["name"], hostile["reason"])]
        assert last["next"] is None
        assert daemon.http.get("/api/v1/clusters/south/nodes").json()["problem"] == "south is out of reach"
        for query in ("limit=0", "limit=1001", "offset=-1", "stat=idle"):
            assert daemon.http.get(f"{path}?{query}").status_code == 422, query
        client = Client(daemon.url, daemon.admin_token)
        assert [node["name"] for node in client.nodes("north", ["idle"])["nodes"]] == ["n10", "n2"]
