"""Run the workload of mohamed-2005 4.2 on an embedded grid with a real daemon, real processes and failing starts.

``python -m tests.experiments.koala_m05 --jobs 500 --claiming atomic --failures 0.3`` prints a report. The jobs are
those of ``koala workload generate --preset m05`` with a sixth of the processors and a sixtieth of the time. No file is
transferred, so a start delay comes from failures only.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from koalapy.client.client import Client
from koalapy.model.job_spec import ClaimingMode
from koalapy.workload.daemon import WorkloadDaemon
from koalapy.workload.generate import generate_workload
from koalapy.workload.measures import compare_reports
from koalapy.workload.recipe import PRESETS, GridSize
from koalapy.workload.run import Options, Run
from koalapy.workload.tables import format_comparison, format_report
from tests.grid.embedded import EmbeddedGrid, close_grid

CLUSTERS = {"north": 16, "south": 16}
NODES, TIMES = 1 / 6, 60.0
"""Factor on the paper's sizes, and divisor of its times."""
LOCAL, LOCAL_SECONDS, LOCAL_NODES = 0.2, 4.0, 6
"""Fraction of the nodes that local users have, and the mean run time and the maximum nodes of their jobs."""
RULES: Mapping[str, str] = {
    "scan_interval": "4",
    "claim_epsilon": "0.05",
    "claim_grace": "1",
    "low_patience": "null",
    "preemption_order": "jst",
    "placement_queue_limit": "100",
    "max_restarts": "null",
    "restart_pause": "0",
    # With a failure probability of 0.3, many errors in a row are chance.
    "error_threshold": "100",
    "probation_pause": "2",
    "probation_pause_max": "16",
}


def make_grid(directory: Path, claiming: ClaimingMode, failures: float) -> EmbeddedGrid:
    """Return an embedded grid, not yet started, with two clusters on which starts fail."""
    directory.mkdir()
    config = directory / "koala.yaml"
    rules = "".join(f"  {name}: {value}\n" for name, value in {**RULES, "claiming": claiming}.items())
    clusters = "".join(f"  {c}: {{nodes: {nodes}, start_failures: {failures}}}\n" for c, nodes in CLUSTERS.items())
    config.write_text(f"background_load: true\nrules:\n{rules}clusters:\n{clusters}")
    return EmbeddedGrid(directory / "data", KOALA_CONFIG=str(config))


def run(
    directory: Path,
    claiming: ClaimingMode,
    *,
    jobs: int,
    failures: float,
    every: float = 1.2,
    scale: float = 1.0,
    longest: float = 1800.0,
) -> dict[str, Any]:
    """Run the workload once on a new grid below ``directory``, and return the report.

    Jobs arrive every ``every`` seconds on average. ``scale`` multiplies the run times of all programs.
    """
    fields = (("claiming", str(claiming)),)
    recipe = replace(PRESETS["m05"], jobs=jobs, rate=1 / every, scale=NODES, compress=TIMES / scale, fields=fields)
    workload = generate_workload(recipe, GridSize(CLUSTERS), 2005)
    local = {"background": LOCAL, "background_seconds": LOCAL_SECONDS * scale, "background_nodes": LOCAL_NODES}
    options = Options(**local, timeout=longest, cancel_on_interrupt=True)  # type: ignore[arg-type]
    grid = make_grid(directory, claiming, failures)
    try:
        grid.start()
        daemon = WorkloadDaemon(Client(grid.url, grid.admin_token), None)
        daemon.check(LOCAL)
        tell = partial(print, file=sys.stderr, flush=True)
        return Run(workload, daemon, options, tell=tell, show=lambda _: None).run()
    finally:
        close_grid(grid)


def main() -> int:
    parser = argparse.ArgumentParser(prog="koala_m05", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument(
        "--claiming", choices=list(ClaimingMode), action="append", help="may be given more than once; default: all"
    )
    parser.add_argument("--failures", type=float, default=0.3, help="probability that a component's start fails")
    parser.add_argument("--every", type=float, default=1.2, help="seconds between two jobs, on average")
    parser.add_argument("--longest", type=float, default=1800.0, help="seconds that one run may take")
    options = parser.parse_args()
    reports = []
    properties = {"jobs": options.jobs, "failures": options.failures, "every": options.every}
    with tempfile.TemporaryDirectory(prefix="koala-m05-") as folder:
        for claiming in map(ClaimingMode, options.claiming or ClaimingMode):
            report = run(Path(folder, claiming), claiming, **properties, longest=options.longest)
            reports.append((str(claiming), report))
            print(format_report(report, f"mohamed-2005, claiming {claiming}"))
            if report["run"]["interrupted"]:
                return 1
    print(format_comparison(compare_reports(reports)))
    return 0 if all(set(report["summary"]["states"]) == {"succeeded"} for _, report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
