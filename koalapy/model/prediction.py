"""What was foretold of a job, held against what came: whether it was right, and how often such predictions are.

A prediction is an interval: of ten truths one is to be below it, and one above. Times in seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt
from statistics import median
from typing import Any

from koalapy.model.advice import was_killed
from koalapy.model.job import JobId, JobState

NORMAL_95 = 1.959964
"""Standard deviations to each side between which 95 % lie."""


class PredictionKind(StrEnum):
    """What was foretold."""

    START = "start"
    """From when it was foretold until the barrier of the next attempt that comes so far opens."""
    END = "end"
    """From when it was foretold until the job is over."""
    RUN_TIME = "run-time"
    """From the opened barrier to the end, as the simulation of what comes had it."""
    ADVISED = "advised"
    """The same, as the policy ``auto`` had it when it placed the job: a point without an interval."""


class PredictionSource(StrEnum):
    """Whose doing a prediction was."""

    DAEMON = "daemon"
    """Nobody asked."""
    ASKED = "asked"
    """Of this job, or of another at the same moment."""
    WHAT_IF = "what-if"
    """What came without the change that was asked about."""


class Outcome(StrEnum):
    """What a prediction has come to."""

    WITHIN = "within"
    EARLY = "early"
    """The truth was below the interval."""
    LATE = "late"
    """It was above, or is going to be: what has not happened by the upper bound is late before it happens."""
    OPEN = "open"
    """It may still come true."""
    CENSORED = "censored"
    """Somebody has cancelled, held or released the job or changed its priority before, its program failed, or the
    clock was set back: what would have come nobody knows."""

    @property
    def is_decided(self) -> bool:
        return self in (Outcome.WITHIN, Outcome.EARLY, Outcome.LATE)


@dataclass(frozen=True, slots=True)
class Prediction:
    """``low``, ``middle`` and ``high`` are seconds, from ``made_at`` or of a run time."""

    job: JobId
    kind: PredictionKind
    made_at: float
    source: PredictionSource
    generation: int
    """Of the job's last attempt then: what comes is looked for after it."""
    low: float
    middle: float
    high: float
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What there was to go by: ``waiting`` and ``active`` jobs, ``draws``, the ``basis`` of its run time, ``not_run``.
    """


@dataclass(frozen=True, slots=True)
class Course:
    """What has become of a job since something was foretold of it, as far as that is stored."""

    state: JobState
    walltime: float | None = None
    ended_at: float | None = None
    started_at: float | None = None
    """When the barrier of the first attempt after the prediction opened that came so far."""
    touched_at: float | None = None
    """When somebody first held or released it or changed its priority, after the prediction."""
    barrier_at: float | None = None
    """Of its last attempt, as what follows."""
    launched_at: float | None = None
    attempt_ended_at: float | None = None
    exit_code: int | None = None

    @property
    def ran_to_its_end(self) -> bool:
        """Whether its end is that of its program, or its walltime, which was known before."""
        if self.state is JobState.SUCCEEDED:
            return True
        ended = self.attempt_ended_at
        return (
            self.state is JobState.FAILED
            and ended is not None
            and was_killed(self.walltime, self.launched_at, ended, self.exit_code)
        )


@dataclass(frozen=True, slots=True)
class JudgedPrediction:
    """A prediction and what it has come to."""

    job: JobId
    kind: PredictionKind
    made_at: float
    outcome: Outcome
    error: float | None
    """By how much more it was than foretold, in the middle; of what is late and not over as much as it is by now."""


def judge_prediction(told: Prediction, course: Course, now: float) -> JudgedPrediction:
    """What a prediction has come to by now."""
    if told.kind is PredictionKind.RUN_TIME:
        came, cut, elapsed = _run_time(course, now)
    else:
        came, cut, elapsed = _moment(told, course, now)
    outcome = classify_outcome(told.low, told.high, came, cut, elapsed)
    seen = next((each for each in (came, cut, elapsed) if each is not None), 0.0)
    return JudgedPrediction(
        told.job, told.kind, told.made_at, outcome, seen - told.middle if outcome.is_decided else None
    )


def classify_outcome(low: float, high: float, came: float | None, cut: float | None, elapsed: float) -> Outcome:
    """Of what came after so many seconds; or was cut off by somebody after as many; or has not come for as long."""
    if came is not None:
        if came < 0:
            return Outcome.CENSORED  # nothing happens before it is foretold: the clock was set back meanwhile
        return Outcome.EARLY if came < low else Outcome.LATE if came > high else Outcome.WITHIN
    if cut is not None:
        return Outcome.LATE if cut > high else Outcome.CENSORED
    return Outcome.LATE if elapsed > high else Outcome.OPEN


def _moment(told: Prediction, course: Course, now: float) -> tuple[float | None, float | None, float]:
    """What came, what it was cut off by, and what has passed, from the prediction on."""
    came = course.started_at
    if told.kind is PredictionKind.END:
        came = course.ended_at if course.ran_to_its_end else None
    cuts = [course.touched_at, course.ended_at if course.state.is_final and came is None else None]
    cut = min((each for each in cuts if each is not None), default=None)
    if came is not None and cut is not None and cut < came:
        came = None
    made = told.made_at
    return None if came is None else came - made, None if cut is None else cut - made, now - made


def _run_time(course: Course, now: float) -> tuple[float | None, float | None, float]:
    began = course.barrier_at
    if not course.state.is_final:
        return None, None, now - began if began is not None and course.state.is_active else 0.0
    ended = course.attempt_ended_at
    lasted = ended - began if began is not None and ended is not None else 0.0
    return (lasted, None, lasted) if course.ran_to_its_end else (None, lasted, lasted)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How right predictions of a kind were that were made in the last ``days`` days."""

    kind: PredictionKind
    days: float
    predictions: int
    """That are decided: by these alone all the rest is told."""
    jobs: int
    """Of so many jobs; each counts as much as any other, however often something was foretold of it."""
    within: float | None
    """The share of truths within the interval; None of what has none, and where nothing is decided."""
    within_between: tuple[float, float] | None
    """Bounds of that share in the long run, with a probability of 95 %, if jobs were independent of each other."""
    early: float | None
    late: float | None
    median_error: float | None
    """By how much the middle was off, one way or the other."""
    bias: float | None
    """By how much more came than was foretold, in the middle; negative when it was less."""
    open: int
    censored: int


def compute_coverage(kind: PredictionKind, days: float, judged: Iterable[JudgedPrediction]) -> Coverage:
    """Of some predictions of one kind."""
    found = list(judged)
    counts = Counter(each.outcome for each in found)
    by_job: dict[JobId, list[JudgedPrediction]] = defaultdict(list)
    for each in found:
        if each.outcome.is_decided:
            by_job[each.job].append(each)
    errors = [median(each.error or 0.0 for each in several) for several in by_job.values()]
    sizes = [median(abs(each.error or 0.0) for each in several) for several in by_job.values()]
    has_interval = bool(by_job) and kind is not PredictionKind.ADVISED
    within = _share(by_job.values(), Outcome.WITHIN)
    return Coverage(
        kind,
        days,
        sum(map(len, by_job.values())),
        len(by_job),
        within if has_interval else None,
        wilson_interval(within, len(by_job)) if has_interval else None,
        _share(by_job.values(), Outcome.EARLY) if has_interval else None,
        _share(by_job.values(), Outcome.LATE) if has_interval else None,
        median(sizes) if sizes else None,
        median(errors) if errors else None,
        counts[Outcome.OPEN],
        counts[Outcome.CENSORED],
    )


def _share(jobs: Iterable[Sequence[JudgedPrediction]], outcome: Outcome) -> float:
    shares = [sum(each.outcome is outcome for each in several) / len(several) for several in jobs]
    return sum(shares) / len(shares) if shares else 0.0


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's interval of a binomial share of ``number`` trials, at least 1, with a probability of 95 %."""
    squared = NORMAL_95**2
    center = (share + squared / (2 * number)) / (1 + squared / number)
    half = NORMAL_95 / (1 + squared / number) * sqrt(share * (1 - share) / number + squared / (4 * number**2))
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))
