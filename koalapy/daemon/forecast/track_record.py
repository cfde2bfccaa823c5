"""Report what the advisor has learned of applications, and how accurate its predictions and forecasts were."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

from koalapy.daemon.engine.database import query
from koalapy.model.advice import AdvisedPlacement
from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.model.history import DAY
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.prediction import (
    Coverage,
    JudgedPrediction,
    Outcome,
    Prediction,
    PredictionKind,
    PredictionSource,
    compute_coverage,
    judge_prediction,
)
from koalapy.policies.knowledge import HOPELESS, PAYS_UP_TO, SURE, ClusterSet, LogNormal, Slowdowns
from koalapy.scheduler.advisor.experience import Experience, RunSummary
from koalapy.simulation.twin import Expected, Forecast, Interval
from koalapy.store.advice import AdviceStore, PredictionStore

log = structlog.get_logger()


PERIODS = (1.0, 7.0, 30.0, 365.0)
"""The periods of the accuracy report, in days up to now."""
MAX_READ = 20_000
"""The most predictions that are compared, the newest first."""
MAX_ADVISED = 5_000
MAX_KEPT = 1_000
"""The maximum number of jobs with stored predictions per forecast; other jobs follow with later forecasts."""
REPEAT_FACTOR = 2.0
"""A prediction is stored again once the job is this many times as old as at the last one, so that a job that waits
for a week has about a dozen."""
MIN_AGE_S = 60.0
"""The least age of a job for this comparison, in seconds."""
COUNTED_DAYS = 7.0
"""The period of the metrics, in days."""
COUNT_INTERVAL = 600.0
"""Seconds between two updates of the metrics."""


class TrackRecord:
    """The stored predictions of users' jobs. Errors in storing are logged only."""

    def __init__(self, store: PredictionStore, advice: AdviceStore, clock: Callable[[], float]) -> None:
        self._store, self._advice, self._clock = store, advice, clock
        self._one_at_a_time = asyncio.Lock()
        self._stored_at: dict[JobId, float] = {}
        """The time of the last stored prediction by unfinished job, in this daemon run."""

    async def store_predictions(self, forecast: Forecast, jobs: Mapping[JobId, Job], source: PredictionSource) -> None:
        """Store the predictions of due jobs; ``jobs`` are those at the time of the forecast."""
        unfinished = {expected.job for expected in forecast.jobs}
        self._stored_at = {job: stored_at for job, stored_at in self._stored_at.items() if job in unfinished}
        due = [expected for expected in forecast.jobs if self._is_due(jobs[expected.job], forecast.at)][:MAX_KEPT]
        await self._write_predictions(forecast, jobs, due, source)

    async def store_shown(self, forecast: Forecast, jobs: Mapping[JobId, Job], job: JobId) -> None:
        """Store the prediction of a job that a user was shown, unless it is stored."""
        expected = forecast.of(job)
        if expected is not None and self._stored_at.get(job) != forecast.at and not jobs[job].spec.internal:
            await self._write_predictions(forecast, jobs, [expected], PredictionSource.ASKED)

    def _is_due(self, job: Job, now: float) -> bool:
        """Check whether to store another prediction for a user's job. They become rarer with its age."""
        last = self._stored_at.get(job.id)
        return not job.spec.internal and (
            last is None or now - job.submitted_at >= REPEAT_FACTOR * max(MIN_AGE_S, last - job.submitted_at)
        )

    async def _write_predictions(
        self, forecast: Forecast, jobs: Mapping[JobId, Job], forecasts: Sequence[Expected], source: PredictionSource
    ) -> None:
        """Store the predictions of a forecast, to compare them later with what happened. Log a failure."""
        waiting = sum(prediction.state is JobState.QUEUED for prediction in forecast.jobs)
        conditions = {"waiting": waiting, "active": len(forecast.jobs) - waiting, "draws": forecast.draws}
        predictions = [
            prediction
            for expected in forecasts
            for prediction in _make_predictions(expected, jobs[expected.job], forecast.at, source, conditions)
        ]
        if not predictions:
            return
        try:
            await query(self._store.add_predictions, predictions)
        except (StoreUnavailable, LeaseLost) as error:
            log.warning("predictions could not be stored", action="predictions-not-kept", error=str(error))
            return
        self._stored_at |= {prediction.job: forecast.at for prediction in forecasts}

    async def read_coverage(self, owner: str | None = None, application: str = "") -> list[Coverage]:
        """Return the accuracy by kind and period, of kinds with predictions; without ``owner`` of all jobs."""
        async with self._one_at_a_time:
            return await query(self._compute_coverage, self._clock(), owner, application)

    async def count_outcomes(self) -> Counter[tuple[PredictionKind, Outcome]]:
        """Count the predictions of the last ``COUNTED_DAYS`` by kind and outcome, without the advisor's."""
        async with self._one_at_a_time:
            judged = await query(self._judge_predictions, self._clock(), COUNTED_DAYS * DAY, None, "")
        kinds = ((prediction.kind, prediction.outcome) for prediction in judged)
        return Counter(pair for pair in kinds if pair[0] is not PredictionKind.ADVISED)

    # In a thread

    def _compute_coverage(self, now: float, owner: str | None, application: str) -> list[Coverage]:
        """Return how often predictions came true, by kind and number of past days."""
        judged = self._judge_predictions(now, PERIODS[-1] * DAY, owner, application)
        coverage = []
        for kind in PredictionKind:
            of_kind = [prediction for prediction in judged if prediction.kind is kind]
            periods = [
                (days, [prediction for prediction in of_kind if prediction.made_at >= now - days * DAY])
                for days in PERIODS
            ]
            coverage += [compute_coverage(kind, days, in_period) for days, in_period in periods if of_kind]
        return coverage

    def _judge_predictions(
        self, now: float, span: float, owner: str | None, application: str
    ) -> list[JudgedPrediction]:
        """Compare the predictions and advice of the last ``span`` seconds with what happened."""
        courses = self._store.predictions(now - span, MAX_READ, owner, application)
        advised = _judged_advice(self._advice.record(application, MAX_ADVISED, owner))
        return [
            *(judge_prediction(prediction, course, now) for prediction, course in courses),
            *(advice for advice in advised if advice.made_at >= now - span),
        ]


def _make_predictions(
    expected: Expected, job: Job, made_at: float, source: PredictionSource, conditions: Mapping[str, object]
) -> Iterator[Prediction]:
    """Yield a prediction for each interval that the forecast of a job has: start, end and run time."""
    intervals: dict[PredictionKind, Interval | None] = {
        PredictionKind.START: expected.starts,
        PredictionKind.END: expected.ends,
        PredictionKind.RUN_TIME: expected.runs,
    }
    under = {**conditions, "basis": expected.basis, "not_run": expected.not_run}
    for kind, interval in intervals.items():
        if interval is not None:
            bounds = interval.low, interval.middle, interval.high
            yield Prediction(job.id, kind, made_at, source, job.generation, *bounds, under)


def _judged_advice(advised: Sequence[AdvisedPlacement]) -> Iterator[JudgedPrediction]:
    """Judge the advice of jobs that succeeded; the full run time of others is unknown."""
    for advice in advised:
        if advice.predicted is not None and advice.actual is not None:
            error = advice.actual - advice.predicted
            outcome = Outcome.LATE if error > 0 else Outcome.EARLY
            yield JudgedPrediction(advice.job, PredictionKind.ADVISED, advice.at, outcome, error)


MAX_LEARNED_RUNS = 5000
"""The number of latest runs from which the advisor learns when a daemon starts."""


class Verdict(StrEnum):
    """What happens to an application's jobs that fit on no single cluster now, but will on one later."""

    CO_ALLOCATED = "co-allocated"
    """Co-allocate, unless the wait is known to be shorter than the cost of co-allocation."""
    BY_THE_WAIT = "by the wait"
    """Co-allocate if the wait is known to be longer than the cost."""
    ONE_CLUSTER = "one cluster"
    """Likewise, but not while other jobs wait."""
    NOT_KNOWN = "not known yet"
    """Likewise, but while other jobs wait only occasionally, to learn the slowdown."""


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """The experience with an application; slowdown and verdict are those on its most used combination of clusters."""

    application: str
    clusters: ClusterSet
    slowdown: LogNormal
    runs_on_several: int
    """The number of co-allocated runs that could be compared with runs of the same size on one cluster."""
    killed_on_several: int
    """The number of those runs that were killed at their walltime."""
    verdict: Verdict
    runs: list[RunSummary]
    slowdowns: dict[ClusterSet, LogNormal]
    """Slowdowns by observed combination of clusters."""


class Advisor:
    """The experience of the scheduler and the stored advice."""

    def __init__(self, experience: Experience, store: AdviceStore, track_record: TrackRecord) -> None:
        self._experience = experience
        self._store = store
        self._track_record = track_record

    async def list_applications(self, owner: str | None = None) -> list[ApplicationRecord]:
        """Return applications by name; with ``owner`` only those that this user's jobs have run."""
        names = self._experience.applications()
        visible = names if owner is None else await query(self._store.applications_of, owner)
        return [self._describe_application(name) for name in names if name in visible]

    def _describe_application(self, name: str) -> ApplicationRecord:
        """Return what past runs show of an application.

        Its verdict is on the clusters that it used together most often.
        """
        summaries, slowdowns = self._experience.seen(name), self._experience.slowdowns(name)
        several: dict[ClusterSet, int] = {}
        for summary in summaries:
            if summary.where:
                several[summary.where] = several.get(summary.where, 0) + summary.runs
        most_used = max(several, key=lambda clusters: (several[clusters], clusters), default=())
        return ApplicationRecord(
            name,
            most_used,
            slowdowns.on_clusters(most_used),
            slowdowns.runs,
            slowdowns.killed,
            verdict_on(slowdowns, most_used),
            summaries,
            {clusters: slowdowns.on_clusters(clusters) for clusters in several},
        )

    async def read_advice(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        """Return stored advice, newest first; an empty application or no owner selects all."""
        return await query(self._store.record, application, limit, owner)

    async def read_coverage(self, application: str, owner: str | None = None) -> list[Coverage]:
        """Return the accuracy of predictions by kind and period, for the same selection."""
        return await self._track_record.read_coverage(owner, application)


def verdict_on(slowdowns: Slowdowns, clusters: ClusterSet) -> Verdict:
    """Return the verdict that follows from the slowdown on these clusters."""
    harmless_probability = slowdowns.harmless_probability(clusters)
    if harmless_probability <= HOPELESS:
        return Verdict.ONE_CLUSTER
    if harmless_probability < SURE:
        return Verdict.NOT_KNOWN
    return Verdict.CO_ALLOCATED if slowdowns.on_clusters(clusters).value <= PAYS_UP_TO else Verdict.BY_THE_WAIT
