"""Advance reservations on embedded clusters: on both or on none, a job in one, and a restart of daemon in between."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

SIX = {"type": "flexible", "total_size": 6}
PATH = "/api/v1/reservations"


def order(begin: str, duration: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"begin": begin, "duration": duration, "request": request}


def names_reported(grid: EmbeddedGrid) -> str:
    return "; ".join(cluster["reason"] for cluster in grid.list_clusters())


def test_job_runs_in_reservation_of_two_clusters_after_restart_of_daemon(
    make_grid: Callable[..., EmbeddedGrid],
) -> None:
    grid = make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")
    begin = time.time() + 12
    shown = grid.run_koala("reserve", "--at", "now+12s", "--for", "5m", "--flexible", "6", "--name", "lecture")
    assert "Use it: koala submit --reservation lecture" in shown.stdout
    refused = grid.run_koala("reserve", "--at", "now+1m", "--for", "1h", "--fixed", "north:2,south:2", check=False)
    assert refused.returncode, "only two nodes are left on both together then"
    job = grid.submit(SIX, "echo", "reserved", reservation="lecture", launcher="processes")
    others = [grid.submit({"type": "flexible", "total_size": 2}, "sleep", "60", launcher="processes") for _ in range(2)]
    wait_until(lambda: grid.get_job(others[0])["state"] == "running", "a job on nodes that are not reserved")
    grid.kill_daemon()
    grid.start()
    ended = grid.wait_for_end(job)
    assert ended["state"] == "succeeded", ended
    assert time.time() >= begin
    assert {c["cluster"] for c in ended["components"]} == {"north", "south"}
    assert grid.read_output(job) == "reserved\n" * 6
    assert grid.get_job(others[1])["state"] == "queued", "it may not run into the reservation"
    listed = grid.http.get(PATH).json()["reservations"]
    assert [(each["name"], each["state"]) for each in listed] == [("lecture", "made")]
    assert "cancelled" in grid.run_koala("reserve", "cancel", "lecture").stdout
    wait_until(lambda: grid.get_job(others[1])["state"] == "running", "the nodes to be free again")
    assert "reserved" not in names_reported(grid)
    for other in others:
        grid.cancel(other)
    grid.wait_until_idle()


def test_reservation_that_a_cluster_refuses_leaves_nothing_behind(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    past = grid.run_koala("reserve", "--at", "2020-01-01T09:00", "--for", "1h", "--flexible", "2")
    assert past.stderr.startswith("koala: --at is 2020-01-01"), past.stderr
    load = grid.start_local_job("south", 3)
    wait_until(lambda: grid.get_cluster("south")["idle"] == 1, "a local user to have nodes")
    for request in (
        SIX,
        {"type": "fixed", "components": [{"cluster": name, "size": 2} for name in ("north", "south")]},
    ):
        answer = grid.http.post(PATH, json=order("now", "1h", request))
        assert answer.status_code == 409, answer.json()
        assert "south: " in answer.json()["detail"]
    wait_until(lambda: "reserved" not in names_reported(grid), "no part of a reservation to be left")
    made = grid.http.post(PATH, json=order("now", "1h", {"type": "flexible", "total_size": 4})).json()
    assert made["parts"] == [{"cluster": "north", "nodes": 4}]
    load.stop()
    assert grid.http.delete(f"{PATH}/{made['name']}").json()["state"] == "cancelled"
    wait_until(lambda: "reserved" not in names_reported(grid), "the reservation to be removed")
    grid.wait_until_idle()
