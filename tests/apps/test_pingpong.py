"""The number of messages that fit the budget, and the evaluation of their times."""

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


def run_turn_with_durations(*took: float) -> tuple[list[Round], list[Round]]:
    """Run a turn with these durations, repeating the last; return the counted rounds and all rounds."""
    rounds: list[Round] = []

    def once() -> Round:
        seconds = took[min(len(rounds), len(took) - 1)]
        rounds.append((seconds, seconds))
        return rounds[-1]

    return run_turn(once, max_rounds=50, budget=0.01), rounds


def test_turn_excludes_its_first_message() -> None:
    counted_rounds, all_rounds = run_turn_with_durations(0.009, 0.001)
    assert set(counted_rounds) == {(0.001, 0.001)}
    assert len(counted_rounds) == len(all_rounds) - 1
    assert 1 <= len(counted_rounds) <= 50


def test_turn_with_tiny_budget_measures_one_round() -> None:
    assert len(run_turn(lambda: (0.0, 0.0), max_rounds=50, budget=1e-12)) == 1


def test_slow_link_is_measured_by_first_message_only() -> None:
    assert run_turn_with_durations(8.0) == ([(8.0, 8.0)], [(8.0, 8.0)])
    sent: list[int] = []

    def exchange(size: int) -> Round:
        sent.append(size)
        return size / 125_000, size / 125_000  # 1 Mbit/s

    rounds = sample_rounds(exchange, max_rounds=300, budget=0.5)
    assert (rounds[LATENCY_BYTES], rounds[BANDWIDTH_BYTES]) == ([(0.524288,) * 2], [(8.388608,) * 2])
    assert sent.count(BANDWIDTH_BYTES) == sent.count(LATENCY_BYTES) == 1
    assert len(rounds[0]) >= TURNS


@pytest.mark.parametrize("max_rounds", [1, 2, 5, 300])
def test_sample_rounds_counts_at_most_max_rounds(max_rounds: int) -> None:
    rounds = sample_rounds(lambda _: (0.0, 0.0), max_rounds, budget=0.05)
    assert all(1 <= len(seconds) <= max_rounds for seconds in rounds.values())


@pytest.mark.parametrize("size", [0, 1, 251, 65536, 1024 * 1024])
def test_message_has_its_size_and_differs_by_pair(size: int) -> None:
    assert len(make_message(size, 1)) == size
    assert size == 0 or make_message(size, 1) != make_message(size, 2)
    assert make_message(1024, 3) == bytes((i * 31 + 3) % 251 for i in range(1024))


def test_one_way_ignores_delayed_messages() -> None:
    direction = one_way({0: [2e-5] * 9, LATENCY_BYTES: [0.001] * 8 + [7.0], BANDWIDTH_BYTES: [9.0, 0.1, 0.1, 0.1]})
    assert direction.latency == pytest.approx(0.001 - 1e-5)
    assert direction.bandwidth == pytest.approx(BANDWIDTH_BYTES / (0.1 - 1e-5))
    assert direction.repeats == 4


def test_one_way_with_slow_answers_is_bounded() -> None:
    direction = one_way({0: [0.004], LATENCY_BYTES: [0.001], BANDWIDTH_BYTES: [0.002]})
    assert (direction.latency, direction.bandwidth) == (0.0005, BANDWIDTH_BYTES / 0.001)
