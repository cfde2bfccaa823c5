"""``koala workload run``: access to the daemon over REST, and the progress display of a run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, show_json
from koalapy.cli.terminal.screen import Block, waiting_for
from koalapy.cli.terminal.streams import without_control_codes
from koalapy.cli.workload.report import Plots, PlotsOption, make_folder, save_report
from koalapy.client.client import Client, in_path
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.http import Json
from koalapy.workload.background import Away, Busy, Refused
from koalapy.workload.plan import parse_workload
from koalapy.workload.recipe import form_for
from koalapy.workload.run import Options, Progress, Run

PLAIN_INTERVAL_S = 10.0
"""Time between two lines of progress without a terminal."""
MAX_ACTIVE_JOBS = 200_000
SERVER_ERRORS = 500


def run_workload(
    file: Annotated[Path, Argument(help="a workload, made with koala workload generate")],
    options: Options,
    directory: Annotated[Path | None, Option(help="directory of the report; default: FILE.report")] = None,
    policy: Annotated[
        str | None, Option(help="placement policy of every job, instead of the file's", completes="policies")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace an existing report")] = False,
    plots: PlotsOption = Plots.PNG,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Run a workload against the daemon, and write a report: koala workload run wave.jsonl --background 0.2"""
    folder = directory or file.with_name(f"{file.name}.report")
    if (folder / "report.json").exists() and not overwrite:
        raise CliError(f"{folder} already has a report", Exit.USAGE, "give another --directory, or --overwrite")
    try:
        with file.open(encoding="utf-8") as lines:
            workload = parse_workload(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise CliError(
            f"cannot read {file}: {reason}",
            Exit.USAGE,
            "give a workload file; koala workload generate -o FILE writes one",
        ) from error
    make_folder(folder)
    rest_daemon = RestDaemon(client := daemon.client(), policy)
    rest_daemon.check(options.background)
    with ProgressDisplay() as display:
        sleep = client.timeouts.sleep
        report = Run(
            workload, rest_daemon, options, tell=display.print_message, show=display.draw_progress, sleep=sleep
        ).run()
    with waiting_for("writes the report"):
        text = save_report(folder, report, plots, folder.name)
    if as_json:
        show_json({name: report[name] for name in ("run", "summary", "utilisation", "by_application", "by_size")})
    else:
        print(without_control_codes(text), end="")
    print(f"koala: the report is in {folder}", file=sys.stderr)
    return ended_with(report)


def ended_with(report: Json) -> Exit:
    """Return the exit code of a report: interrupted, timed out, with failed jobs, or successful."""
    reason = report["run"]["interrupted"]
    if reason == "interrupted":
        return Exit.INTERRUPTED
    if reason:
        return Exit.TIMEOUT if reason.startswith("not done") else Exit.UNREACHABLE
    return Exit.OK if set(report["summary"]["states"]) <= {"succeeded"} else Exit.FAILED


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Convert errors of the client to those that a run handles."""
    try:
        yield
    except CliError as error:
        if error.retry_after:
            raise Busy(error.message, error.retry_after) from error
        if error.code is Exit.UNREACHABLE or error.status >= SERVER_ERRORS:
            raise Away(str(error)) from error
        raise Refused(str(error)) from error


class RestDaemon:
    """The interface of a run to its daemon, over REST."""

    def __init__(self, client: Client, policy: str | None) -> None:
        """``policy``: the placement policy for every job, if given; requests are converted to a kind that it serves."""
        self._client, self._policy = client, policy
        self._owners: set[str] = set()
        """Owners of the submitted jobs: a workload may have several."""

    def check(self, background: float) -> None:
        """Raise ``CliError`` if the daemon is unreachable, or if it rejects the requested background load."""
        clusters = self._client.clusters()
        if not background or not clusters:
            return
        try:
            # A daemon that accepts background load rejects zero nodes with an error for that field.
            nothing = {"nodes": 0, "seconds": 1}
            self._client.post(f"/api/v1/clusters/{in_path(clusters[0]['name'])}/background", nothing)
        except CliError as error:
            if error.field != "nodes":
                raise

    @_translated_errors()
    def submit_job(self, job: Json, key: str) -> Json:
        body = dict(job)
        if self._policy:
            body |= {"policy": self._policy, "request": request_for(self._policy, job["request"])}
        job = self._client.post("/api/v1/jobs", body, {"Idempotency-Key": key})
        self._owners.add(job["owner"])
        return job

    @_translated_errors()
    def list_clusters(self) -> Sequence[Json]:
        clusters: list[Json] = self._client.get("/api/v1/clusters")["clusters"]
        return clusters

    @_translated_errors()
    def active_states(self) -> Mapping[int, str]:
        listings = [
            self._client.list_jobs(MAX_ACTIVE_JOBS, active=True, owner=owner).jobs for owner in sorted(self._owners)
        ]
        return {job["id"]: job["state"] for jobs in listings for job in jobs}

    @_translated_errors()
    def fetch_job(self, job: int) -> Json:
        return self._client.get(f"/api/v1/jobs/{job}")

    @_translated_errors()
    def list_attempts(self, job: int) -> Sequence[Json]:
        attempts: list[Json] = self._client.get(f"/api/v1/jobs/{job}/attempts")["attempts"]
        return attempts

    @_translated_errors()
    def cancel_jobs(self, jobs: Sequence[int]) -> Sequence[str]:
        results = self._client.act_on_jobs("cancel", list(jobs), {"reason": "the workload was interrupted"})
        return [str(result["problem"]["detail"]) for result in results if result["problem"]]

    @_translated_errors()
    def start_load(self, cluster: str, nodes: int, seconds: float) -> None:
        self._client.post(f"/api/v1/clusters/{in_path(cluster)}/background", {"nodes": nodes, "seconds": seconds})

    @_translated_errors()
    def end_load(self, cluster: str) -> None:
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


class ProgressDisplay(Block):
    """A progress line that is redrawn on a terminal, and printed at intervals elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def print_message(self, text: str) -> None:
        Block.report(f"koala: {printable(text)}")

    def draw_progress(self, progress: Progress) -> None:
        if self.is_in_place or progress.seconds >= self._next_s:
            self._next_s = progress.seconds + PLAIN_INTERVAL_S
            self.draw([line_of(progress)])


def line_of(progress: Progress) -> str:
    """Return the progress of a run as one line of text."""
    waiting = progress.states.total() - progress.states["running"]
    ended = ", ".join(f"{count} {state}" for state, count in sorted(progress.ended.items())) or "0 ended"
    idle = progress.total - progress.ours - progress.background
    parts = [
        f"{progress.seconds:5.0f} s",
        f"{progress.submitted}/{progress.jobs} submitted",
        f"{waiting} wait, {progress.states['running']} run, {ended}",
        f"nodes: {progress.ours} jobs, {progress.background} background, {max(0, idle)} idle of {progress.total}",
    ]
    if progress.mean_background is not None:
        parts.append(f"background {progress.mean_background:.0%} so far")
    if progress.late:
        parts.append(f"{progress.late} late")
    if progress.away:
        parts.append("the daemon is away")
    return " · ".join(parts)
