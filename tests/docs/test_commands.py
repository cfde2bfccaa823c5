"""Every command of the documentation prints what its page shows, in order, on one daemon for all pages."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from doctest import DocTestParser
from functools import partial
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, SHOWN, Block
from tests.docs.session import Session, find_missing_lines
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import MAX_WAIT_S
from tests.needs import MPI, RSYNC, needs

pytestmark = [needs(MPI), needs(RSYNC), pytest.mark.grid, pytest.mark.processes]

PLAYED: dict[str, list[Block]] = {}
for _block in SHOWN:
    if _block.mark is None:
        PLAYED.setdefault(_block.page, []).append(_block)
FIRST = "docs/tutorial.md"
PREPARED = {
    "docs/taken-over.md:0": "koala token create --user alice --quiet >/dev/null",
    "docs/taken-over.md:1": """
        koala submit -q --owner alice --flexible 8 -- sleep 600
        koala submit -q --owner alice --flexible 8 -- sleep 600
    """,
    "docs/explain.md:0": """
        koala submit -q --fixed north:2 --launcher processes -- sleep 600
        koala local-run south 2 sleep 600 &
        until koala clusters | grep -Eq 'south .* usable +4 +2 +0 +2 '; do sleep 0.1; done
        koala submit -q --flexible 4 --max-components 1 -- python -m koalapy.apps.poisson
    """,
    "docs/explain.md:1": """
        koala cancel $(koala queue -q)
        until [ -z "$(koala queue -q)" ]; do sleep 0.1; done
        koala clusters drain north --reason "new disks"
    """,
    "docs/files.md:0": """
        mkdir -p data/replicas/fields
        head -c 2000000 /dev/urandom >data/replicas/mesh.nc
        head -c 2000000 /dev/urandom >data/replicas/mesh-v2.nc
        head -c 100000 /dev/urandom | tee data/replicas/fields/a.nc >data/replicas/fields/b.nc
    """,
    "docs/files.md:3": """
        koala cancel $(koala queue -q)
        mkdir lib
        printf '#!/bin/sh\\necho it was here >out-$KOALA_CLUSTER.txt' >run.sh
        chmod +x run.sh
    """,
    "docs/security.md:1": """
        export KOALA_TOKEN=$(cat $KOALA_DATA/token)
        JOB=$(koala submit -q --flexible 1 --launcher processes -- sleep 60)
    """,
    "docs/rest.md:0": "mkdir -p ~/.local/share/koala; cp $KOALA_DATA/token ~/.local/share/koala",
}
"""Commands that prepare a block, by its page and number from 0."""
INTERACTIVE = {"--watch", "top", "shell"}
"""Options and commands that run until they are interrupted; tests/cli plays them on terminals."""
OF_OTHER_GRIDS = {
    *("--account", "--after", "--begin", "--cores", "--cpus-per-rank", "--deadline"),
    *("--feature", "--gpus", "--memory", "--partition", "--qos", "--ranks-on"),
}
"""Options with values that this grid does not have, of a certain time, or for scripts; their own tests use them."""
FINISHED_JOB = """
    printf '#!/bin/sh\\nhostname\\n' >job.sh
    chmod +x job.sh
    koala submit -q --flexible 1 --collect out --launcher processes -- sh -c 'echo x >out' >over
    koala wait $(cat over)
"""
ALL_NODES_TAKEN = "koala submit --fixed north:4,south:4 --priority high --launcher processes -- sleep 600"
JOB_FOR = {
    "release": "koala submit -q --flexible 8 -- true >id; koala hold $(cat id)",
    "logs": "cat over >id",
    "wait": "cat over >id",
    "fetch": "cat over >id",
}
"""Commands that write a job's number into the file ``id``, by the command that uses it. Others get a waiting job."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a subfolder for each page."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def grid(folder: Path) -> Iterator[EmbeddedGrid]:
    sites = {"kind": "local", "replica_directories": [str(folder / "files" / "data" / "replicas")]}
    grid = EmbeddedGrid(
        folder / "data", HOME=str(folder / "home"), KOALA_CLUSTERS=json.dumps({"north": sites, "south": sites})
    ).start()
    yield grid
    close_grid(grid)


@contextmanager
def open_session(grid: EmbeddedGrid, folder: Path, *, with_daemon: bool = False) -> Iterator[Session]:
    """Yield a session on the grid, or one ``with_daemon``, and restore the grid afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in grid.environment.items() if name != "KOALA_CLUSTERS"} | {
        "KOALA_URL": f"http://127.0.0.1:{port}" if with_daemon else grid.url,
        "KOALA_PORT": str(port),
        "KOALA_DATA": str(grid.directory),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "USER": "root",
    }
    newest = grid.http.get("/api/v1/jobs?limit=1").json()["jobs"]
    serving = f"koala serves {grid.url} (data in {grid.directory})"
    paths = {"/data/": f"{folder}/data/", "/var/lib/koala": str(grid.directory), "/opt/koala/bin/": ""}
    session = Session(folder, environment, newest[0]["id"] if newest and not with_daemon else 0, serving, paths)
    try:
        yield session
    finally:
        session.close()
        for cluster in grid.list_clusters():
            if cluster["drained"]:
                grid.http.post(f"/api/v1/clusters/{cluster['name']}/resume")
        grid.cancel_all_jobs()
        grid.wait_until_idle()


@pytest.mark.parametrize("page", sorted(PLAYED, key=lambda page: (page != FIRST, page)))
def test_commands_of_page_print_what_it_shows(page: str, grid: EmbeddedGrid, folder: Path) -> None:
    starts_daemon = any("koala serve --config" in line for block in PLAYED[page] for line in block.lines)
    with open_session(grid, folder / Path(page).stem, with_daemon=starts_daemon) as session:
        for number, block in enumerate(PLAYED[page]):
            session.run(PREPARED.get(f"{page}:{number}", "true"))
            for command in block.commands():
                session.play(command, page)


CONSOLE = """
import code, contextlib, io, json, sys
console = code.InteractiveConsole()
for source in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        console.runsource(source, symbol="single")
    print(json.dumps(printed.getvalue()))
"""
"""A program that runs statements as Python's prompt does, and prints the output of each."""


def test_python_page_prints_what_it_shows(grid: EmbeddedGrid, folder: Path) -> None:
    page = ROOT / "docs" / "python.md"
    text = page.read_text(encoding="utf-8")
    sessions = re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    examples = DocTestParser().get_examples("\n".join(sessions))
    assert len(examples) > 20
    here = folder / "python"
    here.mkdir()
    environment = grid.environment | {"KOALA_URL": grid.url, "USER": "root"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = partial(subprocess.run, capture_output=True, text=True, cwd=here, env=environment, timeout=MAX_WAIT_S)
    played = run([sys.executable, "-c", CONSOLE], input=json.dumps([example.source for example in examples]))
    assert played.returncode == 0, played.stderr
    for example, line in zip(examples, played.stdout.splitlines(), strict=True):
        printed = json.loads(line)
        assert find_missing_lines(example.want.splitlines(), printed) == [], f"{example.source}{printed}"
        assert example.want or not printed, f"{example.source}{printed}"
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (here / "pi.py").write_text(program)
    ran = run([sys.executable, "pi.py"])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(r"pi is about 3\.1\d\n", ran.stdout)
    grid.cancel_all_jobs()
    grid.wait_until_idle()


REQUEST = "request"


def name_of(option: str) -> str:
    """Return the name of an option, and one for all kinds of requests, of which a job has one."""
    name = option.split()[0].partition("=")[0]
    return REQUEST if name in ("--fixed", "--nonfixed", "--flexible") else name


def test_commands_for_slurm_users_succeed(grid: EmbeddedGrid, folder: Path) -> None:
    """Run each command and option of the tables while another job has all nodes."""
    page = (ROOT / "docs" / "coming-from-slurm.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\| .* \| `(koala [^`]*)` \| .*\|$", page, re.MULTILINE)
    commands = [command for command in commands if not INTERACTIVE & set(command.split())]
    table = page.partition("## Options of a job")[2].partition("\n## ")[0]
    options = re.findall(r"`(--[^`]*)`", "".join(re.findall(r"^\| .* \| (`--[^|]*) \|$", table, re.MULTILINE)))
    options = [option for option in options if option.split()[0] not in OF_OTHER_GRIDS]
    assert len(commands) > 20
    assert len(options) > 8
    with open_session(grid, folder / "slurm") as session:
        session.run(FINISHED_JOB)
        nodes_are_taken = False
        waiting = {command for command in commands if "--wait" in command or command.startswith("koala run ")}
        for command in sorted(commands, key=lambda command: command not in waiting):
            if command not in waiting and not nodes_are_taken:
                session.run(ALL_NODES_TAKEN)
                nodes_are_taken = True
            if "JOB" in command:
                is_of_tasks = "JOB[" in command or "--tasks" in command
                submit = f"koala submit -q --flexible 8 {'--array 1-9 ' * is_of_tasks}-- true >id"
                session.run(submit if is_of_tasks else JOB_FOR.get(command.split()[1], submit))
            code, output = session.run(command.replace("JOB", "$(cat id)"))
            assert code == 0, f"{command}: {output}"
        while options:  # as many at once as go together
            at_once = {name_of(command): command for command in reversed(options)}
            options = [command for command in options if command not in at_once.values()]
            at_once.setdefault(REQUEST, "--flexible 2")
            code, output = session.run(f"koala submit --dry-run {' '.join(at_once.values())} -- hostname")
            assert code == 0, f"{at_once}: {output}"
