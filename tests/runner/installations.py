"""Copies of the installed Open MPI at other paths."""

import shutil
from pathlib import Path

from tests.runner.conftest import MPI_ENVIRONMENT


def mpi_prefix() -> Path:
    """Return the prefix of the tests' Open MPI."""
    mpirun = shutil.which("mpirun", path=MPI_ENVIRONMENT["PATH"])
    assert mpirun is not None
    return Path(mpirun).resolve().parents[1]


def copy_installation(prefix: Path, only_on: str) -> Path:
    """Copy the tests' Open MPI, with a daemon that runs only at addresses that begin with ``only_on``."""
    source = mpi_prefix()
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    for program in ("mpirun", "ompirun_wrapper", "prted", "prterun"):
        if (source / "bin" / program).exists():
            shutil.copy(source / "bin" / program, prefix / "bin" / program)
    for library in (source / "lib").glob("lib*.so*"):
        shutil.copy(library, prefix / "lib" / library.name)
    for folder in ("openmpi", "pmix", "prte"):
        if (source / "lib" / folder).is_dir():
            shutil.copytree(source / "lib" / folder, prefix / "lib" / folder)
    daemon = prefix / "bin" / "prted"
    daemon.rename(prefix / "bin" / "prted.real")
    daemon.write_text(
        f'#!/bin/sh\ncase $LOCALD_NODE in {only_on}*) exec "$0.real" "$@";; esac\n'
        'echo "not my cluster: $LOCALD_NODE" >&2; exit 42\n'
    )
    daemon.chmod(0o755)
    return prefix
