"""Measure Open MPI over relayed links in the laboratory of namespaces, and with kernel routing.

``python -m tests.benchmarks.relay [4|5]`` needs root. It prints a table of medians for this series (default: 5):
time and bandwidth between two sites and within one, and the processor time of the relays.
"""

import re
import shutil
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.grid.namespaces import LABORATORY, laboratory, run_open_mpi
from tests.needs import LIBMPI_5, MPIRUN_5, Need
from tests.relay.processes import RelayProcesses, running

EXCHANGE = Path(__file__).parents[1] / "relay" / "exchange.py"
PROGRAM = ["/usr/bin/python3", str(EXCHANGE)]
VERSIONS: dict[int, tuple[str, int, list[str]]] = {
    4: ("/usr/bin/orterun", 4, [*PROGRAM, "libmpi.so.40", "--measure"]),
    5: (MPIRUN_5, 5, [*PROGRAM, str(LIBMPI_5), "--measure"]),
}
"""mpirun, series and program by series."""
WAYS: dict[str, tuple[dict[str, bool], bool | None]] = {
    "kernel routing": ({"routed": True}, None),
    "hub": ({}, False),
    "hub, TLS": ({}, True),
    "head to head, TLS": ({"heads_meet": True}, True),
}
"""Options of the laboratory, and whether the relays use TLS; None: no relays."""
COLUMNS = ("8 B us", "16 MB MB/s", "8 B us site", "16 MB MB/s site", "CPU s")
REPETITIONS = 3
CLOCK_TICKS = 100


def main() -> None:
    series = int(sys.argv[1]) if sys.argv[1:] else 5
    if missing := describe_missing(series):
        sys.exit(missing)
    print(f"Open MPI {series}, medians of {REPETITIONS}:")
    print(f"{'way':20}", *(f"{column:>15}" for column in COLUMNS))
    for name, (options, tls) in WAYS.items():
        rows = [measure(name, options, tls, series) for _ in range(REPETITIONS)]
        medians = [statistics.median(values) for values in zip(*rows, strict=True)]
        print(f"{name:20}", *(f"{median:15.4g}" for median in medians), flush=True)


def describe_missing(series: int, laboratory_need: Need = LABORATORY) -> str:
    """Return what the machine lacks, and how to provide it; empty if nothing."""
    if series not in VERSIONS:
        return f"the series of Open MPI is {series}; give {' or '.join(map(str, VERSIONS))}"
    if not laboratory_need.is_met:
        return f"{laboratory_need.reason}: {laboratory_need.remedy}"
    mpirun = VERSIONS[series][0]
    package = "apt-get install openmpi-bin" if series == 4 else "make .venv/.installed"
    return "" if shutil.which(mpirun) else f"{mpirun} of Open MPI {series} is missing: {package}"


def measure(name: str, options: dict[str, bool], tls: bool | None, series: int) -> list[float]:
    """Run the program once, and return the values of the table's columns."""
    with TemporaryDirectory() as path:
        folder = Path(path)
        folder.chmod(0o755)
        with laboratory(folder, **options) as lab:
            layout = lab.layout()
            with nullcontext() if tls is None else running(folder, layout, tls=tls) as relays:
                ended = run_open_mpi(lab, folder, layout, *VERSIONS[series])
                used = 0.0 if relays is None else sum(map(processor_time, pids(relays)))
    if ended.returncode != 0:
        sys.exit(f"{name}: {ended.stdout}{ended.stderr}")
    figures = {rank: re.findall(r"[0-9]+", values) for rank, values in re.findall(r"ranks 0-(\d): (.*)", ended.stdout)}
    return [*map(float, figures["2"] + figures["1"]), used]


def pids(relays: RelayProcesses) -> list[int]:
    return [process.pid for process in relays.processes.values()]


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


if __name__ == "__main__":
    main()
