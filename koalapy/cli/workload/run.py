"""``koala workload run``: the command and the progress display of a run."""

import sys
from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, show_json
from koalapy.cli.terminal.screen import Block, waiting_for
from koalapy.cli.terminal.streams import without_control_codes
from koalapy.cli.workload.report import make_folder, save_report
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.workload.daemon import WorkloadDaemon
from koalapy.workload.plan import parse_workload
from koalapy.workload.run import Options, Progress, Run

PLAIN_INTERVAL_S = 10.0
"""Time between two lines of progress without a terminal."""


def run_workload(
    file: Annotated[Path, Argument(help="a workload, made with koala workload generate")],
    options: Options,
    directory: Annotated[Path | None, Option(help="directory of the report; default: FILE.report")] = None,
    policy: Annotated[
        str | None, Option(help="placement policy of every job, instead of the file's", completes="policies")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace an existing report")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Run a workload against the daemon, and write a report: koala workload run wave.jsonl --background 0.2"""
    folder = directory or file.with_name(f"{file.name}.report")
    if (folder / "report.json").exists() and not overwrite:
        raise GridError(f"{folder} already has a report", Exit.USAGE, "give another --directory, or --overwrite")
    try:
        with file.open(encoding="utf-8") as lines:
            workload = parse_workload(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise GridError(
            f"cannot read {file}: {reason}",
            Exit.USAGE,
            "give a workload file; koala workload generate -o FILE writes one",
        ) from error
    make_folder(folder)
    workload_daemon = WorkloadDaemon(client := daemon.client(), policy)
    workload_daemon.check(options.background)
    with ProgressDisplay() as display:
        sleep = client.timeouts.sleep
        report = Run(
            workload, workload_daemon, options, tell=display.print_message, show=display.draw_progress, sleep=sleep
        ).run()
    with waiting_for("writes the report"):
        text = save_report(folder, report, folder.name)
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
