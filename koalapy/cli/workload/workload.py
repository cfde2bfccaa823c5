"""The commands for workloads: made, run against a daemon, and told in figures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit, of_koala
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.cli.terminal.progress import waiting_for
from koalapy.cli.terminal.streams import without_control_codes
from koalapy.model.errors import KoalaError

if TYPE_CHECKING:
    from koalapy.workload.plan import Workload

Json = dict[str, Any]


def generate(
    preset: Annotated[str | None, Option(help="m05, s10-vi or s10-vii: the papers' workloads")] = None,
    swf: Annotated[Path | None, Option(help="arrivals, sizes and run times of a trace; also .gz and .xz")] = None,
    status: Annotated[int | None, Option(help="of a trace: only jobs of this status; 1: completed")] = None,
    keep_zero: Annotated[bool, Option("--keep-zero", help="of a trace: jobs of run time 0, too")] = False,
    clusters: Annotated[str | None, Option(help="for which grid: north:4,south:4; default: the daemon's")] = None,
    seed: Annotated[int, Option(help="the same seed gives the same workload")] = 1,
    jobs: Annotated[int | None, Option(help="how many")] = None,
    duration: Annotated[float | None, Option(help="seconds of arrivals")] = None,
    rate: Annotated[float | None, Option(help="jobs per second, on average")] = None,
    utilisation: Annotated[float | None, Option(help="fraction of the grid to use, in place of a rate")] = None,
    sizes: Annotated[str | None, Option(help="nodes of a job, drawn from: 8,16,32")] = None,
    components: Annotated[str | None, Option(help="nonfixed: how many components, drawn from: 3,4,6")] = None,
    least: Annotated[int | None, Option(help="nonfixed: nodes of a component, at least")] = None,
    request: Annotated[str | None, Option(help="nonfixed or flexible; default: as the policy serves")] = None,
    policy: Annotated[str | None, Option(help="placement policy of every job", completes="policies")] = None,
    priorities: Annotated[str | None, Option(help="drawn from, with weights: high:1,low:3")] = None,
    applications: Annotated[str | None, Option(help="drawn from, with weights: prime:2,wave")] = None,
    arguments: Annotated[list[str] | None, Option(help="of an application: wave='--steps 400'")] = None,
    estimate: Annotated[list[str] | None, Option(help="seconds an application takes: wave=6")] = None,
    run_times: Annotated[str | None, Option(help="seconds of sleep, uniformly: 30-192")] = None,
    inputs: Annotated[str | None, Option(help="logical files, of which each job reads one: a,b")] = None,
    scale: Annotated[float | None, Option(help="times the sizes; default: as large a part of the grid")] = None,
    compress: Annotated[float | None, Option(help="how many times as fast everything goes")] = None,
    field: Annotated[list[str] | None, Option(help="of every submission: claiming=incremental")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="the file; default: standard output")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Make a workload file: koala workload generate --preset s10-vi --jobs 50 -o wave.jsonl"""
    from koalapy.cli.workload.workload_options import recipe_of
    from koalapy.workload import plan
    from koalapy.workload.swf import ZERO

    given = {
        "jobs": jobs,
        "duration": duration,
        "rate": rate,
        "utilisation": utilisation,
        "sizes": sizes,
        "components": components,
        "least": least,
        "request": request,
        "policy": policy,
        "priorities": priorities,
        "applications": applications,
        "arguments": arguments,
        "estimates": estimate,
        "run_times": run_times,
        "inputs": inputs,
        "scale": scale,
        "compress": compress,
        "fields": field,
    }
    if swf is not None and (rate is not None or utilisation is not None):
        raise CliError("--swf brings its own arrivals", Exit.USAGE, "leave out --rate and --utilisation")
    try:
        recipe = recipe_of(preset, given, is_trace=swf is not None)
        grid = _grid(clusters, recipe, url, token)
        with waiting_for(f"makes a workload{f' of {swf.name}' if swf else ''}"):
            made = _make(recipe, swf, (status, keep_zero), grid, seed)
    except KoalaError as error:
        raise of_koala(error) from error
    header = {"preset": preset, **made.header} if preset else made.header
    text = "\n".join(plan.lines(plan.Workload(header, made.jobs))) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, text)
    span = f"{made.lasts:.0f} s" if made.lasts < 7200 else f"{made.lasts / 3600:.1f} h"
    print(f"{len(made.jobs)} jobs over {span}{f' in {output}' if output else ''}", file=sys.stderr)
    if left_out := made.header.get("trace", {}).get("left_out"):
        told = ", ".join(f"{number} {why}" for why, number in left_out.items())
        hint = "; --keep-zero keeps those of run time 0" if ZERO in left_out else ""
        print(f"koala: of {swf} are left out: {told}{hint}", file=sys.stderr)


def _make(recipe: Any, swf: Path | None, which: tuple[int | None, bool], grid: Any, seed: int) -> "Workload":
    """``which`` jobs of a trace: their status, and whether those of run time 0."""
    from koalapy.workload.generate import from_trace, generate
    from koalapy.workload.swf import read

    if swf is None:
        return generate(recipe, grid, seed)
    status, keep_zero = which
    return from_trace(recipe, read(swf), grid, seed, status=status, keep_zero=keep_zero, name=swf.name)


def _grid(clusters: str | None, recipe: Any, url: str, token: str | None) -> Any:
    """The grid for which to make it: as given, or as the daemon has it; none where it need not be known."""
    from koalapy.cli.workload.workload_options import clusters_of
    from koalapy.workload.recipe import GridSize

    if clusters is not None:
        return GridSize(clusters_of(clusters))
    try:
        found = Client(url, token).get("/api/v1/clusters")["clusters"]
    except CliError as error:
        if recipe.rate is not None and recipe.scale is not None:
            return GridSize()
        hint = "give --clusters north:4,south:4; or start a daemon, or set KOALA_URL"
        raise CliError(f"the grid is not known: {error.message}", error.code, hint) from error
    return GridSize({cluster["name"]: cluster["total"] for cluster in found if cluster["total"]})


def run(
    file: Annotated[Path, Argument(help="a workload, made with koala workload generate")],
    directory: Annotated[Path | None, Option(help="for the report; default: FILE.report")] = None,
    background: Annotated[float, Option(help="fraction of nodes for local users, as 0.2", min=0, max=0.9)] = 0.0,
    background_seconds: Annotated[float, Option(help="mean run time of their jobs", min=1, max=200)] = 20.0,
    background_nodes: Annotated[int | None, Option(help="most nodes of one; default: a quarter", min=1)] = None,
    policy: Annotated[
        str | None, Option(help="placement policy for every job, in place of the file's", completes="policies")
    ] = None,
    seed: Annotated[int, Option(help="of the background load")] = 1,
    interval: Annotated[float, Option(help="seconds between two looks", min=0.1)] = 1.0,
    patience: Annotated[float, Option(help="seconds for which the daemon may be away", min=0)] = 600.0,
    timeout: Annotated[float | None, Option(help="seconds for the whole run", min=0)] = None,
    cancel_on_interrupt: Annotated[bool, Option("--cancel-on-interrupt", help="on Ctrl-C, end its jobs")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="even if there is a report")] = False,
    plots: Annotated[str, Option(help="png, svg or none")] = "png",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> int:
    """Run a workload against the daemon, and write a report: koala workload run wave.jsonl --background 0.2"""
    from koalapy.cli.workload.workload_reports import check_form, ended_with, save
    from koalapy.cli.workload.workload_run import ProgressDisplay, RestDaemon
    from koalapy.workload.plan import parse
    from koalapy.workload.run import Options, Run

    check_form(plots)
    folder = directory or file.with_name(f"{file.name}.report")
    if (folder / "report.json").exists() and not overwrite:
        raise CliError(f"{folder} has a report already", Exit.USAGE, "give another --directory, or --overwrite")
    try:
        with file.open(encoding="utf-8") as lines:
            workload = parse(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CliError(f"cannot read {file}: {reason}", Exit.USAGE, "koala workload generate -o FILE") from error
    except KoalaError as error:
        raise of_koala(error) from error
    options = Options(
        background=background,
        background_seconds=background_seconds,
        background_nodes=background_nodes,
        seed=seed,
        interval=interval,
        patience=patience,
        timeout=timeout,
        cancel_on_interrupt=cancel_on_interrupt,
    )
    _make_folder(folder)
    daemon = RestDaemon(client := Client(url, token), policy)
    daemon.check(background)
    with ProgressDisplay() as display:
        report = Run(
            workload, daemon, options, tell=display.report, show=display.show, sleep=client.timeouts.sleep
        ).run()
    with waiting_for("writes the report"):
        text = save(folder, report, plots, folder.name)
    if as_json:
        show_json({name: report[name] for name in ("run", "summary", "utilisation", "by_application", "by_size")})
    else:
        print(without_control_codes(text), end="")
    print(f"koala: the report is in {folder}", file=sys.stderr)
    return ended_with(report)


def report(
    directories: Annotated[list[Path], Argument(metavar="DIR...", help="reports of runs; the first is the base")],
    output: Annotated[Path | None, Option("-o", "--output", help="folder to write it to, with plots")] = None,
    plots: Annotated[str, Option(help="png, svg or none")] = "png",
    as_json: AsJson = False,
) -> None:
    """Show the report of a run again, or compare several: koala workload report wf.report fcm.report -o compared"""
    from koalapy.cli.workload.workload_reports import check_form, load, save, save_comparison

    check_form(plots)
    found = [(directory.name or str(directory), load(directory)) for directory in directories]
    if output is not None:
        _make_folder(output)
    if len(found) == 1:
        name, shown = found[0]
        text = save(output, shown, plots, name)
    else:
        shown, text = save_comparison(output, found, plots)
    if as_json:
        show_json(shown)
    else:
        print(without_control_codes(text), end="")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make {folder}: {error.strerror}", Exit.USAGE, "give another directory") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", Exit.USAGE, "give another -o") from error


workload_group = Group(
    "Make workloads, run them, and tell how it went.", {"generate": generate, "run": run, "report": report}
)
