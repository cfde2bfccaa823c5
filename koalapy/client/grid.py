"""The grid as a Python object: submit, find and list jobs. Start at ``connect``."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from koalapy.client.client import FINAL, Client
from koalapy.client.errors import Exit as Exit
from koalapy.client.errors import GridError as GridError
from koalapy.client.http import Json
from koalapy.client.jobs import Array, Job
from koalapy.client.notebook import Table
from koalapy.client.tables import CLUSTERS, QUEUE
from koalapy.model.job_state import ACTIVE_STATES, WAITING_STATES

if TYPE_CHECKING:
    from koalapy.client.executor import GridExecutor

STATES = {"waiting": WAITING_STATES, "active": ACTIVE_STATES, "ended": FINAL}
"""Words for several states."""


def connect(url: str | None = None, token: str | None = None) -> "Grid":
    """Connect to the daemon of a grid.

    The URL is by default that of ``KOALA_URL``, or of the daemon on this machine. The token is found as by the command
    ``koala``: ``KOALA_TOKEN``, the files of this account's own daemon, or a login. Raise ``GridError`` if no daemon
    answers or it rejects the token.
    """
    client = Client(url or os.environ.get("KOALA_URL") or None, token or os.environ.get("KOALA_TOKEN") or None)
    return Grid(client, client.get("/api/v1/whoami")["user"])


class Grid:
    """A grid of clusters. Its methods raise ``GridError`` for what the daemon rejects."""

    def __init__(self, client: Client, user: str) -> None:
        self.client, self.user = client, user
        """The client of the REST API, as in ``grid.client.get("/api/v1/alerts")``, and the name of the caller."""

    def submit(self, command: str | Sequence[object], **options: Any) -> Job:
        """Submit a job and return it, or an ``Array`` with the option ``array`` or ``each_line``.

        The command is a list of words, or a text that is split as a shell does. The options are those of ``koala
        submit`` with ``_`` for ``-``, or the fields of the REST API: ``flexible=6``, ``fixed={"north": 2}``,
        ``nonfixed=[2, 4]``, ``walltime="1h"`` or a ``timedelta``, ``inputs=["climate/2026.nc"]``, ``stage=["model"]``,
        ``collect=["out/*.csv"]``, ``environment={"A": "1"}``, ``after=[job]``. The default is one node, and MPI:
        ``launcher="processes"`` starts the command once on each node.
        """
        from koalapy.client.submission import build_submission

        body, paths = build_submission(command, options)
        if paths:
            from koalapy.client.archive import upload_files

            body["bundle"] = upload_files(self.client, paths)
        return self._make_job(self.client.submit(body, os.urandom(16).hex()))

    def map(
        self, command: str | Sequence[object], values: Iterable[object], *, at_once: int | None = None, **options: Any
    ) -> Array:
        """Submit an array with a task for each value, which replaces ``{}`` in the command: ``grid.map("./sim {}",
        range(100))``.

        ``at_once``: maximum number of tasks that run at once; ``options``: as of ``submit``. By default each task is
        one process on one node.
        """
        words = shlex.split(command) if isinstance(command, str) else list(map(str, command))
        # A shell on the node inserts the value, quoted as one word or as a part of one.
        line = '"$KOALA_ARRAY_LINE"'
        parts = [line.join(part and shlex.quote(part) for part in word.split("{}")) or "''" for word in words]
        lines = list(map(str, values))
        if not lines:
            raise GridError("values is empty", Exit.USAGE, "give a value for each task", "values")
        options = {"launcher": "processes", "each_line": lines, **options}
        if at_once is not None:
            options["array"] = f"{options.get('array', '')}%{at_once}"
        array = self.submit(["sh", "-c", f"exec {' '.join(parts)}"], **options)
        assert isinstance(array, Array)
        return array

    def executor(
        self,
        nodes: int = 1,
        *,
        walltime: object = None,
        at_once: int | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> "GridExecutor":
        """Return an executor, as of ``concurrent.futures``, of which each call runs as a task on nodes of the grid.

        The function runs once, on the first of its ``nodes``, by the interpreter ``python``. ``at_once``: maximum
        number of tasks of a batch that run at once; ``options``: as of ``submit``.
        """
        from koalapy.client.executor import GridExecutor

        sizes = {} if options.keys() & {"fixed", "nonfixed"} else {"flexible": nodes}
        options = {**sizes, "walltime": walltime, **options}
        return GridExecutor(self.client, python, at_once, options)

    def job(self, job: SupportsIndex | str) -> Job:
        """Return a job by its id, or a task of an array by a text such as ``7[3]``."""
        if isinstance(job, str):
            from koalapy.client.job_reference import JobReference

            job = JobReference.parse(job).find_number(self.client)
        return self._make_job(self.client.job(job.__index__()))

    def jobs(
        self,
        state: str | Sequence[str] | None = None,
        *,
        user: str | None = None,
        everyone: bool = False,
        limit: int = 1000,
        **query: Any,
    ) -> Table[Job]:
        """Return jobs, by default your unfinished ones, running jobs first.

        ``state``: a state or several, or ``waiting``, ``active`` or ``ended``, newest first; ``query``: other
        parameters of the REST API, such as ``name``, ``cluster``, ``since`` and ``array``.
        """
        names = [state] if isinstance(state, str) else state or ()
        states = sorted({str(job_state) for name in names for job_state in STATES.get(name, (name,))})
        sort = "newest" if set(states) & set(FINAL) else "queue"
        mine = None if user or everyone else True
        query |= {"state": states, "active": not states, "owner": user, "mine": mine, "sort": sort}
        answers = self.client.list_jobs(limit, **query).jobs
        return Table(map(self._make_job, answers), QUEUE, answers)

    def clusters(self) -> Table[Json]:
        """Return the clusters with their nodes."""
        clusters = self.client.clusters()
        return Table(clusters, CLUSTERS, clusters)

    def _make_job(self, answer: Json) -> Job:
        return Job(self.client, answer) if answer["tasks"] is None else Array(self.client, answer)

    def __repr__(self) -> str:
        return f"<Grid {self.client.url} as {self.user}>"

    def _repr_html_(self) -> str:
        return self.clusters()._repr_html_()
