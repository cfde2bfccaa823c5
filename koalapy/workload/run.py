"""Execution of a workload on a live daemon: submit jobs, keep the background load, poll until all jobs have ended."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated
from uuid import uuid4

from koalapy.client.errors import GridError
from koalapy.client.http import Json
from koalapy.model.field import Bounds, Field
from koalapy.workload import measures
from koalapy.workload.background import BackgroundLoad
from koalapy.workload.daemon import WorkloadDaemon, is_away
from koalapy.workload.measures import Samples
from koalapy.workload.plan import Workload

LATE = 1.0
"""Delay of a submission in seconds from which on it is reported as late."""
TICK = 0.1
RETRY = 1.0
"""Seconds between two attempts to reach an unavailable daemon."""
ENDS_WITHIN = 10.0
"""Seconds to wait for cancelled jobs to end."""
SHARE = 10
"""Minimum interval between two polls, as a multiple of the duration of a poll."""
AT_ONCE = 20
"""Maximum number of jobs that are fetched in one poll."""
SHOWN_EVERY = 0.5
"""Seconds between two updates of the progress display without a poll."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, with their help texts."""

    background: Annotated[float, Field("fraction of nodes for background load, e.g. 0.2"), Bounds(0, 0.9)] = 0.0
    background_seconds: Annotated[float, Field("mean run time of background jobs in seconds"), Bounds(1, 200)] = 20.0
    background_nodes: Annotated[
        int | None, Field("maximum nodes of a background job; default: a quarter of the cluster"), Bounds(1)
    ] = None
    seed: Annotated[int, Field("seed of the background load")] = 1
    interval: Annotated[float, Field("seconds between samples of the clusters"), Bounds(0.1)] = 1.0
    patience: Annotated[float, Field("seconds that the daemon may be unreachable"), Bounds(0)] = 600.0
    timeout: Annotated[float | None, Field("timeout of the whole run in seconds"), Bounds(0)] = None
    cancel_on_interrupt: Annotated[bool, Field("cancel its jobs on Ctrl-C")] = False


@dataclass(slots=True)
class Progress:
    """The progress of a run, for display."""

    seconds: float = 0.0
    jobs: int = 0
    submitted: int = 0
    states: Counter[str] = field(default_factory=Counter)
    """Number of unfinished jobs by state."""
    ended: Counter[str] = field(default_factory=Counter)
    late: int = 0
    total: int = 0
    ours: int = 0
    background: int = 0
    mean_background: float | None = None
    away: bool = False


class Run:
    """One run of a workload."""

    def __init__(
        self,
        workload: Workload,
        daemon: WorkloadDaemon,
        options: Options,
        *,
        tell: Callable[[str], None],
        show: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare a run. ``tell`` receives messages for the user; ``show`` receives the progress repeatedly."""
        self._workload, self._daemon, self._options = workload, daemon, options
        self._tell, self._show, self._clock, self._sleep = tell, show, clock, sleep
        self._began = clock()
        self._began_at = datetime.now(UTC)
        self._key = uuid4().hex
        self._waiting = deque(range(len(workload.jobs)))
        self._try_at = 0.0
        self._submitted: dict[int, tuple[int, float]] = {}
        """Job number in the workload to the job's id and its submission time."""
        self._rows = [measures.planned_row(number, arrival) for number, arrival in enumerate(workload.jobs, 1)]
        self._over: set[int] = set()
        self._active: Mapping[int, str] = {}
        self._samples = Samples()
        self._in_doubt: int | None = None
        """Number of the job with a submission that may or may not have arrived; None if there is none."""
        self._sample_at = self._poll_at = self._show_at = 0.0
        self._mean_background: float | None = None
        self._away_since: float | None = None
        self._away = 0.0
        """Total seconds for which the daemon was unavailable."""
        self._late_told = False
        self._load: BackgroundLoad | None = None
        if options.background:
            self._load = BackgroundLoad(
                daemon,
                options.background,
                seconds=options.background_seconds,
                nodes=options.background_nodes,
                seed=options.seed,
                tell=tell,
            )
        self.interrupted = ""
        """The reason why the run ended before its jobs; empty if it did not."""

    def run(self) -> Json:
        """Run the workload and return the report; return earlier on an interrupt, a rejection or a timeout."""
        try:
            while not self._is_over():
                self._do_due_work()
        except KeyboardInterrupt:
            self.interrupted = "interrupted"
        except GridError as error:
            self.interrupted = f"the daemon refuses to tell more: {error}"
        finally:
            self._end_load()
        if self.interrupted:
            self._fetch_unfinished()
        return self._create_report()

    def _elapsed_s(self) -> float:
        return self._clock() - self._began

    def _is_over(self) -> bool:
        """Return whether all jobs have ended, or the run or an absence of the daemon lasts too long.

        In the second case, set ``interrupted`` to the reason.
        """
        if not self._waiting and len(self._over) == len(self._rows):
            return True
        now, options = self._elapsed_s(), self._options
        if options.timeout is not None and now > options.timeout:
            self.interrupted = f"not done within {options.timeout:g} s"
        elif self._away_since is not None and now - self._away_since > options.patience:
            self.interrupted = f"the daemon was away for {options.patience:g} s"
        return bool(self.interrupted)

    def _do_due_work(self) -> None:
        """Do all work that is due, then sleep briefly."""
        try:
            if self._elapsed_s() >= self._sample_at or self._away_since is not None:
                self._sample_clusters()
            self._is_back()
            self._submit_due()
            if self._elapsed_s() >= self._poll_at:
                self._poll_jobs()
        except GridError as error:
            if not is_away(error):
                raise
            self._is_away(error)
        if (now := self._elapsed_s()) >= self._show_at:
            self._show(self._current_progress())
            self._show_at = now + max(SHOWN_EVERY, SHARE * (self._elapsed_s() - now))
        self._sleep(TICK if self._away_since is None else RETRY)

    # Availability of the daemon

    def _is_away(self, error: GridError) -> None:
        """Note that the daemon is unavailable, and say so at the first failure."""
        if self._away_since is None:
            self._away_since = self._elapsed_s()
            self._samples.add_sample(self._away_since, ())
            self._tell(f"the daemon is away: {error}; waiting up to {self._options.patience:g} s")

    def _is_back(self) -> None:
        """Note that the daemon is available, and say so after a failure."""
        if self._away_since is not None:
            away_s, self._away_since = self._elapsed_s() - self._away_since, None
            self._away += away_s
            self._tell(f"the daemon is back after {away_s:.0f} s")

    # Submission

    def _submit_due(self) -> None:
        """Submit the jobs that are due, in order, until the daemon asks to wait.

        Report rejected jobs, and the first late submission.
        """
        while self._waiting and self._elapsed_s() >= self._try_at:
            number = self._waiting[0]
            arrival, row = self._workload.jobs[number], self._rows[number]
            if arrival.arrives_at > self._elapsed_s():
                return
            self._in_doubt = number
            try:
                job = self._daemon.submit_job(arrival.job, self._key_of(number))
            except GridError as error:
                if error.retry_after:
                    self._in_doubt = None
                    self._try_at = self._elapsed_s() + error.retry_after
                    self._tell(f"job {number + 1} waits {error.retry_after:g} s to be submitted: {error.message}")
                    return
                if is_away(error):
                    raise
                self._rows[number] = row | {"state": "refused", "reason": str(error)}
                self._over.add(number)
                self._tell(f"job {number + 1} was refused: {error}")
            else:
                late = self._has_arrived(number, job) - arrival.arrives_at
                if late > LATE and not self._late_told:
                    self._late_told = True
                    self._tell(f"job {number + 1} was submitted {late:.1f} s late")
            self._in_doubt = None
            self._waiting.popleft()

    def _has_arrived(self, number: int, job: Json) -> float:
        """Record a job that the daemon accepted; return the time."""
        now = self._elapsed_s()
        self._submitted[number] = int(job["id"]), now
        self._rows[number] = measures.measured_row(self._rows[number], now, job, ())
        return now

    def _key_of(self, number: int) -> str:
        """Return the key with which repeated submissions of a job are one job."""
        return f"workload-{self._key}-{number}"

    # Polling

    def _sample_clusters(self) -> None:
        """Record the node counts of the clusters, and adjust the background load to them."""
        clusters = self._daemon.list_clusters()
        now = self._elapsed_s()
        self._samples.add_sample(now, clusters)
        self._mean_background = self._samples.utilisation()["all"]["background"]
        self._sample_at = now + self._options.interval
        if self._load is not None:
            self._load.adjust_load(now, clusters)

    def _poll_jobs(self) -> None:
        """Poll the unfinished jobs, and fetch the records of some that have ended."""
        began = self._elapsed_s()
        self._active = self._daemon.active_states()
        ended = [n for n, (job, _) in self._submitted.items() if n not in self._over and job not in self._active]
        for number in ended[:AT_ONCE]:
            self._fetch_job(number)
        now = self._elapsed_s()
        self._poll_at = now + max(self._options.interval, SHARE * (now - began)) if len(ended) <= AT_ONCE else now
        self._show_at = now

    def _fetch_job(self, number: int) -> None:
        """Update the row of a job from its record and its attempts, and note whether it has ended."""
        ident, submitted = self._submitted[number]
        job = self._daemon.fetch_job(ident)
        self._rows[number] = measures.measured_row(
            self._rows[number], submitted, job, self._daemon.list_attempts(ident)
        )
        if job["ended_at"] is not None:
            self._over.add(number)

    def _current_progress(self) -> Progress:
        """Return the numbers for the progress display, as of the last poll and the last sample."""
        active = {job: self._active[job] for job, _ in self._submitted.values() if job in self._active}
        last = {
            column: sum(values[column][-1] for values in self._samples.clusters.values())
            for column in ("total", "used", "background")
        }
        return Progress(
            seconds=self._elapsed_s(),
            jobs=len(self._rows),
            submitted=len(self._submitted),
            states=Counter(active.values()),
            ended=Counter(self._rows[number]["state"] for number in self._over),
            late=sum((row["late"] or 0) > LATE for row in self._rows),
            total=last["total"],
            ours=last["used"],
            background=last["background"],
            mean_background=self._mean_background,
            away=self._away_since is not None,
        )

    # End of the run

    def _end_load(self) -> None:
        """End the background load; an interrupt leaves its jobs running."""
        try:
            if self._load is not None:
                self._load.end_jobs()
        except KeyboardInterrupt:
            self._tell("background load goes on by itself, for a few minutes at most")

    def _fetch_unfinished(self) -> None:
        """Fetch the remaining jobs a last time; cancel them first if the options ask for it."""
        unfinished = [number for number in self._submitted if number not in self._over]
        is_single = len(unfinished) == 1
        consequence = (
            f"{'is' if is_single else 'are'} cancelled"
            if self._is_cancelling
            else f"{'goes' if is_single else 'go'} on"
        )
        self._tell(f"{self.interrupted}: {len(unfinished)} job{'' if is_single else 's'} {consequence}")
        try:
            if self._is_cancelling and (number := self._in_doubt) is not None:
                # A second submission with the same key ensures that the job exists exactly once.
                self._has_arrived(
                    number, self._daemon.submit_job(self._workload.jobs[number].job, self._key_of(number))
                )
                unfinished.append(number)
            if self._is_cancelling and unfinished:
                for message in self._daemon.cancel_jobs([self._submitted[number][0] for number in unfinished]):
                    self._tell(message)  # The job ended before it was cancelled.
            self._poll_until_ended(unfinished, self._elapsed_s() + (ENDS_WITHIN if self._is_cancelling else 0.0))
        except GridError as error:
            self._tell(f"what became of the last jobs is not known: {error}")
        except KeyboardInterrupt:
            self._tell("what became of the last jobs is not known")

    def _poll_until_ended(self, unfinished: list[int], until: float) -> None:
        """Fetch these jobs until all have ended, or until a time in seconds."""
        while True:
            for number in unfinished:
                self._fetch_job(number)
            unfinished = [number for number in unfinished if number not in self._over]
            if not unfinished or self._elapsed_s() >= until:
                return
            self._sleep(RETRY)

    @property
    def _is_cancelling(self) -> bool:
        return self.interrupted == "interrupted" and self._options.cancel_on_interrupt

    def _create_report(self) -> Json:
        """Return the report of the run so far, with its parameters, late submissions and outages in seconds."""
        late = [row["late"] for row in self._rows if row["late"] is not None]
        away = self._away + (self._elapsed_s() - self._away_since if self._away_since is not None else 0.0)
        run: Json = {
            "began": self._began_at.isoformat(timespec="seconds"),
            "seconds": round(self._elapsed_s(), 3),
            "complete": not self.interrupted,
            "interrupted": self.interrupted,
            "background_target": self._options.background,
            "background_seconds": self._options.background_seconds if self._options.background else None,
            "interval": self._options.interval,
            "late": sum(delay > LATE for delay in late),
            "latest": round(max(late, default=0.0), 3),
            "daemon_away": round(away, 3),
        }
        return measures.report_of(self._rows, self._samples, self._workload.header, run)
