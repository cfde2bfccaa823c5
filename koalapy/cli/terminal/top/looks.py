"""What ``koala top`` asks the daemon for."""

from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Thread
from typing import Any

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError

Json = dict[str, Any]
WAITING = ("queued", "held", "placed", "claiming", "unknown")
"""States of a job of which it is told why."""
ATTEMPTS = 5
"""As many are charted."""
TAIL_LINES = 500
"""Of a job's output, as many are kept."""
MAX_LINE_LENGTH = 2000
"""Characters."""


@dataclass(slots=True)
class Query:
    """Whose jobs, and where; set by who looks at them."""

    everyone: bool
    limit: int
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """How everything stands."""

    clusters: list[Json]
    jobs: list[Json]
    has_more: bool
    alerts: list[Json]
    asked: tuple[bool, str]
    """Whether all users' jobs, and on which cluster."""


@dataclass(frozen=True, slots=True)
class OneJob:
    """How one job stands."""

    job: Json
    attempts: list[Json]
    explanation: Json | None
    problem: str = ""
    """Why there is nothing of it."""


def grid(client: Client, query: Query) -> Grid:
    everyone, cluster = query.everyone, query.cluster
    found = client.get("/api/v1/clusters")["clusters"]
    jobs, more = client.unfinished_jobs(query.limit, mine=None if everyone else True, cluster=cluster)
    return Grid(found, jobs, more, _alerts(client), (everyone, cluster))


def _alerts(client: Client) -> list[Json]:
    try:
        found: list[Json] = client.get("/api/v1/alerts")["alerts"]
    except CliError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return []  # of a daemon that knows of none
    return found


def one_job(client: Client, job: int) -> OneJob:
    """What is refused of it is told in its place; a daemon that is away, or lets nobody in, is an error."""
    try:
        found = client.get(f"/api/v1/jobs/{job}")
        if found["redacted"]:
            return OneJob(found, [], None, "it is somebody else's: only operators see more")
        explanation = client.get(f"/api/v1/jobs/{job}/explain") if found["state"] in WAITING else None
        return OneJob(found, client.attempts(job, ATTEMPTS + 1), explanation)
    except CliError as error:
        if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT):
            return OneJob({}, [], None, str(error))
        raise


@dataclass
class Tail:
    """The last lines of what a job prints, as it comes, by a thread of its own."""

    client: Client
    job: int
    lines: deque[str] = field(default_factory=lambda: deque([""], TAIL_LINES))
    told: str = "as it comes"

    def start(self) -> None:
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for piece in self.client.logs(self.job, True, None):
                first, *others = piece.decode(errors="replace").split("\n")
                self.lines[-1] = (self.lines[-1] + first)[-MAX_LINE_LENGTH:]
                self.lines.extend(line[:MAX_LINE_LENGTH] for line in others)
            self.told = "all of it has come"
        except CliError as error:
            self.told = str(error)
