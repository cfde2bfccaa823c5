"""``koala audit`` with the accounting of real resource managers, by the commands of docs/audit.md."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.grid.containers import Container
from tests.grid.testbed import WEST, Testbed

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
SACCT, COMPLETION, QACCT = re.findall(r"^    \$ (TZ=UTC (?:sacct|qacct) .*) > \w+\.txt$", PAGE, re.MULTILINE)
ACCOUNTING = {"north": COMPLETION, "south": COMPLETION, WEST: SACCT, "east": QACCT}
SOURCES = {"database", "record of events", "sacct of north", f"sacct of {WEST}", "qacct of east"}
END = r"(?<=\|)[-\d]+T[:\d]+(?=\|\w+-[^|]*$)"
PLANTED = [
    ("north", END, "2100-01-01T00:00:00"),
    (WEST, END, "2100-01-01T00:00:00"),
    ("east", r"(?<=end_time     ).*", "Fri Jan  1 00:00:00 2100"),
]
"""A cluster, the end in the lines of a job in its accounting, and another end."""


@dataclass
class Evidence:
    """What a run of the testbed has written, in a folder of this machine."""

    folder: Path
    database: str
    first: int
    """The number of the first job of the run."""
    last: int

    def path(self, cluster: str) -> Path:
        return self.folder / f"{cluster}.txt"

    def audit(self, run: Callable[..., "subprocess.CompletedProcess[str]"]) -> dict[str, Any]:
        options = [word for cluster in ACCOUNTING for word in ("--accounting", f"{cluster}={self.path(cluster)}")]
        options += [word for cluster in ACCOUNTING for word in ("--spool", f"{cluster}={self.folder / cluster}")]
        ended = run("audit", "--json", "--data-dir", str(self.folder / "data"), "--database", self.database, *options)
        assert ended.returncode in (0, 1), ended.stderr
        report: dict[str, Any] = json.loads(ended.stdout)
        # The jobs of other tests are not judged: some of them change a record, or a clock.
        report["findings"] = [f for f in report["findings"] if self.first <= f["job"] <= self.last]
        return report


def copy(container: Container, path: str, target: Path) -> None:
    subprocess.run(["docker", "cp", f"{container.name}:{path}", str(target)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def evidence(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evidence]:
    """Kill agents and the daemon under a job over three resource managers, run other jobs, and gather evidence."""
    folder = tmp_path_factory.mktemp("audit")
    heads = testbed.heads | {WEST: testbed.west_head}
    with testbed.open_west():
        gate = testbed.make_gate()
        job = testbed.start_gated_job(gate, testbed.request_on_managers(), 6)
        for cluster in ("north", WEST, "east"):
            heads[cluster].kill("agent")
        testbed.kill_daemon()
        testbed.containers["daemon"].release("daemon")
        testbed.connect(testbed.url)
        testbed.finish_gated_job(job, gate)
        testbed.wait_until_idle()
        after = [testbed.submit(testbed.request_on_managers(), "true") for _ in range(2)]
        after.append(testbed.submit({"type": "fixed", "components": [{"cluster": "south", "size": 2}]}, "false"))
        states = [testbed.wait_for_end(ident)["state"] for ident in after]
        assert states == ["succeeded", "succeeded", "failed"]
        testbed.wait_until_idle()
        for cluster, command in ACCOUNTING.items():
            (folder / f"{cluster}.txt").write_text(heads[cluster].shell(command))
            copy(heads[cluster], f"/shared/{cluster}/home/koala/agent/spool", folder / cluster)
        daemon = testbed.containers["daemon"]
        copy(daemon, "/var/lib/koala", folder / "data")
        url = daemon.shell("grep -h ^KOALA_DATABASE= /etc/koala/*.env").strip().partition("=")[2]
        yield Evidence(folder, url.replace("@database/", "@198.18.0.3/"), job, after[-1])


def test_audit_after_kills_of_agents_and_daemon_finds_nothing(testbed: Testbed, evidence: Evidence) -> None:
    report = evidence.audit(testbed.run_koala)
    assert report["findings"] == []
    assert set(report["sources"]) >= SOURCES


@pytest.mark.parametrize(("cluster", "end", "value"), PLANTED)
def test_audit_with_changed_end_in_accounting_finds_it(
    testbed: Testbed, evidence: Evidence, cluster: str, end: str, value: str
) -> None:
    """Let the first job of the run have its nodes when they have been given to others."""
    path = evidence.path(cluster)
    before = path.read_text()
    parts = re.split("(?m)^(?====)" if cluster == "east" else "(?m)^", before)
    changed = [re.sub(end, value, part) if f"-{evidence.first}.1." in part else part for part in parts]
    assert changed != parts
    path.write_text("".join(changed))
    try:
        findings = evidence.audit(testbed.run_koala)["findings"]
    finally:
        path.write_text(before)
    matching = [finding for finding in findings if finding["rule"] == "node-once"]
    assert f"{evidence.first}.1" in str(matching)
    assert f"of {cluster}" in str(matching)
