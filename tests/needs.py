"""Programs and permissions that tests need of the machine. The summary of a run lists the unmet needs."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.traces import default_folder
from tests.confined import HEADERS

OPEN_MPI_4_PREFIX = Path("/usr")
"""The prefix under which Debian installs Open MPI 4."""
TESTBED_ENV = Path(__file__).parents[1] / ".testbed.env"


@dataclass(frozen=True, slots=True)
class Need:
    """A program or permission that a machine may lack, and how to provide it."""

    name: str
    is_met: bool
    remedy: str
    untested: str = ""
    """Tests that are not collected without it, as a clause."""

    @property
    def reason(self) -> str:
        """Return the skip reason of tests with this need."""
        return f"{self.name} missing"


def find_postgresql() -> Path | None:
    """Return the folder of ``initdb`` and ``postgres``, or None if PostgreSQL is not installed."""
    newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    initdb = str(newest[-1]) if newest else shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


def _find_pythons(*names: str) -> dict[str, str]:
    """Return the paths of those interpreters that run, by name, from PATH or pyenv."""
    paths = {}
    for name in names:
        version = name.removeprefix("python")
        versions = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}*/bin/{name}"))
        for path in filter(None, (shutil.which(name), *map(str, versions))):
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                paths[name] = path
                break
    return paths


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def _has_namespaces() -> bool:
    """Check for mount namespaces and for the kernel's protection against memory that is writable and executable."""
    deny = "import ctypes; raise SystemExit(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0)"
    command = ["unshare", "--mount", sys.executable, "-c", deny]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def _may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


RSYNC = Need("rsync", shutil.which("rsync") is not None, "apt-get install rsync")
POSTGRESQL = Need(
    "PostgreSQL", find_postgresql() is not None, "apt-get install postgresql", "the store is tested with SQLite only"
)
PGBOUNCER_PATH = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
PGBOUNCER = Need(
    "PgBouncer",
    POSTGRESQL.is_met and Path(PGBOUNCER_PATH).exists(),
    "apt-get install postgresql pgbouncer",
    "PostgreSQL is not tested behind a pooler",
)
TESTBED_UP = Need(
    "testbed",
    TESTBED_ENV.exists(),
    "make testbed, which needs Docker",
    "nothing is tested on real Slurm and Grid Engine",
)
MPI = Need(
    "Open MPI or mpi4py",
    _has_module("mpi4py") and _has_module("numpy"),
    "make .venv/.installed, or pip install '.[mpi]'",
)
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun") or "mpirun"
"""The mpirun of this environment, activated or not, or else of PATH."""
MPIRUN_5 = str(Path(sys.executable).parent / "mpirun")
"""The mpirun of the package openmpi."""
LIBMPI_5 = Path(sys.prefix) / "lib" / "libmpi.so.40"
OPEN_MPI_4 = Need(
    "Open MPI 4",
    shutil.which(str(OPEN_MPI_4_PREFIX / "bin" / "orterun")) is not None,
    "apt-get install openmpi-bin",
    "series 4 is not tested",
)
CHARLIECLOUD = Need(
    "Charliecloud",
    shutil.which("ch-run") is not None,
    "apt-get install charliecloud",
    "container images are not tested",
)
OLDER_PYTHONS = _find_pythons("python3.9", "python3.10")
"""Paths of the interpreters, by name."""
OLDER_PYTHON = Need(
    "Python 3.9 or 3.10", len(OLDER_PYTHONS) == 2, "pyenv install 3.9 3.10", "the runner is not tested on every Python"
)
C_COMPILER = Need(
    "C compiler",
    bool(shutil.which("gcc") or shutil.which("cc")),
    "apt-get install gcc libc6-dev",
    "no side effect is interrupted, and no power is cut",
)
MATPLOTLIB = Need("matplotlib", _has_module("matplotlib"), "pip install '.[plots]'")
DRMAA = Need("package drmaa", _has_module("drmaa"), "pip install '.[drmaa]'")
IPV6 = Need("IPv6", _has_ipv6(), "give the loopback interface the address ::1")
RELEASE_TOOLS = Need(
    "release tools",
    (Path(__file__).parents[1] / ".venv-release" / ".installed").exists(),
    "make release",
    "packages and their bill of materials are not tested",
)
SYSTEMD = Need("systemd-analyze", shutil.which("systemd-analyze") is not None, "apt-get install systemd")
CONFINEMENT = Need(
    "confinement",
    os.geteuid() == 0 and SYSTEMD.is_met and HEADERS.exists() and _has_namespaces(),
    "apt-get install systemd linux-libc-dev, and root with the capability SYS_ADMIN, on x86-64 with Linux 6.3",
    "the daemon is not run with the restrictions of its unit",
)
PROMETHEUS = Need(
    "Prometheus",
    shutil.which("prometheus") is not None and shutil.which("promtool") is not None,
    "apt-get install prometheus",
    "metrics, rules and the Grafana board are not checked with Prometheus",
)
CHROMIUM_PATH = Path(shutil.which("chromium") or "/usr/bin/chromium")
CHROMIUM = Need(
    "Chromium",
    CHROMIUM_PATH.exists() and _has_module("playwright"),
    "apt-get install chromium",
    "the dashboard is not shown in a browser",
)
TRACES = Need(
    "traces",
    default_folder().is_dir(),
    "KOALA_TRACES=FOLDER, of logs of the Parallel Workloads Archive",
    "published results of experiments on traces are not checked",
)
ZSH = Need("zsh", shutil.which("zsh") is not None, "apt-get install zsh")
FISH = Need("fish", shutil.which("fish") is not None, "apt-get install fish")
ROOT = Need("root", os.geteuid() == 0, "run as root the tests that act as another account")
NAMESPACES = Need("network namespaces", True, "run them as root, with the capability SYS_ADMIN")
"""Checked by the tests themselves."""
SMALL_DISKS = Need("small disks", _may_mount(), "run them as root, with the capability SYS_ADMIN")
ALL = (
    RSYNC,
    POSTGRESQL,
    PGBOUNCER,
    TESTBED_UP,
    MPI,
    OPEN_MPI_4,
    CHARLIECLOUD,
    OLDER_PYTHON,
    C_COMPILER,
    MATPLOTLIB,
    DRMAA,
    IPV6,
    RELEASE_TOOLS,
    SYSTEMD,
    PROMETHEUS,
    CONFINEMENT,
    CHROMIUM,
    TRACES,
    ZSH,
    FISH,
    ROOT,
    NAMESPACES,
    SMALL_DISKS,
)


def needs(need: Need) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the need is unmet."""
    return pytest.mark.skipif(not need.is_met, reason=need.reason)
