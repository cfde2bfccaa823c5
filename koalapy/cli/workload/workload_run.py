"""A run's daemon over REST, and what a run shows on the screen."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from koalapy.cli.client import Client, in_path
from koalapy.cli.errors import CliError, Exit, printable
from koalapy.workload.daemon import Away, Busy, Refused
from koalapy.workload.recipe import form_for
from koalapy.workload.run import Progress

if TYPE_CHECKING:
    from rich.live import Live

Json = dict[str, Any]
PLAIN_INTERVAL = 10.0
"""Seconds between two lines of progress where there is no terminal."""
MAX_ACTIVE_JOBS = 200_000
SERVER_ERRORS = 500


class RestDaemon:
    """The daemon as a run wants it."""

    def __init__(self, client: Client, policy: str | None) -> None:
        """``policy`` is set in every job, with the kind of request that it serves."""
        self._client, self._policy = client, policy
        self._owners: set[str] = set()
        """Of the jobs that were submitted: a workload may name them."""

    def check(self, background: float) -> None:
        """``CliError`` when the daemon cannot be reached, or will not load clusters."""
        found = self._client.get("/api/v1/clusters")["clusters"]
        if not background or not found:
            return
        try:
            # An order for nothing: a daemon that takes orders refuses it for that.
            nothing = {"nodes": 0, "seconds": 1}
            self._client.post(f"/api/v1/clusters/{in_path(found[0]['name'])}/background", nothing)
        except CliError as error:
            if error.field != "nodes":
                raise

    def submit(self, job: Json, key: str) -> Json:
        body = dict(job)
        if self._policy:
            body |= {"policy": self._policy, "request": request_for(self._policy, job["request"])}
        try:
            job = self._client.post("/api/v1/jobs", body, {"Idempotency-Key": key})
        except CliError as error:
            _raise(error)
        self._owners.add(job["owner"])
        return job

    def clusters(self) -> Sequence[Json]:
        found: list[Json] = self._get("/api/v1/clusters")["clusters"]
        return found

    def active(self) -> Mapping[int, str]:
        try:
            found = [self._client.jobs(MAX_ACTIVE_JOBS, active=True, owner=owner)[0] for owner in sorted(self._owners)]
        except CliError as error:
            _raise(error)
        return {job["id"]: job["state"] for jobs in found for job in jobs}

    def job(self, job: int) -> Json:
        return self._get(f"/api/v1/jobs/{job}")

    def attempts(self, job: int) -> Sequence[Json]:
        found: list[Json] = self._get(f"/api/v1/jobs/{job}/attempts")["attempts"]
        return found

    def cancel(self, jobs: Sequence[int]) -> Sequence[str]:
        try:
            found = list(self._client.act("cancel", list(jobs), reason="the workload was interrupted"))
        except CliError as error:
            _raise(error)
        return [str(one["problem"]["detail"]) for one in found if one["problem"]]

    def load(self, cluster: str, nodes: int, seconds: float) -> None:
        self._post(f"/api/v1/clusters/{in_path(cluster)}/background", {"nodes": nodes, "seconds": seconds})

    def unload(self, cluster: str) -> None:
        try:
            self._client.delete(f"/api/v1/clusters/{in_path(cluster)}/background")
        except CliError as error:
            _raise(error)

    def _get(self, path: str) -> Json:
        try:
            return self._client.get(path)
        except CliError as error:
            _raise(error)

    def _post(self, path: str, body: Json) -> None:
        try:
            self._client.post(path, body)
        except CliError as error:
            _raise(error)


def request_for(policy: str, request: Json) -> Json:
    """A request of the kind that a policy serves; a flexible one becomes two components as equal as can be."""
    form = form_for(policy, request["type"])
    if form == request["type"] or request["type"] == "fixed":
        return request
    if form == "flexible":
        return {"type": "flexible", "total_size": sum(component["size"] for component in request["components"])}
    total = int(request["total_size"])
    sizes = [size for size in (total - total // 2, total // 2) if size]
    return {"type": "nonfixed", "components": [{"size": size} for size in sizes]}


def _raise(error: CliError) -> NoReturn:
    if error.retry_after:
        raise Busy(error.message, error.retry_after) from error
    if error.code is Exit.UNREACHABLE or error.status >= SERVER_ERRORS:
        raise Away(str(error)) from error
    raise Refused(str(error)) from error


class ProgressDisplay:
    """One live line on a terminal, else a line now and then; what is worth telling above it."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._shown_at = -PLAIN_INTERVAL

    def __enter__(self) -> "ProgressDisplay":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def report(self, text: str) -> None:
        line = printable(text)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(f"koala: {line}", file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line_of(progress), overflow="ellipsis", no_wrap=True))
        elif progress.seconds >= self._shown_at + PLAIN_INTERVAL:
            self._shown_at = progress.seconds
            print(line_of(progress), file=sys.stderr, flush=True)


def line_of(progress: Progress) -> str:
    """Where a run stands, in one line."""
    waiting = progress.states.total() - progress.states["running"]
    idle = progress.total - progress.ours - progress.background
    parts = [
        f"{progress.seconds:5.0f} s",
        f"{progress.submitted}/{progress.jobs} submitted",
        f"{waiting} wait, {progress.states['running']} run, {_ended(progress.ended.items())}",
        f"nodes: {progress.ours} jobs, {progress.background} background, {max(0, idle)} idle of {progress.total}",
    ]
    if progress.mean_background is not None:
        parts.append(f"background {progress.mean_background:.0%} so far")
    if progress.late:
        parts.append(f"{progress.late} late")
    if progress.away:
        parts.append("the daemon is away")
    return " · ".join(parts)


def _ended(states: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states)) or "0 ended"
