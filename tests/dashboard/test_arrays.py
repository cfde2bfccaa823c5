"""The pages of arrays and their tasks."""

import re

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

ARRAY = {
    "request": {"type": "flexible", "total_size": 1},
    "command": ["sleep", "600"],
    "launcher": "processes",
    "array": "1-9%2",
}


def test_waiting_array_is_one_row_and_its_task_has_a_page(daemon: ServedDaemon) -> None:
    array = daemon.http.post("/api/v1/jobs", json=ARRAY).json()["id"]
    person = Person(daemon, daemon.admin_token)
    (row,) = [row for row in person.get_json("/queue.json")["jobs"] if row["id"] == array]
    assert row["label"] == str(array)
    assert row["reason"].startswith("9 waiting; ")
    assert "1-9%2" in person.get_page(f"/jobs/{array}")
    page = person.get_page(f"/jobs/{array + 3}")
    assert f'task {array}[3] of <a href="/jobs/{array}">array {array}</a>' in page
    person.close()


def test_page_of_an_array_lists_its_running_tasks(grid: EmbeddedGrid) -> None:
    array = grid.http.post("/api/v1/jobs", json=ARRAY).json()["id"]
    wait_until(lambda: grid.get_job(array)["tasks"]["running"] == 2, "two tasks")
    person = Person(grid, grid.admin_token)
    assert [task["label"] for task in person.get_json(f"/jobs/{array}.json")["tasks"]] == [f"{array}[1]", f"{array}[2]"]
    assert f'<a href="/jobs/{array + 2}">{array}[2]</a>' in person.get_page(f"/jobs/{array}")
    assert {row["id"] for row in person.get_json(f"/queue.json?q=array:{array}")["jobs"]} == {array + 1, array + 2}
    (unfinished,) = re.findall(r'href="/queue"[^>]*>Jobs <small>(\d+)', person.get_page("/queue"))
    assert int(unfinished) == person.get_json("/queue.json")["table"]["total"]
    person.close()
    grid.cancel(array)
    grid.wait_until_idle()
