"""Incidents that raise an alert; its text names the cause, and its remedy ends the incident."""

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
"""Buttons of the page to which an alert links."""
NO_REMEDIES = "I am on it|Silence"
"""The buttons of each alert that change nothing in the grid."""
OF_VERSION = "import sys, koalapy; koalapy.__version__ = sys.argv.pop(1); from koalapy.cli.main import main; main()"
OF_CLOCK = (
    "import os, sys, time; real, file = time.time, sys.argv.pop(1); "
    "time.time = lambda: real() - 7200 * os.path.exists(file); from koalapy.cli.main import main; main()"
)


class IncidentGrid(EmbeddedGrid):
    """A grid with the embedded clusters north and south, and west with a separate agent and one node."""

    def __init__(self, directory: Path, **sections: Any) -> None:
        """``sections`` replace those of the configuration, which shortens the delays of alerts."""
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
            "rules": {"unreachable_after": 3, "claim_grace": 600, "barrier_timeout": 600, "plan_after": None},
            "alerts": QUICK,
            **sections,
        }
        self.set_measured_bandwidth(1e9)
        (directory.parent / "koala.yaml").write_text(json.dumps(configuration))
        super().__init__(directory, KOALA_CONFIG=str(directory.parent / "koala.yaml"))
        self.west: subprocess.Popen[bytes] | None = None
        self.page: Any = None
        """The page of an operator's browser that shows the dashboard, or None without Chromium."""

    def set_measured_bandwidth(self, bandwidth: float) -> None:
        """Set the bandwidth that further measurements report."""
        self.measured.write_text(json.dumps({"pairs": [{"latency": 1e-4, "bandwidth": bandwidth}]}) + "\n")

    def start(self, port: int = 0) -> "IncidentGrid":
        url = self.launch_daemon(port)
        self.start_west(url=url)
        self.connect(url)
        return self

    def start_west(
        self, version: str = "", url: str = "", *, clock_file: Path | None = None, token: str = TOKEN
    ) -> None:
        """Start the agent of west.

        It reports ``version`` unless that is empty. Its clock is two hours behind while ``clock_file`` exists.
        """
        start = [sys.executable, "-c", OF_VERSION, version] if version else self.koala_command
        if clock_file is not None:
            start = [sys.executable, "-c", OF_CLOCK, str(clock_file)]
        directory = str(self.directory.parent / "west")
        ca_file = {"KOALA_CA_FILE": str(self.ca_file)} if self.ca_file else {}
        self.west = subprocess.Popen(
            [*start, "agent", "west", "--url", url or self.url, "--directory", directory],
            env=self.environment | {"KOALA_AGENT_TOKEN": token} | ca_file,
            stderr=(self.directory.parent / "west.log").open("a"),
        )

    def stop_west(self) -> None:
        assert self.west is not None
        self.west.terminate()
        self.west.wait(timeout=MAX_WAIT_S)

    # Alerts

    def list_alerts(self, kind: str, user: str = "") -> list[Alert]:
        """Return the alerts of a kind that an operator, or the user, sees."""
        headers = {"Authorization": f"Bearer {self.create_user_token(user)}"} if user else {}
        alerts: list[Alert] = self.http.get("/api/v1/alerts", headers=headers).json()["alerts"]
        return [alert for alert in alerts if alert["kind"] == kind]

    def create_user_token(self, name: str) -> str:
        """Create a token with the role of a user."""
        answer = self.http.post("/api/v1/tokens", json={"user": name, "role": "user"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])

    def wait_for_alert(self, kind: str, target: str, cause: str = "") -> Alert:
        """Wait for an alert and check that it has a cause, a remedy and an entry on the dashboard."""

        def look() -> Alert | None:
            return next((a for a in self.list_alerts(kind) if a["target"] == target and cause in a["cause"]), None)

        alert = wait_until(look, f"an alert {kind} of {target} for {cause!r}: {self.list_alerts(kind)}")
        assert alert is not None
        assert all(alert[text] for text in ("summary", "cause", "remedy")), alert
        self.check_on_dashboard(alert)
        return alert

    def check_on_dashboard(self, alert: Alert) -> None:
        """Check that the dashboard shows the alert with cause and remedy, and a link to a page with details."""
        if self.page is None:
            return
        self.page.goto("/")
        entry = self.find_in_browser(alert)
        entry.wait_for()
        assert all(alert[text] in entry.inner_text() for text in ("summary", "remedy")), entry.inner_text()
        box = entry.bounding_box()
        assert box["y"] + box["height"] <= self.page.viewport_size["height"], box
        links = entry.get_by_role("link")
        if links.count():
            links.first.click()
            self.page.locator("h1").wait_for()
            assert self.page.locator("main .problem.refused").count() == 0
            assert not re.match(r"[45]\d\d ", self.page.locator("h1").inner_text()), self.page.url
            for button in ONE_CLICK_AWAY.get(alert["kind"], ()):
                self.page.get_by_role("button", name=button).first.wait_for()

    def find_in_browser(self, alert: Alert) -> Any:
        """Return the alert's entry on the first page."""
        target = re.sub(r"[^A-Za-z0-9_-]+", "-", alert["target"])
        return self.page.locator(f"#alert-{alert['kind']}-{target}")

    def wait_for_alert_end(self, kind: str) -> None:
        wait_until(lambda: not self.list_alerts(kind), f"no alert {kind} any more: {self.list_alerts(kind)}")

    def apply_remedy(self, alert: Alert) -> str:
        """Apply an alert's remedy and return the output.

        Use the button of the dashboard if there is one, or else run the first command of the text.
        """
        if self.page is not None:
            self.page.goto("/")
            buttons = self.find_in_browser(alert).get_by_role("button")
            if (button := buttons.filter(has_not_text=re.compile(NO_REMEDIES))).count():
                button.first.click()
                self.page.wait_for_load_state()
                return ""
        command = re.search(r"koala (?:[^;$]|\$\([^)]*\))*", alert["remedy"])
        assert command is not None, alert
        script = f'koala() {{ {" ".join(self.koala_command)} "$@"; }}; {command[0]}'
        environment = self.environment | {"KOALA_URL": self.url}
        result = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=MAX_WAIT_S
        )
        assert result.returncode == 0, (command[0], result.stderr)
        return result.stdout


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IncidentGrid]:
    """Yield a grid with its data on a small disk if one can be mounted; each test ends its incident."""
    directory = tmp_path_factory.mktemp("grid")
    (data := directory / "data").mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=0700", "tmpfs", data], check=False)
    grid = IncidentGrid(data)
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


def fixed_request(cluster: str, size: int = 1) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def flexible_request(size: int) -> dict[str, Any]:
    return {"type": "flexible", "total_size": size}


def request_all_nodes(grid: IncidentGrid) -> dict[str, Any]:
    """Return a request for all nodes of north and south."""
    return {"type": "fixed", "components": [{"size": 4, "cluster": name} for name in ("north", "south")]}


def test_alert_of_hung_resource_manager_and_dead_agent(grid: IncidentGrid) -> None:
    lrm = grid.find_resource_manager("north")
    agent, hung = grid.find_agent("south"), psutil.Process(lrm.pid)
    hung.suspend()
    psutil.Process(agent.pid).suspend()
    try:
        dead = grid.wait_for_alert("agent-away", "cluster south", "its agent has not answered for 3 s")
        assert (dead["severity"], dead["cluster"]) == ("critical", "south")
        assert "pkill -f 'agent south --embedded'" in dead["remedy"]
        assert "agent south --embedded" in " ".join(agent.command)
        page = grid.run_koala("alerts").stdout
        assert "CRITICAL  cluster south  agent-away" in page
        assert dead["remedy"] in page
        agent.kill()
        grid.wait_for_alert_end("agent-away")
        alert = grid.wait_for_alert("resource-manager", "cluster north", "not answering since")
        assert "koala clusters drain north" in alert["remedy"]
        grid.apply_remedy(alert)
        grid.wait_for_alert_end("resource-manager")
        assert "its resource manager" in grid.get_cluster("north")["reason"]
    finally:
        hung.resume()
        assert grid.run_koala("clusters", "resume", "north").returncode == 0


def test_alert_of_black_hole_cluster(grid: IncidentGrid) -> None:
    healthy_only = ("sh", "-c", '[ -z "$BROKEN" ]')
    jobs = [grid.submit(fixed_request(name), *healthy_only) for name in ("north", "south") for _ in range(3)]
    assert [grid.wait_for_end(job)["state"] for job in jobs] == ["succeeded"] * 3 + ["failed"] * 3
    alert = grid.wait_for_alert(
        "black-hole", "cluster south", "3 of 3 jobs that ended there in 15 minutes failed within 30 s"
    )
    assert "koala clusters drain south" in alert["remedy"]
    grid.apply_remedy(alert)
    grid.wait_for_alert_end("black-hole")
    jobs = [grid.submit(flexible_request(1), *healthy_only) for _ in range(4)]
    assert [grid.wait_for_end(job)["state"] for job in jobs] == ["succeeded"] * 4
    assert grid.run_koala("clusters", "resume", "south").returncode == 0
    assert not grid.list_alerts("black-hole")


def test_alert_of_job_stuck_in_claiming(grid: IncidentGrid) -> None:
    request = {
        "type": "fixed",
        "components": [*fixed_request("north", 2)["components"], *fixed_request("south")["components"]],
    }
    job, resume = grid.submit_to_stopped_agent("south", request, "true")
    try:
        load = grid.start_local_job("south", 4)
    finally:
        resume()
    alert = grid.wait_for_alert(
        "claim-stuck", f"job {job}", "waits in the resource manager of south behind local users"
    )
    assert (alert["job"], alert["cluster"]) == (job, "south")
    assert "holds 2 nodes meanwhile" in alert["summary"]
    assert grid.apply_remedy(alert).startswith(f"job {job} ")
    assert grid.wait_for_end(job)["state"] == "cancelled"
    grid.wait_for_alert_end("claim-stuck")
    load.stop()
    grid.wait_until_idle()


def test_alert_of_starving_wide_job(grid: IncidentGrid) -> None:
    gates = [grid.make_gate() for _ in range(4)]
    first = grid.submit(fixed_request("north", 4), *gates[0].hold)
    second = grid.submit(fixed_request("south", 4), *gates[1].hold)
    wide = grid.submit(request_all_nodes(grid), "true")
    narrow = [grid.submit(fixed_request("north", 4), *gate.hold) for gate in gates[2:]]
    gates[0].open()
    grid.wait_for_state(narrow[0], "running")
    alert = grid.wait_for_alert("job-starves", f"job {wide}")
    assert "waits for 8 nodes, while 1 later job got some" in alert["summary"]
    assert alert["remedy"].endswith(f"koala explain {wide}")
    assert f"job {wide} waits:" in grid.apply_remedy(alert)
    assert grid.run_koala("hold", str(narrow[1]), "--reason", "starving").returncode == 0
    for gate in gates:
        gate.open()
    assert {grid.wait_for_end(job)["state"] for job in (first, second, wide, narrow[0])} == {"succeeded"}
    grid.wait_for_alert_end("job-starves")
    grid.cancel(narrow[1])
    grid.wait_until_idle()


def test_alert_of_user_flooding_queue(grid: IncidentGrid) -> None:
    gate = grid.make_gate()
    running = grid.submit(request_all_nodes(grid), *gate.hold)
    grid.wait_for_state(running, "running")
    flood = [grid.submit(request_all_nodes(grid), "true", owner="mallory") for _ in range(10)]
    assert not grid.list_alerts("queue-flooded"), "nobody else waits"
    bobs_job = grid.submit(request_all_nodes(grid), "true", owner="bob")
    alert = grid.wait_for_alert("queue-flooded", "user mallory", "other users have queued jobs as well: bob")
    assert "10 of the 11 queued jobs" in alert["summary"]
    assert [flood_alert["target"] for flood_alert in grid.list_alerts("queue-flooded", user="mallory")] == [
        "user mallory"
    ]
    assert grid.list_alerts("queue-flooded", user="bob") == []
    assert [flood_alert["job"] for flood_alert in grid.list_alerts("job-starves", user="bob")] in ([], [bobs_job])
    assert grid.apply_remedy(alert).count("held") == 10
    grid.wait_for_alert_end("queue-flooded")
    gate.open()
    assert grid.wait_for_end(bobs_job)["state"] == "succeeded"
    assert {grid.get_job(job)["state"] for job in flood} == {"held"}
    assert grid.run_koala("cancel", *map(str, flood), "--reason", "test").returncode == 0
    grid.wait_until_idle()


def test_alert_of_database_that_rejects_writes(grid: IncidentGrid) -> None:
    holder = sqlite3.connect(grid.directory / "koala.db", isolation_level=None, timeout=MAX_WAIT_S)
    with contextlib.closing(holder):
        holder.execute("begin immediate")
        body = {"request": flexible_request(1), "command": ["true"], "launcher": "processes"}
        assert grid.http.post("/api/v1/jobs", json=body).status_code == 503
        alert = grid.wait_for_alert("database", "database")
        assert alert["severity"] == "critical"
        assert f"fuser -v {grid.directory}/koala.db" in alert["remedy"]
        holder.execute("rollback")
    grid.wait_for_alert_end("database")
    grid.wait_until_idle()


@needs(SMALL_DISKS)
def test_alert_of_nearly_full_disk(grid: IncidentGrid) -> None:
    filler = grid.directory / "bundles" / "filler"
    filler.parent.mkdir(exist_ok=True)
    filler.write_bytes(bytes(248 * 2**20 - sum(f.stat().st_size for f in grid.directory.rglob("*") if f.is_file())))
    alert = grid.wait_for_alert("disk", "disk data directory", "left")
    assert alert["severity"] == "warning"
    command = re.search(r"du .*? \| tail", alert["remedy"])
    assert command is not None
    usage = subprocess.run(
        ["sh", "-c", command[0]], capture_output=True, text=True, timeout=MAX_WAIT_S, check=True
    ).stdout
    assert str(filler.parent) in usage
    filler.unlink()
    grid.wait_for_alert_end("disk")


@pytest.mark.mpi
def test_alert_of_slow_link(grid: IncidentGrid) -> None:
    grid.set_measured_bandwidth(2e7)
    assert grid.run_koala("network", "measure", "north", "south").returncode == 0
    alert = grid.wait_for_alert(
        "slow-link", "link north-south", "the last measurement was 20 MB/s, the usual one is 1 GB/s"
    )
    assert "2% of their bandwidth" in alert["summary"]
    grid.set_measured_bandwidth(9e8)
    grid.apply_remedy(alert)
    grid.wait_for_alert_end("slow-link")
    grid.wait_until_idle()


@needs(RSYNC)
def test_alert_of_missing_replicas(grid: IncidentGrid) -> None:
    file = grid.directory / "clusters" / "north" / "replicas" / "sea"
    file.write_text("waves")
    assert grid.run_koala("replicas", "add", "the sea's data", f"north:{file}").returncode == 0
    file.unlink()
    assert grid.run_koala("replicas", "verify").returncode == 1
    alert = grid.wait_for_alert("replicas-gone", "replicas on north", "the sea's data is missing")
    assert alert["severity"] == "critical", "there is no other"
    assert """koala replicas remove 'the sea'"'"'s data' --cluster north""" in alert["remedy"]
    file.write_text("waves")
    grid.apply_remedy(alert)
    grid.wait_for_alert_end("replicas-gone")
    assert grid.run_koala("replicas", "remove", "the sea's data").returncode == 0


def test_alert_of_flapping_cluster(grid: IncidentGrid) -> None:
    for _ in range(3):
        grid.kill_agent("south")
        wait_until(lambda: grid.get_cluster("south")["state"] == "usable", "a new agent")
    alert = grid.wait_for_alert("cluster-flapping", "cluster south", "last loss: ")
    assert "is unstable: lost" in alert["summary"]
    grid.apply_remedy(alert)
    grid.wait_for_alert_end("cluster-flapping")
    assert grid.run_koala("clusters", "resume", "south").returncode == 0
    grid.wait_until_idle()


def test_alert_of_agent_with_other_version(grid: IncidentGrid) -> None:
    agents = "agents have version 9.1"
    for version, target, text in (("0.0.9", "cluster west", "not updated"), ("9.1", "daemon", agents)):
        grid.stop_west()
        grid.start_west(version)
        alert = grid.wait_for_alert("old-version", target, text)
        assert version in alert["summary"] + alert["cause"]
        assert "systemctl restart koala-" in alert["remedy"]
    grid.stop_west()
    grid.start_west()
    grid.wait_for_alert_end("old-version")
    wait_until(lambda: grid.get_cluster("west")["state"] == "usable", "west to be there again")


def test_alert_of_wrong_clock(grid: IncidentGrid, tmp_path: Path) -> None:
    grid.stop_west()
    grid.start_west(clock_file=(clock_file := tmp_path / "behind"))
    clock_file.touch()
    alert = grid.wait_for_alert("clock", "cluster west", "it shows")
    assert "is 2:00:0" in alert["summary"]
    assert "behind the daemon's" in alert["summary"]
    clock_file.unlink()
    grid.wait_for_alert_end("clock")
