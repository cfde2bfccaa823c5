"""AccaSim (Galleguillos et al. 2018), a simulator of clusters in Python, on the workload of ``whole_life``.

It runs in a virtual environment in a temporary folder, with its simplest dispatcher (first in first out, first fit), on
the same number of nodes and without output. It has no claiming: a dispatched job runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.whole_life import CLUSTERS, NODES, Arrival

PACKAGE = "accasim==1.1.3"
CLUSTERS_OF_NODES = len(CLUSTERS), NODES
"""Number of AccaSim nodes and of cores in each: a cluster is a node, and a node is a core."""
PROGRAM = """
import collections, collections.abc, json, logging, statistics, sys, time
collections.Mapping = collections.abc.Mapping  # it is of the time of Python 3.5
from accasim.base.allocator_class import FirstFit
from accasim.base.scheduler_class import FirstInFirstOut
from accasim.base.simulator_class import Simulator
rates = []
for _ in range(int(sys.argv[1])):
    simulator = Simulator(
        "workload.swf", "system.json", FirstInFirstOut(FirstFit()), scheduling_output=False, statistics_output=False,
        show_statistics=False, LOG_LEVEL="WARNING", RESULTS_FOLDER_PATH=".",
    )
    began = time.process_time()
    simulator.start_simulation()
    rates.append(simulator.dispatched_jobs / (time.process_time() - began))
    assert simulator.dispatched_jobs == int(sys.argv[2])
print(json.dumps(statistics.median(rates)))
"""


def jobs_per_s(arrivals: Sequence[Arrival], rounds: int, system: tuple[int, int] = CLUSTERS_OF_NODES) -> float | None:
    """Return the median rate of jobs by CPU time, or None with a message if AccaSim cannot be installed.

    ``system`` has the number of nodes and the cores of each.
    """
    nodes, cores = system
    system_description = {
        "groups": {"cluster": {"core": cores}},
        "resources": {"cluster": nodes},
        "equivalence": {"processor": {"core": 1}},
    }
    with tempfile.TemporaryDirectory(prefix="accasim-") as folder:
        (Path(folder) / "system.json").write_text(json.dumps(system_description))
        (Path(folder) / "workload.swf").write_text("".join(map(swf_line, range(1, len(arrivals) + 1), arrivals)))
        try:
            python = os.environ.get("ACCASIM_PYTHON") or _install(Path(folder) / "venv")
            command = [python, "-c", PROGRAM, str(rounds), str(len(arrivals))]
            result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            message = getattr(error, "stderr", "") or str(error)
            print(f"AccaSim is not available: {message.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        return float(json.loads(result.stdout.splitlines()[-1]))


def swf_line(number: int, arrival: Arrival) -> str:
    """Return a job of one component as a line in the Standard Workload Format, with a node as a processor."""
    (size,) = arrival.sizes
    lasts = arrival.lasts
    return f"{number} {arrival.time_s} -1 {lasts} {size} -1 -1 {size} {lasts} -1 1 1 1 1 1 1 -1 -1\n"


def _install(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=600)
    return python
