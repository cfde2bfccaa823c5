"""``koala sharing``: whether every site is better off for taking part in the grid."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.cli.terminal.tables import table
from koalapy.model.wording import duration, listed

Json = dict[str, Any]
MAX_DAYS = 36_500
HEADER = ("SITE", "NODES", "JOBS", "ELSEWHERE", "TOO WIDE", "IN THE GRID", "ALONE", "GAIN", "BETWEEN", "IT IS")
ANSWERS = {
    "better": "No site is worse off in the grid than by itself.",
    "same": "No site is better or worse off in the grid than by itself.",
    "worse": "Not every site is better off: {worse} would be by itself.",
    "unclear": "Whether every site is better off cannot be told of these jobs.",
}


def report(
    days: Annotated[int, Option(help="of jobs submitted in so many days until the last, in UTC", min=1)] = 30,
    last: Annotated[str | None, Option(help="the last day, as 2026-11-30; default: today")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Is every site better off? Response times of each site's own users in the grid, and on their site by itself.

    By itself is simulated: the same jobs, submitted at the same moments and as long as they really were. GAIN is what
    the grid saves of a job on average, and lies BETWEEN these bounds in 95 of 100 cases.
    """
    until = _day(last) if last else datetime.now(UTC).date()
    first = until - timedelta(days=min(days - 1, MAX_DAYS, (until - date.min).days))
    found = Client(url, token).get_patiently("/api/v1/sharing", first=first.isoformat(), last=until.isoformat())
    if as_json:
        show_json(found)
    else:
        print(_page(found))


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise CliError(f"--last is {text!r}", Exit.USAGE, "give a day, as 2026-11-30") from None


def _page(found: Json) -> str:
    sites: list[Json] = found["sites"]
    worse = listed([site["site"] for site in sites if site["verdict"] == "worse"])
    parts = [ANSWERS[found["every_site"]].format(worse=worse), table(HEADER, [_row(site) for site in sites])]
    if found["left_out"]:
        parts.append("\n".join(["Jobs that do not count:", *(f"  {_left_out(each)}" for each in found["left_out"])]))
    return "\n\n".join(parts)


def _row(site: Json) -> list[object]:
    low, high = site["low"], site["high"]
    return [
        site["site"],
        site["nodes"],
        site["jobs"],
        site["elsewhere"],
        site["too_wide"],
        duration(site["grid"]),
        duration(site["alone"]),
        _signed(site["gain"]),
        "-" if low is None else f"{_signed(low)} and {_signed(high)}",
        site["verdict"] if site["jobs"] else "-",
    ]


def _signed(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def _left_out(each: Json) -> str:
    return f"{each['count']} {each['why']}: {listed([str(job) for job in each['jobs']], each['count'])}"


sharing_group = Group("Show who gains by the grid.", {"report": report})
