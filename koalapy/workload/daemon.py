"""The interface of a daemon that a run of a workload needs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Json = dict[str, Any]


class Away(Exception):
    """The daemon is temporarily unavailable."""


class Busy(Away):
    """The daemon is overloaded; retry after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """The daemon rejected the request."""


class Daemon(Protocol):
    """The requests of a run to a daemon. Each method may raise ``Away`` or ``Refused``."""

    def submit_job(self, job: Json, key: str) -> Json:
        """Submit a job, once for all calls with the same key. May also raise ``Busy``."""
        ...

    def list_clusters(self) -> Sequence[Json]: ...

    def active_states(self) -> Mapping[int, str]:
        """Return the state of each unfinished job, at least of those submitted in this run."""
        ...

    def fetch_job(self, job: int) -> Json: ...

    def list_attempts(self, job: int) -> Sequence[Json]: ...

    def cancel_jobs(self, jobs: Sequence[int]) -> Sequence[str]:
        """Cancel all of the jobs; return a message for each that cannot be cancelled."""
        ...

    def start_load(self, cluster: str, nodes: int, seconds: float) -> None:
        """Keep nodes of a cluster busy with a job that bypasses the scheduler."""

    def end_load(self, cluster: str) -> None:
        """End the jobs that ``load`` started on a cluster."""
