"""Predictions of job times, their outcomes, and how often predictions are right.

A prediction is an interval that holds 80 % of the actual times, with 10 % below and 10 % above. Times are in seconds.
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
"""Standard deviations around the mean that hold 95 % of a normal distribution."""


class PredictionKind(StrEnum):
    """The predicted time."""

    START = "start"
    """From the prediction until all nodes of a later attempt are ready, so that its barrier opens."""
    END = "end"
    """From the prediction until the job ends."""
    RUN_TIME = "run-time"
    """From the start of the program, when the barrier opens, to its end; predicted by simulation."""
    ADVISED = "advised"
    """The run time predicted by the policy ``auto`` at placement: a point without an interval."""


class PredictionSource(StrEnum):
    """The origin of a prediction."""

    DAEMON = "daemon"
    """The daemon made it by itself."""
    ASKED = "asked"
    """A user requested it, for this job or another job."""
    WHAT_IF = "what-if"
    """The unchanged course in a what-if request."""


class Outcome(StrEnum):
    """The outcome of a prediction."""

    WITHIN = "within"
    """The actual time is within the interval."""
    EARLY = "early"
    """The actual time is below the interval."""
    LATE = "late"
    """The actual time is above the interval, or the upper bound has passed without the event."""
    OPEN = "open"
    """The event has not happened, and the upper bound has not passed."""
    CENSORED = "censored"
    """The actual time is unknown: the job was cancelled, held, released or given another priority, its program failed,
    or the clock was set back."""

    @property
    def is_decided(self) -> bool:
        return self in (Outcome.WITHIN, Outcome.EARLY, Outcome.LATE)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time: ``low``, ``middle`` and ``high`` are seconds from ``made_at``, or of a run time."""

    job: JobId
    kind: PredictionKind
    made_at: float
    source: PredictionSource
    generation: int
    """The generation of the job's last attempt at the time; the prediction is about later attempts."""
    low: float
    middle: float
    high: float
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What there was to go by: ``waiting`` and ``active`` jobs, ``draws``, the ``basis`` of its run time, ``not_run``.
    """


@dataclass(frozen=True, slots=True)
class Course:
    """The events of a job since a prediction; times in seconds since the epoch, None if not happened."""

    state: JobState
    walltime: float | None = None
    ended_at: float | None = None
    started_at: float | None = None
    """When the first barrier after the prediction opened."""
    touched_at: float | None = None
    """When a user first held or released the job or changed its priority after the prediction."""
    barrier_at: float | None = None
    """Time in the last attempt, as are the following fields."""
    launched_at: float | None = None
    attempt_ended_at: float | None = None
    exit_code: int | None = None

    @property
    def ran_to_its_end(self) -> bool:
        """Return whether the job succeeded or ended at its walltime."""
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
    """A prediction with its outcome."""

    job: JobId
    kind: PredictionKind
    made_at: float
    outcome: Outcome
    error: float | None
    """The actual time minus ``middle``; for a late event that has not happened, the time elapsed minus ``middle``."""


def judge_prediction(prediction: Prediction, course: Course, now: float) -> JudgedPrediction:
    """Return a prediction with its outcome at the time ``now``."""
    if prediction.kind is PredictionKind.RUN_TIME:
        came, cut, elapsed = _run_time(course, now)
    else:
        came, cut, elapsed = _time_of_event(prediction, course, now)
    outcome = classify_outcome(prediction.low, prediction.high, came, cut, elapsed)
    judged_at = next((timestamp for timestamp in (came, cut, elapsed) if timestamp is not None), 0.0)
    return JudgedPrediction(
        prediction.job,
        prediction.kind,
        prediction.made_at,
        outcome,
        judged_at - prediction.middle if outcome.is_decided else None,
    )


def classify_outcome(low: float, high: float, came: float | None, cut: float | None, elapsed: float) -> Outcome:
    """Return the outcome of an interval, given the seconds until the event, until a user interfered, or until now."""
    if came is not None:
        if came < 0:
            return Outcome.CENSORED  # nothing happens before it is foretold: the clock was set back meanwhile
        return Outcome.EARLY if came < low else Outcome.LATE if came > high else Outcome.WITHIN
    if cut is not None:
        return Outcome.LATE if cut > high else Outcome.CENSORED
    return Outcome.LATE if elapsed > high else Outcome.OPEN


def _time_of_event(prediction: Prediction, course: Course, now: float) -> tuple[float | None, float | None, float]:
    """Return the seconds from the prediction to the event, to its interruption, and until now.

    A change by a user and an earlier end of the job are interruptions. The first two values are None if they have not
    occurred; the first also if the interruption was earlier.
    """
    came = course.started_at
    if prediction.kind is PredictionKind.END:
        came = course.ended_at if course.ran_to_its_end else None
    cuts = [course.touched_at, course.ended_at if course.state.is_final and came is None else None]
    cut = min((timestamp for timestamp in cuts if timestamp is not None), default=None)
    if came is not None and cut is not None and cut < came:
        came = None
    made_at = prediction.made_at
    return None if came is None else came - made_at, None if cut is None else cut - made_at, now - made_at


def _run_time(course: Course, now: float) -> tuple[float | None, float | None, float]:
    """Return the seconds of a complete run, of an incomplete one, and until now; the first two may be None.

    A run begins when the barrier opens, which holds the program until all nodes are ready.
    """
    began = course.barrier_at
    if not course.state.is_final:
        return None, None, now - began if began is not None and course.state.is_active else 0.0
    ended = course.attempt_ended_at
    lasted = ended - began if began is not None and ended is not None else 0.0
    return (lasted, None, lasted) if course.ran_to_its_end else (None, lasted, lasted)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The accuracy of the predictions of one kind made in the last ``days`` days."""

    kind: PredictionKind
    days: float
    predictions: int
    """Number of decided predictions; the shares and errors are computed from these."""
    jobs: int
    """Number of their jobs; each job has the same weight, however many predictions it has."""
    within: float | None
    """Share of actual times within the interval; None without intervals or decided predictions."""
    within_between: tuple[float, float] | None
    """Confidence interval of ``within`` with a probability of 95 %, if jobs are independent of each other."""
    early: float | None
    late: float | None
    median_error: float | None
    """Median of the absolute error."""
    bias: float | None
    """Median of the signed error; positive if actual times are longer than predicted."""
    open: int
    censored: int


def compute_coverage(kind: PredictionKind, days: float, judged: Iterable[JudgedPrediction]) -> Coverage:
    """Return the accuracy of predictions of one kind."""
    predictions = list(judged)
    counts = Counter(prediction.outcome for prediction in predictions)
    by_job: dict[JobId, list[JudgedPrediction]] = defaultdict(list)
    for prediction in predictions:
        if prediction.outcome.is_decided:
            by_job[prediction.job].append(prediction)
    errors = [median(prediction.error or 0.0 for prediction in several) for several in by_job.values()]
    sizes = [median(abs(prediction.error or 0.0) for prediction in several) for several in by_job.values()]
    has_interval = bool(by_job) and kind is not PredictionKind.ADVISED
    within = _mean_share(by_job.values(), Outcome.WITHIN)
    return Coverage(
        kind,
        days,
        sum(map(len, by_job.values())),
        len(by_job),
        within if has_interval else None,
        wilson_interval(within, len(by_job)) if has_interval else None,
        _mean_share(by_job.values(), Outcome.EARLY) if has_interval else None,
        _mean_share(by_job.values(), Outcome.LATE) if has_interval else None,
        median(sizes) if sizes else None,
        median(errors) if errors else None,
        counts[Outcome.OPEN],
        counts[Outcome.CENSORED],
    )


def _mean_share(jobs: Iterable[Sequence[JudgedPrediction]], outcome: Outcome) -> float:
    """Return the mean over jobs of the fraction of their predictions with this outcome; 0 without jobs."""
    shares = [sum(prediction.outcome is outcome for prediction in several) / len(several) for several in jobs]
    return sum(shares) / len(shares) if shares else 0.0


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a proportion observed in ``number`` trials, at least 1."""
    squared = NORMAL_95**2
    center = (share + squared / (2 * number)) / (1 + squared / number)
    half = NORMAL_95 / (1 + squared / number) * sqrt(share * (1 - share) / number + squared / (4 * number**2))
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))
