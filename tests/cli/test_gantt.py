"""The chart of a job's attempts: fixed examples, and properties of generated jobs."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from koalapy.cli.clusters.gantt import ASCII, MEANINGS, UNICODE, draw_chart

Json = dict[str, Any]
NOON = 1795262400.0
"""2026-11-21 12:00:00 UTC."""


def iso_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(NOON + seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def make_component(
    index: int, cluster: str, submitted: float | None, claimed: float | None, ended: float | None, **changes: Any
) -> Json:
    return {
        "index": index,
        "rank": index,
        "cluster": cluster,
        "size": 2,
        "state": "ended",
        "superseded": False,
        "submitted_at": iso_time(submitted),
        "claimed_at": iso_time(claimed),
        "ended_at": iso_time(ended),
    } | changes


def make_attempt(generation: int, placed: float, *components: Json, reason: str = "", **times: float | None) -> Json:
    moments = {name: iso_time(times.get(name)) for name in ("barrier_at", "launched_at", "ended_at")}
    fields = {"generation": generation, "placed_at": iso_time(placed), "end_reason": reason, "components": components}
    return fields | moments


def make_job(state: str, ended: float | None, *timeline: tuple[float, str]) -> Json:
    entries = [{"at": iso_time(moment), "state": state} for moment, state in timeline]
    return {"submitted_at": iso_time(0), "ended_at": iso_time(ended), "state": state, "timeline": entries}


FAILED = make_attempt(
    1,
    12,
    make_component(0, "north", 14, 16, 26),
    make_component(1, "south", 14, None, 24.2),
    ended_at=24,
    reason="claim-failed: local users of south were faster",
)
RUNS = make_attempt(
    2,
    40,
    make_component(0, "north", 41, 42, None, state="running"),
    make_component(1, "south", 41, None, 46, superseded=True),
    make_component(2, "west", 46.5, 51, None, rank=1, state="running"),
    barrier_at=52,
    launched_at=53,
)
JOB = make_job(
    "running",
    None,
    (0, "queued"),
    (6, "held"),
    (9, "queued"),
    (12, "placed"),
    (12, "claiming"),
    (27, "queued"),
    (40, "placed"),
    (40, "claiming"),
    (52, "starting"),
    (53, "running"),
)


TWO_ATTEMPTS_CHART = """\
12:00:00 UTC        0s                 30s                1:00
                    ├──────────────────┼──────────────────┼──────────────────┼──
queued              ────╌╌──         ────────
attempt 1           claim-failed: local users of south were faster
  0 north:2                 ·░▒▒▒▒▒≈
  1 south:2                 ·░░░░░░≈
attempt 2           running
  0 north:2                                  ·░▒▒▒▒▒▒███████████████████████████
  1 south:2                                  ·░░░
  2 west:2 (for 1)                               ·░░▒███████████████████████████

─ queued  ╌ held  · placed, no nodes yet  ░ waits in the cluster's own queue
▒ has nodes, waits for the others  █ running  ≈ stopping"""


def test_chart_of_two_attempts() -> None:
    assert draw_chart(JOB, [FAILED, RUNS], width=80, now=NOON + 95) == TWO_ATTEMPTS_CHART


LAST_ATTEMPT_CHART = """\
12:00:26 UTC        0s               30s               1:00
                    +----------------+-----------------+----
queued               -------
                    1 earlier attempt not shown; --attempts~
attempt 2           running
  0 north:2                 .:+++++#########################
  1 south:2                 .:::
  2 west:2 (for 1)              .:+#########################

- queued  . placed, no nodes yet
: waits in the cluster's own queue
+ has nodes, waits for the others  # running"""


def test_chart_of_last_attempt_in_ascii() -> None:
    assert draw_chart(JOB, [FAILED, RUNS], width=60, now=NOON + 95, limit=1, unicode=False) == LAST_ATTEMPT_CHART


ENDED_JOB_CHART = """\
2026-11-21 12:00:00 UTC  0s                5s
                         ├─────────────────┼────────────────
queued                   ──
attempt 1                succeeded
  0 north:2                ░░█████████████████████████████≈≈

─ queued  ░ waits in the cluster's own queue  █ running
≈ stopping"""


def test_chart_of_ended_job_ends_with_it() -> None:
    ended_attempt = make_attempt(
        1, 0.5, make_component(0, "north", 0.5, 1, 9.5), barrier_at=1, launched_at=1, ended_at=9
    )
    ended_job = make_job("succeeded", 9, (0, "queued"), (0.5, "placed"), (9, "succeeded"))
    text = draw_chart(ended_job, [ended_attempt], width=60, now=NOON + 1e6)
    assert text == ENDED_JOB_CHART


TIMES = st.none() | st.floats(0, 1000).map(lambda seconds: round(seconds, 3))
NAMES = st.text(min_size=1, max_size=40)


@st.composite
def draw_component(draw: st.DrawFn, index: int) -> Json:
    rank = draw(st.integers(0, index))
    state = draw(st.sampled_from(["placed", "submitted", "claimed", "running", "ended"]))
    fields = make_component(index, draw(NAMES), draw(TIMES), draw(TIMES), draw(TIMES), rank=rank, state=state)
    return fields | {"superseded": draw(st.booleans())}


@st.composite
def draw_attempt(draw: st.DrawFn, generation: int) -> Json:
    parts = [draw(draw_component(index)) for index in range(draw(st.integers(1, 3)))]
    times = {name: draw(TIMES) for name in ("barrier_at", "launched_at", "ended_at")}
    return make_attempt(generation, draw(st.floats(0, 1000)), *parts, reason=draw(st.text(max_size=90)), **times)


@st.composite
def draw_job(draw: st.DrawFn) -> tuple[Json, list[Json]]:
    states = st.sampled_from(["queued", "held", "placed", "running"])
    entries = sorted(draw(st.lists(st.tuples(st.floats(0, 1000), states), max_size=60)))
    job_attempts = [draw(draw_attempt(generation)) for generation in range(1, draw(st.integers(1, 4)) + 1)]
    return make_job("running", draw(TIMES), (0.0, "queued"), *entries), job_attempts


def cut_margin(line: str, columns: int) -> str:
    return next(line[i:] for i in range(len(line) + 1) if cell_len(line[:i]) == columns)


@given(draw_job(), st.integers(75, 200), st.floats(0, 5000), st.integers(1, 4), st.booleans())
def test_chart_fits_width_and_keeps_order_of_marks(
    job_and_attempts: tuple[Json, list[Json]], width: int, now: float, limit: int, unicode: bool
) -> None:
    text = draw_chart(*job_and_attempts, width=width, now=NOON + now, limit=limit, unicode=unicode)
    assert unicode or text.isascii()
    marks = UNICODE if unicode else ASCII
    order = "".join(marks[state] for state in list(MEANINGS)[2:])
    lines = text.split("\n")
    assert all(cell_len(line) <= width for line in lines)
    margin = len(lines[1]) - len(lines[1].lstrip())
    lanes = [cut_margin(line, margin) for line in lines if line.startswith("  ") and line[2].isdecimal()]
    assert len(lanes) == sum(len(a["components"]) for a in job_and_attempts[1][-limit:])
    for lane in lanes:
        drawn = lane.strip()
        assert drawn
        assert " " not in drawn
        assert [order.index(mark) for mark in drawn] == sorted(order.index(mark) for mark in drawn)
    queued = next((line for line in lines[2:] if line.startswith("queued")), "")[margin:]
    assert set(queued) <= {" ", marks["queued"], marks["held"]}


def test_chart_shows_every_short_phase() -> None:
    quick = make_attempt(
        1, 500, make_component(0, "north", 500.001, 500.002, 500.005), barrier_at=500.003, ended_at=500.004
    )
    ended_job = make_job("failed", 1000, (0, "queued"), (500, "placed"), (1000, "failed"))
    lane = draw_chart(ended_job, [quick], width=80, now=NOON).split("\n")[4]
    assert lane.split()[-1] == "·░▒█≈"
    late = make_attempt(
        1, 999.99, make_component(0, "north", 999.992, 999.994, 1000), barrier_at=999.996, ended_at=999.998
    )
    lane = draw_chart(ended_job, [late], width=80, now=NOON).split("\n")[4]
    assert (len(lane), lane.split()[-1]) == (80, "·░▒█≈")


def test_chart_counts_hidden_attempts() -> None:
    text = draw_chart(JOB, [RUNS | {"generation": 9}], width=90, now=NOON + 95)
    assert "8 earlier attempts not shown; --attempts 9 shows all" in text


def test_chart_replaces_control_codes() -> None:
    odd = make_attempt(1, 1, make_component(0, "\x1b[2Jnorth\n" * 9, 1, 2, 3), reason="\x1b[31m\nred", ended_at=3)
    text = draw_chart(make_job("failed", 3, (0, "queued"), (1, "placed")), [odd], width=80, now=NOON)
    assert "\x1b" not in text
    assert [len(line) <= 80 for line in text.split("\n")] == [True] * 7
