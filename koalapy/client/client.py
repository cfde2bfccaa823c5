"""The routes of a daemon's REST API as methods, with retries, and its problems as errors."""

import json
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import parse_qs, quote, urlsplit

from koalapy.client.access import DEFAULT_URL, Access
from koalapy.client.errors import CODE_OF_STATUS, Exit, GridError, printable
from koalapy.client.http import CONNECTION_ERRORS, Answer, Connection, Json, Readable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.errors import ProblemCode
from koalapy.model.wording import is_utf8
from koalapy.system.tls import explain_tls_error, split_urls, without_password

if TYPE_CHECKING:
    from koalapy.client.node_stream import NodeStream

FINAL = ("succeeded", "failed", "cancelled")
MAX_PAGE_SIZE = 1000
MAX_STATES = 10_000
"""Jobs in one request for states."""
MAX_ACTIVE_JOBS = 10_000
"""Maximum number of listed jobs that have nodes or are about to get them."""
LONG_POLL_S = 20.0
"""Time for which the daemon may hold a request until a job has ended."""
ANSWER_TIMEOUT_S = LONG_POLL_S + 20
RETRY_DELAY_S = 0.5
"""Pause before a new connection for a download that broke off."""
SUBMISSION_PAUSES_S = (0.2, 0.5, 1.0)
"""Pauses between attempts to submit a job."""
TAKEOVER_PAUSES_S = (1.0, 2.0, 2.0, 3.0)
"""Further pauses while a standby daemon takes over."""
MAX_TURNS = 3
"""Maximum number of daemons that a request turns to, one after another."""
MAX_POSITIONS_LENGTH = 48_000
"""Characters of the offsets from which the daemon continues an output; its limit of a URL is 64 KiB."""


def name_of(job: Json | Json) -> str:
    """Return the name of a job for users: its number, or ``7[3]`` for a task of an array."""
    if job["array_job"] is None or job["array_index"] is None:
        return str(job["id"])
    from koalapy.model.array import format_task  # slow to import, and most jobs are no tasks

    return format_task(job["array_job"], job["array_index"])


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class JobListing:
    """Listed jobs, and how many there are."""

    jobs: list[Json]
    has_more: bool
    """Whether more jobs match than are listed."""
    count: int | None = None
    """Number of matching jobs; None if it was not requested."""
    is_whole: bool = True
    """False: more than ``count`` jobs match."""


class Client:
    """A client of one daemon. Every failure is a ``GridError``."""

    def __init__(
        self,
        url: str | None,
        token: str | None,
        access: Access | None = None,
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
        report: Callable[[str], None] = _print_line,
    ) -> None:
        """``url``: None for the default daemon, several with commas between for an active and standby daemons;
        ``report`` prints a line about the cause of a wait."""
        self.has_answered, self.has_connected, self.timeouts, self.report = False, False, timeouts, report
        self._user_token = token
        self._login: Access | None = None
        """The access by a login, of any of the daemons."""
        self._urls = split_urls(url or DEFAULT_URL) or [str(url)]
        """The addresses of all daemons that the user gave, or that of the login; the present one is first."""
        self._use_daemon(self._urls[0] if url else None, access)
        if not url:
            self._urls = [self.url]

    def _use_daemon(self, url: str | None, access: Access | None = None) -> None:
        """Send the next requests to the daemon at a URL. Raise ``GridError`` if it is invalid."""
        try:
            chosen = access or Access(url, self._user_token, timeouts=self.timeouts, report=self.report)
            if not chosen.token and (login := self._find_login()):  # daemons of one database accept the same logins
                chosen = Access(url, login.token, login.ca, timeouts=self.timeouts, report=self.report)
            self.http = Connection(
                chosen.parts, chosen.headers, by_proxy=chosen.by_proxy, trust=chosen.trust, timeouts=self.timeouts
            )
        except ValueError as error:
            shown = without_password(str(url))
            raise GridError(f"{shown} is not a URL: {error}", Exit.USAGE, "set --url or KOALA_URL") from error
        self._access, self.url = chosen, chosen.url
        if chosen.is_login:
            self._login = chosen

    def _find_login(self) -> Access | None:
        """Return the access by a login of a daemon that the user gave; None without one."""
        for url in self._urls[1:] if self._login is None else ():
            with suppress(ValueError, GridError):  # this address is not used now
                access = Access(url, None, timeouts=self.timeouts, report=self.report)
                if access.is_login:
                    self._login = access
                    break
        return self._login

    def _connect(self) -> None:
        """Connect to the first daemon that can be reached. Raise ``CONNECTION_ERRORS`` if none can."""
        for remaining in range(len(self._urls) - 1, -1, -1):
            try:
                self.http.open_connection()
                self.has_connected = True
                return
            except CONNECTION_ERRORS:
                if not remaining:
                    raise
            self._urls.append(self._urls.pop(0))
            self._use_daemon(self._urls[0])

    def _follow_standby(self, answer: Answer) -> bool:
        """Turn to the active daemon that a standby daemon names, or to the next address; return whether there is one.

        The standby daemon has done nothing. A token goes only to addresses that the user gave.
        """
        try:
            problem = answer.json() if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
            active = str(problem["active"]) if problem.get("code") == ProblemCode.DAEMON_STANDBY else None
        except (ValueError, KeyError, TypeError, AttributeError):
            active = None
        if active is None:
            return False
        self._urls = [*self._urls[1:], self._urls[0]]
        if active in self._urls:
            self._urls = [active, *(url for url in self._urls if url != active)]
        self._use_daemon(self._urls[0])
        return len(self._urls) > 1

    def get(self, path: str, *, patient: bool = False, **query: Any) -> Json:
        """Send a GET request. ``patient``: wait for the response without a timeout. Omit empty values of the query."""
        return self._request_json("GET", path, query=query, timeout=None if patient else ANSWER_TIMEOUT_S)

    def post(
        self, path: str, body: Json | None = None, headers: dict[str, str] | None = None, *, patient: bool = False
    ) -> Json:
        return self._request_json(
            "POST", path, body=body, headers=headers, timeout=None if patient else ANSWER_TIMEOUT_S
        )

    def delete(self, path: str, **query: Any) -> Json:
        return self._request_json("DELETE", path, query=query)

    def submit(self, body: Json, key: str) -> Json:
        """Submit a job, and retry while the daemon is briefly unreachable. The key prevents duplicate jobs."""
        return self._post_with_retries("/api/v1/jobs", body, key)

    def submit_batch(self, bodies: Sequence[Json], key: str) -> list[int]:
        """Submit up to ``MAX_PAGE_SIZE`` jobs in one transaction, with retries, and return their ids.

        If one is rejected, none is submitted; the error's field names it, such as ``jobs[3].command``.
        """
        answer = self._post_with_retries("/api/v1/jobs:batch", {"jobs": list(bodies)}, key)
        return cast(list[int], answer["jobs"])

    def _post_with_retries(self, path: str, body: Json, key: str) -> Json:
        """Send a submission, and retry it with the same key while the daemon is briefly unreachable."""
        headers = {"Idempotency-Key": key}
        for pause in SUBMISSION_PAUSES_S if len(self._urls) == 1 else (*SUBMISSION_PAUSES_S, *TAKEOVER_PAUSES_S):
            try:
                return self.post(path, body, headers)
            except GridError as error:
                if not error.may_recover:
                    raise
            self.timeouts.sleep(pause)
        return self.post(path, body, headers)

    def act_on_jobs(
        self, action: str, jobs: list[int], order: Json, post: Callable[[str, Json], Json] | None = None
    ) -> Iterator[Json]:
        """Apply an action to jobs and yield the result for each job.

        ``order``: the fields of the action; ``post``: sends a request in place of the client's method.
        """
        for start in range(0, len(jobs), MAX_PAGE_SIZE):
            body = {"jobs": jobs[start : start + MAX_PAGE_SIZE], **order}
            yield from (post or self.post)(f"/api/v1/jobs/{action}", body)["jobs"]

    def change_job(self, job: int, change: Json) -> Json:
        """Change fields of a waiting job, which is then tried at once. Null means the default of a field."""
        return self._request_json("PATCH", f"/api/v1/jobs/{job}", body=change)

    def job(self, job: int, **query: Any) -> Json:
        return self.get(f"/api/v1/jobs/{job}", **query)

    def wait_for_end(self, job: int, deadline: float | None) -> Json:
        """Wait until a job has ended and return it. Raise ``GridError`` at ``deadline`` (monotonic seconds).

        Continue to wait if a daemon that has responded before, or its database, becomes unreachable.
        """
        absence, state = Absence(self), "unknown"
        while True:
            requested_at = time.monotonic()
            # The first request does not wait, to distinguish a daemon that never responded from one that stopped.
            wait_s = LONG_POLL_S if self.has_answered else 0.0
            if deadline is not None:
                wait_s = max(0.0, min(wait_s, deadline - requested_at))
            try:
                answer = self.job(job, wait=wait_s)
                state = answer["state"]
                absence.end()
                if state in FINAL:
                    return answer
            except GridError as error:
                absence.tolerate(error)
                wait_s = LONG_POLL_S if deadline is None else max(0.0, deadline - requested_at)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise GridError(f"job {job} is still {state}", Exit.TIMEOUT, f"the job continues: koala wait {job}")
            # A daemon that is shutting down or unreachable does not hold the request, so pause here.
            self.timeouts.sleep(max(0.0, min(0.2, wait_s) - (now - requested_at)))

    def states(self, jobs: Sequence[int]) -> Iterator[Json]:
        """Yield ``job``, ``state`` (None without such a job) and ``problem`` of each job."""
        for start in range(0, len(jobs), MAX_STATES):
            yield from self.post("/api/v1/jobs/states", {"jobs": list(jobs[start : start + MAX_STATES])})["jobs"]

    def attempts(self, job: int, last: int | None = None) -> list[Json]:
        """Return the last attempts of a job, oldest first."""
        return cast(list[Json], self.get(f"/api/v1/jobs/{job}/attempts", last=last)["attempts"])

    def cluster(self, name: str) -> Json:
        return self.get(f"/api/v1/clusters/{in_path(name)}")

    def clusters(self) -> list[Json]:
        return cast(list[Json], self.get("/api/v1/clusters")["clusters"])

    def nodes(self, cluster: str, states: Sequence[str] = ()) -> Json:
        """Return the nodes of a cluster one by one, of all pages, with the fields of the first page."""
        answer = self.get(f"/api/v1/clusters/{in_path(cluster)}/nodes", state=list(states), limit=MAX_PAGE_SIZE)
        page = answer
        while page["next"]:
            page = self.get(page["next"])
            answer["nodes"] += page["nodes"]
        answer["next"] = None
        return answer

    def alerts(self) -> list[Json]:
        return cast(list[Json], self.get("/api/v1/alerts")["alerts"])

    def act_on_cluster(self, name: str, action: str, body: Json | None = None) -> Json:
        return self.post(f"/api/v1/clusters/{in_path(name)}/{action}", body)

    def list_jobs(self, limit: int, **query: Any) -> JobListing:
        """Return the first jobs of a list, the newest unless the query has another order."""
        jobs: dict[int, Json] = {}
        while True:
            page = self.get("/api/v1/jobs", limit=min(limit - len(jobs), MAX_PAGE_SIZE), **query)
            jobs |= {job["id"]: job for job in page["jobs"]}
            if page["next"] is None or len(jobs) >= limit:
                has_more, count = page["next"] is not None, page["count"]
                return JobListing(list(jobs.values()), has_more, count, page["count_is_whole"])
            position = parse_qs(urlsplit(page["next"]).query)
            query |= {name: position[name][0] for name in ("before", "offset") if name in position}

    def unfinished_jobs(self, limit: int, **query: Any) -> JobListing:
        """Return the first unfinished jobs: running ones, then waiting ones in the order of their queues."""
        return self.list_jobs(limit, **{"active": True, "sort": "queue", **query})

    def follow_output(
        self,
        job: int,
        *,
        follow: bool = True,
        component: int | None = None,
        stream: str | None = None,
        tail: int | None = None,
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the output of a job as it arrives, each piece with whether nothing is missing up to there.

        With ``follow``, return when the job has ended. After a lost connection, continue where it broke off, however
        long the daemon is away. ``stream``: one of the two streams, or ``marked``. ``tail``: begin with so many last
        lines of each component.
        """
        absence, attempt, offsets, is_complete = Absence(self), 0, dict[int, int](), True
        options = {"component": component, "stream": stream, "tail": tail}
        query: Json = {"follow": follow} | {name: value for name, value in options.items() if value is not None}
        while True:
            error = GridError(f"the daemon at {self.url} broke off", Exit.UNREACHABLE, "try again")
            try:
                pieces = self._stream_pieces(f"/api/v1/jobs/{job}/output", query, ANSWER_TIMEOUT_S)
                for part in map(json.loads, _split_lines(pieces)):
                    absence.end()
                    if "data" not in part:
                        yield b"", is_complete and part["is_complete"]
                        return
                    if part["attempt"] != attempt:
                        attempt, offsets, is_complete = part["attempt"], {}, True
                    is_complete = is_complete and not part["missing"]
                    offsets[part["component"]] = part["offset"]
                    yield b64decode(part["data"]), is_complete
            except GridError as rejection:
                error = rejection
            positions = ",".join(f"{number}:{offset}" for number, offset in offsets.items())
            if len(positions) > MAX_POSITIONS_LENGTH:
                lost = f"{error.message}, and output of {len(offsets)} components at once cannot be continued"
                raise GridError(lost, Exit.UNREACHABLE, f"koala logs {job} prints it from the beginning")
            absence.tolerate(error)
            query |= {"attempt": attempt, "offsets": positions}
            self.timeouts.sleep(RETRY_DELAY_S)

    def stream_events(self, job: int, last: int) -> Iterator[bytes]:
        """Yield the server-sent events of a job after event number ``last``. The daemon sends data every 15 seconds."""
        return self._stream_pieces(f"/api/v1/jobs/{job}/events", {}, ANSWER_TIMEOUT_S, {"Last-Event-ID": str(last)})

    def grid_events(self, last: str, timeout: float) -> Iterator[bytes]:
        """Yield the server-sent events of the grid after event id ``last``, until ``timeout`` seconds without data."""
        headers = {"Last-Event-ID": last} if last else {}
        return self._stream_pieces("/api/v1/events", {}, timeout, headers)

    def stream_text(self, path: str, query: Json) -> Iterator[bytes]:
        """Yield the pieces of a text response."""
        return self._stream_pieces(path, query, LONG_POLL_S)

    def clone_for_thread(self) -> "Client":
        """Return a client of the same daemons for another thread."""
        clone = Client(self.url, self._user_token, self._access, self.timeouts, self.report)
        clone._urls, clone._login = list(self._urls), self._login
        return clone

    def stream_results(self, job: int) -> Iterator[bytes]:
        """Yield the archive of a job's results. After a lost connection, continue where it broke off."""
        absence, received = Absence(self), 0
        query: Json = {}
        while True:
            offset, headers = received, dict[str, str]()
            try:
                for piece in self._stream_pieces(f"/api/v1/jobs/{job}/results", query, LONG_POLL_S, answered=headers):
                    received += len(piece)
                    yield piece
                return
            except GridError as error:
                version = headers.get("etag", "").strip('"') or query.get("version")
                if not version or (headers and received == offset):
                    raise
                if received > offset:
                    absence.end()
                absence.tolerate(error)
            query = {"offset": received, "version": version}
            self.timeouts.sleep(RETRY_DELAY_S)

    def open_stream(self, job: int, kind: Literal["terminal", "input"], **query: Any) -> "NodeStream":
        """Open a terminal on a node of a job, or a stream to its program's standard input; ``query``: as in REST."""
        from koalapy.client.node_stream import StreamRejected, connect_stream

        for turn in range(MAX_TURNS):
            try:
                self._connect()
                access = self._access
                stream = connect_stream(
                    access.parts,
                    f"/api/v1/jobs/{job}/{kind}",
                    query,
                    self.http.headers,
                    access.trust,
                    by_proxy=access.by_proxy,
                )
                self.has_answered = True
                return stream
            except StreamRejected as rejection:
                is_unauthorized = rejection.answer.status == HTTPStatus.UNAUTHORIZED
                is_renewed = is_unauthorized and turn == 0 and self._renew_login()
                if turn == MAX_TURNS - 1 or not (is_renewed or self._follow_standby(rejection.answer)):
                    raise self._rejection_error(rejection.answer) from None
            except CONNECTION_ERRORS as error:
                raise self._unreachable_error(error) from error
        raise AssertionError("the last attempt returns or raises")

    def has_bundle(self, bundle: str) -> bool:
        """Return whether the daemon stores the archive of this SHA-256. If so, the daemon extends its lifetime."""
        try:
            self.get(f"/api/v1/bundles/{bundle}")
        except GridError as error:
            if error.code is not Exit.NOT_FOUND:
                raise
            return False
        return True

    def upload_archive(self, archive: Readable, size: int) -> Json:
        """Upload an archive of ``size`` bytes to the daemon."""
        headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
        return self._request_json("POST", "/api/v1/bundles", content=archive, headers=headers, timeout=None)

    def _stream_pieces(
        self,
        path: str,
        query: Json,
        timeout: float | None,
        headers: dict[str, str] | None = None,
        answered: dict[str, str] | None = None,
    ) -> Iterator[bytes]:
        """Yield the body of a GET response as it arrives. Request a new login once if the daemon rejects the old one.

        ``timeout``: seconds without data; None for no limit. ``answered`` gets the headers of an accepted response,
        with names in small letters. Raise ``GridError`` for a rejected or interrupted response.
        """
        began = False
        try:
            for turn in range(MAX_TURNS):
                self._connect()
                with self.http.stream_response(path, query=query, timeout=timeout, headers=headers) as (
                    status,
                    response_headers,
                    pieces,
                ):
                    if status == HTTPStatus.UNAUTHORIZED and turn == 0 and self._renew_login():
                        continue
                    if status >= HTTPStatus.BAD_REQUEST:
                        answer = Answer(status, response_headers, b"".join(pieces))
                        if turn < MAX_TURNS - 1 and self._follow_standby(answer):
                            continue
                        raise self._rejection_error(answer)
                    began = self.has_answered = True
                    if answered is not None:
                        answered.update((name.lower(), value) for name, value in response_headers.items())
                    yield from pieces
                    return
        except CONNECTION_ERRORS as error:
            if began:
                message = f"the daemon at {self.url} broke off ({error})"
                raise GridError(message, Exit.UNREACHABLE, "try again") from error
            raise self._unreachable_error(error) from error

    def _request_json(self, method: str, path: str, timeout: float | None = ANSWER_TIMEOUT_S, **options: Any) -> Json:
        """Send a request and return the JSON object of the response; raise ``GridError`` for any failure.

        Request a new login once if the daemon rejects the old one. ``timeout``: in seconds; None for no limit.
        """
        try:
            options["query"] = {k: v for k, v in options.get("query", {}).items() if v not in (None, "", [], ())}
            for _ in range(MAX_TURNS):
                self._connect()
                answer = self.http.send_request(method, path, timeout=timeout, **options)
                if answer.status == HTTPStatus.UNAUTHORIZED and self._renew_login(options.get("content")):
                    answer = self.http.send_request(method, path, timeout=timeout, **options)
                if not self._follow_standby(answer):
                    break
                if (content := options.get("content")) is not None:
                    content.seek(0)
        except CONNECTION_ERRORS as error:
            raise self._unreachable_error(error) from error
        except UnicodeEncodeError as error:
            raise _no_unicode(error, options) from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise self._rejection_error(answer)
        self.has_answered = True
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise GridError(f"the server at {self.url} is not a koala daemon", Exit.UNREACHABLE, "set KOALA_URL")
        return body

    def _renew_login(self, content: Readable | None = None) -> bool:
        """Renew the login and rewind ``content`` for another request; return whether that succeeded."""
        login = self._login if self._login and self._login.token == self._access.token else self._access
        is_renewed = login.renew_login()
        self._access.token, self._access.hint = login.token, login.hint
        if not is_renewed:
            return False
        self.http.headers = self.http.headers | self._access.headers
        if content is not None:
            content.seek(0)
        return True

    def _unreachable_error(self, error: Exception) -> GridError:
        """Convert a connection error to an error for the user; it names the cause if TLS failed."""
        if explanation := explain_tls_error(error, urlsplit(self.url).hostname or ""):
            return GridError(
                f"cannot connect to the daemon at {self.url}: {explanation[0]}", Exit.UNREACHABLE, explanation[1]
            )
        if self._access.is_starting:
            message = f"the daemon at {self.url} is still starting"
            return GridError(message, Exit.UNREACHABLE, "try again when it has printed its address")
        hint = "start one with koala serve, or set KOALA_URL"
        fallbacks = f", nor at {' and '.join(map(without_password, self._urls[1:]))}" if len(self._urls) > 1 else ""
        return GridError(f"no daemon answers at {self.url}{fallbacks} ({error})", Exit.UNREACHABLE, hint)

    def _rejection_error(self, answer: Answer) -> GridError:
        """Convert an error response to an error for the user; for status 401 advise on the token."""
        error = _answer_to_error(answer)
        if error.status == HTTPStatus.UNAUTHORIZED:
            error.hint = self._access.hint
        return error


class Absence:
    """The time in which a daemon or its database is unreachable, while a command waits for a job."""

    def __init__(self, client: Client) -> None:
        self._client, self._reported = client, False

    def tolerate(self, error: GridError) -> None:
        """Print once that the daemon is unreachable, or raise the error if it is not expected to return.

        A daemon that has responded before, or says when to retry, is waited for without limit: jobs go on without it.
        """
        if not error.may_recover or (error.code is Exit.UNREACHABLE and not self._client.has_answered):
            raise error
        if not self._reported:
            self._client.report(f"koala: {printable(error.message)}; still waiting")
            self._reported = True

    def end(self) -> None:
        self._reported = False


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the complete lines of a stream that are not empty."""
    buffer = b""
    for piece in pieces:
        *complete, buffer = (buffer + piece).split(b"\n")
        yield from filter(None, complete)


def read_events(pieces: Iterator[bytes]) -> Iterator[dict[str, str]]:
    """Yield the fields of each server-sent event: ``event``, ``data``, ``id``. Skip comments."""
    buffer = b""
    for piece in pieces:
        *complete, buffer = (buffer + piece).split(b"\n\n")
        for event in complete:
            fields = dict(line.split(": ", 1) for line in event.decode().splitlines() if not line.startswith(":"))
            if fields:
                yield fields


def nodes_of(request: Json) -> int:
    """Return the number of nodes of a request."""
    if request["type"] == "flexible":
        return int(request["total_size"])
    return sum(int(component["size"]) for component in request["components"])


def in_path(name: str) -> str:
    """Quote a name as one segment of a URL path. Raise ``GridError`` if it cannot be encoded."""
    if not is_utf8(name):
        raise GridError(f"the name {name[:60]!r} is not valid UTF-8", Exit.USAGE, "write it in UTF-8")
    return quote(name, safe="")


def _no_unicode(error: UnicodeEncodeError, sent: Json) -> GridError:
    """Return an error with the name of the field that cannot be encoded."""
    field, text = _odd_text(sent.get("body"), "") or ("", error.object)
    message = f"{field or 'what was given'} is {text[:60]!r}, which is not valid UTF-8"
    return GridError(message, Exit.USAGE, "write it in UTF-8", field)


def _odd_text(value: object, field: str) -> tuple[str, str] | None:
    """Return the first text that cannot be encoded, and its field."""
    if isinstance(value, str):
        return None if is_utf8(value) else (field, value)
    children: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        if odd := next((str(name) for name in value if not is_utf8(str(name))), None):
            return field, odd
        children = ((f"{field}.{name}" if field else str(name), child) for name, child in value.items())
    elif isinstance(value, (list, tuple)):
        children = ((f"{field}[{index}]", child) for index, child in enumerate(value))
    return next((pair for name, child in children if (pair := _odd_text(child, name))), None)


def _answer_to_error(answer: Answer) -> GridError:
    """Convert a problem+json response to an error."""
    try:
        error = problem_to_error({**answer.json(), "status": answer.status})
    except (ValueError, KeyError, TypeError):
        return GridError(f"HTTP status {answer.status}, not from a koala daemon", Exit.UNREACHABLE, "set KOALA_URL")
    pause = answer.headers.get("Retry-After", "")
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS and pause:
        error.hint = f"{error.hint or 'try again'} (in {pause} s)"
    error.retry_after = float(pause) if pause.isdecimal() else 0.0
    return error


def problem_to_error(problem: Json) -> GridError:
    """Convert a problem of the daemon to an error."""
    status, hint, field = int(problem["status"]), str(problem.get("hint") or ""), str(problem.get("field") or "")
    error = GridError(str(problem["detail"]), CODE_OF_STATUS.get(status, Exit.FAILED), hint, field)
    error.status = status
    error.problem = next((code for code in ProblemCode if code == problem.get("code")), None)
    return error
