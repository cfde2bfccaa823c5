"""The commands for the papers' experiments: listed, run, and told beside the papers' numbers."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from koalapy.cli.errors import CliError, Exit, of_koala, printable
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import show_json
from koalapy.cli.terminal.progress import Progress, waiting_for
from koalapy.model.errors import KoalaError

if TYPE_CHECKING:
    from koalapy.simulation.experiments.experiment import Experiment
    from koalapy.simulation.experiments.runs import Outcome
    from koalapy.simulation.experiments.runs import Progress as Cells
    from koalapy.simulation.experiments.traces import Traces

BAR = 24
"""Characters of the bar."""
MAX_PROBLEMS = 3
"""Of an experiment, that are told one by one."""
Names = Annotated[list[str] | None, Argument(help="experiments, or papers for all of theirs", completes="experiments")]
Results = Annotated[
    Path, Option("--results", envvar="KOALA_RESULTS", help="folder of what they gave, one Parquet file for each")
]
TraceFolder = Annotated[Path | None, Option("--traces", envvar="KOALA_TRACES", help="folder of the workload traces")]
DEFAULT_RESULTS = Path("koala-experiments")


def list_(as_json: Annotated[bool, Option("--json", help="for programs")] = False, traces: TraceFolder = None) -> None:
    """Which experiments there are, and which traces they need."""
    from koalapy.simulation.experiments.registry import experiments
    from koalapy.simulation.experiments.traces import Traces, default_folder
    from koalapy.workload.tables import markdown

    there = Traces(traces or default_folder())
    found = [
        {
            "name": one.name,
            "title": one.title,
            "seeds": one.seeds,
            "cells": len(one.cells(one.seeds)),
            "traces": list(one.traces),
            "missing": [name for name in one.traces if not there.has(name)],
        }
        for one in experiments().values()
    ]
    if as_json:
        show_json({"experiments": found})
        return
    rows = [[one["name"], one["seeds"], one["cells"], _traces(one), one["title"]] for one in found]
    print(markdown(["experiment", "seeds", "cells", "traces", "what"], rows))


def _traces(told: dict[str, Any]) -> str:
    names, missing = told["traces"], len(told["missing"])
    shown = f"{len(names)} of them" if len(names) > 1 else "".join(names) or "-"
    return f"{shown} ({missing} missing)" if missing else shown


def traces_(
    malformed: Annotated[bool, Option("--malformed", help="also each line that tells of no job")] = False,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
    traces: TraceFolder = None,
) -> int:
    """Which workload traces there are, and what of them is left out: lines that tell of no job, and jobs of which not
    enough is known."""
    from koalapy.simulation.experiments.traces import Traces, default_folder
    from koalapy.workload.tables import markdown

    there = Traces(traces or default_folder())
    with waiting_for("reads traces"):
        found = [_about(there, name) for name in there.names()]
    if not found:
        hint = "give the folder that has some, by --traces or KOALA_TRACES"
        raise CliError(f"there are no traces in {there.folder}", Exit.NOT_FOUND, hint)
    if as_json:
        show_json({"traces": found})
        return Exit.OK
    rows = [
        [one["name"], one["jobs"], one["processors"], len(one["malformed"]), _left_out(one), one["problem"] or "-"]
        for one in found
    ]
    print(markdown(["trace", "jobs", "processors", "malformed lines", "left out", "problem"], rows))
    if malformed:
        for line in (line for one in found for line in one["malformed"]):
            print(printable(line))
    return Exit.FAILED if any(one["problem"] for one in found) else Exit.OK


def _about(traces: "Traces", name: str) -> dict[str, Any]:
    from koalapy.workload import swf

    told: dict[str, Any] = {"name": name, "sha256": traces.sha256(name)}
    try:
        trace = traces.read(name)
    except KoalaError as error:
        return told | {"jobs": 0, "processors": 0, "malformed": [], "left_out": {}, "problem": error.message}
    left_out = swf.sort(trace.jobs).left_out
    about = {"jobs": len(trace.jobs), "processors": trace.processors, "malformed": trace.malformed}
    return told | about | {"left_out": left_out, "problem": ""}


def _left_out(told: dict[str, Any]) -> str:
    return ", ".join(f"{number} {why}" for why, number in told["left_out"].items()) or "-"


def run(
    names: Names = None,
    all_: Annotated[bool, Option("--all", help="every experiment there is")] = False,
    seeds: Annotated[int | None, Option(help="repetitions; default: each experiment's own", min=1, max=10**6)] = None,
    jobs: Annotated[int | None, Option(help="processes; default: one for each processor", min=1, max=4096)] = None,
    again: Annotated[bool, Option("--again", help="also what has been run already")] = False,
    results: Results = DEFAULT_RESULTS,
    traces: TraceFolder = None,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> int:
    """Run experiments, and show their numbers beside the papers': koala experiment run huang-2007-table-3

    What is finished is kept at once: a run that was interrupted goes on where it ended, and what was made before by
    the same source and traces is not made again.
    """
    from koalapy.simulation.experiments import runs
    from koalapy.simulation.experiments.traces import Traces, default_folder
    from koalapy.simulation.experiments.workers import workers

    asked = runs.Asked(_chosen(names, all_), results, Traces(traces or default_folder()), seeds, again)
    cells = runs.Progress()
    try:
        with Progress(lambda: line_of(cells)), workers(jobs) as executor:
            outcomes = runs.run(asked, executor, cells)
    except KoalaError as error:
        raise of_koala(error) from error
    except KeyboardInterrupt:
        print("koala: interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        raise
    return _tell(outcomes, as_json)


def report(
    names: Names = None,
    output: Annotated[Path | None, Option("-o", "--output", help="folder for pages and plots")] = None,
    results: Results = DEFAULT_RESULTS,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> int:
    """Show again what experiments gave, or write a page for each paper: koala experiment report -o docs/experiments"""
    from koalapy.simulation.experiments import pages
    from koalapy.simulation.experiments.results import load
    from koalapy.simulation.experiments.runs import Outcome

    asked = _chosen(names, not names)
    try:
        outcomes = [Outcome(one, load(results, one.name)) for one in asked]
        found = [one for one in outcomes if one.kept is not None]
        if not found:
            hint = "koala experiment run, or give the folder by --results"
            raise CliError(f"there are no results in {results}", Exit.NOT_FOUND, hint)
        if output is not None:
            for path in pages.write(output, found):
                print(f"koala: {path}", file=sys.stderr)
    except ImportError as error:
        raise without(error) from error
    except KoalaError as error:
        raise of_koala(error) from error
    for one in outcomes:
        if names and one.kept is None:
            print(f"koala: {one.experiment.name} has no results in {results}", file=sys.stderr)
    if output is not None and not as_json:
        return Exit.OK
    return _tell(found, as_json)


def _chosen(names: Sequence[str] | None, everything: bool) -> "list[Experiment]":
    from koalapy.simulation.experiments.registry import experiment_named, experiments

    if everything and names:
        raise CliError("--all is every experiment", Exit.USAGE, "leave out --all, or the names")
    if not everything and not names:
        raise CliError("which experiments?", Exit.USAGE, "name some, or a paper for all of its, or give --all")
    known = experiments()
    chosen: dict[str, Experiment] = {}
    try:
        for name in known if everything else names or ():
            of_paper = [one for one in known.values() if one.paper == name]
            chosen |= {one.name: one for one in of_paper or [experiment_named(name)]}
    except KoalaError as error:
        raise of_koala(error) from error
    return list(chosen.values())


def _tell(outcomes: "Sequence[Outcome]", as_json: bool) -> Exit:
    from koalapy.simulation.experiments import tables

    if as_json:
        show_json(tables.as_json(outcomes))
    else:
        parts = [
            f"{one.experiment.name}: {one.experiment.title}\n\n"
            + tables.table(one.experiment.rows(one.kept.results), one.experiment.unit)
            for one in outcomes
            if one.kept is not None
        ]
        print("\n\n".join(parts))
    for one in outcomes:
        for problem in one.problems[:MAX_PROBLEMS]:
            print(f"koala: {one.experiment.name}: {printable(problem)}", file=sys.stderr)
        if (more := len(one.problems) - MAX_PROBLEMS) > 0:
            print(f"koala: {one.experiment.name}: and {more} more cells failed", file=sys.stderr)
    return Exit.FAILED if any(one.problems for one in outcomes) else Exit.OK


def line_of(cells: "Cells") -> str:
    """How far a run has come, as a bar, and how long it may take yet."""
    from koalapy.model.wording import duration

    if not cells.cells:
        return ""
    full = BAR * cells.done // cells.cells
    passed, left = time.monotonic() - cells.began, cells.cells - cells.done
    parts = [f"[{'#' * full}{'-' * (BAR - full)}] {cells.done} of {cells.cells} simulations, {duration(passed)}"]
    if cells.finished:
        parts.append(f"about {duration(passed / cells.finished * left)} left")
    return ", ".join([*parts, *([cells.running] if cells.running else [])])


def without(error: ImportError) -> CliError:
    """A package that experiments need, and nothing else does."""
    return CliError(f"there is no {error.name}", Exit.FAILED, "pip install 'koalapy[experiments]'")


experiment_group = Group(
    "Make the papers' experiments again, with the production scheduler in a simulated world.",
    {"list": list_, "traces": traces_, "run": run, "report": report},
)
