"""Estimated run times of the jobs of a live grid.

They are drawn from earlier runs of the same application, or else of all applications, and never exceed walltimes.
"""

from collections.abc import Collection, Mapping, Sequence
from math import exp
from random import Random
from statistics import median

from koalapy.model.advice import Run, Size, run_size
from koalapy.model.application import application_of
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.scheduler.advisor.experience import Experience
from koalapy.simulation.jobs import Gang, PlannedJob

ENOUGH = 3
"""Minimum number of runs of one size that are preferred to the runs of all sizes of an application."""
FEW_SCATTER = 0.7
"""Standard deviation of the logarithm of a run time that is estimated from fewer runs."""
NOTHING_KNOWN = 3600.0
"""Mean run time in seconds of a job for which there is no information at all."""


class RunTimeEstimates:
    """Run-time distributions of jobs, from the runs up to the time of a snapshot."""

    def __init__(self, runs: Sequence[Run], speeds: Mapping[ClusterName, float]) -> None:
        self._experience, self._speeds = Experience(speeds, runs), speeds
        self._by_size: dict[tuple[str, Size], list[float]] = {}
        self._by_application: dict[str, list[float]] = {}
        self._all: list[float] = []
        for run in runs:
            seconds = run.seconds / self._run_time_factor(run.application, None, run.clusters)
            self._by_size.setdefault((run.application, run.size), []).append(seconds)
            self._by_application.setdefault(run.application, []).append(seconds)
            self._all.append(seconds)

    def run_time(self, job: PlannedJob, gang: Gang) -> float:
        """Return the run time of a placement relative to one cluster of speed 1, as a ``RunTime``."""
        clusters = [cluster for cluster, _ in gang]
        return self._run_time_factor(application_of(job.spec), job.spec.communication, clusters)

    def draw_run_time(self, job: Job, now: float, draws: Random) -> float:
        """Draw a run time in seconds on one cluster of speed 1; for a running job, one that is still possible."""
        spec, attempt = job.spec, job.attempt
        factor, elapsed = 1.0, 0.0
        if attempt is not None and attempt.barrier_at is not None:
            factor = self._run_time_factor(application_of(spec), spec.communication, [c.cluster for c in attempt.gang])
            elapsed = max(0.0, now - attempt.barrier_at)
        run_times = self._earlier_run_times(spec)
        if len(run_times) < ENOUGH:
            # Fewer runs give only the order of magnitude.
            run_times = (
                [] if spec.walltime is not None else [each * exp(draws.gauss(0.0, FEW_SCATTER)) for each in run_times]
            )
        possible = [seconds * factor for seconds in run_times if seconds * factor > elapsed]
        if possible:
            lasts = draws.choice(possible)
        elif run_times:
            # The job has run longer than any earlier run. Expect a remaining time of the order of the elapsed time.
            lasts = elapsed + draws.expovariate(1 / max(elapsed, 1.0))
        elif spec.walltime is not None:
            lasts = draws.uniform(min(elapsed, spec.walltime), spec.walltime)
        else:
            lasts = elapsed + draws.expovariate(1 / (median(self._all) if self._all else NOTHING_KNOWN))
        if spec.walltime is not None:
            lasts = min(lasts, spec.walltime)
        return lasts / factor

    def describe_basis(self, spec: JobSpec) -> str:
        """Return a text that names the data from which a job's run time is estimated."""
        application, run_times = application_of(spec), self._earlier_run_times(spec)
        if len(run_times) >= ENOUGH or (run_times and spec.walltime is None):
            return f"{len(run_times)} run{'s' * (len(run_times) > 1)} of {application}"
        if spec.walltime is not None:
            return "its walltime"
        return "the runs of other applications" if self._all else "nothing"

    def _earlier_run_times(self, spec: JobSpec) -> list[float]:
        """Return the run times in seconds of the same application and size; of all its sizes if those are too few."""
        application = application_of(spec)
        same = self._by_size.get((application, run_size(spec)), [])
        return same if len(same) >= ENOUGH else self._by_application.get(application, [])

    def _run_time_factor(
        self, application: str, communication: float | None, clusters: Collection[ClusterName]
    ) -> float:
        """Return the run time on these clusters relative to that on one cluster of speed 1.

        The slowest cluster sets the speed, and several clusters add the slowdown estimated for the application.
        ``communication``: the declared fraction of run time for communication; None if it is not declared.
        """
        names = tuple(sorted(set(clusters)))
        speed = min((self._speeds.get(name, 1.0) for name in names), default=1.0)
        if len(names) < 2:
            return 1.0 / speed
        return max(1.0, self._experience.slowdowns(application, communication).on_clusters(names).value) / speed
