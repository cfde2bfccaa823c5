"""``koala network``: the matrix, measurements and the history of a link."""

import json
from dataclasses import replace

import pytest

from koalapy.cli.clusters.network import format_matrix
from koalapy.model.cluster import Link, RelayedSince
from koalapy.model.measurement import Measurement, MeasurementKind
from tests.cli.conftest import FAST, Koala, Server
from tests.cli.memory_network import NOW

NORTH, BOTH, SOUTH = ("north", "north"), ("north", "south"), ("south", "south")


def make_pingpong(pair: tuple[str, str], ended_at: float = NOW, error: str = "") -> Measurement:
    latency, bandwidth = (None, None) if error else (0.4e-3, 185e6)
    return Measurement(*pair, MeasurementKind.PINGPONG, ended_at, latency, bandwidth, 7, error)


UNREACHABLE_ERROR = "node s cannot reach node n (timed out)"


def test_network_without_measurements_shows_dashes(koala: Koala) -> None:
    assert koala("network").out.splitlines() == [
        "MB/s, ms     north     south",
        "north            –         –",
        "                 –         –",
        "south            –         –",
        "                 –         –",
        "",
        "–  not measured: koala network measure",
    ]


def unmeasured_links(clusters: list[str]) -> dict[tuple[str, str], dict[str, object]]:
    link = {"state": "unmeasured", "latency": None, "bandwidth": None}
    return {(cluster, peer): link for cluster in clusters for peer in clusters if cluster <= peer}


def test_matrix_wider_than_terminal_is_split() -> None:
    clusters = [f"cluster-{i:02}" for i in range(10)]
    links = unmeasured_links(clusters)
    assert max(len(line) for line in format_matrix(clusters, links).splitlines()) > 80
    parts = format_matrix(clusters, links, 80).split("\n\n")
    assert max(len(line) for part in parts for line in part.splitlines()) <= 80
    assert [part.splitlines()[0].split()[2:] for part in parts] == [clusters[:5], clusters[5:]]
    assert {len(part.splitlines()) for part in parts} == {21}
    assert format_matrix(clusters[:2], links, 5).count("MB/s, ms") == 2, "one column at least"


def test_matrix_of_no_clusters_or_wide_names() -> None:
    assert format_matrix([], {}) == format_matrix([], {}, 80) == "MB/s, ms"
    lines = format_matrix(["delft", "東京"], unmeasured_links(["delft", "東京"])).splitlines()
    assert lines == [
        "MB/s, ms     delft      東京",
        "delft            –         –",
        "                 –         –",
        "東京             –         –",
        "                 –         –",
    ]


def test_network_marks_and_explains_link_states(koala: Koala, server: Server) -> None:
    server.network.set_measurements(
        replace(make_pingpong(NORTH, ended_at=NOW - 7200.0), latency=3e-5, bandwidth=561.4e6),
        make_pingpong(BOTH, ended_at=NOW - 50.0, error=UNREACHABLE_ERROR),
        replace(make_pingpong(SOUTH, error="no nodes for 300 s"), kind=MeasurementKind.INCONCLUSIVE),
        configured={BOTH: Link(1e-3, 1e6), SOUTH: Link(None, 1.25e9)},
    )
    lines = koala("network").out.splitlines()
    assert lines[:10] == [
        "MB/s, ms        north        south",
        "north            561*  unreachable",
        "               0.030*",
        "south     unreachable       (1250)",
        "                                 –",
        "",
        "–  not measured: koala network measure",
        "( )  configured, not measured",
        "*  measured more than 1:00:00 ago; used all the same",
        "unreachable  the nodes do not reach each other: never combined",
    ]
    assert lines[11] == f"north - south: unreachable, 1970-01-01 00:15:50 UTC: {UNREACHABLE_ERROR}"
    assert lines[12].startswith("south - south: the last try came to nothing, ")
    assert lines[12].endswith(": no nodes for 300 s")
    assert json.loads(koala("network", "--json").out)["links"][1]["state"] == "unreachable"


def test_network_shows_each_direction_of_a_link(koala: Koala, server: Server) -> None:
    server.network.set_measurements(replace(make_pingpong(BOTH), back=100e6))
    lines = koala("network").out.splitlines()
    assert (lines[1].split(), lines[3].split()) == (["north", "–", "185"], ["south", "100", "–"])


def test_network_marks_relayed_links(koala: Koala, server: Server) -> None:
    server.network.set_measurements(
        replace(make_pingpong(BOTH, ended_at=NOW - 50.0), kind=MeasurementKind.RELAYED, latency=3e-4, bandwidth=5e8)
    )
    lines = koala("network").out.splitlines()
    assert lines[1].split() == ["north", "–", "500^"]
    assert lines[2].split() == ["–", "0.300^"]
    assert "^  MPI messages go over relays" in lines
    server.network.relayed[BOTH] = RelayedSince(
        NOW - 50.0, "nodes of job 7 did not, by the report of south", NOW + 550.0
    )
    assert koala("network").out.splitlines()[-1] == (
        "north - south: relayed since 1970-01-01 00:15:50 UTC: nodes of job 7 did not, by the report of south; "
        "tried directly again from 1970-01-01 00:25:50 UTC"
    )
    link = json.loads(koala("network", "--json").out)["links"][1]
    assert (link["relayed_since"], link["direct_retry_at"]) == ("1970-01-01T00:15:50.000Z", "1970-01-01T00:25:50.000Z")
    assert json.loads(koala("network", "--json").out)["links"][1]["relayed"] is True


@pytest.mark.parametrize(
    ("bandwidth", "latency", "numbers"),
    [
        (561e6, 0.03e-3, ("561", "0.030")),
        (9.996e6, 1.45e-3, ("10.00", "1.45")),
        (77e6, 12.34e-3, ("77.0", "12.3")),
        (125e3, 2.0, ("0.125", "2000")),
    ],
)
def test_matrix_numbers_have_three_digits(bandwidth: float, latency: float, numbers: tuple[str, str]) -> None:
    link = {"state": "measured", "bandwidth": bandwidth, "latency": latency}
    lines = format_matrix(["a"], {("a", "a"): link}).splitlines()
    assert (lines[1].split()[1], lines[2].split()[0]) == numbers


def test_measure_prints_result_of_each_link(koala: Koala, server: Server) -> None:
    server.network.results = {NORTH: make_pingpong(NORTH), BOTH: make_pingpong(BOTH)}
    result = koala("network", "measure")
    assert (result.code, result.err) == (0, "")
    assert sorted(result.out.splitlines()) == [
        "north - north: 0.400 ms, 185 MB/s",
        "north - south: 0.400 ms, 185 MB/s",
        "south - south: not measured, south has 1 node",
    ]
    lines = koala("network").out.splitlines()
    assert lines[1:3] == ["north          185       185", "             0.400     0.400"]


@pytest.mark.parametrize("options", [(), ("--no-wait",), ("--json",), ("--json", "--no-wait")])
def test_measure_without_measurable_links_exits_with_1(koala: Koala, server: Server, options: tuple[str, ...]) -> None:
    result = koala("network", "measure", *options)
    assert (result.code, result.err) == (1, "koala: no link is measured; see the reasons above and koala clusters\n")
    assert result.out.count("south has 1 node") == 1


def test_measure_with_failed_link_exits_with_1(koala: Koala, server: Server) -> None:
    server.network.results = {
        NORTH: make_pingpong(NORTH),
        BOTH: make_pingpong(BOTH, error=UNREACHABLE_ERROR),
        SOUTH: None,
    }
    result = koala("network", "measure", "north", "south")
    assert result.code == 1
    assert sorted(result.out.splitlines()) == [
        "north - north: 0.400 ms, 185 MB/s",
        f"north - south: unreachable: {UNREACHABLE_ERROR}",
        "south - south: the daemon has lost it; measure again",
    ]
    server.network.results = {SOUTH: replace(make_pingpong(SOUTH, error="no nodes"), kind=MeasurementKind.INCONCLUSIVE)}
    assert koala("network", "measure", "south").out == "south - south: not measured: no nodes\n"


def test_measure_json_has_results(koala: Koala, server: Server) -> None:
    server.network.results = {NORTH: make_pingpong(NORTH)}
    (link,) = json.loads(koala("network", "measure", "north", "--json").out)["links"]
    assert (link["one"], link["other"], link["job"], link["reason"]) == (*NORTH, 7, "")
    assert link["result"] == {
        "kind": "pingpong",
        "at": "1970-01-01T00:16:40.000Z",
        "latency": 0.4e-3,
        "bandwidth": 185e6,
        "job": 7,
        "error": "",
        "source": "north",
        "bandwidth_back": None,
    }


def test_measure_no_wait_prints_links_under_way(koala: Koala, server: Server) -> None:
    server.network.results = {NORTH: make_pingpong(NORTH), BOTH: make_pingpong(BOTH)}
    server.network.is_stalled = True
    result = koala("network", "measure", "--no-wait")
    assert (result.code, result.out.splitlines()) == (
        0,
        ["north - north: under way", "north - south: under way", "south - south: not measured, south has 1 node"],
    )
    assert koala("network").out.splitlines()[-2:] == [
        "north - north: is being measured by job 7",
        "north - south: waits to be measured",
    ]
    late = koala("network", "measure", "north", "--timeout", "0")
    assert (late.code, "north - north" in late.err, "continue" in late.err) == (6, True, True)
    assert json.loads(koala("network", "measure", "--no-wait", "--json").out)["links"][0]["reason"] == ""


def test_measure_prints_cause_of_wait(koala: Koala, server: Server, interrupted_wait: list[str]) -> None:
    koala("submit", "--flexible", "1", "program")
    server.network.results = {NORTH: make_pingpong(NORTH)}
    server.network.is_stalled, server.network.measuring_job = True, 1
    result = koala("network", "measure", "north", timeouts=FAST)
    assert (result.code, result.err) == (130, "koala: the measurements continue; see koala network\n")
    assert interrupted_wait == ["job 1 is queued: too few idle nodes"]


def test_network_history_lists_newest_first(koala: Koala, server: Server) -> None:
    moved = Measurement(*BOTH, MeasurementKind.TRANSFER, NOW, bandwidth=100e6)
    server.network.set_measurements(
        moved, make_pingpong(BOTH, ended_at=500.0), make_pingpong(BOTH, ended_at=100.0, error=UNREACHABLE_ERROR)
    )
    result = koala("network", "history", "south", "north")
    header, first, second, third = result.out.splitlines()
    assert header.split()[:2] == ["UTC", "KIND"]
    assert first.split() == ["1970-01-01", "00:16:40", "transfer", "–", "100", "-", "-"]
    assert second.split()[2:] == ["pingpong", "0.400", "185", "7", "-"]
    assert third.endswith(UNREACHABLE_ERROR)
    assert len(koala("network", "history", "south", "north", "--limit", "1").out.splitlines()) == 2
    history = json.loads(koala("network", "history", "south", "north", "--json").out)
    assert [line["kind"] for line in history["measurements"]] == ["transfer", "pingpong", "pingpong"]
    assert "there are no measurements" in koala("network", "history", "north", "north").err


def test_network_with_unknown_cluster_or_daemon_fails(koala: Koala, server: Server) -> None:
    wrong = koala("network", "measure", "nroth")
    assert (wrong.code, wrong.err) == (2, "koala: clusters[0] is nroth; known: north, south\n")
    assert koala("network", "history", "north", "x").code == 3
    assert koala("network", "history", "north").code == 2
    server.end()
    assert koala("network").code == 5
    server.start()
