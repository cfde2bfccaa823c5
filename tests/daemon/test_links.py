"""Values of a link from configuration, measurements, transfers and failures."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.daemon.network.links import (
    MAX_RISE,
    MIN_CHANGE,
    MIN_TRANSFER_SECONDS,
    MIN_TRANSFER_SIZE,
    LinkState,
    LinkTable,
)
from koalapy.model.cluster import Link, pair_of
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.grid import GridStatus

NAMES = ("north", "south")
PAIR = NAMES
WEEK = 7 * 86400.0

BASE = Measurement(*PAIR, MeasurementKind.PINGPONG, 0.0)
FAILED = replace(BASE, error="node a cannot reach node b")
BACK = replace(BASE, one="south", other="north", kind=MeasurementKind.TRANSFER)
VAIN = replace(BASE, kind=MeasurementKind.INCONCLUSIVE, error="no nodes")

positive = st.floats(1e-6, 1e12)
links = st.builds(Link, st.none() | positive, st.none() | positive)
measurements = st.one_of(
    st.builds(
        lambda lat, bw, back: replace(BASE, latency=lat, bandwidth=bw, back=back),
        positive,
        positive,
        st.none() | positive,
    ),
    st.just(FAILED),
    st.just(VAIN),
    st.builds(lambda bw: replace(BASE, kind=MeasurementKind.TRANSFER, bandwidth=bw), positive),
    st.builds(lambda bw: replace(BACK, bandwidth=bw), positive),
)
histories = st.lists(st.builds(lambda found, at: replace(found, at=at), measurements, st.floats(0, 1e6)), max_size=12)
"""Measurements in the order of their arrival, with any times."""


def make_table(configured: Link | None = None, *history: Measurement) -> LinkTable:
    return LinkTable(NAMES, {PAIR: configured} if configured else {}, history)


def newest_of_each_sort(history: list[Measurement]) -> list[Measurement]:
    """Return the measurements that a store keeps of a history, in order."""
    found: dict[tuple[MeasurementKind, bool, bool], list[Measurement]] = {}
    for measurement in reversed(history):
        group = found.setdefault((measurement.kind, measurement.error != "", measurement.one > measurement.other), [])
        good = measurement.kind is MeasurementKind.PINGPONG and not measurement.error
        if len(group) < (MAX_PINGPONGS if good else 1):
            group.append(measurement)
    chosen = [id(measurement) for group in found.values() for measurement in group]
    return [measurement for measurement in history if id(measurement) in chosen]


@given(st.none() | links, histories)
def test_link_prefers_measured_values_and_unreachability(configured: Link | None, history: list[Measurement]) -> None:
    measurements = make_table(configured, *history)[PAIR]
    pingpongs = [measurement for measurement in history if measurement.kind is MeasurementKind.PINGPONG]
    if pingpongs and pingpongs[-1].error:
        assert measurements.unreachable
        assert measurements.link == measurements.link_back == Link(unreachable=True)
        return
    failures = [time for time, measurement in enumerate(history) if measurement in pingpongs and measurement.error]
    since = history[failures[-1] + 1 :] if failures else history
    good = [measurement for measurement in since if measurement in pingpongs]
    if failures:  # transfers before the next successful ping-pong are ignored
        since = since[since.index(good[0]) :]
    latencies = [measurement.latency for measurement in good[-MAX_PINGPONGS:] if measurement.latency is not None]
    assert measurements.link.latency == (median(latencies) if latencies else configured.latency if configured else None)
    for link, direction in ((measurements.link, PAIR), (measurements.link_back, PAIR[::-1])):
        moved = [
            measurement
            for measurement in since
            if measurement.kind is MeasurementKind.TRANSFER and (measurement.one, measurement.other) == direction
        ]
        if not good:
            moved = moved or [measurement for measurement in since if measurement.kind is MeasurementKind.TRANSFER]
        last = [measurement for measurement in since if measurement in good or measurement in moved][-1:]
        if not last:
            assert link.bandwidth == (configured.bandwidth if configured else None)
        elif last[0] in moved:
            assert link.bandwidth == last[0].bandwidth
        else:
            newest = [
                measurement for measurement in since if any(measurement is counted for counted in (*good, *moved[-1:]))
            ][-MAX_PINGPONGS:]
            values = [
                (measurement.back if direction != PAIR and measurement in good else None)
                or measurement.bandwidth
                or 0.0
                for measurement in newest
            ]
            assert link.bandwidth == median(values)


MOVED = replace(BASE, kind=MeasurementKind.TRANSFER, bandwidth=5.0)
FOLLOWED = [FAILED, BASE, MOVED, *(replace(BASE, bandwidth=float(n)) for n in range(MAX_PINGPONGS))]


@example(None, FOLLOWED)  # the store keeps the transfer without the ping-pong before it
@given(st.none() | links, histories)
def test_link_table_after_restart_has_reported_values(configured: Link | None, history: list[Measurement]) -> None:
    live = make_table(configured)
    grid = GridStatus([ClusterStatus(name) for name in NAMES], live.known_links())
    for measurement in history:
        live.add_measurement(measurement)
        grid.set_link(*PAIR, live[PAIR].link)
        grid.set_link(*PAIR[::-1], live[PAIR].link_back)
    again = make_table(configured, *newest_of_each_sort(history))
    assert again[PAIR] == live[PAIR]
    assert GridStatus([], again.known_links()).link(*PAIR) == grid.link(*PAIR) == live[PAIR].link
    back = PAIR[::-1]
    assert GridStatus([], again.known_links()).link(*back) == grid.link(*back) == live[PAIR].link_back


@given(st.lists(st.tuples(st.integers(0, 10 * MIN_TRANSFER_SIZE), st.floats(0, 1e4)), max_size=20), st.booleans())
def test_transfer_moves_bandwidth_towards_its_own(moves: list[tuple[int, float]], measured: bool) -> None:
    table = make_table(Link(bandwidth=5.0), *([replace(BASE, latency=1.0, bandwidth=1e6)] if measured else []))
    for time, (size, seconds) in enumerate(moves, 1):
        previous = table[PAIR].newest
        reported = table.learn_transfer(PAIR, size, seconds, float(time))
        current = table[PAIR].newest
        if size < MIN_TRANSFER_SIZE or seconds < MIN_TRANSFER_SECONDS:
            assert reported is None
            assert current is previous
            continue
        assert current is not None
        assert current.bandwidth is not None
        bounds = [size / seconds, previous.bandwidth if previous and previous.bandwidth else size / seconds]
        assert min(bounds) * (1 - 1e-9) <= current.bandwidth <= max(bounds) * (1 + 1e-9)
        assert reported in (None, current)


def test_transfer_first_over_configured_link_replaces_bandwidth() -> None:
    table = make_table(Link(0.1, 5.0))
    reported = table.learn_transfer(PAIR, 2 * MIN_TRANSFER_SIZE, 2.0, 10.0)
    assert reported is not None
    assert table[PAIR].link == Link(0.1, float(MIN_TRANSFER_SIZE))
    second = table.learn_transfer(PAIR, 4 * MIN_TRANSFER_SIZE, 2.0, 11.0)
    assert second is not None
    assert second.bandwidth == pytest.approx(1.5 * MIN_TRANSFER_SIZE), "six times that in four seconds"


def test_transfer_small_changes_are_reported_once_large() -> None:
    table = make_table(None, replace(BASE, latency=1.0, bandwidth=1e8))
    reported = [
        table.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 9 * MIN_TRANSFER_SIZE / 0.9e8, float(time))
        for time in range(1, 60)
    ]
    assert reported[0] is None, "0.4 % slower"
    bandwidths = [measurement.bandwidth for measurement in reported if measurement and measurement.bandwidth]
    assert bandwidths[0] <= 1e8 * (1 - MIN_CHANGE)
    assert table.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 40.0, 10_000.0) is not None, "it was long ago"


def test_link_unreachable_ignores_transfers_until_measured() -> None:
    table = make_table(Link(0.1, 5.0), replace(BASE, at=1.0, latency=1.0, bandwidth=2.0), replace(FAILED, at=2.0))
    table.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 1.0, 3.0)
    assert (table[PAIR].state_at(4.0, WEEK), table[PAIR].link) == (LinkState.UNREACHABLE, Link(unreachable=True))
    assert table.known_links() == {PAIR: Link(unreachable=True)}
    table.add_measurement(replace(BASE, at=4.0, latency=3.0, bandwidth=4.0))
    assert (table[PAIR].state_at(5.0, WEEK), table[PAIR].link) == (LinkState.MEASURED, Link(3.0, 4.0))


def test_link_state_follows_measurements() -> None:
    assert make_table()[PAIR].state_at(0.0, WEEK) is LinkState.UNMEASURED
    assert make_table(Link(1.0))[PAIR].state_at(0.0, WEEK) is LinkState.CONFIGURED
    old = make_table(None, replace(BASE, latency=1.0, bandwidth=2.0))
    assert [old[PAIR].state_at(now, WEEK) for now in (WEEK, WEEK + 1)] == [LinkState.MEASURED, LinkState.STALE]
    assert old[PAIR].link == Link(1.0, 2.0), "used all the same"
    old.add_measurement(replace(VAIN, at=WEEK))
    assert old[PAIR].state_at(WEEK, WEEK) is LinkState.MEASURED
    assert (old[PAIR].error, old[PAIR].tried_at) == ("no nodes", WEEK)


def test_link_table_ignores_unknown_clusters() -> None:
    table = LinkTable(["north"], {}, [replace(BASE, latency=1.0, bandwidth=1.0)])
    assert (table.list_pairs(), table.known_links()) == ([("north", "north")], {})
    assert table.learn_transfer(PAIR, 10 * MIN_TRANSFER_SIZE, 1.0, 1.0) is None
    assert pair_of("south", "north") == PAIR


def test_pingpong_after_clock_set_back_is_newest() -> None:
    measurements = make_table(None, replace(FAILED, at=7200.0))[PAIR].with_measurement(
        replace(BASE, at=3600.0, latency=1.0, bandwidth=2.0)
    )
    assert (measurements.state_at(3601.0, WEEK), measurements.link, measurements.error) == (
        LinkState.MEASURED,
        Link(1.0, 2.0),
        "",
    )
    assert measurements.tried_at == 3600.0
    moved = replace(BASE, kind=MeasurementKind.TRANSFER, at=100.0, bandwidth=9.0)
    assert measurements.with_measurement(moved).link == Link(1.0, 9.0)
    assert measurements.with_measurement(replace(VAIN, at=100.0)).error == "no nodes"


def test_transfer_after_future_report_is_reported() -> None:
    table = make_table(None, replace(BASE, at=10_000.0, latency=1.0, bandwidth=1e6))
    size = 9 * MIN_TRANSFER_SIZE
    assert table.learn_transfer(PAIR, size, size / 1.01e6, 100.0) is not None


def test_transfer_of_small_size_hardly_changes_bandwidth() -> None:
    table = make_table(None, replace(BASE, latency=1.0, bandwidth=1200e6))
    for time in range(10):
        table.learn_transfer(PAIR, MIN_TRANSFER_SIZE, 0.08, float(time))
    assert (table[PAIR].link.bandwidth or 0.0) > 1000e6
    for time in range(2):
        table.learn_transfer(PAIR, 6_000_000_000, 60.0, 20.0 + time)
    assert (table[PAIR].link.bandwidth or 0.0) < 600e6, "two of a minute say something"


sizes, seconds = st.integers(MIN_TRANSFER_SIZE, 10**13), st.floats(MIN_TRANSFER_SECONDS, 1e5)
transfers = st.lists(st.tuples(sizes, seconds), max_size=20)


def moved_after(history: list[tuple[int, float]], *, measured: bool) -> LinkTable:
    """Return a table with a link of known bandwidth, by ping-pongs or by transfers, after these transfers."""
    pingpongs = [replace(BASE, at=float(time), latency=1.0, bandwidth=1e8) for time in range(MAX_PINGPONGS)]
    table = make_table(None, *(pingpongs if measured else [replace(MOVED, bandwidth=1e8)]))
    for time, (size, took) in enumerate(history, 10):
        table.learn_transfer(PAIR, size, took, float(time))
    return table


@example([(10**9, 10.0)] * 100, False, 10**8, 3600.0)  # one stalled transfer gave 0.6 of 100 MB/s
@example([], True, 10**8, 3600.0)
@given(transfers, st.booleans(), sizes, seconds)
def test_transfer_changes_bandwidth_by_bounded_factor(
    history: list[tuple[int, float]], measured: bool, size: int, took: float
) -> None:
    table = moved_after(history, measured=measured)
    previous = table[PAIR].link.bandwidth or 0.0
    table.learn_transfer(PAIR, size, took, 1e6)
    assert previous / 1.5 * (1 - 1e-9) <= (table[PAIR].link.bandwidth or 0.0) <= MAX_RISE * previous


@given(transfers, st.booleans(), st.floats(-2.0, 2.0))
def test_transfers_of_long_duration_replace_bandwidth(
    history: list[tuple[int, float]], measured: bool, magnitude: float
) -> None:
    table = moved_after(history, measured=measured)
    rate = (table[PAIR].link.bandwidth or 0.0) * 10**magnitude
    for time in range(15):
        table.learn_transfer(
            PAIR, max(MIN_TRANSFER_SIZE, round(60 * rate)), max(60.0, MIN_TRANSFER_SIZE / rate), 1e6 + time
        )
    assert table[PAIR].link.bandwidth == pytest.approx(rate, rel=0.3)
