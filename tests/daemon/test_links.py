"""What is known of a link after whatever was configured, measured, moved and found unreachable."""

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
"""In the order in which they were learned, whatever the clocks said."""


def book(configured: Link | None = None, *found: Measurement) -> LinkTable:
    return LinkTable(NAMES, {PAIR: configured} if configured else {}, found)


def newest_of_each_sort(history: list[Measurement]) -> list[Measurement]:
    """What a store gives back of a history, in order."""
    found: dict[tuple[MeasurementKind, bool, bool], list[Measurement]] = {}
    for each in reversed(history):
        some = found.setdefault((each.kind, each.error != "", each.one > each.other), [])
        good = each.kind is MeasurementKind.PINGPONG and not each.error
        if len(some) < (MAX_PINGPONGS if good else 1):
            some.append(each)
    chosen = [id(each) for some in found.values() for each in some]
    return [each for each in history if id(each) in chosen]


@given(st.none() | links, histories)
def test_measured_wins_over_configured_and_unreachable_over_both(
    configured: Link | None, history: list[Measurement]
) -> None:
    known = book(configured, *history)[PAIR]
    pingpongs = [each for each in history if each.kind is MeasurementKind.PINGPONG]
    if pingpongs and pingpongs[-1].error:
        assert known.unreachable
        assert known.link == known.link_back == Link(unreachable=True)
        return
    failures = [at for at, each in enumerate(history) if each in pingpongs and each.error]
    since = history[failures[-1] + 1 :] if failures else history
    good = [each for each in since if each in pingpongs]
    if failures:  # what was moved while the nodes could not reach each other says nothing of them
        since = since[since.index(good[0]) :]
    latencies = [each.latency for each in good[-MAX_PINGPONGS:] if each.latency is not None]
    assert known.link.latency == (median(latencies) if latencies else configured.latency if configured else None)
    for link, way in ((known.link, PAIR), (known.link_back, PAIR[::-1])):
        moved = [each for each in since if each.kind is MeasurementKind.TRANSFER and (each.one, each.other) == way]
        if not good:
            moved = moved or [each for each in since if each.kind is MeasurementKind.TRANSFER]
        last = [each for each in since if each in good or each in moved][-1:]
        if not last:
            assert link.bandwidth == (configured.bandwidth if configured else None)
        elif last[0] in moved:
            assert link.bandwidth == last[0].bandwidth
        else:
            newest = [each for each in since if any(each is one for one in (*good, *moved[-1:]))][-MAX_PINGPONGS:]
            values = [(each.back if way != PAIR and each in good else None) or each.bandwidth or 0.0 for each in newest]
            assert link.bandwidth == median(values)


MOVED = replace(BASE, kind=MeasurementKind.TRANSFER, bandwidth=5.0)
FOLLOWED = [FAILED, BASE, MOVED, *(replace(BASE, bandwidth=float(n)) for n in range(MAX_PINGPONGS))]


@example(None, FOLLOWED)  # the transfer is given back without the ping-pong that it followed
@given(st.none() | links, histories)
def test_a_daemon_that_starts_knows_what_the_one_before_had_told_the_scheduler(
    configured: Link | None, history: list[Measurement]
) -> None:
    live = book(configured)
    grid = GridStatus([ClusterStatus(name) for name in NAMES], live.known_links())
    for measurement in history:
        live.add_measurement(measurement)
        grid.set_link(*PAIR, live[PAIR].link)
        grid.set_link(*PAIR[::-1], live[PAIR].link_back)
    again = book(configured, *newest_of_each_sort(history))
    assert again[PAIR] == live[PAIR]
    assert GridStatus([], again.known_links()).link(*PAIR) == grid.link(*PAIR) == live[PAIR].link
    back = PAIR[::-1]
    assert GridStatus([], again.known_links()).link(*back) == grid.link(*back) == live[PAIR].link_back


@given(st.lists(st.tuples(st.integers(0, 10 * MIN_TRANSFER_SIZE), st.floats(0, 1e4)), max_size=20), st.booleans())
def test_transfers_move_a_bandwidth_between_what_was_known_and_what_they_had(
    moves: list[tuple[int, float]], measured: bool
) -> None:
    known = book(Link(bandwidth=5.0), *([replace(BASE, latency=1.0, bandwidth=1e6)] if measured else []))
    for at, (size, seconds) in enumerate(moves, 1):
        before = known[PAIR].newest
        told = known.learn_transfer(PAIR, size, seconds, float(at))
        after = known[PAIR].newest
        if size < MIN_TRANSFER_SIZE or seconds < MIN_TRANSFER_SECONDS:
            assert told is None
            assert after is before
            continue
        assert after is not None
        assert after.bandwidth is not None
        bounds = [size / seconds, before.bandwidth if before and before.bandwidth else size / seconds]
        assert min(bounds) * (1 - 1e-9) <= after.bandwidth <= max(bounds) * (1 + 1e-9)
        assert told in (None, after)


def test_the_first_transfer_over_a_link_that_was_only_configured_replaces_its_bandwidth() -> None:
    known = book(Link(0.1, 5.0))
    told = known.learn_transfer(PAIR, 2 * MIN_TRANSFER_SIZE, 2.0, 10.0)
    assert told is not None
    assert known[PAIR].link == Link(0.1, float(MIN_TRANSFER_SIZE))
    second = known.learn_transfer(PAIR, 4 * MIN_TRANSFER_SIZE, 2.0, 11.0)
    assert second is not None
    assert second.bandwidth == pytest.approx(1.5 * MIN_TRANSFER_SIZE), "six times that in four seconds"


def test_small_changes_are_told_once_they_have_become_a_large_one() -> None:
    known = book(None, replace(BASE, latency=1.0, bandwidth=1e8))
    told = [
        known.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 9 * MIN_TRANSFER_SIZE / 0.9e8, float(at))
        for at in range(1, 60)
    ]
    assert told[0] is None, "0.4 % slower"
    said = [each.bandwidth for each in told if each and each.bandwidth]
    assert said[0] <= 1e8 * (1 - MIN_CHANGE)
    assert known.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 40.0, 10_000.0) is not None, "it was long ago"


def test_an_unreachable_link_stays_so_whatever_was_moved_over_it_until_it_is_measured() -> None:
    known = book(Link(0.1, 5.0), replace(BASE, at=1.0, latency=1.0, bandwidth=2.0), replace(FAILED, at=2.0))
    known.learn_transfer(PAIR, 9 * MIN_TRANSFER_SIZE, 1.0, 3.0)
    assert (known[PAIR].state_at(4.0, WEEK), known[PAIR].link) == (LinkState.UNREACHABLE, Link(unreachable=True))
    assert known.known_links() == {PAIR: Link(unreachable=True)}
    known.add_measurement(replace(BASE, at=4.0, latency=3.0, bandwidth=4.0))
    assert (known[PAIR].state_at(5.0, WEEK), known[PAIR].link) == (LinkState.MEASURED, Link(3.0, 4.0))


def test_states() -> None:
    assert book()[PAIR].state_at(0.0, WEEK) is LinkState.UNMEASURED
    assert book(Link(1.0))[PAIR].state_at(0.0, WEEK) is LinkState.CONFIGURED
    old = book(None, replace(BASE, latency=1.0, bandwidth=2.0))
    assert [old[PAIR].state_at(now, WEEK) for now in (WEEK, WEEK + 1)] == [LinkState.MEASURED, LinkState.STALE]
    assert old[PAIR].link == Link(1.0, 2.0), "used all the same"
    old.add_measurement(replace(VAIN, at=WEEK))
    assert old[PAIR].state_at(WEEK, WEEK) is LinkState.MEASURED
    assert (old[PAIR].error, old[PAIR].tried_at) == ("no nodes", WEEK)


def test_clusters_that_are_not_configured_any_more_are_not_learned_of() -> None:
    known = LinkTable(["north"], {}, [replace(BASE, latency=1.0, bandwidth=1.0)])
    assert (known.list_pairs(), known.known_links()) == ([("north", "north")], {})
    assert known.learn_transfer(PAIR, 10 * MIN_TRANSFER_SIZE, 1.0, 1.0) is None
    assert pair_of("south", "north") == PAIR


def test_a_ping_pong_after_the_clock_was_set_back_is_the_newest() -> None:
    known = book(None, replace(FAILED, at=7200.0))[PAIR].with_measurement(
        replace(BASE, at=3600.0, latency=1.0, bandwidth=2.0)
    )
    assert (known.state_at(3601.0, WEEK), known.link, known.error) == (LinkState.MEASURED, Link(1.0, 2.0), "")
    assert known.tried_at == 3600.0
    moved = replace(BASE, kind=MeasurementKind.TRANSFER, at=100.0, bandwidth=9.0)
    assert known.with_measurement(moved).link == Link(1.0, 9.0)
    assert known.with_measurement(replace(VAIN, at=100.0)).error == "no nodes"


def test_what_was_told_later_than_now_does_not_keep_a_transfer_from_being_told() -> None:
    known = book(None, replace(BASE, at=10_000.0, latency=1.0, bandwidth=1e6))
    size = 9 * MIN_TRANSFER_SIZE
    assert known.learn_transfer(PAIR, size, size / 1.01e6, 100.0) is not None


def test_small_transfers_hardly_move_what_is_known() -> None:
    known = book(None, replace(BASE, latency=1.0, bandwidth=1200e6))
    for at in range(10):
        known.learn_transfer(PAIR, MIN_TRANSFER_SIZE, 0.08, float(at))
    assert (known[PAIR].link.bandwidth or 0.0) > 1000e6
    for at in range(2):
        known.learn_transfer(PAIR, 6_000_000_000, 60.0, 20.0 + at)
    assert (known[PAIR].link.bandwidth or 0.0) < 600e6, "two of a minute say something"


sizes, seconds = st.integers(MIN_TRANSFER_SIZE, 10**13), st.floats(MIN_TRANSFER_SECONDS, 1e5)
transfers = st.lists(st.tuples(sizes, seconds), max_size=20)


def moved_after(history: list[tuple[int, float]], *, measured: bool) -> LinkTable:
    """A link of which much is known, by ping-pongs or by transfers."""
    pingpongs = [replace(BASE, at=float(at), latency=1.0, bandwidth=1e8) for at in range(MAX_PINGPONGS)]
    known = book(None, *(pingpongs if measured else [replace(MOVED, bandwidth=1e8)]))
    for at, (size, took) in enumerate(history, 10):
        known.learn_transfer(PAIR, size, took, float(at))
    return known


@example([(10**9, 10.0)] * 100, False, 10**8, 3600.0)  # one that was stalled made 0.6 MB/s of 100
@example([], True, 10**8, 3600.0)
@given(transfers, st.booleans(), sizes, seconds)
def test_one_transfer_moves_what_is_known_by_a_bounded_factor(
    history: list[tuple[int, float]], measured: bool, size: int, took: float
) -> None:
    known = moved_after(history, measured=measured)
    before = known[PAIR].link.bandwidth or 0.0
    known.learn_transfer(PAIR, size, took, 1e6)
    assert before / 1.5 * (1 - 1e-9) <= (known[PAIR].link.bandwidth or 0.0) <= MAX_RISE * before


@given(transfers, st.booleans(), st.floats(-2.0, 2.0))
def test_several_long_transfers_in_a_row_replace_what_was_known(
    history: list[tuple[int, float]], measured: bool, magnitude: float
) -> None:
    known = moved_after(history, measured=measured)
    rate = (known[PAIR].link.bandwidth or 0.0) * 10**magnitude
    for at in range(15):
        known.learn_transfer(
            PAIR, max(MIN_TRANSFER_SIZE, round(60 * rate)), max(60.0, MIN_TRANSFER_SIZE / rate), 1e6 + at
        )
    assert known[PAIR].link.bandwidth == pytest.approx(rate, rel=0.3)


def test_one_ping_pong_that_is_far_from_the_others_does_not_count() -> None:
    known = book(None, *(replace(BASE, at=float(at), latency=1.0, bandwidth=1e9) for at in range(2)))
    known.add_measurement(replace(BASE, at=3.0, latency=50.0, bandwidth=2e7))
    assert known[PAIR].link == Link(1.0, 1e9)
    known.add_measurement(replace(BASE, at=4.0, latency=50.0, bandwidth=2e7))
    assert known[PAIR].link == Link(50.0, 2e7), "it was no chance"


def test_one_ping_pong_does_not_replace_what_transfers_have_shown() -> None:
    known = book(None, *(replace(BASE, at=float(at), latency=1.0, bandwidth=9e8) for at in range(2)))
    known.learn_transfer(PAIR, 60 * 10**9, 60.0, 3.0)
    known.add_measurement(replace(BASE, at=4.0, latency=1.0, bandwidth=2e7))
    assert (known[PAIR].link.bandwidth or 0.0) > 8e8
    known.add_measurement(replace(BASE, at=5.0, latency=1.0, bandwidth=2e7))
    assert known[PAIR].link.bandwidth == 2e7, "the network has become another"


def test_the_two_ways_of_a_link_are_two_numbers() -> None:
    known = book(None, replace(BASE, latency=1.0, bandwidth=1e9, back=1e8))
    assert (known[PAIR].link, known[PAIR].link_back) == (Link(1.0, 1e9), Link(1.0, 1e8))
    for at in range(20):
        known.learn_transfer(PAIR[::-1], 40 * 10**9, 10_000.0, float(at))
    assert known[PAIR].link == Link(1.0, 1e9)
    assert known[PAIR].link_back.bandwidth == pytest.approx(4e6, rel=0.05)
    grid = GridStatus([], known.known_links())
    assert grid.link(*PAIR).bandwidth == 1e9
    assert grid.link(*PAIR[::-1]).bandwidth == known[PAIR].link_back.bandwidth
