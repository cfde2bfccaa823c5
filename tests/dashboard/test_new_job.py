"""The form for a new job: check, submission, "submit again", and hostile values."""

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from koalapy.dashboard.pages.new_job import EMPTY_FIELDS, body_of, parse_nodes
from koalapy.model.errors import UsageError
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token


@pytest.fixture(scope="module")
def alice(daemon: ServedDaemon) -> Iterator[Person]:
    person = Person(daemon, create_token(daemon, "alice"))
    yield person
    person.close()


def read_form(page: str) -> dict[str, str]:
    """Return the values with which a browser would send the form of a page."""
    form = re.search(r'<form[^>]*action="/jobs/new".*?</form>', page, re.DOTALL)
    assert form is not None
    fields = re.findall(r'<input (?:type="hidden" )?name="(\w+)"\s+value="([^"]*)"', form[0])
    fields += re.findall(r'<input type="radio" name="(\w+)" value="(\w+)" checked', form[0])
    fields += [("script", text) for text in re.findall(r"<textarea[^>]*>(.*?)</textarea>", form[0], re.DOTALL)]
    for name, options in re.findall(r'<select name="(\w+)".*?>(.*?)</select>', form[0]):
        fields += [(name, chosen) for chosen in re.findall(r"<option selected>([^<]*)", options)]
    return {name: unescape(value) for name, value in fields}


def send(person: Person, path: str, page: str = "/jobs/new", **values: str) -> Any:
    return person.http.post(path, data=read_form(person.get_page(page)) | values, headers=person.origin)


def test_check_shows_problem_wait_and_equivalent_command(daemon: ServedDaemon, alice: Person) -> None:
    page = send(alice, "/jobs/new/check", nodes="8", command="sleep 60", walltime="90").text
    assert "walltime is" in page
    assert page.count('aria-invalid="true"') == 1
    page = send(alice, "/jobs/new/check", nodes="8", command="sleep '6 0'", walltime="90m", name="<b>x").text
    assert "koala submit --flexible 8 --name &#39;&lt;b&gt;x&#39; --walltime 90m -- sleep &#39;6 0&#39;" in page
    assert "Waits" in page
    assert "<b>x" not in page
    page = send(alice, "/jobs/new/check", nodes="8", script="#!/bin/sh\ntrue\n").text
    assert "koala submit -f job.json" in page
    assert daemon.http.get("/api/v1/jobs?owner=alice").json()["jobs"] == []


def test_form_without_an_answer_of_the_database_submits_the_same_job(daemon: ServedDaemon, alice: Person) -> None:
    sent = read_form(alice.get_page("/jobs/new")) | {"nodes": "1", "command": "true"}
    daemon.loop.call_soon_threadsafe(daemon.engine.database.note_failure, "engine", "the database is locked")
    unanswered = alice.http.post("/jobs/new", data=sent, headers=alice.origin)
    daemon.loop.call_soon_threadsafe(daemon.engine.database.note_success, "engine")
    assert (unanswered.status_code, read_form(unanswered.text)["key"]) == (503, sent["key"])
    rejected = alice.http.post("/jobs/new", data=sent | {"nodes": "x"}, headers=alice.origin)
    assert read_form(rejected.text)["key"] != sent["key"], "it is another job when it is corrected"


def test_form_submits_job_once_and_copies_an_earlier_one(daemon: ServedDaemon, alice: Person) -> None:
    sent = read_form(alice.get_page("/jobs/new")) | {"nodes": "3,2", "kind": "nonfixed", "command": "echo 'a b'"}
    answers = [alice.http.post("/jobs/new", data=sent, headers=alice.origin) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 303]
    (path,) = {answer.headers["location"] for answer in answers}
    number = int(path.removeprefix("/jobs/"))
    job = daemon.job(number)
    assert (job["command"], [c["size"] for c in job["request"]["components"]]) == (["echo", "a b"], [3, 2])
    assert job["owner"] == "alice"

    special = {
        "request": {"type": "nonfixed", "components": [{"size": 2, "command": ["a"]}, {"size": 1, "command": ["b"]}]},
        "environment": {"A": "<x>"},
        "walltime": 5400,
        "memory": "2GB",
        "name": "&amp;",
        "collect": ["out/*"],
    }
    first = daemon.http.post("/api/v1/jobs", json=special | {"owner": "alice"}).raise_for_status().json()["id"]
    again = send(alice, "/jobs/new", f"/jobs/new?from={first}")
    copy = daemon.job(int(again.headers["location"].removeprefix("/jobs/")))
    assert copy["id"] != first
    original = daemon.job(first)
    for name in ("request", "command", "environment", "walltime", "memory", "name", "collect", "policy"):
        assert copy[name] == original[name], name
    changed = send(alice, "/jobs/new", f"/jobs/new?from={first}", nodes="2", kind="flexible", command="true")
    copy = daemon.job(int(changed.headers["location"].removeprefix("/jobs/")))
    assert (copy["request"]["type"], copy["environment"]) == ("flexible", {"A": "<x>"})


def test_rejected_form_keeps_its_values(daemon: ServedDaemon, alice: Person) -> None:
    answer = send(alice, "/jobs/new", nodes="900000", command="x <y>", name='"><script>', script="")
    assert answer.status_code == 422
    values = read_form(answer.text)
    assert (values["nodes"], values["command"], values["name"]) == ("900000", "x <y>", '"><script>')
    assert "<script>" not in answer.text.partition("<main")[2].partition("</main>")[0]
    assert 'id="wrong"' in answer.text
    assert send(alice, "/jobs/new", nodes="2", command="x", csrf="wrong").status_code == 403
    assert send(alice, "/jobs/new", nodes="2", command="x", key="").status_code == 422
    assert send(alice, "/jobs/new", nodes="2", command="x", kept="[[").status_code == 422
    other = daemon.http.post(
        "/api/v1/jobs", json={"request": {"type": "flexible", "total_size": 1}, "command": ["x"], "owner": "bob"}
    ).json()["id"]
    assert alice.http.get(f"/jobs/new?from={other}").status_code == 403
    assert alice.http.get("/jobs/new?from=99999").status_code == 404
    forged = json.dumps({"source": 1, "request": {}, "fields": {"owner": "bob"}})
    assert send(alice, "/jobs/new", nodes="2", command="x", kept=forged).status_code == 403
    for request in ({"type": "flexible"}, {"type": "flexible", "total_size": {}}, None):
        forged = json.dumps({"source": 1, "nodes": "2", "request": request, "fields": {"command": 5}})
        assert send(alice, "/jobs/new/check", nodes="2", command="x", kept=forged).status_code == 200


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("flexible", ""),
        ("flexible", "4,2"),
        ("flexible", "north:4"),
        ("flexible", "٣"),
        ("nonfixed", "4,,2"),
        ("fixed", "4"),
        ("fixed", ":4"),
        ("fixed", "north:"),
        ("flexible", "9" * 5000),
        ("other", "4"),
    ],
)
def test_nodes_that_are_no_request_are_rejected(kind: str, text: str) -> None:
    with pytest.raises(UsageError):
        parse_nodes(kind, text)


def test_incomplete_command_is_rejected() -> None:
    with pytest.raises(UsageError, match="quotation"):
        body_of({**EMPTY_FIELDS, "nodes": "2", "command": "echo 'a"})


def test_my_jobs_lists_own_jobs_and_limits_only(daemon: ServedDaemon, alice: Person) -> None:
    view = alice.get_json("/my-jobs.json")
    assert view["waiting"] == len(view["unfinished"]) >= 1
    assert {job["user"] for job in view["unfinished"]} == {"alice"}
    newcomer = Person(daemon, create_token(daemon, "nina"))
    page = newcomer.get_page("/my-jobs")
    assert "You have no waiting or running jobs." in page
    assert "/jobs/new" in page
    newcomer.close()
