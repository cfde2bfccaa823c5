"""Replicas and transfers on the testbed, with one link that is slower than the others."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.grid.grid import wait_until
from tests.grid.slow_links import limited_link
from tests.grid.testbed import Testbed

pytestmark = pytest.mark.timeout(300)

MEGABYTES = 200


class Replicas:
    """A file of random bytes with replicas on some clusters, registered under a unique name."""

    def __init__(self, testbed: Testbed, megabytes: int, *clusters: str) -> None:
        self.testbed, self.name = testbed, f"survey-{uuid.uuid4().hex[:8]}"
        self.clusters = clusters
        make = "import random, sys; sys.stdout.buffer.write(random.Random(sys.argv[1]).randbytes(int(sys.argv[2])))"
        for cluster in clusters:
            path = f"/shared/{cluster}/replicas/{self.name}"
            size = str(megabytes * 10**6)
            testbed.heads[cluster].shell(f"python3 -c '{make}' {self.name} {size} > {path}", user="koala")
            added = testbed.run_koala("replicas", "add", self.name, f"{cluster}:{path}")
            assert added.returncode == 0, added.stderr
        self.checksum = (
            testbed.heads[clusters[0]].shell(f"sha256sum < /shared/{clusters[0]}/replicas/{self.name}").split()[0]
        )

    def remove(self) -> None:
        self.testbed.run_koala("replicas", "remove", self.name)
        for cluster in self.clusters:
            self.testbed.heads[cluster].run("rm", "-f", f"/shared/{cluster}/replicas/{self.name}")


@pytest.fixture
def grid(testbed: Testbed) -> Iterator[Testbed]:
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def run_checksum_job(
    grid: Testbed, request: dict[str, Any], replicas: Replicas, policy: str
) -> tuple[int, dict[str, Any]]:
    """Run a job that prints the checksum of its input, and return its number and its final state."""
    ident = grid.submit(
        request,
        "sh",
        "-c",
        f"sha256sum < {replicas.name}",
        launcher="processes",
        policy=policy,
        inputs=[{"file": replicas.name}],
    )
    job = grid.wait_for_end(ident, 120)
    assert job["state"] == "succeeded", job
    assert replicas.checksum in grid.read_output(ident), "the program saw another file"
    return ident, job


def list_events(grid: Testbed, ident: int) -> list[str]:
    return [entry["event"] for entry in grid.http.get(f"/api/v1/jobs/{ident}/timeline").json()["timeline"]]


def test_job_runs_at_its_input_or_after_transfer(grid: Testbed) -> None:
    replicas = Replicas(grid, MEGABYTES, "north")
    two: dict[str, Any] = {"type": "nonfixed", "components": [{"size": 2}]}
    try:
        ident, job = run_checksum_job(grid, two, replicas, "close-to-files")
        assert [c["cluster"] for c in job["components"]] == ["north"]
        assert "transfer" not in list_events(grid, ident)
        ident, job = run_checksum_job(grid, two, replicas, "worst-fit")
        assert [c["cluster"] for c in job["components"]] == ["east"], "the first of the two with most idle nodes"
        job_events = list_events(grid, ident)
        assert [event for event in job_events if event in ("placed", "transfer", "staged", "started")] == [
            "placed",
            "transfer",
            "staged",
            "started",
        ]
        listing = grid.run_koala("show", str(ident))
        assert f"{replicas.name} (200 MB) from north to east" in listing.stdout
        for head in grid.heads.values():
            wait_until(lambda head=head: not head.shell("ls -A /shared/*/stages"), "the files to be gone")  # type: ignore[misc]
    finally:
        replicas.remove()


@pytest.mark.nightly
def test_transfer_uses_replica_behind_faster_link(grid: Testbed) -> None:
    """Measure a slow link of the cluster that is first by name, and check that the transfer uses the other one.

    A changed measurement is trusted from the second time on.
    """
    replicas = Replicas(grid, 20, "north", "south")
    on_east: dict[str, Any] = {"type": "fixed", "components": [{"size": 1, "cluster": "east"}]}
    try:
        with limited_link(grid, "north", "east", "40mbit"):
            for _ in range(2):
                measured = grid.run_koala("network", "measure", "north", "south", "east", timeout=120)
                assert measured.returncode == 0, measured.stderr
            links = {frozenset((e["one"], e["other"])): e for e in grid.http.get("/api/v1/network").json()["links"]}
            assert links[frozenset(("north", "east"))]["bandwidth"] < 6e6
            assert links[frozenset(("south", "east"))]["bandwidth"] > 12e6
            _, job = run_checksum_job(grid, on_east, replicas, "close-to-files")
        assert [c["sources"] for c in job["components"]] == [["south"]]
    finally:
        grid.run_koala("network", "measure", timeout=120)
        replicas.remove()
