"""Runs a workload against a live daemon: submits, keeps the background, looks, and waits until every job is over."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from koalapy.workload import measures
from koalapy.workload.background import BackgroundLoad
from koalapy.workload.daemon import Away, Busy, Daemon, Json, Refused
from koalapy.workload.measures import Samples
from koalapy.workload.plan import Workload

LATE = 1.0
"""Seconds after which a submission is told to be late."""
TICK = 0.1
RETRY = 1.0
"""Seconds between two tries to reach a daemon that is away."""
ENDS_WITHIN = 10.0
"""Seconds for which cancelled jobs are waited for."""
SHARE = 10
"""How many times as long as a look at the jobs took, we wait at least until the next one."""
AT_ONCE = 20
"""Jobs whose record is fetched in one look."""
SHOWN_EVERY = 0.5
"""Seconds between two tellings of the progress, if nothing was looked at meanwhile."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run goes about it; times in seconds."""

    background: float = 0.0
    """The fraction of nodes that local users are to have."""
    background_seconds: float = 20.0
    background_nodes: int | None = None
    seed: int = 1
    interval: float = 1.0
    """Between two looks."""
    patience: float = 600.0
    """How long the daemon may be away."""
    timeout: float | None = None
    """How long the whole run may take."""
    cancel_on_interrupt: bool = False


@dataclass(slots=True)
class Progress:
    """Where a run stands, for people."""

    seconds: float = 0.0
    jobs: int = 0
    submitted: int = 0
    states: Counter[str] = field(default_factory=Counter)
    """Of the jobs that are not over."""
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
        daemon: Daemon,
        options: Options,
        *,
        tell: Callable[[str], None],
        show: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``tell`` gets what is worth a line of its own, ``show`` the progress again and again."""
        self._workload, self._daemon, self._options = workload, daemon, options
        self._tell, self._show, self._clock, self._sleep = tell, show, clock, sleep
        self._began = clock()
        self._began_at = datetime.now(UTC)
        self._key = uuid4().hex
        self._waiting = deque(range(len(workload.jobs)))
        self._try_at = 0.0
        self._submitted: dict[int, tuple[int, float]] = {}
        """Number of a job in the workload to its id, and when it was submitted."""
        self._rows = [measures.planned(number, arrival) for number, arrival in enumerate(workload.jobs, 1)]
        self._over: set[int] = set()
        self._active: Mapping[int, str] = {}
        self._samples = Samples()
        self._in_doubt: int | None = None
        """The job of which is not known whether its submission has arrived."""
        self._sample_at = self._look_at = self._show_at = 0.0
        self._mean_background: float | None = None
        self._away_since: float | None = None
        self._away = 0.0
        """Seconds for which the daemon was away, in all."""
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
        """Why the run ended before its jobs, if it did."""

    def run(self) -> Json:
        """The report, when every job is over; earlier when interrupted, out of patience or out of time."""
        try:
            while not self._is_over():
                self._step()
        except KeyboardInterrupt:
            self.interrupted = "interrupted"
        except Refused as error:
            self.interrupted = f"the daemon refuses to tell more: {error}"
        finally:
            self._end_load()
        if self.interrupted:
            self._leave()
        return self._report()

    def _now(self) -> float:
        return self._clock() - self._began

    def _is_over(self) -> bool:
        if not self._waiting and len(self._over) == len(self._rows):
            return True
        now, options = self._now(), self._options
        if options.timeout is not None and now > options.timeout:
            self.interrupted = f"not done within {options.timeout:g} s"
        elif self._away_since is not None and now - self._away_since > options.patience:
            self.interrupted = f"the daemon was away for {options.patience:g} s"
        return bool(self.interrupted)

    def _step(self) -> None:
        """Whatever is due, then a short sleep."""
        try:
            if self._now() >= self._sample_at or self._away_since is not None:
                self._sample()
            self._is_back()
            self._submit()
            if self._now() >= self._look_at:
                self._look()
        except Away as error:
            self._is_away(error)
        if (now := self._now()) >= self._show_at:
            self._show(self._progress())
            self._show_at = now + max(SHOWN_EVERY, SHARE * (self._now() - now))
        self._sleep(TICK if self._away_since is None else RETRY)

    # The daemon comes and goes

    def _is_away(self, error: Away) -> None:
        if self._away_since is None:
            self._away_since = self._now()
            self._samples.add(self._away_since, ())
            self._tell(f"the daemon is away: {error}; waiting up to {self._options.patience:g} s")

    def _is_back(self) -> None:
        if self._away_since is not None:
            gone, self._away_since = self._now() - self._away_since, None
            self._away += gone
            self._tell(f"the daemon is back after {gone:.0f} s")

    # Submitting

    def _submit(self) -> None:
        while self._waiting and self._now() >= self._try_at:
            number = self._waiting[0]
            arrival, row = self._workload.jobs[number], self._rows[number]
            if arrival.at > self._now():
                return
            self._in_doubt = number
            try:
                job = self._daemon.submit(arrival.job, self._key_of(number))
            except Busy as error:
                self._in_doubt = None
                self._try_at = self._now() + error.retry_after
                self._tell(f"job {number + 1} waits {error.retry_after:g} s to be submitted: {error}")
                return
            except Refused as error:
                self._rows[number] = row | {"state": "refused", "reason": str(error)}
                self._over.add(number)
                self._tell(f"job {number + 1} was refused: {error}")
            else:
                late = self._has_arrived(number, job) - arrival.at
                if late > LATE and not self._late_told:
                    self._late_told = True
                    self._tell(f"job {number + 1} was submitted {late:.1f} s late")
            self._in_doubt = None
            self._waiting.popleft()

    def _has_arrived(self, number: int, job: Json) -> float:
        """Note a job that the daemon has taken; returns when that was."""
        now = self._now()
        self._submitted[number] = int(job["id"]), now
        self._rows[number] = measures.measured(self._rows[number], now, job, ())
        return now

    def _key_of(self, number: int) -> str:
        """However often it is sent with this key, it is one job."""
        return f"workload-{self._key}-{number}"

    # Looking

    def _sample(self) -> None:
        clusters = self._daemon.clusters()
        now = self._now()
        self._samples.add(now, clusters)
        self._mean_background = self._samples.utilisation()["all"]["background"]
        self._sample_at = now + self._options.interval
        if self._load is not None:
            self._load.look(now, clusters)

    def _look(self) -> None:
        """See which jobs are over, and fetch the records of some of them."""
        began = self._now()
        self._active = self._daemon.active()
        ended = [n for n, (job, _) in self._submitted.items() if n not in self._over and job not in self._active]
        for number in ended[:AT_ONCE]:
            self._fetch(number)
        now = self._now()
        self._look_at = now + max(self._options.interval, SHARE * (now - began)) if len(ended) <= AT_ONCE else now
        self._show_at = now

    def _fetch(self, number: int) -> None:
        ident, submitted = self._submitted[number]
        job = self._daemon.job(ident)
        self._rows[number] = measures.measured(self._rows[number], submitted, job, self._daemon.attempts(ident))
        if job["ended_at"] is not None:
            self._over.add(number)

    def _progress(self) -> Progress:
        active = {job: self._active[job] for job, _ in self._submitted.values() if job in self._active}
        last = {
            column: sum(values[column][-1] for values in self._samples.clusters.values())
            for column in ("total", "used", "background")
        }
        return Progress(
            seconds=self._now(),
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

    # The end

    def _end_load(self) -> None:
        try:
            if self._load is not None:
                self._load.end()
        except KeyboardInterrupt:
            self._tell("background load goes on by itself, for a few minutes at most")

    def _leave(self) -> None:
        """Look a last time at what goes on; cancel it only if that was asked for."""
        left = [number for number in self._submitted if number not in self._over]
        one = len(left) == 1
        what = f"{'is' if one else 'are'} cancelled" if self._cancels else f"{'goes' if one else 'go'} on"
        self._tell(f"{self.interrupted}: {len(left)} job{'' if one else 's'} {what}")
        try:
            if self._cancels and (number := self._in_doubt) is not None:
                # Sent again it has arrived, once.
                self._has_arrived(number, self._daemon.submit(self._workload.jobs[number].job, self._key_of(number)))
                left.append(number)
            if self._cancels and left:
                for said in self._daemon.cancel([self._submitted[number][0] for number in left]):
                    self._tell(said)  # it has ended in between
            self._look_again(left, self._now() + (ENDS_WITHIN if self._cancels else 0.0))
        except (Away, Refused) as error:
            self._tell(f"what became of the last jobs is not known: {error}")
        except KeyboardInterrupt:
            self._tell("what became of the last jobs is not known")

    def _look_again(self, left: list[int], until: float) -> None:
        """At each of these jobs, until all are over."""
        while True:
            for number in left:
                self._fetch(number)
            left = [number for number in left if number not in self._over]
            if not left or self._now() >= until:
                return
            self._sleep(RETRY)

    @property
    def _cancels(self) -> bool:
        return self.interrupted == "interrupted" and self._options.cancel_on_interrupt

    def _report(self) -> Json:
        late = [row["late"] for row in self._rows if row["late"] is not None]
        away = self._away + (self._now() - self._away_since if self._away_since is not None else 0.0)
        run: Json = {
            "began": self._began_at.isoformat(timespec="seconds"),
            "seconds": round(self._now(), 3),
            "complete": not self.interrupted,
            "interrupted": self.interrupted,
            "background_target": self._options.background,
            "background_seconds": self._options.background_seconds if self._options.background else None,
            "interval": self._options.interval,
            "late": sum(one > LATE for one in late),
            "latest": round(max(late, default=0.0), 3),
            "daemon_away": round(away, 3),
        }
        return measures.report_of(self._rows, self._samples, self._workload.header, run)
