"""``koala sharing``: the benefit of the grid for the users of each site."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import format_table, signed_duration
from koalapy.client.answers import Json
from koalapy.client.errors import CliError, Exit
from koalapy.model.wording import format_duration, format_list

MAX_DAYS = 36_500
HEADER = ("SITE", "NODES", "JOBS", "ELSEWHERE", "TOO WIDE", "IN THE GRID", "ALONE", "GAIN", "BETWEEN", "IT IS")
ANSWERS = {
    "better": "No site is worse off in the grid than by itself.",
    "same": "No site is better or worse off in the grid than by itself.",
    "worse": "Not every site is better off: {worse} would be by itself.",
    "unclear": "Whether every site is better off cannot be told of these jobs.",
}


def report_sharing(
    days: Annotated[int, Option(help="jobs submitted in so many days until --last, in UTC", min=1)] = 30,
    last: Annotated[str | None, Option(help="last day, e.g. 2026-11-30; default: today")] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Compare response times of each site's users in the grid and on their site alone.

    ALONE is simulated with the same jobs, submission times and durations. GAIN: mean time saved for each job.
    BETWEEN: its 95 % interval.
    """
    until = _parse_day(last) if last else datetime.now(UTC).date()
    first = until - timedelta(days=min(days - 1, MAX_DAYS, (until - date.min).days))
    comparison = daemon.client().get("/api/v1/sharing", patient=True, first=first.isoformat(), last=until.isoformat())
    print_answer(comparison, as_json, _format_comparison)


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise CliError(f"--last is {text!r}, which is not a date", Exit.USAGE, "give a date, e.g. 2026-11-30") from None


def _format_comparison(comparison: Json) -> str:
    """Return the page for a response: a conclusion, a row for each site, and the excluded jobs."""
    sites: list[Json] = comparison["sites"]
    worse = format_list([site["site"] for site in sites if site["verdict"] == "worse"])
    parts = [
        ANSWERS[comparison["every_site"]].format(worse=worse),
        format_table(HEADER, [_site_row(site) for site in sites]),
    ]
    if comparison["exclusions"]:
        lines = [
            f"  {group['count']} {group['reason']}: {format_list([str(job) for job in group['jobs']], group['count'])}"
            for group in comparison["exclusions"]
        ]
        parts.append("\n".join(["Jobs that do not count:", *lines]))
    return "\n\n".join(parts)


def _site_row(site: Json) -> list[object]:
    low, high = signed_duration(site["low"]), signed_duration(site["high"])
    counts = [site[name] for name in ("site", "nodes", "jobs", "elsewhere", "too_wide")]
    between = "-" if site["low"] is None else f"{low} and {high}"
    times = [format_duration(site["grid"]), format_duration(site["alone"]), signed_duration(site["gain"]), between]
    return [*counts, *times, site["verdict"] if site["jobs"] else "-"]


sharing_group = Group("Show the benefit of the grid for each site.", {"report": report_sharing})
