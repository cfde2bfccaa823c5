"""The requests of a workload's run to a daemon."""

from collections.abc import Mapping, Sequence

from koalapy.client.client import Client, in_path
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.workload.recipe import form_for

MAX_ACTIVE_JOBS = 200_000
SERVER_ERRORS = 500


def is_away(error: GridError) -> bool:
    """Return whether a daemon is only temporarily unavailable, and did not reject a request."""
    return error.code is Exit.UNREACHABLE or error.status >= SERVER_ERRORS or error.retry_after > 0


class WorkloadDaemon:
    """The daemon that runs a workload. Each method may raise ``GridError``."""

    def __init__(self, client: Client, policy: str | None) -> None:
        """``policy``: the placement policy for every job, if given; requests are converted to a kind that it serves."""
        self._client, self._policy = client, policy
        self._owners: set[str] = set()
        """Owners of the submitted jobs: a workload may have several."""

    def check(self, background: float) -> None:
        """Raise ``GridError`` if the daemon is unreachable, or if it rejects the requested background load."""
        clusters = self._client.clusters()
        if not background or not clusters:
            return
        try:
            # A daemon that accepts background load rejects zero nodes with an error for that field.
            self.start_load(clusters[0]["name"], 0, 1)
        except GridError as error:
            if error.field != "nodes":
                raise

    def submit_job(self, job: Json, key: str) -> Json:
        """Submit a job, once for all calls with the same key."""
        body = dict(job)
        if self._policy:
            body |= {"policy": self._policy, "request": request_for(self._policy, job["request"])}
        job = self._client.post("/api/v1/jobs", body, {"Idempotency-Key": key})
        self._owners.add(job["owner"])
        return job

    def list_clusters(self) -> Sequence[Json]:
        return self._client.clusters()

    def active_states(self) -> Mapping[int, str]:
        """Return the state of each unfinished job, at least of those submitted in this run."""
        listings = [
            self._client.list_jobs(MAX_ACTIVE_JOBS, active=True, owner=owner).jobs for owner in sorted(self._owners)
        ]
        return {job["id"]: job["state"] for jobs in listings for job in jobs}

    def fetch_job(self, job: int) -> Json:
        return self._client.job(job)

    def list_attempts(self, job: int) -> Sequence[Json]:
        return self._client.attempts(job)

    def cancel_jobs(self, jobs: Sequence[int]) -> Sequence[str]:
        """Cancel all of the jobs; return a message for each that cannot be cancelled."""
        results = self._client.act_on_jobs("cancel", list(jobs), {"reason": "the workload was interrupted"})
        return [str(result["problem"]["detail"]) for result in results if result["problem"]]

    def start_load(self, cluster: str, nodes: int, seconds: float) -> None:
        """Keep nodes of a cluster busy with a job that bypasses the scheduler."""
        self._client.post(f"/api/v1/clusters/{in_path(cluster)}/background", {"nodes": nodes, "seconds": seconds})

    def end_load(self, cluster: str) -> None:
        """End the jobs that ``start_load`` started on a cluster."""
        self._client.delete(f"/api/v1/clusters/{in_path(cluster)}/background")


def request_for(policy: str, request: Json) -> Json:
    """Convert a request to a kind that a policy serves. A flexible one becomes two components of similar size."""
    form = form_for(policy, request["type"])
    if form == request["type"] or request["type"] == "fixed":
        return request
    if form == "flexible":
        return {"type": "flexible", "total_size": sum(component["size"] for component in request["components"])}
    total = int(request["total_size"])
    sizes = [size for size in (total - total // 2, total // 2) if size]
    return {"type": "nonfixed", "components": [{"size": size} for size in sizes]}
