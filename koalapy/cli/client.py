"""The daemon's REST API as the commands use it."""

import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from koalapy.cli.auth.access import Access
from koalapy.cli.errors import CODE_OF_STATUS, CliError, Exit, printable
from koalapy.cli.http import CONNECTION_ERRORS, Answer, Connection, Readable
from koalapy.cli.terminal.screen import Block
from koalapy.cli.timeouts import ClientTimeouts, command_timeouts
from koalapy.model.errors import ProblemCode
from koalapy.model.job import ACTIVE_STATES, WAITING_STATES
from koalapy.model.wording import is_utf8
from koalapy.system.tls import refusal

Json = dict[str, Any]
FINAL = ("succeeded", "failed", "cancelled")
MAX_PAGE_SIZE = 1000
MAX_ACTIVE_JOBS = 10_000
"""Jobs with nodes, or about to get them, that are listed at most."""
LONG_POLL = 20.0
"""Seconds for which the daemon is asked to hold a question."""
ANSWER_TIMEOUT = LONG_POLL + 20
"""Seconds."""
ABSENCE_TIMEOUT = 60.0
"""Seconds for which a daemon that has answered before may be away: jobs go on without it."""


class Absence:
    """That of a daemon, or of its database, while somebody waits for a job."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._reported = False

    def tolerate(self, error: CliError, *, answered: bool) -> None:
        """Go on; raises ``error`` when nothing may be hoped for: ``answered`` says whether the daemon ever did.

        One that answers 503 is there and tries for itself, however long that takes.
        """
        now = time.monotonic()
        if not error.is_passing:
            raise error
        if error.code is Exit.UNREACHABLE:
            self._since = self._since or now
            if not answered or now - self._since > ABSENCE_TIMEOUT:
                raise error
        if not self._reported:
            Block.report(f"koala: {printable(error.message)}; still waiting")
            self._reported = True

    def over(self) -> None:
        """It has answered."""
        self._since, self._reported = None, False


class Client:
    """Talks to one daemon; every failure is a ``CliError``.

    What it shows to it is found by ``Access``.
    """

    def __init__(
        self, url: str, token: str | None, access: Access | None = None, timeouts: ClientTimeouts | None = None
    ) -> None:
        """``timeouts``: by default those of the running command."""
        self._answered = False
        self.timeouts = timeouts or command_timeouts()
        try:
            self._access = access or Access(url, token)
            found = self._access
            self.http = Connection(
                found.parts, found.headers, by_proxy=found.by_proxy, trust=found.trust, timeouts=self.timeouts
            )
        except ValueError as error:
            raise CliError(f"{url} is no URL: {error}", Exit.USAGE, "set --url or KOALA_URL") from error
        self.url = self._access.url

    @property
    def has_answered(self) -> bool:
        return self._answered

    def get(self, path: str, **query: Any) -> Json:
        return self._json("GET", path, query=_said(query))

    def get_patiently(self, path: str, **query: Any) -> Json:
        """The same of what takes its time to be worked out."""
        return self._json("GET", path, query=_said(query), timeout=None)

    def post(
        self, path: str, body: Json | None = None, headers: dict[str, str] | None = None, *, patient: bool = False
    ) -> Json:
        """A ``patient`` one waits for the answer however long it takes."""
        return self._json("POST", path, body=body, headers=headers, timeout=None if patient else ANSWER_TIMEOUT)

    def delete(self, path: str, **query: Any) -> Json:
        return self._json("DELETE", path, query={k: v for k, v in query.items() if v is not None})

    def submit(self, body: Json, key: str) -> Json:
        """Submit once, however often it has to be sent: the key makes a repetition harmless."""
        for pause in (0.2, 0.5, 1.0):
            try:
                return self.post("/api/v1/jobs", body, {"Idempotency-Key": key})
            except CliError as error:
                if not error.is_passing:
                    raise
            self.timeouts.sleep(pause)
        return self.post("/api/v1/jobs", body, {"Idempotency-Key": key})

    def act(self, action: str, jobs: list[int], **order: str | bool) -> Iterator[Json]:
        """What becomes of each of many jobs, some at a time; ``order`` is what the action wants beside them."""
        for start in range(0, len(jobs), MAX_PAGE_SIZE):
            some = {"jobs": jobs[start : start + MAX_PAGE_SIZE], **order}
            yield from self.post(f"/api/v1/jobs/{action}", some)["jobs"]

    def wait(self, job: int, deadline: float | None) -> Json:
        """The job when it is over; ``CliError`` when that is not so at ``deadline`` (monotonic seconds).

        A daemon that has answered before and goes away is waited for, and one whose database does not answer: the job
        goes on without them. It is said once on standard error.
        """
        absence = Absence()
        state = "unknown"
        while True:
            asked = time.monotonic()
            # The first answer comes at once, so that a daemon that was never there is told from one that went away.
            left = LONG_POLL if self._answered else 0.0
            if deadline is not None:
                left = max(0.0, min(left, deadline - asked))
            try:
                found = self.get(f"/api/v1/jobs/{job}", wait=left)
                state = found["state"]
                absence.over()
                if state in FINAL:
                    return found
            except CliError as error:
                absence.tolerate(error, answered=self._answered)
                left = LONG_POLL if deadline is None else max(0.0, deadline - asked)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise CliError(f"job {job} is still {state}", Exit.TIMEOUT, f"it goes on: koala wait {job}")
            # A daemon that is about to end answers at once, and one that is away does not wait either.
            self.timeouts.sleep(max(0.0, min(0.2, left) - (now - asked)))

    def attempts(self, job: int, last: int) -> list[Json]:
        """The last tries to run a job, in order."""
        found: list[Json] = self.get(f"/api/v1/jobs/{job}/attempts", last=last)["attempts"]
        return found

    def cluster(self, name: str) -> Json:
        return self.get(f"/api/v1/clusters/{in_path(name)}")

    def act_on_cluster(self, name: str, action: str, body: Json | None = None) -> Json:
        return self.post(f"/api/v1/clusters/{in_path(name)}/{action}", body)

    def jobs(self, limit: int, **query: Any) -> tuple[list[Json], bool]:
        """The newest jobs, page by page, and whether there are more."""
        found: list[Json] = []
        while True:
            page = self.get("/api/v1/jobs", limit=min(limit - len(found), MAX_PAGE_SIZE), **query)
            found += page["jobs"]
            if page["next"] is None or len(found) >= limit:
                return found, page["next"] is not None
            query["before"] = parse_qs(urlsplit(page["next"]).query)["before"][0]

    def unfinished_jobs(self, max_waiting: int, **query: Any) -> tuple[list[Json], bool]:
        """Return the jobs that are not over, and whether more of them wait than are listed.

        First come all jobs with nodes or about to get them, then the newest ``max_waiting`` of those that wait; each
        group newest first. Later submissions never hide a job that runs.
        """
        # Waiting jobs first: a job placed between the two requests is then in the second answer.
        waiting, has_more = self.jobs(max_waiting, state=sorted(WAITING_STATES), **query)
        active, _ = self.jobs(MAX_ACTIVE_JOBS, state=sorted(ACTIVE_STATES), **query)
        active_ids = {job["id"] for job in active}
        return active + [job for job in waiting if job["id"] not in active_ids], has_more

    def logs(self, job: int, follow: bool, component: int | None) -> Iterator[bytes]:
        """The output of a job, piece by piece."""
        query: Json = {"follow": follow} | ({} if component is None else {"component": component})
        return self._pieces(f"/api/v1/jobs/{job}/logs", query, None if follow else LONG_POLL)

    def events(self, job: int, last: int) -> Iterator[bytes]:
        """What happens to a job as it happens, after the event of that number, as server-sent events."""
        return self._pieces(f"/api/v1/jobs/{job}/events", {}, None, {"Last-Event-ID": str(last)})

    def grid_events(self, last: str, timeout: float) -> Iterator[bytes]:
        """That something in the grid has changed, after the event of that id; it broke off where so many seconds
        nothing comes."""
        headers = {"Last-Event-ID": last} if last else {}
        return self._pieces("/api/v1/events", {}, timeout, headers)

    def text(self, path: str, query: Json) -> Iterator[bytes]:
        """What is told as text, piece by piece."""
        return self._pieces(path, query, LONG_POLL)

    def another(self) -> "Client":
        """One of its own for another thread."""
        return Client(self.url, None, self._access, self.timeouts)

    def results(self, job: int) -> Iterator[bytes]:
        """The archive of what a job brought, piece by piece."""
        return self._pieces(f"/api/v1/jobs/{job}/results", {}, LONG_POLL)

    def has_bundle(self, bundle: str) -> bool:
        """Whether the daemon has the archive of this SHA-256; it then keeps it for a while."""
        try:
            self.get(f"/api/v1/bundles/{bundle}")
        except CliError as error:
            if error.code is not Exit.NOT_FOUND:
                raise
            return False
        return True

    def upload(self, archive: Readable, size: int) -> Json:
        """Give the daemon an archive of so many bytes."""
        headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
        return self._json("POST", "/api/v1/bundles", content=archive, headers=headers, timeout=None)

    def _pieces(
        self, path: str, query: Json, timeout: float | None, headers: dict[str, str] | None = None
    ) -> Iterator[bytes]:
        began = False
        try:
            for is_first in (True, False):
                with self.http.stream(path, query=query, timeout=timeout, headers=headers) as (status, told, pieces):
                    if status == HTTPStatus.UNAUTHORIZED and is_first and self._renewed():
                        continue
                    if status >= HTTPStatus.BAD_REQUEST:
                        raise self._refusal(Answer(status, told, b"".join(pieces)))
                    began = self._answered = True
                    yield from pieces
                    return
        except CONNECTION_ERRORS as error:
            if began:
                said = f"the daemon at {self.url} broke off ({error})"
                raise CliError(said, Exit.UNREACHABLE, "try again") from error
            raise self._unreachable(error) from error

    def _json(self, method: str, path: str, timeout: float | None = ANSWER_TIMEOUT, **more: Any) -> Json:
        try:
            answer = self.http.request(method, path, timeout=timeout, **more)
            if answer.status == HTTPStatus.UNAUTHORIZED and self._renewed(more.get("content")):
                answer = self.http.request(method, path, timeout=timeout, **more)
        except CONNECTION_ERRORS as error:
            raise self._unreachable(error) from error
        except UnicodeEncodeError as error:
            raise _no_unicode(error, more) from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise self._refusal(answer)
        self._answered = True
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise CliError(f"what answers at {self.url} is no koala daemon", Exit.UNREACHABLE, "set KOALA_URL")
        return body

    def _renewed(self, content: Readable | None = None) -> bool:
        """Whether there is another login to show, with what was read of ``content`` to be read again."""
        if not self._access.renew():
            return False
        self.http.show(self._access.headers)
        if content is not None:
            content.seek(0)
        return True

    def _unreachable(self, error: Exception) -> CliError:
        if told := refusal(error, urlsplit(self.url).hostname or ""):
            return CliError(f"the daemon at {self.url} cannot be asked: {told[0]}", Exit.UNREACHABLE, told[1])
        hint = "start one with koala serve, or set KOALA_URL"
        return CliError(f"no daemon answers at {self.url} ({error})", Exit.UNREACHABLE, hint)

    def _refusal(self, answer: Answer) -> CliError:
        error = _refusal(answer)
        if error.status == HTTPStatus.UNAUTHORIZED:
            error.hint = self._access.hint
        return error


def in_path(name: str) -> str:
    """A name as one part of a path; ``CliError`` for what no URL takes."""
    if not is_utf8(name):
        raise CliError(f"the name {name[:60]!r} is no UTF-8", Exit.USAGE, "write it in UTF-8")
    return quote(name, safe="")


def _no_unicode(error: UnicodeEncodeError, sent: Json) -> CliError:
    """What was given cannot be sent: which field of the body it is, if it is there."""
    field, text = _odd_text(sent.get("body"), "") or ("", error.object)
    what = f"{field or 'what was given'} is {text[:60]!r}, which is no UTF-8"
    return CliError(what, Exit.USAGE, "write it in UTF-8", field)


def _odd_text(value: object, field: str) -> tuple[str, str] | None:
    """The first text that cannot be encoded, and its field."""
    if isinstance(value, str):
        return None if is_utf8(value) else (field, value)
    named: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        if odd := next((str(name) for name in value if not is_utf8(str(name))), None):
            return field, odd
        named = ((f"{field}.{name}" if field else str(name), one) for name, one in value.items())
    elif isinstance(value, (list, tuple)):
        named = ((f"{field}[{index}]", one) for index, one in enumerate(value))
    return next((found for name, one in named if (found := _odd_text(one, name))), None)


def _refusal(answer: Answer) -> CliError:
    """A problem+json answer as an error."""
    try:
        error = refused({**answer.json(), "status": answer.status})
    except (ValueError, KeyError, TypeError):
        return CliError(f"HTTP status {answer.status}, not from a koala daemon", Exit.UNREACHABLE, "set KOALA_URL")
    pause = answer.headers.get("Retry-After", "")
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS and pause:
        error.hint = f"{error.hint or 'try again'} (in {pause} s)"
    error.retry_after = float(pause) if pause.isdecimal() else 0.0
    return error


def refused(problem: Json) -> CliError:
    """A problem of the daemon's as an error."""
    status, hint, field = int(problem["status"]), str(problem.get("hint") or ""), str(problem.get("field") or "")
    error = CliError(str(problem["detail"]), CODE_OF_STATUS.get(status, Exit.FAILED), hint, field)
    error.status = status
    error.problem = next((code for code in ProblemCode if code == problem.get("code")), None)
    return error


def _said(query: Json) -> Json:
    return {name: value for name, value in query.items() if value not in (None, "", [], ())}
