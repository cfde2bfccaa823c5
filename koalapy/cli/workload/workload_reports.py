"""Reports of workload runs in folders: JSON, a page, and plots."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from koalapy.cli.errors import CliError, Exit
from koalapy.workload import compare, tables

Json = dict[str, Any]
FORMS = ("png", "svg", "none")


def check_form(form: str) -> None:
    if form not in FORMS:
        raise CliError(f"--plots is {form!r}", Exit.USAGE, f"give {', '.join(FORMS)}")


def load(folder: Path) -> Json:
    """The report in a folder."""
    path = folder / "report.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "give folders that koala workload run has written"
        raise CliError(f"cannot read {path}: {error.strerror}", Exit.USAGE, hint) from error
    except ValueError as error:
        raise CliError(f"{path} is no JSON: {error}", Exit.USAGE, "run the workload again") from error
    if not isinstance(told, dict) or told.get("koala_workload_report") != 1:
        raise CliError(f"{path} is no report of a workload", Exit.USAGE, "run the workload again")
    return told


def save(folder: Path | None, told: Json, form: str, name: str) -> str:
    """The page of one run; with a folder, it, ``report.json`` and the plots are written there."""
    title = compare.label_of(told, name)
    text = tables.report(told, f"Workload run: {title}")
    if folder is not None:
        _write(folder / "report.json", json.dumps(told, indent=1) + "\n")
        text = _page(text, folder, [(title, told)], form)
        _write(folder / "report.md", text)
    return text


def save_comparison(folder: Path | None, found: Sequence[tuple[str, Json]], form: str) -> tuple[Json, str]:
    """The same of several runs side by side; nothing is written where there is no folder."""
    told = compare.compare(found)
    text = tables.comparison(told)
    if folder is not None:
        runs = [(run["label"], report) for run, (_, report) in zip(told["runs"], found, strict=True)]
        text = _page(text, folder, runs, form)
        _write(folder / "comparison.json", json.dumps(told, indent=1) + "\n")
        _write(folder / "comparison.md", text)
    return told, text


def ended_with(told: Json) -> Exit:
    """How the command ends: interrupted, out of time, with jobs that did not succeed, or well."""
    reason = told["run"]["interrupted"]
    if reason == "interrupted":
        return Exit.INTERRUPTED
    if reason:
        return Exit.TIMEOUT if reason.startswith("not done") else Exit.UNREACHABLE
    return Exit.OK if set(told["summary"]["states"]) <= {"succeeded"} else Exit.FAILED


def _page(text: str, folder: Path, runs: Sequence[tuple[str, Json]], form: str) -> str:
    """The page with the plots below."""
    if form == "none":
        return text
    try:
        from koalapy.workload import plots
    except ImportError:
        print("koala: no plots without matplotlib: pip install 'koalapy[plots]'", file=sys.stderr)
        return text
    drawn = plots.draw(runs, folder, form)
    return text + "".join(f"\n![{path.stem}]({path.name})\n" for path in drawn)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", Exit.FAILED, "make room, or give another") from error
