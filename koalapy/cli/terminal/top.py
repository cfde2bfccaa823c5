"""``koala top``: a live full-screen view of alerts, clusters, the queue and one job."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from threading import Thread
from typing import Annotated

from koalapy.cli.jobs import explain, waiting
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.cli.terminal.screen import BOLD, REVERSE, TICK_S, Feed, Line, Screen, can_redraw
from koalapy.cli.terminal.text import fold_text
from koalapy.client.answers import Alert, Cluster, ListedJob
from koalapy.client.client import Client, nodes_of
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_nodes

EXPLAINED = ("queued", "held", "placed", "claiming", "unknown")
"""States of jobs for which the page begins with an explanation."""
MAX_ALERTS = 3
MAX_ATTEMPTS = 5
MAX_REASON_LINES = 4
MAX_TAIL_LINES = 500
MAX_LINE_LENGTH = 2000
"""Maximum length of a line of output in characters."""


def show_top(
    everyone: Annotated[bool, Option("--all", help="show jobs of all users")] = False,
    limit: Annotated[int, Option(help="maximum number of jobs", min=1, max=2000)] = 200,
    daemon: Daemon = DAEMON,
) -> None:
    """Show alerts, clusters, queue and a job, live on the whole terminal.

    Keys: Enter opens a job or filters by a cluster, a shows all users' jobs, / searches, q quits.
    """
    if not (sys.stdin.isatty() and can_redraw(sys.stdout) and can_redraw(sys.stderr)):
        raise CliError("koala top needs a terminal", Exit.USAGE, "use koala queue --watch instead")
    screen = Screen(reads_keys=True)
    view = Top(daemon.client(), everyone=everyone, limit=limit, wake=screen.end_wait)
    try:
        with screen.open_screen():
            while not view.is_over:
                screen.draw_page(view.page_lines(*screen.size))
                for key in screen.wait_for_input(TICK_S):
                    view.press_key(key)
    except KeyboardInterrupt:
        pass
    finally:
        view.close()
    if view.feed.ended is not None:
        raise view.feed.ended


@dataclass(frozen=True, slots=True)
class Grid:
    """The responses of the daemon to one update, and the filters of the requests."""

    clusters: list[Cluster]
    jobs: list[ListedJob]
    has_more: bool
    alerts: list[Alert]
    everyone: bool
    cluster: str


@dataclass(slots=True)
class Rows:
    """A table with a cursor that follows its row. Rows are identified by their first cells."""

    header: Sequence[str]
    ids: list[str] = field(default_factory=list)
    """First cells of the rows, in order."""
    position: int = 0

    @property
    def selected(self) -> str:
        return self.ids[self.position] if self.ids else ""

    def page_lines(self, rows: Sequence[Sequence[object]], height: int, *, has_focus: bool) -> list[Line]:
        """Return the header, and the rows around the cursor that fit ``height``."""
        chosen, self.ids = self.selected, [str(row[0]) for row in rows]
        self.position = self.ids.index(chosen) if chosen in self.ids else min(self.position, max(0, len(rows) - 1))
        header, *texts = tables.format_table(self.header, rows, fold=False).split("\n")
        row_count = max(1, height - 1)
        first = max(0, min(self.position - row_count // 2, len(texts) - row_count))
        cursor = self.position if has_focus and rows else -1
        lines = [
            Line(text, REVERSE if first + i == cursor else "")
            for i, text in enumerate(texts[first : first + row_count])
        ]
        return [Line(header, BOLD), *lines]

    def move_cursor(self, key: str, page: int) -> None:
        """Move the cursor by a key, within the table. ``page``: number of rows for Page Up and Page Down."""
        last = len(self.ids) - 1
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "page down": page, "page up": -page, "home": -last, "end": last}
        steps |= {"g": -last, "G": last}
        self.position = max(0, min(self.position + steps.get(key, 0), last))


class Top:
    """The content and the key bindings of ``koala top``, independent of a terminal."""

    def __init__(self, client: Client, *, everyone: bool, limit: int, wake: Callable[[], None]) -> None:
        self._client, self._everyone, self._limit, self._wake = client, everyone, limit, wake
        self._cluster, self._pattern, self._is_typing = "", "", False
        self._clusters, self._jobs = Rows(tables.CLUSTERS), Rows(tables.QUEUE)
        self._focus, self._page_rows = self._jobs, 10
        self._job: JobPage | None = None
        self._has_quit = False
        self._unicode = tables.is_unicode()
        self.whoami = client.get("/api/v1/whoami")
        self.feed: Feed[Grid] = Feed(client, self._request_data, wake)

    @property
    def is_over(self) -> bool:
        return self._has_quit or self.feed.ended is not None

    def close(self) -> None:
        self.feed.close()
        if self._job is not None:
            self._job.close()

    def _request_data(self, client: Client) -> Grid:
        """Request clusters, jobs and alerts with the current filters, for one update of the page."""
        everyone, cluster = self._everyone, self._cluster
        clusters = client.clusters()
        listing = client.unfinished_jobs(self._limit, mine=None if everyone else True, cluster=cluster)
        return Grid(clusters, listing.jobs, listing.has_more, client.alerts(), everyone, cluster)

    def press_key(self, key: str) -> None:
        """Handle a key: pass it to the open job or the search, or control the lists."""
        if self._job is not None:
            if key in ("escape", "q"):
                self._job.close()
                self._job = None
            else:
                self._job.press_key(key)
        elif self._is_typing:
            self._type_key(key)
        elif key == "q":
            self._has_quit = True
        elif key == "tab":
            self._focus = self._clusters if self._focus is self._jobs else self._jobs
        elif key == "enter" and self._focus is self._jobs and self._jobs.selected:
            self._job = JobPage(self._client, int(self._jobs.selected), self._wake, unicode=self._unicode)
        elif key in ("enter", "a", "escape"):
            self._choose_jobs(key)
        elif key == "/":
            self._is_typing = True
        else:
            self._focus.move_cursor(key, self._page_rows)

    def _choose_jobs(self, key: str) -> None:
        """Change the owner or the cluster of the listed jobs."""
        if key == "a":
            self._everyone = not self._everyone
        elif key == "escape":
            self._pattern = self._cluster = ""
        elif self._focus is self._clusters:
            self._cluster = "" if self._cluster == self._clusters.selected else self._clusters.selected
        self.feed.refresh()

    def _type_key(self, key: str) -> None:
        """Edit the search text by a key. Enter ends typing, Escape also deletes the text."""
        if key in ("enter", "escape"):
            self._is_typing = False
            self._pattern = self._pattern if key == "enter" else ""
        elif key == "erase":
            self._pattern = self._pattern[:-1]
        elif len(key) == 1:
            self._pattern += key.lower()

    def page_lines(self, columns: int, rows: int) -> list[Line]:
        """Return the page for a terminal of this size."""
        feed = self.feed if self._job is None or self._job.feed is None else self._job.feed
        now = datetime.now(UTC).strftime("%H:%M:%S UTC")
        identity = f"{self.whoami['user']}, {self.whoami['role']}"
        live = f"koala top {self._client.url} {identity} {now} {'live' if feed.is_live else 'every 2 s'}"
        stale = feed.staleness
        head = Line(stale.upper() if stale else printable(live), f"{BOLD};{REVERSE}" if stale else BOLD)
        if self._job is not None:
            keys = Line("Esc Back  o Output  j/k Scroll", BOLD)
            return [head, *self._job.page_lines(rows - 2), keys]
        grid = self.feed.latest
        jobs = [row for job in grid.jobs if self._pattern in " ".join(map(str, row := tables.queue_row(job))).lower()]
        upper_lines = [head, *(Line(text, f"{BOLD};{REVERSE}") for text in alert_lines(grid.alerts))]
        clusters = [tables.cluster_row(cluster) for cluster in grid.clusters]
        upper_lines += self._clusters.page_lines(
            clusters, max(3, rows * 3 // 10), has_focus=self._focus is self._clusters
        )
        upper_lines.append(Line(f"/{self._pattern}" if self._is_typing else self._describe_jobs(grid, len(jobs))))
        selected = next((job for job in grid.jobs if str(job["id"]) == self._jobs.selected), None)
        reason = (
            f"job {selected['id']} is {selected['state']}: {selected['reason']}"
            if selected and selected["reason"]
            else ""
        )
        lower_lines = (
            [Line(text) for text in fold_text(printable(reason), columns)[:MAX_REASON_LINES]] if reason else []
        )
        lower_lines.append(Line("q Quit  a All/mine  / Look for  Tab Clusters/jobs  Enter Open", BOLD))
        self._page_rows = max(1, rows - len(upper_lines) - len(lower_lines) - 1)
        return [
            *upper_lines,
            *self._jobs.page_lines(jobs, self._page_rows + 1, has_focus=self._focus is self._jobs),
            *lower_lines,
        ]

    def _describe_jobs(self, grid: Grid, job_count: int) -> str:
        """Describe which jobs are listed."""
        text = "Jobs of all users" if grid.everyone else f"Jobs of {self.whoami['user']}"
        text += f" on {grid.cluster}" if grid.cluster else ""
        text += f" with {self._pattern!r}" if self._pattern else ""
        text += f": {job_count}" + ("; more jobs wait, --limit shows them" if grid.has_more else "")
        waiting = sum(job["state"] in ("queued", "held") for job in grid.jobs)
        requested = sum(nodes_of(job["request"]) for job in grid.jobs if job["state"] == "queued")
        text += f" ({waiting} wait for {format_nodes(requested)})" if waiting and not grid.has_more else ""
        is_old = (grid.everyone, grid.cluster) != (self._everyone, self._cluster)
        return printable(text + (" …" if is_old else ""))


def alert_lines(alerts: Sequence[Alert]) -> list[str]:
    """Return a line for each of the most urgent alerts, with its remedy."""
    lines = [
        printable(f"{alert['severity'].upper()} {alert['target']}: {alert['summary']}. {alert['remedy']}")
        for alert in alerts[:MAX_ALERTS]
    ]
    return lines + ([f"and {len(alerts) - MAX_ALERTS} more: koala alerts"] if len(alerts) > MAX_ALERTS else [])


class JobPage:
    """The page of one job, with its output on request."""

    def __init__(self, client: Client, job: int, wake: Callable[[], None], *, unicode: bool) -> None:
        self._client, self._number, self._wake, self._unicode = client, job, wake, unicode
        self.feed: Feed[Callable[[], str]] | None = None
        self._failure = "…"
        self._output: deque[str] | None = None
        self._output_state = "as it comes"
        self._first, self._last_first = 0, 0
        self._is_closed = False
        Thread(target=self._open_feed, daemon=True).start()

    def _open_feed(self) -> None:
        """Start the updates of the page; if the first request fails, show its error. Runs in a thread."""
        try:
            self.feed = Feed(self._client, self._request_data, self._wake)
        except CliError as error:
            self._failure = str(error)
        if self._is_closed:
            self.close()
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        if self.feed is not None:
            self.feed.close()

    def _request_data(self, client: Client) -> Callable[[], str]:
        """Request the job and return a function that formats the page for the current time.

        If the daemon rejects the request because of this job, the page is the error message.
        """
        try:
            job = client.job(self._number)
            if job["redacted"]:
                return lambda: f"job {self._number}: only its owner and operators see more"
            is_explained = job["state"] in EXPLAINED
            explanation = client.get(f"/api/v1/jobs/{self._number}/explain") if is_explained else None
            attempts = client.attempts(self._number, MAX_ATTEMPTS + 1)
        except CliError as error:
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT):
                return partial("job {}: {}".format, self._number, error)
            raise

        def format_page() -> str:
            staged = waiting.transfer_lines(job, unicode=self._unicode)
            text = tables.job_page(job, attempts, MAX_ATTEMPTS, staged, unicode=self._unicode)
            return text if explanation is None else f"{explain.format_explanation(explanation)}\n\n{text}"

        return format_page

    def press_key(self, key: str) -> None:
        """Scroll, or show the output."""
        if key == "o":
            if self._output is None:
                self._output = deque([""], MAX_TAIL_LINES)
                Thread(
                    target=self._follow_output, args=(self._client.clone_for_thread(), self._output), daemon=True
                ).start()
            self._first = sys.maxsize
        steps = {
            "down": 1,
            "j": 1,
            "up": -1,
            "k": -1,
            "page down": 20,
            "page up": -20,
            "end": sys.maxsize,
            "G": sys.maxsize,
        }
        steps |= {"home": -sys.maxsize, "g": -sys.maxsize}
        self._first = max(0, min(self._first, self._last_first) + steps[key]) if key in steps else self._first

    def page_lines(self, height: int) -> list[Line]:
        """Return ``height`` lines of the page from the scroll position."""
        lines = (self._failure if self.feed is None else self.feed.latest()).split("\n")
        if self._output is not None:
            lines += ["", f"output, {printable(self._output_state)}", *map(_without_control_codes, list(self._output))]
        self._last_first = max(0, len(lines) - height)
        first = min(self._first, self._last_first)
        visible = lines[first : first + max(0, height)]
        return [Line(line) for line in visible + [""] * (height - len(visible))]

    def _follow_output(self, client: Client, output: deque[str]) -> None:
        """Add the lines of the job's output to ``output`` as they arrive. Runs in a thread."""

        def stop_following(message: str) -> None:
            raise CliError(message.removeprefix("koala: ").partition("; still waiting")[0], Exit.UNREACHABLE)

        client.report = stop_following  # the page shows that the daemon is away
        try:
            for piece, _ in client.follow_output(self._number):
                first, *new_lines = piece.decode(errors="replace").split("\n")
                output[-1] = (output[-1] + first)[-MAX_LINE_LENGTH:]
                output.extend(line[:MAX_LINE_LENGTH] for line in new_lines)
                self._wake()
            self._output_state = "all of it has come"
        except CliError as error:
            self._output_state = str(error)
        self._wake()


def _without_control_codes(line: str) -> str:
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in line.rstrip("\r"))
