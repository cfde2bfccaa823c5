"""The rows of docs/coming-from-slurm.md in both forms, on real Slurm and by koala: what both do is the same.

It takes minutes of processor time. ``--rings 4`` runs it while the testbed is up.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.docs.slurm_page import DATA, ROWS, find_commands
from tests.grid.containers import Container
from tests.grid.grid import MAX_WAIT_S
from tests.grid.testbed import WEST, Testbed

pytestmark = pytest.mark.nightly

RECORD = """
import json, os, ssl, sys, urllib.request
url = os.environ["KOALA_URL"] + f"/api/v1/jobs/{sys.argv[1]}?wait={sys.argv[3]}"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["KOALA_TOKEN"]})
trust = ssl.create_default_context(cafile=os.environ["KOALA_CA_FILE"])
values = [json.load(urllib.request.urlopen(request, context=trust))]
for name in sys.argv[2].split("."):
    values = [item[name] for value in values for item in (value if isinstance(value, list) else [value])]
print("\\n".join(map(str, values)))
"""
"""A program that prints a field of a job, after it has waited for the end of the job for some seconds."""


class Sides:
    """Run the two forms of rows: Slurm's in the container of a head node, koalapy's on this machine."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self._bed, self._folder = bed, folder
        (folder / "record.py").write_text(RECORD)
        shared = bed.make_folder()
        north = bed.heads["north"].name
        self._koala_functions = (
            f"{DATA['koala_functions']}\nSHARED={shared.path}\n"
            f'shared() {{ docker exec -w /shared/north{shared.path} {north} cat "$@"; }}\n'
        )
        self._environment = bed.client_environment | {
            "RECORD": str(folder / "record.py"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def compare(self, row: str) -> tuple[str, str]:
        """Return what both sides print."""
        slurm, koala = find_commands()[row]
        entry = ROWS[row]
        head = self._bed.west_head if entry.get("head") == WEST else self._bed.heads[entry.get("head", "north")]
        on_slurm = self._run_on_head(head, entry.get("user", "alice"), entry["slurm"].replace("{}", slurm))
        return on_slurm, self._run_koala(row, entry["koala"].replace("{}", koala))

    def _run_on_head(self, head: Container, user: str, script: str) -> str:
        folder = "/tmp" if user == "root" else f"/shared/{head.service.removesuffix('-head')}/home/{user}"
        script = f"export FOLDER={folder} USER={user} HOME={folder}\n{DATA['slurm_functions']}\n{script}"
        return _run([*exec_on_head(head, user), "bash", "-c", script])

    def _run_koala(self, row: str, script: str) -> str:
        folder = self._folder / re.sub(r"\W", "-", row)
        folder.mkdir()
        return _run(["bash", "-c", f"{self._koala_functions}\n{script}"], cwd=folder, env=self._environment)


def exec_on_head(head: Container, user: str, *options: str) -> list[str]:
    as_user = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
    return ["docker", "exec", *options, head.name, *as_user]


def _run(command: list[str], **options: object) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_S, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        return f"no end after {MAX_WAIT_S} s: {error.stdout!r} {error.stderr!r}"
    return f"{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def bed(testbed: Testbed) -> Iterator[Testbed]:
    with testbed.open_west():
        yield testbed


@pytest.fixture(scope="module")
def outputs(bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, str]]:
    """Return what both sides of each row print; the rows run side by side."""
    sides = Sides(bed, tmp_path_factory.mktemp("rows"))
    together = [row for row in ROWS if not ROWS[row].get("alone")]
    with ThreadPoolExecutor(6) as pool:
        outputs = dict(zip(together, pool.map(sides.compare, together), strict=True))
    for user, head in [("alice", bed.heads["north"]), ("root", bed.heads["north"]), ("alice", bed.west_head)]:
        head.run("scancel", "-u", user)
    bed.cancel_all_jobs()
    return outputs | {row: sides.compare(row) for row in ROWS if row not in outputs}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS)
def test_row_has_the_same_effect_on_slurm_and_koalapy(outputs: Mapping[str, tuple[str, str]], row: str) -> None:
    slurm, koala = outputs[row]
    assert slurm == koala
    assert slurm.strip()


def test_interactive_rows_have_the_same_effect(bed: Testbed) -> None:
    commands = find_commands()
    head = bed.heads["north"]
    slurm_job = head.run(
        "sbatch", "--parsable", "-N", "1", "-o", "/dev/null", "--wrap", "sleep 60", user="alice"
    ).strip()
    koala_job = str(bed.submit({"type": "fixed", "components": [{"cluster": "south", "size": 1}]}, "sleep", "60"))
    bed.wait_for_state(int(koala_job), "running")
    rows = {
        "srun --jobid=JOB --overlap --pty bash": "exit 3",
        "srun --pty bash": "test -t 0 && exit 3",
        "salloc -N 2": 'test "${KOALA_NODES:-$SLURM_NNODES}" = 2 && exit 3',
    }
    for row, typed in rows.items():
        slurm, koala = commands[row]
        on_slurm = [*exec_on_head(head, "alice", "-it", "-w", "/tmp"), *shlex.split(slurm.replace("${JOB}", slurm_job))]
        with ExitStack() as stack:
            sides = [
                stack.enter_context(Terminal(on_slurm, os.environ)),
                stack.enter_context(
                    Terminal(
                        [*bed.koala_command, *shlex.split(koala.replace("${JOB}", koala_job))[1:]],
                        bed.client_environment,
                    )
                ),
            ]
            for side in sides:
                side.expect(r"[$#] $")
                side.send_text(f"{typed}\n")
            assert [side.wait_for_exit() for side in sides] == [3, 3], row
        head.run("scancel", slurm_job)
