"""Files and links on the testbed: replicas that lie in one cluster, and a link that is narrower than the others."""

import uuid
from collections.abc import Iterator

import pytest

from tests.grid.grid import wait_until
from tests.grid.slow_links import narrowed
from tests.grid.testbed import Testbed

pytestmark = pytest.mark.timeout(300)

MEGABYTES = 200


class Replicas:
    """A file of random bytes in some clusters' replica directories, under a name of its own in the catalogue."""

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


def run(grid: Testbed, request: dict[str, object], replicas: Replicas, policy: str) -> tuple[int, dict[str, object]]:
    """A job that prints the checksum of its input; the job at its end."""
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


def events(grid: Testbed, ident: int) -> list[str]:
    return [entry["event"] for entry in grid.http.get(f"/api/v1/jobs/{ident}/timeline").json()["timeline"]]


def test_a_job_runs_where_its_input_is_or_its_input_comes_to_it(grid: Testbed) -> None:
    replicas = Replicas(grid, MEGABYTES, "north")
    two: dict[str, object] = {"type": "nonfixed", "components": [{"size": 2}]}
    try:
        ident, job = run(grid, two, replicas, "close-to-files")
        assert [c["cluster"] for c in job["components"]] == ["north"]
        assert "transfer" not in events(grid, ident)
        ident, job = run(grid, two, replicas, "worst-fit")
        assert [c["cluster"] for c in job["components"]] == ["east"], "the first of the two with most idle nodes"
        told = events(grid, ident)
        assert [event for event in told if event in ("placed", "transfer", "staged", "started")] == [
            "placed",
            "transfer",
            "staged",
            "started",
        ]
        shown = grid.run_koala("show", str(ident))
        assert f"{replicas.name} (200 MB) from north to east" in shown.stdout
        for head in grid.heads.values():
            wait_until(lambda head=head: not head.shell("ls -A /shared/*/stages"), "the files to be gone")  # type: ignore[misc]
    finally:
        replicas.remove()


def test_the_faster_replica_is_taken(grid: Testbed) -> None:
    """A narrow link is measured, and the transfer goes by the other one; then the other one is narrow.

    A network that has become another is believed at the second ping-pong.
    """
    replicas = Replicas(grid, 20, "north", "south")
    on_east: dict[str, object] = {"type": "fixed", "components": [{"size": 1, "cluster": "east"}]}
    try:
        for slow, fast in (("north", "south"), ("south", "north")):
            with narrowed(grid, slow, "east", "40mbit"):
                for _ in range(2):
                    measured = grid.run_koala("network", "measure", "north", "south", "east", timeout=120)
                    assert measured.returncode == 0, measured.stderr
                links = {frozenset((e["one"], e["other"])): e for e in grid.http.get("/api/v1/network").json()["links"]}
                assert links[frozenset((slow, "east"))]["bandwidth"] < 6e6
                assert links[frozenset((fast, "east"))]["bandwidth"] > 12e6
                _, job = run(grid, on_east, replicas, "close-to-files")
            assert [c["sources"] for c in job["components"]] == [[fast]]
    finally:
        grid.run_koala("network", "measure", timeout=120)
        replicas.remove()
