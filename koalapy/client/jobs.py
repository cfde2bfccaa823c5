"""Jobs of the Python client: their state, output, results and explanation."""

import time
import warnings
from codecs import getincrementaldecoder
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Self

from koalapy.client.client import FINAL, Client, name_of
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.notebook import draw_timeline, format_html_table
from koalapy.client.tables import QUEUE, explain_headline


class Explanation(dict[str, Any]):
    """Why a job waits, runs or has ended: the fields of the REST API, shown as the decisive reason and what helps."""

    def __repr__(self) -> str:
        change = self["smallest_change"]
        lines = [
            explain_headline(self),
            *(f"{cluster['cluster']}: {cluster['reason']}" for cluster in self["clusters"]),
            *(f"suffices: {event}" for event in self["suffices"]),
            *([f"would start now: {change['text']}"] if change else []),
        ]
        return "\n".join(map(printable, lines))


class Job:
    """A job of a grid. Its properties ask the grid, until the job has ended."""

    def __init__(self, client: Client, answer: Json) -> None:
        """``answer``: the job as the daemon has sent it; its id is enough."""
        self._client, self._answer = client, answer
        self.id: int = answer["id"]
        """The number of the job."""

    def __index__(self) -> int:
        return self.id

    @property
    def info(self) -> Json:
        """All fields of the job in the REST API, with its timeline."""
        if self._answer.get("state") not in FINAL or "timeline" not in self._answer:
            self._answer = self._client.job(self.id)
        return self._answer

    @property
    def name(self) -> str:
        """The number of the job, or ``7[3]`` for a task of an array."""
        return name_of(self._answer if "array_job" in self._answer else self.info)

    @property
    def state(self) -> str:
        """The state: ``queued``, ``held``, ``placed``, ``claiming``, ``starting``, ``running``, ``unknown`` while a
        cluster is unreachable, ``succeeded``, ``failed`` or ``cancelled``."""
        return str(self.info["state"])

    @property
    def reason(self) -> str:
        """Why the job waits, failed or was cancelled."""
        return str(self.info["reason"])

    @property
    def exit_code(self) -> int | None:
        """The exit code of the program; None until it has ended."""
        code: int | None = self.info["exit_code"]
        return code

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the job has ended, also while the daemon is away, and return the job.

        Raise ``GridError`` with the code ``Exit.TIMEOUT`` after ``timeout`` seconds. A failed job is no error: see
        ``state``.
        """
        self._client.wait_for_end(self.id, None if timeout is None else time.monotonic() + timeout)
        return self

    def output(self, stream: str | None = None, tail: int | None = None) -> str:
        """Return the output until now. ``stream``: only ``output`` or ``error``; ``tail``: only so many last lines of
        each component."""
        return "".join(self._read_output(follow=False, stream=stream, tail=tail))

    def follow(self, stream: str | None = None) -> Iterator[str]:
        """Yield the output as it arrives, until the job has ended."""
        return self._read_output(follow=True, stream=stream)

    def _read_output(self, **options: Any) -> Iterator[str]:
        decoder, is_complete = getincrementaldecoder("utf-8")("replace"), True
        for piece, is_whole in self._client.follow_output(self.id, **options):
            is_complete = is_whole
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
        if not is_complete:
            warnings.warn(f"a part of the output of job {self.name} is missing", stacklevel=2)

    def explain(self) -> Explanation:
        """Return why the job waits and what would start it, or why it is where it is."""
        return Explanation(self._client.get(f"/api/v1/jobs/{self.id}/explain"))

    def cancel(self, reason: str = "", *, warn: bool = False) -> None:
        """Cancel the job. ``reason`` is required for jobs of others. ``warn``: send the warning signal first."""
        self._client.post(f"/api/v1/jobs/{self.id}/cancel", {"reason": reason, "warn": warn})

    def fetch(self, folder: str | PathLike[str] | None = None, *, force: bool = False) -> Path:
        """Download the collected results into a folder, by default ``job-ID``, and return it.

        Each component has a folder in it, such as ``0-north``. ``force``: overwrite existing files. Raise
        ``GridError`` if a component has no results.
        """
        from koalapy.client.results import check_folder, missing_results, unpack_results

        target = Path(folder or f"job-{self.name}")
        check_folder(target, force=force)
        info = self.info
        received = unpack_results(self._client.stream_results(self.id), target, force=force)
        if missing := missing_results(info, received):
            hint = "the job is not over" if info["state"] not in FINAL else f"see koala show {self.name}"
            raise GridError(f"there are no results of {', '.join(missing)}", Exit.FAILED, hint)
        return target

    def __repr__(self) -> str:
        info = self.info
        reason = f": {info['reason']}" if info["reason"] else ""
        return printable(f"<{type(self).__name__} {self.name} {info['state']}{reason}>")

    def _repr_html_(self) -> str:
        table = format_html_table(list(QUEUE), [[cell(self.info) for cell in QUEUE.values()]])
        return table + draw_timeline(self.info)


class Array(Job):
    """An array: one submission with many tasks, each a job. ``tasks[0]`` is the first of ``len(tasks)``."""

    def __len__(self) -> int:
        return int((self._answer if "tasks" in self._answer else self.info)["tasks"]["size"])

    def __getitem__(self, position: int) -> Job:
        """Return the task at a position, from 0. It need not be started."""
        return Job(self._client, {"id": range(self.id + 1, self.id + 1 + len(self))[position]})

    def __iter__(self) -> Iterator[Job]:
        return map(self.__getitem__, range(len(self)))

    def states(self) -> list[str]:
        """Return the state of each task by one request for 10,000; ``cancelled`` for those that never start."""
        numbers = range(self.id + 1, self.id + 1 + len(self))
        return [answer["state"] or "cancelled" for answer in self._client.states(numbers)]
