"""List, run and report the papers' experiments: ``python -m experiments run huang-2007-table-3``."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import pages, registry, runs, tables
from experiments.experiment import Experiment
from experiments.results import load_results
from experiments.traces import VARIABLE, Traces, default_folder
from experiments.workers import start_workers
from koalapy.model.errors import KoalaError, NotFoundError, UsageError
from koalapy.model.wording import format_duration
from koalapy.workload import swf
from koalapy.workload.tables import markdown_table

BAR_LENGTH = 24
MAX_PROBLEMS = 3
"""Number of problems of an experiment that are printed."""


def list_experiments(options: argparse.Namespace) -> int:
    """List the experiments with the traces that they need."""
    rows = []
    for experiment in registry.load_experiments().values():
        missing = [name for name in experiment.traces if not options.traces.has(name)]
        names = ", ".join(experiment.traces) if len(experiment.traces) < 2 else f"{len(experiment.traces)} of them"
        traces = f"{names or '-'} ({len(missing)} missing)" if missing else names or "-"
        cells = len(experiment.list_cells(experiment.seeds))
        rows.append([experiment.name, experiment.seeds, cells, traces, experiment.title])
    print(markdown_table(["experiment", "seeds", "cells", "traces", "what"], rows))
    return 0


def list_traces(options: argparse.Namespace) -> int:
    """List the workload traces with the lines and jobs that experiments leave out."""
    rows, malformed, problems = [], [], 0
    for name in options.traces.names():
        try:
            trace = options.traces.read(name)
        except KoalaError as error:
            problems += 1
            rows.append([name, 0, 0, 0, "-", error.message])
            continue
        left_out = ", ".join(f"{number} {reason}" for reason, number in swf.select_jobs(trace.jobs).left_out.items())
        rows.append([name, len(trace.jobs), trace.processors, len(trace.malformed), left_out or "-", "-"])
        malformed += trace.malformed
    if not rows:
        raise NotFoundError(f"there are no traces in {options.traces.folder}", hint=f"give --traces or set {VARIABLE}")
    print(markdown_table(["trace", "jobs", "processors", "malformed lines", "left out", "problem"], rows))
    if options.malformed:
        print("\n".join(malformed))
    return 1 if problems else 0


def run_command(options: argparse.Namespace) -> int:
    """Run experiments and print their numbers next to the papers'.

    Each finished simulation is stored at once: the same command continues an interrupted run.
    """
    run_options = runs.RunOptions(
        chosen_experiments(options.names, options.all), options.results, options.traces, options.seeds, options.again
    )
    with start_workers(options.jobs) as executor:
        outcomes = runs.run_experiments(run_options, executor, _print_progress if sys.stderr.isatty() else None)
    return _print_outcomes(outcomes, options.json)


def report_command(options: argparse.Namespace) -> int:
    """Print the numbers of earlier runs, or write a page for each paper."""
    outcomes = [
        runs.Outcome(experiment, load_results(options.results, experiment.name))
        for experiment in chosen_experiments(options.names, not options.names)
    ]
    stored = [outcome for outcome in outcomes if outcome.stored is not None]
    if not stored:
        raise NotFoundError(f"there are no results in {options.results}", hint="run some, or give --results")
    for outcome in outcomes:
        if options.names and outcome.stored is None:
            print(f"{outcome.experiment.name} has no results in {options.results}", file=sys.stderr)
    if options.output is None:
        return _print_outcomes(stored, options.json)
    for path in pages.write_pages(options.output, stored):
        print(path, file=sys.stderr)
    return 0


def chosen_experiments(names: Sequence[str], everything: bool) -> list[Experiment]:
    """Return experiments by their names or papers."""
    if everything and names:
        raise UsageError("--all is every experiment", hint="leave out --all, or the names")
    if not everything and not names:
        raise UsageError("no experiment is named", hint="name some, or a paper for all of its, or give --all")
    if everything:
        return list(registry.load_experiments().values())
    chosen: dict[str, Experiment] = {}
    for name in names:
        of_paper = [experiment for experiment in registry.load_experiments().values() if experiment.paper == name]
        chosen |= {experiment.name: experiment for experiment in of_paper or [registry.find_experiment(name)]}
    return list(chosen.values())


def _print_outcomes(outcomes: Sequence[runs.Outcome], as_json: bool) -> int:
    if as_json:
        print(json.dumps(tables.export_json(outcomes), indent=2))
    else:
        parts = [
            f"{outcome.experiment.name}: {outcome.experiment.title}\n\n"
            + tables.format_table(outcome.experiment.build_rows(outcome.stored.results), outcome.experiment.unit)
            for outcome in outcomes
            if outcome.stored is not None
        ]
        print("\n\n".join(parts))
    for outcome in outcomes:
        for problem in outcome.problems[:MAX_PROBLEMS]:
            print(f"{outcome.experiment.name}: {problem}", file=sys.stderr)
        if (unprinted := len(outcome.problems) - MAX_PROBLEMS) > 0:
            print(f"{outcome.experiment.name}: and {unprinted} more cells failed", file=sys.stderr)
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def _print_progress(progress: runs.Progress) -> None:
    end = "\n" if progress.completed == progress.cells else ""
    print(f"\r\x1b[K{progress_line(progress)}", end=end, file=sys.stderr, flush=True)


def progress_line(progress: runs.Progress) -> str:
    """Return a bar, the number of simulations that are done, and the expected time until all are."""
    bar = "#" * (BAR_LENGTH * progress.completed // progress.cells)
    passed, remaining = time.monotonic() - progress.began, progress.cells - progress.completed
    parts = [f"[{bar:-<{BAR_LENGTH}}] {progress.completed} of {progress.cells} simulations, {format_duration(passed)}"]
    if progress.finished:
        parts.append(f"about {format_duration(passed / progress.finished * remaining)} left")
    return ", ".join([*parts, *([progress.running] if progress.running else [])])


def _parse_positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _open_traces(text: str) -> Traces:
    return Traces(Path(text))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    traces, results = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    default = Traces(default_folder())
    traces.add_argument("--traces", type=_open_traces, default=default, help=f"folder of workload traces ({VARIABLE})")
    folder = Path(os.environ.get("KOALA_RESULTS", "koala-experiments"))
    results.add_argument("names", nargs="*", metavar="NAME", help="experiments, or papers for all of theirs")
    results.add_argument("--results", type=Path, default=folder, help="folder of Parquet files (KOALA_RESULTS)")
    results.add_argument("--json", action="store_true", help="print JSON")

    listed = commands.add_parser("list", parents=[traces], help="list the experiments with the traces that they need")
    listed.set_defaults(command=list_experiments)
    about = commands.add_parser("traces", parents=[traces], help="list the traces with what is left out of them")
    about.add_argument("--malformed", action="store_true", help="print the lines that describe no job")
    about.set_defaults(command=list_traces)
    ran = commands.add_parser("run", parents=[traces, results], help="run experiments")
    ran.add_argument("--all", action="store_true", help="run every experiment")
    ran.add_argument("--seeds", type=_parse_positive, help="repetitions; default: each experiment's own")
    ran.add_argument("--jobs", type=_parse_positive, help="processes; default: one for each processor")
    ran.add_argument("--again", action="store_true", help="also run what has been run already")
    ran.set_defaults(command=run_command)
    reported = commands.add_parser("report", parents=[results], help="print or write the numbers of earlier runs")
    reported.add_argument("-o", "--output", type=Path, help="folder for pages and plots")
    reported.set_defaults(command=report_command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 for a failure, 2 for wrong usage."""
    options = _build_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except ModuleNotFoundError as error:
        print(f"there is no package {error.name}; pip install 'koalapy[experiments]'", file=sys.stderr)
        return 1
    except KoalaError as error:
        print(f"{error.message}; {error.hint}" if error.hint else error.message, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("interrupted; finished simulations are kept, and the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
