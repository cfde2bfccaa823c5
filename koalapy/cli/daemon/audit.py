"""``koala audit``: find violations of what the grid promises, in what each side wrote."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from koalapy.cli.daemon.processes import DATA, DataDir
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import AsJson, show_json
from koalapy.cli.terminal.screen import waiting_for
from koalapy.cli.terminal.tables import format_table
from koalapy.client.errors import Exit, printable
from koalapy.client.http import Json

if TYPE_CHECKING:
    from koalapy.audit.rules import Report


def audit_grid(
    data_dir: DataDir = DATA,
    database: Annotated[str | None, Option(help="URL of the database; default: that of the data directory")] = None,
    spool: Annotated[
        list[str] | None, Option("--spool", help="spool folder of an agent, [CLUSTER=]DIR; repeatable")
    ] = None,
    accounting: Annotated[
        list[str] | None, Option("--accounting", help="output of sacct or qacct, [CLUSTER=]FILE; repeatable")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Find violations of what the grid promises: koala audit --accounting north=sacct.txt

    Compares what the database, the record of events, agents and resource managers wrote. Changes nothing, also while
    the daemon runs. Exit codes: 0 no violation, 1 violations, 2 evidence that cannot be read.
    """
    from koalapy.audit.readers import GridFiles, read_grid
    from koalapy.audit.rules import audit_facts

    files = GridFiles(
        data_dir.expanduser(),
        database or "",
        tuple(map(_parse_place, spool or ())),
        tuple(map(_parse_place, accounting or ())),
    )
    with waiting_for("audits"):
        report = audit_facts(read_grid(files))
    if as_json:
        show_json(_report_json(report))
    else:
        _print_report(report)
    return Exit.FAILED if report.finding_count else Exit.OK


def _parse_place(text: str) -> tuple[str, Path]:
    """Return the cluster, if it is named, and the path of ``[CLUSTER=]PATH``."""
    cluster, separator, path = text.partition("=")
    return (cluster, Path(path)) if separator and "/" not in cluster else ("", Path(text))


def _report_json(report: "Report") -> Json:
    return {
        "sources": sorted({source.name for source in report.sources}),
        "jobs": report.jobs,
        "violations": report.finding_count,
        "findings": [asdict(finding) for finding in report.findings],
        "not_proved": [
            {"rule": rule, "missing": missing, "jobs": jobs.count, "examples": jobs.examples}
            for (rule, missing), jobs in report.missing.items()
        ],
    }


def _print_report(report: "Report") -> None:
    sources = ", ".join(sorted({source.name for source in report.sources})) or "no source"
    print(printable(f"{report.jobs} jobs; {report.finding_count} violations; read: {sources}"))
    if report.findings:
        rows = []
        for finding in report.findings:
            job = str(finding.job) if finding.attempt is None else f"{finding.job}.{finding.attempt}"
            rows.append((finding.rule, job, finding.text))
            rows += [("", "", f"  {entry}") for entry in finding.evidence]
        print(format_table(("RULE", "JOB", "WHAT"), rows))
    if report.missing:
        rows = [
            (rule, str(jobs.count), f"evidence missing: {missing}, as of job {jobs.examples[0]}")
            for (rule, missing), jobs in report.missing.items()
        ]
        print(format_table(("NOT PROVED", "JOBS", "WHY"), rows))
