"""What operators are called for, each made real: there is an alert that says what and why, and its remedy helps."""

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import MAX_WAIT_S, wait_until
from tests.needs import CHROMIUM, RSYNC, SMALL_DISKS, needs

pytestmark = [pytest.mark.processes, pytest.mark.grid]

Alert = dict[str, Any]
TOKEN = "the-agent-of-west-may-come"
QUICK = {"hold": 0, "release": 0, "black_hole_failures": 3, "flapping_changes": 3, "claim_stuck_after": 1}
QUICK |= {"starving_after": 1, "flood_jobs": 10}
ONE_CLICK_AWAY = {"claim-stuck": ("Cancel…",), "queue-flooded": ("Hold…", "Cancel…"), "slow-link": ("Measure",)}
"""Buttons of the page that an alert leads to."""
OF_VERSION = "import sys, koalapy; koalapy.__version__ = sys.argv.pop(1); from koalapy.cli.main import main; main()"


class Grid(EmbeddedGrid):
    """North and south are the daemon's; west has an agent of its own, as other sites have, and nothing in it."""

    def __init__(self, directory: Path) -> None:
        self.measured = directory.parent / "measured.json"
        clusters = {
            "north": {"nodes": 4, "network": "127.0.91"},
            "south": {"nodes": 4, "network": "127.0.92", "environment": {"BROKEN": "1"}},
            "west": {"nodes": 1, "network": "127.0.93", "embedded": False, "token": TOKEN},
        }
        configuration = {
            "clusters": clusters,
            "links": [{"between": ["north", "south"], "bandwidth": "1GB"}],
            "network": {"command": ["cat", str(self.measured)]},
            "rules": {"unreachable_after": 3, "claim_grace": 600, "barrier_timeout": 600, "aging": False},
            "alerts": QUICK,
        }
        self.measures(1e9)
        (directory.parent / "koala.yaml").write_text(json.dumps(configuration))
        super().__init__(directory, KOALA_CONFIG=str(directory.parent / "koala.yaml"))
        self.west: subprocess.Popen[bytes] | None = None
        self.page: Any = None
        """Of an operator's browser that shows the dashboard, where there is one."""

    def measures(self, bandwidth: float) -> None:
        """What measuring a link finds from now on."""
        self.measured.write_text(json.dumps({"pairs": [{"latency": 1e-4, "bandwidth": bandwidth}]}) + "\n")

    def start(self, port: int = 0) -> "Grid":
        url = self.launch_daemon(port)
        self.start_west(url=url)
        self.connect(url)
        return self

    def start_west(self, version: str = "", url: str = "") -> None:
        """``version``: of its koalapy, if not ours."""
        start = [sys.executable, "-c", OF_VERSION, version] if version else self.koala_command
        directory = str(self.directory.parent / "west")
        self.west = subprocess.Popen(
            [*start, "agent", "west", "--url", url or self.url, "--directory", directory],
            env=self.environment | {"KOALA_AGENT_TOKEN": TOKEN},
            stderr=(self.directory.parent / "west.log").open("a"),
        )

    def stop_west(self) -> None:
        assert self.west is not None
        self.west.terminate()
        self.west.wait(timeout=MAX_WAIT_S)

    # Alerts

    def alerts(self, kind: str, of: str = "") -> list[Alert]:
        """``of``: as a user is told."""
        headers = {"Authorization": f"Bearer {self.user(of)}"} if of else {}
        told: list[Alert] = self.http.get("/api/v1/alerts", headers=headers).json()["alerts"]
        return [alert for alert in told if alert["kind"] == kind]

    def user(self, name: str) -> str:
        """A token of somebody who is no operator."""
        answer = self.http.post("/api/v1/tokens", json={"user": name, "role": "user"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])

    def told(self, kind: str, target: str, words: str = "") -> Alert:
        """The alert of that kind, once it is told: it names its cause, and what helps."""

        def look() -> Alert | None:
            return next((a for a in self.alerts(kind) if a["target"] == target and words in a["cause"]), None)

        alert = wait_until(look, f"an alert {kind} of {target} for {words!r}: {self.alerts(kind)}")
        assert alert is not None
        assert all(alert[text] for text in ("summary", "cause", "remedy")), alert
        self.shown_first(alert)
        return alert

    def shown_first(self, alert: Alert) -> None:
        """The dashboard's first screen has it, with its cause and what helps; one click leads to what says more."""
        if self.page is None:
            return
        self.page.goto("/")
        shown = self.in_browser(alert)
        shown.wait_for()
        assert all(alert[text] in shown.inner_text() for text in ("summary", "remedy")), shown.inner_text()
        box = shown.bounding_box()
        assert box["y"] + box["height"] <= self.page.viewport_size["height"], box
        more = shown.get_by_role("link")
        if more.count():
            more.first.click()
            self.page.locator("h1").wait_for()
            assert self.page.locator("main .problem.refused").count() == 0
            assert not re.match(r"[45]\d\d ", self.page.locator("h1").inner_text()), self.page.url
            for button in ONE_CLICK_AWAY.get(alert["kind"], ()):
                self.page.get_by_role("button", name=button).first.wait_for()

    def in_browser(self, alert: Alert) -> Any:
        """Its place on the first page."""
        target = re.sub(r"[^A-Za-z0-9_-]+", "-", alert["target"])
        return self.page.locator(f"#alert-{alert['kind']}-{target}")

    def over(self, kind: str) -> None:
        wait_until(lambda: not self.alerts(kind), f"no alert {kind} any more: {self.alerts(kind)}")

    def do(self, alert: Alert) -> str:
        """Do what an alert says that helps: by the dashboard's own button where it has one, else to the letter, the
        first of its commands; what that printed."""
        if self.page is not None:
            self.page.goto("/")
            if (button := self.in_browser(alert).get_by_role("button")).count():
                button.first.click()
                self.page.wait_for_load_state()
                return ""
        command = re.search(r"koala (?:[^;$]|\$\([^)]*\))*", alert["remedy"])
        assert command is not None, alert
        script = f'koala() {{ {" ".join(self.koala_command)} "$@"; }}; {command[0]}'
        environment = self.environment | {"KOALA_URL": self.url}
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=MAX_WAIT_S
        )
        assert done.returncode == 0, (command[0], done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """One daemon, which every incident leaves as it found it; its data lie on a small disk where one can be had."""
    directory = tmp_path_factory.mktemp("grid")
    (data := directory / "data").mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=0700", "tmpfs", data], check=False)
    grid = Grid(data)
    browsing = contextlib.ExitStack()
    try:
        grid.start()
        if CHROMIUM.is_met:
            from tests.dashboard.browser import Visitor, chromium

            operator = Visitor(browsing.enter_context(chromium()), grid.url, grid.admin_token)
            grid.page = operator.page
        yield grid
        grid.wait_until_idle()
    finally:
        browsing.close()
        grid.stop_west()
        close_grid(grid)
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", data], check=True)


def fixed(cluster: str, size: int = 1) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def flexible(size: int) -> dict[str, Any]:
    return {"type": "flexible", "total_size": size}


def eight(grid: Grid) -> dict[str, Any]:
    """All nodes of north and south, so that west stays out of it."""
    return {"type": "fixed", "components": [{"size": 4, "cluster": name} for name in ("north", "south")]}


def test_a_hung_resource_manager_and_a_dead_agent_at_once(grid: Grid) -> None:
    lrm = grid.find_resource_manager("north")
    agent, hung = grid.find_agent("south"), psutil.Process(lrm.pid)
    hung.suspend()
    psutil.Process(agent.pid).suspend()
    try:
        dead = grid.told("agent-away", "cluster south", "its agent has not answered for 3 s")
        assert (dead["severity"], dead["cluster"]) == ("critical", "south")
        assert "pkill -f 'agent south --embedded'" in dead["remedy"]
        assert "agent south --embedded" in " ".join(agent.command)
        page = grid.run_koala("alerts").stdout
        assert "CRITICAL  cluster south  agent-away" in page
        assert dead["remedy"] in page
        agent.kill()
        grid.over("agent-away")
        alert = grid.told("resource-manager", "cluster north", "not answering since")
        assert "koala clusters drain north" in alert["remedy"]
        grid.do(alert)
        grid.over("resource-manager")
        assert "its resource manager" in grid.get_cluster("north")["reason"]
    finally:
        hung.resume()
        assert grid.run_koala("clusters", "resume", "north").returncode == 0


def test_a_black_hole(grid: Grid) -> None:
    healthy_only = ("sh", "-c", '[ -z "$BROKEN" ]')
    jobs = [grid.submit(fixed(name), *healthy_only) for name in ("north", "south") for _ in range(3)]
    assert [grid.wait_for_end(job)["state"] for job in jobs] == ["succeeded"] * 3 + ["failed"] * 3
    alert = grid.told("black-hole", "cluster south", "3 of 3 jobs that ended there in 15 minutes failed within 30 s")
    assert "koala clusters drain south" in alert["remedy"]
    grid.do(alert)
    grid.over("black-hole")
    jobs = [grid.submit(flexible(1), *healthy_only) for _ in range(4)]
    assert [grid.wait_for_end(job)["state"] for job in jobs] == ["succeeded"] * 4
    assert grid.run_koala("clusters", "resume", "south").returncode == 0
    assert not grid.alerts("black-hole")


def test_a_job_stuck_in_claiming(grid: Grid) -> None:
    request = {"type": "fixed", "components": [*fixed("north", 2)["components"], *fixed("south")["components"]]}
    job, resume = grid.submit_to_stopped_agent("south", request, "true")
    try:
        load = grid.start_local_job("south", 4)
    finally:
        resume()
    alert = grid.told("claim-stuck", f"job {job}", "waits in the resource manager of south behind local users")
    assert (alert["job"], alert["cluster"]) == (job, "south")
    assert "holds 2 nodes meanwhile" in alert["summary"]
    assert grid.do(alert).startswith(f"job {job} ")
    assert grid.wait_for_end(job)["state"] == "cancelled"
    grid.over("claim-stuck")
    load.stop()
    grid.wait_until_idle()


def test_a_wide_job_that_starves(grid: Grid) -> None:
    gates = [grid.make_gate() for _ in range(4)]
    first = grid.submit(fixed("north", 4), *gates[0].hold)
    second = grid.submit(fixed("south", 4), *gates[1].hold)
    wide = grid.submit(eight(grid), "true")
    narrow = [grid.submit(fixed("north", 4), *gate.hold) for gate in gates[2:]]
    gates[0].open()
    grid.wait_for_state(narrow[0], "running")
    alert = grid.told("job-starves", f"job {wide}")
    assert "waits for 8 nodes, while 1 later job got some" in alert["summary"]
    assert f"koala hold {narrow[1]};" in alert["remedy"]
    assert "rules.aging" in alert["remedy"]
    grid.do(alert)
    assert grid.get_job(narrow[1])["state"] == "held"
    for gate in gates:
        gate.open()
    assert {grid.wait_for_end(job)["state"] for job in (first, second, wide, narrow[0])} == {"succeeded"}
    grid.over("job-starves")
    grid.cancel(narrow[1])
    grid.wait_until_idle()


def test_a_user_who_floods_the_queue(grid: Grid) -> None:
    gate = grid.make_gate()
    running = grid.submit(eight(grid), *gate.hold)
    grid.wait_for_state(running, "running")
    flood = [grid.submit(eight(grid), "true", owner="mallory") for _ in range(10)]
    assert not grid.alerts("queue-flooded"), "nobody else waits"
    other = grid.submit(eight(grid), "true", owner="bob")
    alert = grid.told("queue-flooded", "user mallory", "other users have queued jobs as well: bob")
    assert "10 of the 11 queued jobs" in alert["summary"]
    assert [told["target"] for told in grid.alerts("queue-flooded", of="mallory")] == ["user mallory"]
    assert grid.alerts("queue-flooded", of="bob") == []
    assert [told["job"] for told in grid.alerts("job-starves", of="bob")] in ([], [other])
    assert grid.do(alert).count("held") == 10
    grid.over("queue-flooded")
    gate.open()
    assert grid.wait_for_end(other)["state"] == "succeeded"
    assert {grid.get_job(job)["state"] for job in flood} == {"held"}
    assert grid.run_koala("cancel", *map(str, flood)).returncode == 0
    grid.wait_until_idle()


def test_the_database_takes_nothing(grid: Grid) -> None:
    holder = sqlite3.connect(grid.directory / "koala.db", isolation_level=None, timeout=MAX_WAIT_S)
    with contextlib.closing(holder):
        holder.execute("begin immediate")
        body = {"request": flexible(1), "command": ["true"], "launcher": "processes"}
        assert grid.http.post("/api/v1/jobs", json=body).status_code == 503
        alert = grid.told("database", "database")
        assert alert["severity"] == "critical"
        assert f"fuser -v {grid.directory}/koala.db" in alert["remedy"]
        holder.execute("rollback")
    grid.over("database")
    grid.wait_until_idle()


@needs(SMALL_DISKS)
def test_a_disk_that_is_nearly_full(grid: Grid) -> None:
    filler = grid.directory / "bundles" / "filler"
    filler.parent.mkdir(exist_ok=True)
    filler.write_bytes(bytes(248 * 2**20 - sum(f.stat().st_size for f in grid.directory.rglob("*") if f.is_file())))
    alert = grid.told("disk", "disk data directory", "left")
    assert alert["severity"] == "warning"
    command = re.search(r"du .*? \| tail", alert["remedy"])
    assert command is not None
    told = subprocess.run(
        ["sh", "-c", command[0]], capture_output=True, text=True, timeout=MAX_WAIT_S, check=True
    ).stdout
    assert str(filler.parent) in told
    filler.unlink()
    grid.over("disk")


@pytest.mark.mpi
def test_a_slow_link(grid: Grid) -> None:
    grid.measures(2e7)
    assert grid.run_koala("network", "measure", "north", "south").returncode == 0
    alert = grid.told("slow-link", "link north-south", "the last measurement was 20 MB/s, the usual one is 1 GB/s")
    assert "2% of their bandwidth" in alert["summary"]
    grid.measures(9e8)
    grid.do(alert)
    grid.over("slow-link")
    grid.wait_until_idle()


@needs(RSYNC)
def test_replicas_that_are_gone(grid: Grid) -> None:
    file = grid.directory / "clusters" / "north" / "replicas" / "sea"
    file.write_text("waves")
    assert grid.run_koala("replicas", "add", "the sea's data", f"north:{file}").returncode == 0
    file.unlink()
    assert grid.run_koala("replicas", "verify").returncode == 1
    alert = grid.told("replicas-gone", "replicas on north", "the sea's data is missing")
    assert alert["severity"] == "critical", "there is no other"
    assert """koala replicas remove 'the sea'"'"'s data' --cluster north""" in alert["remedy"]
    file.write_text("waves")
    grid.do(alert)
    grid.over("replicas-gone")
    assert grid.run_koala("replicas", "remove", "the sea's data").returncode == 0


def test_a_cluster_that_comes_and_goes(grid: Grid) -> None:
    for _ in range(3):
        grid.kill_agent("south")
        wait_until(lambda: grid.get_cluster("south")["state"] == "usable", "a new agent")
    alert = grid.told("cluster-flapping", "cluster south", "last loss: ")
    assert "is unstable: lost" in alert["summary"]
    grid.do(alert)
    grid.over("cluster-flapping")
    assert grid.run_koala("clusters", "resume", "south").returncode == 0
    grid.wait_until_idle()


def test_agents_and_a_daemon_of_different_versions(grid: Grid) -> None:
    agents = "agents have version 9.1"
    for version, target, words in (("0.0.9", "cluster west", "not updated"), ("9.1", "daemon", agents)):
        grid.stop_west()
        grid.start_west(version)
        alert = grid.told("old-version", target, words)
        assert version in alert["summary"] + alert["cause"]
        assert "systemctl restart koala-" in alert["remedy"]
    grid.stop_west()
    grid.start_west()
    grid.over("old-version")
    wait_until(lambda: grid.get_cluster("west")["state"] == "usable", "west to be there again")
