"""``koala workload report``, and report folders with JSON and a page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import AsJson, show_json
from koalapy.cli.terminal.streams import without_control_codes
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.workload import measures, tables


def show_report(
    directories: Annotated[list[Path], Argument(metavar="DIR...", help="reports of runs; the first is the base")],
    output: Annotated[Path | None, Option("-o", "--output", help="directory for the report")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report of a run again, or compare several: koala workload report wf.report fcm.report -o compared"""
    reports = [(directory.name or str(directory), load_report(directory)) for directory in directories]
    if output is not None:
        make_folder(output)
    if len(reports) == 1:
        name, answer = reports[0]
        text = save_report(output, answer, name)
    else:
        answer, text = save_comparison(output, reports)
    if as_json:
        show_json(answer)
    else:
        print(without_control_codes(text), end="")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GridError(f"cannot make {folder}: {error.strerror}", Exit.USAGE, "give another directory") from error


def load_report(folder: Path) -> Json:
    """Read the report in a folder. Raise ``GridError`` if there is no valid report."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "give report directories of koala workload run"
        raise GridError(f"cannot read {path}: {error.strerror}", Exit.USAGE, hint) from error
    except ValueError as error:
        raise GridError(f"{path} is not JSON: {error}", Exit.USAGE, "run the workload again") from error
    if not isinstance(report, dict) or report.get("koala_workload_report") != 1:
        raise GridError(f"{path} is not a report of koala workload run", Exit.USAGE, "run the workload again")
    return report


def save_report(folder: Path | None, report: Json, name: str) -> str:
    """Return the page of one run. If a folder is given, write the page and ``report.json`` there."""
    title = measures.label_of(report, name)
    text = tables.format_report(report, f"Workload run: {title}")
    if folder is not None:
        write_file(folder / "report.json", json.dumps(report, indent=1) + "\n")
        write_file(folder / "report.md", text)
    return text


def save_comparison(folder: Path | None, reports: Sequence[tuple[str, Json]]) -> tuple[Json, str]:
    """Return the comparison of several runs as JSON and as a page. With a folder, write both there."""
    comparison = measures.compare_reports(reports)
    text = tables.format_comparison(comparison)
    if folder is not None:
        write_file(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
        write_file(folder / "comparison.md", text)
    return comparison, text


def write_file(path: Path, text: str, code: Exit = Exit.FAILED, hint: str = "make room, or give another") -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GridError(f"cannot write {path}: {error.strerror}", code, hint) from error
