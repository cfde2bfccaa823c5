"""Advance reservations on Slurm 22.05 (by sudo), Slurm 24.11 (as its operator) and Grid Engine."""

import re
from collections.abc import Iterator

import pytest

from tests.grid.grid import wait_until
from tests.grid.testbed import WEST, Testbed

PATH = "/api/v1/reservations"
MANAGERS = ("north", "east", WEST)
SIX = {"type": "fixed", "components": [{"cluster": name, "size": 2} for name in MANAGERS]}


@pytest.fixture(scope="module")
def bed(testbed: Testbed) -> Iterator[Testbed]:
    with testbed.open_west():
        yield testbed


def managers_with_reservation(bed: Testbed) -> set[str]:
    """Return the clusters whose resource manager shows a reservation of koalapy."""
    heads = {"north": bed.heads["north"], "south": bed.heads["south"], WEST: bed.west_head}
    shown = {name: head.run("scontrol", "show", "reservation", "--oneliner") for name, head in heads.items()}
    shown["east"] = bed.heads["east"].shell("qrstat -u '*' -xml", user="koala")
    return {name for name, text in shown.items() if "koala-" in text}


def test_job_runs_on_reserved_nodes_of_every_manager(bed: Testbed) -> None:
    answer = bed.http.post(PATH, json={"begin": "now+20s", "duration": "20m", "request": SIX}, timeout=60)
    assert answer.is_success, answer.text
    name = answer.json()["name"]
    assert managers_with_reservation(bed) == set(MANAGERS)
    job = bed.submit(SIX, "echo", "reserved", reservation=name, walltime="5m", launcher="processes")
    ended = bed.wait_for_end(job)
    assert ended["state"] == "succeeded", ended
    assert bed.read_output(job) == "reserved\n" * 6
    wait_until(lambda: bed.get_cluster("north")["idle"] == 1, "the reserved nodes not to count as idle")
    assert bed.http.delete(f"{PATH}/{name}").is_success
    wait_until(lambda: not managers_with_reservation(bed), "all reservations to be removed")
    bed.wait_until_idle()


def test_reservation_that_one_manager_refuses_leaves_nothing_on_others(bed: Testbed) -> None:
    request = {"type": "fixed", "components": [{"cluster": name, "size": 1} for name in ("north", "east", "south")]}
    answer = bed.http.post(PATH, json={"begin": "now+1h", "duration": "1h", "request": request}, timeout=60)
    assert answer.status_code == 409, answer.text
    assert "south: scontrol" in answer.json()["detail"]
    assert "adminlevel=operator" in answer.json()["detail"]
    wait_until(lambda: not managers_with_reservation(bed), "all reservations to be removed")


def test_cancelled_reservation_of_grid_engine_stays_until_a_job_in_it_has_ended(bed: Testbed) -> None:
    request = {"type": "fixed", "components": [{"cluster": "east", "size": 1}]}
    answer = bed.http.post(PATH, json={"begin": "now", "duration": "20m", "request": request}, timeout=60)
    assert answer.is_success, answer.text
    head = bed.heads["east"]
    (number,) = re.findall(r"^ *(\d+) koala", head.shell("qrstat", user="koala"), re.MULTILINE)
    command = f"cd /tmp && qsub -terse -ar {number} -o /dev/null -j y -b y -pe koala 2 sleep 300"
    job = head.shell(command, user="koala").strip()
    wait_until(lambda: " r " in head.shell("qstat", user="koala"), "the job to run")
    assert bed.http.delete(f"{PATH}/{answer.json()['name']}").json()["state"] == "cancelled"
    assert " r " in head.shell("qstat", user="koala")
    assert managers_with_reservation(bed) == {"east"}
    head.run("qdel", job, user="koala")
    wait_until(lambda: not managers_with_reservation(bed), "the reservation to be removed")
