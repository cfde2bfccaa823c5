"""The commands for the advisor: what it has learned of applications, and how right its predictions were."""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.cli.terminal.tables import table
from koalapy.model.wording import duration

Json = dict[str, Any]
KINDS = {"start": "start", "end": "end", "run-time": "run time", "advised": "run time by auto"}


def advisor(as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show how long applications run on one cluster and on several, and what is decided for them."""
    answer = Client(url, token).get("/api/v1/advisor")
    if as_json:
        show_json(answer)
    else:
        print(applications_table(answer["applications"]))


def record(
    application: Annotated[str, Option("--application", help="of this application only")] = "",
    limit: Annotated[int, Option("--limit", help="how many, the newest", min=1, max=1000)] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Show what was advised and foretold, against what came.

    WITHIN is the share of truths within the interval, to be 80 %, and in brackets what it may be in the long run.
    """
    answer = Client(url, token).get("/api/v1/advisor/record", application=application, limit=limit)
    if as_json:
        show_json(answer)
    else:
        print(record_table(answer["record"]))
        if answer["coverage"]:
            print(f"\n{coverage_table(answer['coverage'])}")


def applications_table(found: Sequence[Json]) -> str:
    """One line for each size and set of clusters; the verdict with the first of each application."""
    if not found:
        return "nothing is known yet: no job whose program has a name has run to its end"
    rows = []
    for application in found:
        name, verdict = application["application"], application["verdict"]
        for runs in application["runs"]:
            per_node = runs["processes_per_node"]
            nodes = f"{runs['nodes']}x{per_node}" if per_node else runs["nodes"]
            where = "+".join(runs["where"]) or "one"
            ran = f"{runs['runs']} ({runs['killed']} killed)" if runs["killed"] else runs["runs"]
            time = f"{_seconds(runs['seconds'])} ({_between(runs['seconds_between'], '.1f')})"
            slower = "-"
            if runs["slowdown"] is not None:
                slower = f"{runs['slowdown']:.2f} ({_between(runs['slowdown_between'], '.2f')})"
            rows.append([name, nodes, where, ran, time, slower, verdict])
            name = verdict = ""
    return table(["APPLICATION", "NODES", "CLUSTERS", "RUNS", "TIME", "SLOWDOWN", "VERDICT"], rows)


def record_table(found: Sequence[Json]) -> str:
    """The newest first; below, how far off predictions were on the whole."""
    if not found:
        return "the policy auto has placed no job yet"
    rows = [
        [
            given["job"],
            given["at"],
            given["application"] or "-",
            given["clusters"],
            _seconds(given["predicted"]),
            _seconds(given["actual"]),
            _percent(given["error"]),
            given["reason"],
        ]
        for given in found
    ]
    header = ["JOB", "PLACED", "APPLICATION", "CLUSTERS", "PREDICTED", "ACTUAL", "ERROR", "REASON"]
    shown = table(header, rows)
    errors = [abs(given["error"]) for given in found if given["error"] is not None]
    if not errors:
        return shown
    times = f"{len(errors)} run time{'s' if len(errors) > 1 else ''}"
    return f"{shown}\n\nPredictions of {times} were off by {fmean(errors):.0%} on average."


def coverage_table(found: Sequence[Json]) -> str:
    """How right predictions were, by kind and period; a period that has no more than the one before is left out."""
    rows, before = [], None
    for told in found:
        same = [told[name] for name in ("kind", "predictions", "open", "censored")]
        if same == before or not any(same[1:]):
            continue
        before = same
        rows.append(
            [
                KINDS[told["kind"]],
                f"{told['days']:g} d",
                told["predictions"],
                told["jobs"],
                _share(told),
                _part(told["early"]),
                _part(told["late"]),
                "-" if told["median_error"] is None else duration(told["median_error"]),
                _signed(told["bias"]),
                told["open"],
                told["censored"],
            ]
        )
    header = [
        "FORETOLD",
        "LAST",
        "DECIDED",
        "JOBS",
        "WITHIN",
        "EARLY",
        "LATE",
        "MEDIAN ERROR",
        "BIAS",
        "OPEN",
        "CENSORED",
    ]
    return table(header, rows)


def _share(told: Json) -> str:
    if told["within"] is None:
        return "-"
    low, high = told["within_between"]
    return f"{told['within']:.0%} ({low:.0%} to {high:.0%})"


def _part(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _signed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def _between(bounds: Sequence[float], form: str) -> str:
    return " to ".join(format(bound, form) for bound in bounds)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"


advisor_group = Group("Show what the policy auto has learned, or its record.", {"record": record}, default=advisor)
