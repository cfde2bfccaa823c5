"""The daemon's REST API as the commands use it."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from koalapy.cli.errors import CODE_OF_STATUS, CliError, Exit

if TYPE_CHECKING:
    import httpx2

Json = dict[str, Any]
FINAL = ("succeeded", "failed", "cancelled")
LONG_POLL = 20.0
"""Seconds for which the daemon is asked to hold a question."""
TRIES = 4


class Client:
    """Talks to one daemon; every failure is a ``CliError``."""

    def __init__(self, url: str, token: str | None) -> None:
        import httpx2

        self._errors = httpx2.TransportError
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=LONG_POLL + 20)
        except (httpx2.InvalidURL, ValueError) as error:
            raise CliError(f"{url} is no URL: {error}", Exit.USAGE, "set --url or KOALA_URL") from error

    def get(self, path: str, **query: Any) -> Json:
        return self._json("GET", path, params={k: v for k, v in query.items() if v not in (None, "", [], ())})

    def post(self, path: str, body: Json | None = None, headers: dict[str, str] | None = None) -> Json:
        return self._json("POST", path, json=body, headers=headers)

    def submit(self, body: Json, key: str) -> Json:
        """Submit once, however often it has to be sent: the key makes a repetition harmless."""
        for pause in (0.2, 0.5, 1.0):
            try:
                return self.post("/api/v1/jobs", body, {"Idempotency-Key": key})
            except CliError as error:
                if error.code is not Exit.UNREACHABLE:
                    raise
            time.sleep(pause)
        return self.post("/api/v1/jobs", body, {"Idempotency-Key": key})

    def wait(self, job: int, deadline: float | None) -> Json:
        """The job when it is over; ``CliError`` when that is not so at ``deadline`` (monotonic seconds)."""
        while True:
            left = LONG_POLL if deadline is None else max(0.0, min(LONG_POLL, deadline - time.monotonic()))
            found = self.get(f"/api/v1/jobs/{job}", wait=left)
            if found["state"] in FINAL:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise CliError(f"job {job} is still {found['state']}", Exit.TIMEOUT, f"it goes on: koala wait {job}")

    def logs(self, job: int, follow: bool, component: int | None) -> Iterator[bytes]:
        """The output of a job, piece by piece."""
        query: Json = {"follow": follow} | ({} if component is None else {"component": component})
        timeout = None if follow else LONG_POLL
        try:
            with self._http.stream("GET", f"/api/v1/jobs/{job}/logs", params=query, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    raise _refusal(answer)
                yield from answer.iter_raw()
        except self._errors as error:
            raise self._unreachable(error) from error

    def _json(self, method: str, path: str, **more: Any) -> Json:
        try:
            answer = self._http.request(method, path, **more)
        except self._errors as error:
            raise self._unreachable(error) from error
        if answer.is_error:
            raise _refusal(answer)
        body: Json = answer.json()
        return body

    def _unreachable(self, error: Exception) -> CliError:
        hint = "start one with koala serve, or set KOALA_URL"
        return CliError(f"no daemon answers at {self.url} ({error})", Exit.UNREACHABLE, hint)


def _refusal(answer: "httpx2.Response") -> CliError:
    """A problem+json answer as an error."""
    try:
        problem = answer.json()
        detail, hint = str(problem["detail"]), str(problem.get("hint") or "")
    except (ValueError, KeyError, TypeError):
        detail, hint = f"the daemon answered {answer.status_code}", "is KOALA_URL a koala daemon's?"
    code = CODE_OF_STATUS.get(answer.status_code, Exit.FAILED)
    return CliError(detail, code, hint)
