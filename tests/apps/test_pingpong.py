"""How often a message is sent: as often as there is time for, and once over a link that is too slow."""

import pytest

from tests.needs import MPI

pytest.importorskip("mpi4py.MPI", reason=MPI.reason, exc_type=ImportError)

from koalapy.apps.pingpong import (
    BANDWIDTH_BYTES,
    LATENCY_BYTES,
    TURNS,
    Round,
    make_message,
    one_way,
    run_turn,
    sample_rounds,
)

pytestmark = pytest.mark.mpi


def counted(*took: float) -> tuple[list[Round], list[Round]]:
    """What ``turn`` makes of messages that took so long each way, the last for ever on; and what it was given."""
    given: list[Round] = []

    def once() -> Round:
        seconds = took[min(len(given), len(took) - 1)]
        given.append((seconds, seconds))
        return given[-1]

    return run_turn(once, max_rounds=50, budget=0.01), given


def test_the_first_message_of_a_turn_does_not_count() -> None:
    found, given = counted(0.009, 0.001)
    assert set(found) == {(0.001, 0.001)}
    assert len(found) == len(given) - 1
    assert 1 <= len(found) <= 50


def test_one_is_sent_though_there_is_no_time_for_more() -> None:
    assert len(run_turn(lambda: (0.0, 0.0), max_rounds=50, budget=1e-12)) == 1


def test_over_a_slow_link_the_first_message_is_all_there_is() -> None:
    assert counted(8.0) == ([(8.0, 8.0)], [(8.0, 8.0)])
    sent: list[int] = []

    def exchange(size: int) -> Round:
        sent.append(size)
        return size / 125_000, size / 125_000  # 1 Mbit/s

    found = sample_rounds(exchange, max_rounds=300, budget=0.5)
    assert (found[LATENCY_BYTES], found[BANDWIDTH_BYTES]) == ([(0.524288,) * 2], [(8.388608,) * 2])
    assert sent.count(BANDWIDTH_BYTES) == sent.count(LATENCY_BYTES) == 1
    assert len(found[0]) >= TURNS


@pytest.mark.parametrize("most", [1, 2, 5, 300])
def test_no_more_messages_count_than_were_asked_for(most: int) -> None:
    found = sample_rounds(lambda _: (0.0, 0.0), most, budget=0.05)
    assert all(1 <= len(seconds) <= most for seconds in found.values())


@pytest.mark.parametrize("size", [0, 1, 251, 65536, 1024 * 1024])
def test_a_message_has_its_size_and_is_of_one_pair_only(size: int) -> None:
    assert len(make_message(size, 1)) == size
    assert size == 0 or make_message(size, 1) != make_message(size, 2)
    assert make_message(1024, 3) == bytes((i * 31 + 3) % 251 for i in range(1024))


def test_each_way_is_told_by_itself() -> None:
    found = one_way({0: [2e-5] * 9, LATENCY_BYTES: [0.001] * 8 + [7.0], BANDWIDTH_BYTES: [9.0, 0.1, 0.1, 0.1]})
    assert found.latency == pytest.approx(0.001 - 1e-5)
    assert found.bandwidth == pytest.approx(BANDWIDTH_BYTES / (0.1 - 1e-5))
    assert found.repeats == 4


def test_an_answer_never_takes_longer_than_its_message() -> None:
    found = one_way({0: [0.004], LATENCY_BYTES: [0.001], BANDWIDTH_BYTES: [0.002]})
    assert (found.latency, found.bandwidth) == (0.0005, BANDWIDTH_BYTES / 0.001)
