"""The history of links: what is newest, what is kept, in SQLite and PostgreSQL."""

from dataclasses import replace

import pytest

from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.ports import MeasurementStore
from koalapy.store.opening import Stores
from koalapy.store.service_tables import SqlMeasurements

GOOD = Measurement("north", "south", MeasurementKind.PINGPONG, 100.0, 0.5, 1e6, 7)
FAILED = replace(GOOD, latency=None, bandwidth=None, error="node a cannot reach node b")
MOVED = replace(GOOD, kind=MeasurementKind.TRANSFER, latency=None, job=None)
VAIN = replace(FAILED, kind=MeasurementKind.INCONCLUSIVE, job=None, error="no nodes")


@pytest.fixture
def measurements(stores: Stores) -> MeasurementStore:
    return SqlMeasurements(stores.jobs.database, max_retained=3)


def test_a_line_is_as_it_was_written(measurements: MeasurementStore) -> None:
    lines = [replace(each, at=float(at)) for at, each in enumerate((GOOD, FAILED, MOVED, VAIN))]
    for line in lines:
        measurements.add(line)
    assert measurements.history("north", "south", 10) == lines[::-1]
    assert measurements.history("north", "south", 2) == lines[:1:-1]
    assert measurements.history("north", "north", 10) == []
    assert measurements.latest() == lines


def test_the_latest_are_those_of_each_pair_and_sort(stores: Stores) -> None:
    measurements = stores.measurements
    others = [replace(GOOD, one="north", other=other, at=50.0) for other in ("north", "west")]
    good = [replace(GOOD, at=200.0 + at, back=2e6) for at in range(MAX_PINGPONGS)]
    back = replace(MOVED, one="south", other="north")
    older = [replace(MOVED, at=1.0), replace(back, at=1.0), GOOD, FAILED]
    for line in (*older, *others, *good, replace(FAILED, at=150.0, error="x"), MOVED, back):
        measurements.add(line)
    assert measurements.latest() == [*others, *good, replace(FAILED, at=150.0, error="x"), MOVED, back]
    assert measurements.history("north", "south", 2) == measurements.history("south", "north", 2) == [back, MOVED]


def test_old_lines_go_but_never_for_another_sort(measurements: MeasurementStore) -> None:
    measurements.add(GOOD)
    measurements.add(replace(GOOD, other="west"))
    for at in range(5):
        measurements.add(replace(MOVED, at=200.0 + at))
    assert [line.at for line in measurements.history("north", "south", 10)] == [204.0, 203.0, 202.0, 100.0]
    assert len(measurements.history("north", "west", 10)) == 1


def test_a_line_that_comes_again_is_kept_once(measurements: MeasurementStore) -> None:
    """The answer to the first try may have been lost."""
    measurements.add(GOOD)
    measurements.add(GOOD)
    measurements.add(replace(GOOD, at=101.0))
    assert [line.at for line in measurements.history("north", "south", 10)] == [101.0, 100.0]
