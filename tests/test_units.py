"""The restrictions of the systemd units, and the daemon and agents under them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from koalapy.agent.accounts import Account, RunAs, SwitchMethod
from tests.needs import CONFINEMENT, ROOT, SYSTEMD, needs

UNITS = Path(__file__).parents[1] / "deploy" / "systemd"
SERVE = UNITS / "koala-serve.service"
AGENT = UNITS / "koala-agent@.service"
PYTHON = sys.executable
PROBE = """
import json, mmap, os, socket, sys
import httptools, psycopg, sqlalchemy, uvloop
import koalapy.daemon.main
from koalapy.system.process import scrub_environment
scrub_environment()
def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "written": [error_of(lambda: open(path, "w").close()) for path in ("/etc/x", "/mnt/x", "/tmp/x")],
    "remaining": {name: status[name].strip() for name in ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp")},
    "rejected": [error_of(f) for f in (
        lambda: os.setuid(12), lambda: os.chown("/mnt/x", 1, 1), lambda: os.sched_setaffinity(0, {0}),
        lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), lambda: mmap.mmap(-1, 4096, prot=7),
    )],
}))
"""


def start_confined(data: Path, *command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [PYTHON, "-m", "tests.confined", str(SERVE), str(data), *command],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "XDG_STATE_HOME": "/mnt/state", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=UNITS.parents[1],
    )


def read_exposure(unit: Path) -> float:
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert level, result.stderr
    return float(level[1])


@pytest.mark.evidence("I1", "C10")
@pytest.mark.processes
@needs(SYSTEMD)
def test_exposure_of_units_is_below_limits(tmp_path: Path) -> None:
    assert read_exposure(SERVE) <= 1.5
    for relay in ("koala-relay-hub.service", "koala-relay-head@.service"):
        assert read_exposure(UNITS / relay) <= 1.5, relay
    # The drop-ins for mapped accounts add rights.
    for drop_in, limit in ((None, 2.5), ("mapped-setuid.conf", 3.5), ("mapped-sudo.conf", 6.0)):
        unit = tmp_path / "koala-agent@.service"
        unit.write_text(
            AGENT.read_text().partition("[Install]")[0] + ((UNITS / drop_in).read_text() if drop_in else "")
        )
        assert read_exposure(unit) <= limit, drop_in


@pytest.mark.processes
@needs(SYSTEMD)
@pytest.mark.parametrize("name", sorted(path.name for path in UNITS.iterdir()))
def test_systemd_accepts_every_unit(name: str, tmp_path: Path) -> None:
    base = {"embedded.conf": SERVE}.get(name, AGENT) if name.endswith(".conf") else UNITS / name
    text = re.sub(r"^ExecStart=.*", "ExecStart=/bin/true", base.read_text(), flags=re.MULTILINE)
    drop_in = (UNITS / name).read_text() if name.endswith(".conf") else ""
    unit = tmp_path / base.name
    unit.write_text(text.partition("[Install]")[0] + drop_in)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert not re.findall(r".*koala.*", result.stderr), result.stderr


@pytest.mark.evidence("I1")
@pytest.mark.processes
@needs(CONFINEMENT)
def test_daemon_modules_work_under_restrictions_of_unit(tmp_path: Path) -> None:
    probe = start_confined(tmp_path, PYTHON, "-c", PROBE)
    out, errors = probe.communicate(timeout=120)
    assert probe.returncode == 0, errors
    report: dict[str, Any] = json.loads(out)
    assert report["written"] == [30, None, None]  # EROFS
    assert report["remaining"] == {"CapBnd": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    assert report["rejected"] == [1, 1, 1, 97, 13]  # EPERM, EAFNOSUPPORT, EACCES


@pytest.mark.evidence("I1", "C10")
@pytest.mark.processes
@needs(CONFINEMENT)
def test_daemon_serves_under_restrictions_of_unit(tmp_path: Path) -> None:
    configuration = {"clusters": {"north": {"kind": "slurm", "token": "the-token-of-the-agent-of-north"}}}
    (tmp_path / "koala.yaml").write_text(json.dumps(configuration))
    serve = [PYTHON, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", "/mnt/data"]
    daemon = start_confined(tmp_path, *serve, KOALA_CONFIG="/mnt/koala.yaml")
    try:
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        assert line.startswith("koala serves "), daemon.communicate(timeout=60)[1]
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        assert re.search(r"^NoNewPrivs:\s1$", status, re.MULTILINE)
        assert re.search(r"^Seccomp:\s2$", status, re.MULTILINE)
        token = (tmp_path / "data" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=line.split()[2], headers=headers, timeout=60) as api:
            body = {"request": {"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, "command": ["true"]}
            submission = api.post("/api/v1/jobs", json=body)
            assert submission.status_code == 201, submission.text
            assert api.get("/healthz").json()["problems"] == []
            assert api.get(f"/api/v1/jobs/{submission.json()['id']}/timeline").status_code == 200
    finally:
        daemon.send_signal(signal.SIGTERM)
        _, errors = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, errors
    assert not re.findall(r".*(?:denied|not permitted|Read-only|not supported).*", errors)


@pytest.mark.evidence("I2")
@pytest.mark.processes
@needs(ROOT)
def test_setuid_drop_in_allows_account_change_only() -> None:
    """Run an agent's command as another account with the drop-in's capabilities, none of which the command inherits."""
    lines = (UNITS / "mapped-setuid.conf").read_text().splitlines()
    capabilities = next(line.partition("=")[2].split() for line in lines if line.startswith("AmbientCapabilities="))
    assert f"CapabilityBoundingSet={' '.join(capabilities)}" in lines
    capability_options = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities)])
    agent = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]
    agent += [
        "--inh-caps",
        capability_options,
        "--ambient-caps",
        capability_options,
        "--bounding-set",
        capability_options,
    ]
    accounts = SimpleNamespace(are_many=True)
    account = Account("somebody", 4321, 4322, (4323,), "/", "/bin/sh")
    command = RunAs(accounts, SwitchMethod.SETUID).build_command(
        account, ["grep", "-E", "^(Cap|Uid|Gid|Groups)", "/proc/self/status"]
    )  # type: ignore[arg-type]
    result = subprocess.run([*agent, *command], capture_output=True, text=True, timeout=60)
    status = {name: value.split() for name, _, value in (line.partition(":") for line in result.stdout.splitlines())}
    assert status["Uid"] == ["4321"] * 4, result.stderr
    assert (status["Gid"], status["Groups"]) == (["4322"] * 4, ["4322", "4323"])
    assert {status[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


def test_security_page_names_every_unit_file() -> None:
    docs = (UNITS.parents[1] / "docs" / "security.md").read_text()
    assert [path.name for path in UNITS.iterdir() if f"`{path.name}`" not in docs] == []
