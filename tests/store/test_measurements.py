"""Link measurements in SQLite and PostgreSQL."""

from dataclasses import replace

import pytest

from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.store.opening import Stores
from koalapy.store.service_tables import MeasurementStore

GOOD = Measurement("north", "south", MeasurementKind.PINGPONG, 100.0, 0.5, 1e6, 7)
FAILED = replace(GOOD, latency=None, bandwidth=None, error="node a cannot reach node b")
MOVED = replace(GOOD, kind=MeasurementKind.TRANSFER, latency=None, job=None)
VAIN = replace(FAILED, kind=MeasurementKind.INCONCLUSIVE, job=None, error="no nodes")


@pytest.fixture
def measurements(stores: Stores) -> MeasurementStore:
    return MeasurementStore(stores.jobs.database, max_retained=3)


def test_measurements_are_read_as_written(measurements: MeasurementStore) -> None:
    lines = [
        replace(measurement, at=float(timestamp)) for timestamp, measurement in enumerate((GOOD, FAILED, MOVED, VAIN))
    ]
    for line in lines:
        measurements.add(line)
    assert measurements.history("north", "south", 10) == lines[::-1]
    assert measurements.history("north", "south", 2) == lines[:1:-1]
    assert measurements.history("north", "north", 10) == []
    assert measurements.latest() == lines


def test_latest_returns_newest_of_each_pair_and_kind(stores: Stores) -> None:
    measurements = stores.measurements
    other_pairs = [replace(GOOD, one="north", other=cluster, at=50.0) for cluster in ("north", "west")]
    good = [replace(GOOD, at=200.0 + offset, back=2e6) for offset in range(MAX_PINGPONGS)]
    reverse = replace(MOVED, one="south", other="north")
    older = [replace(MOVED, at=1.0), replace(reverse, at=1.0), GOOD, FAILED]
    for line in (*older, *other_pairs, *good, replace(FAILED, at=150.0, error="x"), MOVED, reverse):
        measurements.add(line)
    assert measurements.latest() == [*other_pairs, *good, replace(FAILED, at=150.0, error="x"), MOVED, reverse]
    assert measurements.history("north", "south", 2) == measurements.history("south", "north", 2) == [reverse, MOVED]


def test_add_removes_oldest_of_same_pair_and_kind(measurements: MeasurementStore) -> None:
    measurements.add(GOOD)
    measurements.add(replace(GOOD, other="west"))
    for offset in range(5):
        measurements.add(replace(MOVED, at=200.0 + offset))
    assert [line.at for line in measurements.history("north", "south", 10)] == [204.0, 203.0, 202.0, 100.0]
    assert len(measurements.history("north", "west", 10)) == 1


def test_measurement_added_again_is_stored_once(measurements: MeasurementStore) -> None:
    """The response to the first try may have been lost."""
    measurements.add(GOOD)
    measurements.add(GOOD)
    measurements.add(replace(GOOD, at=101.0))
    assert [line.at for line in measurements.history("north", "south", 10)] == [101.0, 100.0]
