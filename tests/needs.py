"""What tests need of the machine: those that cannot be played are told in one line for each thing that is missing."""

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

SERIES_4 = Path("/usr")
"""With Open MPI 4 below, where Debian has it."""
TESTBED = Path(__file__).parents[1] / ".testbed.env"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a machine may lack, and how it gets it."""

    name: str
    is_met: bool
    remedy: str
    left_out: str = ""
    """What is not even collected without it."""

    @property
    def reason(self) -> str:
        """Of tests that are skipped for it; by this they are counted."""
        return f"{self.name} missing"


def postgresql() -> Path | None:
    """The folder of ``initdb`` and ``postgres``, where PostgreSQL is installed."""
    newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = str(newest[-1]) if newest else shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _pythons(*names: str) -> dict[str, str]:
    """Which of these there are, with where: on the path, or pyenv's."""
    found = {}
    for name in names:
        version = name.removeprefix("python")
        versions = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}*/bin/{name}"))
        for path in filter(None, (shutil.which(name), *map(str, versions))):
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                found[name] = path
                break
    return found


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def _has_namespaces() -> bool:
    """Of mounts, and whether memory can be kept from being written and run."""
    deny = "import ctypes; raise SystemExit(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0)"
    asked = ["unshare", "--mount", sys.executable, "-c", deny]
    return shutil.which("unshare") is not None and subprocess.run(asked, capture_output=True).returncode == 0


def _may_mount() -> bool:
    asked = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(asked, capture_output=True).returncode == 0


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


RSYNC = Need("rsync", shutil.which("rsync") is not None, "apt-get install rsync")
POSTGRESQL = Need(
    "PostgreSQL", postgresql() is not None, "apt-get install postgresql", "the store is tested with SQLite only"
)
TESTBED_UP = Need(
    "testbed", TESTBED.exists(), "make testbed, which needs Docker", "nothing is tested on real Slurm and Grid Engine"
)
MPI = Need(
    "Open MPI or mpi4py",
    _has_module("mpi4py") and _has_module("numpy"),
    "make .venv/.installed, or pip install '.[mpi]'",
)
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun") or "mpirun"
"""Of this environment, whether it is activated or not."""
OPEN_MPI_4 = Need(
    "Open MPI 4",
    shutil.which(str(SERIES_4 / "bin" / "orterun")) is not None,
    "apt-get install openmpi-bin",
    "series 4 is not tested",
)
OLDER_PYTHONS = _pythons("python3.9", "python3.10")
"""Where they are, by name."""
OLDER_PYTHON = Need(
    "Python 3.9 or 3.10", len(OLDER_PYTHONS) == 2, "pyenv install 3.9 3.10", "the runner is not played on every Python"
)
MATPLOTLIB = Need("matplotlib", _has_module("matplotlib"), "pip install '.[plots]'")
DRMAA = Need("package drmaa", _has_module("drmaa"), "pip install '.[drmaa]'")
IPV6 = Need("IPv6", _has_ipv6(), "give the loopback interface the address ::1")
RELEASE_TOOLS = Need(
    "release tools",
    (Path(__file__).parents[1] / ".venv-release" / ".installed").exists(),
    "make release",
    "packages and their list of parts are not made",
)
SYSTEMD = Need("systemd-analyze", shutil.which("systemd-analyze") is not None, "apt-get install systemd")
CONFINEMENT = Need(
    "confinement",
    os.geteuid() == 0 and SYSTEMD.is_met and HEADERS.exists() and _has_namespaces(),
    "apt-get install systemd linux-libc-dev, and root with the capability SYS_ADMIN, on x86-64 with Linux 6.3",
    "the daemon is not run under what its unit takes away",
)
PROMETHEUS = Need(
    "Prometheus",
    shutil.which("prometheus") is not None and shutil.which("promtool") is not None,
    "apt-get install prometheus",
    "metrics, rules and board are not looked at by Prometheus",
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
    "what experiments on them gave is not held against them",
)
ZSH = Need("zsh", shutil.which("zsh") is not None, "apt-get install zsh")
FISH = Need("fish", shutil.which("fish") is not None, "apt-get install fish")
ROOT = Need("root", os.geteuid() == 0, "run them as root, for what another account may do")
NAMESPACES = Need("network namespaces", True, "run them as root, with the capability SYS_ADMIN")
"""Found out by the tests themselves."""
SMALL_DISKS = Need("small disks", _may_mount(), "run them as root, with the capability SYS_ADMIN")
ALL = (
    RSYNC,
    POSTGRESQL,
    TESTBED_UP,
    MPI,
    OPEN_MPI_4,
    OLDER_PYTHON,
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
    """A test that is skipped where the machine lacks that."""
    return pytest.mark.skipif(not need.is_met, reason=need.reason)
