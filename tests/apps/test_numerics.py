"""Numerical functions of the applications."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.apps.allgather import is_right, make_pattern
from koalapy.apps.poisson import analytic_solution, conjugate_gradients, minus_laplace, source_term
from koalapy.apps.prime import PRIME_COUNTS, count_between, count_by_sums, small_primes
from koalapy.apps.program import rank_range
from koalapy.apps.wave import closed_form, next_points


@given(st.integers(0, 500), st.integers(1, 40))
def test_rank_ranges_cover_total_once_and_evenly(total: int, ranks: int) -> None:
    blocks = [rank_range(total, rank, ranks) for rank in range(ranks)]
    assert [n for start, end in blocks for n in range(start, end)] == list(range(total))
    sizes = [end - start for start, end in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_count_between_agrees_with_trial_division(start: int, end: int) -> None:
    naive = sum(1 for n in range(max(start, 2), end) if all(n % d for d in range(2, int(n**0.5) + 1)))
    assert count_between(start, end) == naive


@given(st.integers(1, 20_000))
def test_count_by_sums_agrees_with_sieve(limit: int) -> None:
    assert count_by_sums(limit) == len(small_primes(limit))


@pytest.mark.parametrize("limit", [n for n in PRIME_COUNTS if n <= 10**6])
def test_count_by_sums_gives_known_counts(limit: int) -> None:
    assert count_by_sums(limit) == PRIME_COUNTS[limit]


def test_poisson_error_falls_with_square_of_spacing() -> None:
    errors = []
    for points in (20, 40):
        spacing = 1 / (points + 1)
        inner = np.arange(1, points + 1) * spacing
        x, y = np.meshgrid(inner, inner)
        border = np.zeros(points)
        u, _ = conjugate_gradients(
            lambda v, b=border, h=spacing: minus_laplace(v, b, b, h),  # type: ignore[misc]
            lambda a, b: float(np.vdot(a, b)),
            source_term(x, y),
            1e-10,
            1000,
        )
        errors.append(float(np.abs(u - analytic_solution(x, y)).max()))
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_wave_of_one_rank_follows_closed_form() -> None:
    points, courant = 400, 0.9
    spacing = 1 / (points + 1)
    x = np.arange(1, points + 1) * spacing
    previous, now = closed_form(x, 0), closed_form(x, courant * spacing)
    for _ in range(300):
        previous, now = now, next_points(now, previous, 0.0, 0.0, courant)
    assert np.abs(now - closed_form(x, 301 * courant * spacing)).max() < 2e-2


def test_allgather_with_wrong_row_is_detected() -> None:
    rows = np.array([make_pattern(rank, 3, 10) for rank in range(4)])
    assert is_right(rows, 3)
    rows[2, 5] += 1
    assert not is_right(rows, 3)
