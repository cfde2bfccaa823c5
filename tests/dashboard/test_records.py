"""The pages Users, Files and Audit."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert

from koalapy.daemon.jobs.history import MAX_LINES
from koalapy.dashboard.pages.audit import MAX_CHANGES
from koalapy.model.history import day_of
from koalapy.model.limits import Charge, FairShareSettings
from koalapy.scheduler.fair_share import FairShares
from koalapy.store import tables
from koalapy.store.engine import make_engine
from tests.daemon.archives import GOOD, archive_of
from tests.daemon_in_process import ServedDaemon, daemon_in_thread
from tests.dashboard.people import Person, create_token


@pytest.fixture(scope="module")
def root(daemon: ServedDaemon) -> Iterator[Person]:
    person = Person(daemon, daemon.admin_token)
    yield person
    person.close()


@pytest.fixture(scope="module")
def alice(daemon: ServedDaemon) -> Iterator[Person]:
    person = Person(daemon, create_token(daemon, "alice"))
    yield person
    person.close()


def test_users_page_revokes_token_with_permission(daemon: ServedDaemon, root: Person, alice: Person) -> None:
    create_token(daemon, "bob")
    own_tokens = alice.get_json("/users.json")["tokens"]
    assert {token["user"] for token in own_tokens} == {"alice"}
    assert alice.get_page("/users").count("this browser") == 1
    user_tokens = root.get_json("/users.json", user="bob")["tokens"]
    assert {token["user"] for token in user_tokens} == {"bob"}
    path = f"/users/tokens/{user_tokens[0]['id']}/revoke"
    form = {"csrf": alice.get_page("/users").partition('name="csrf" value="')[2].partition('"')[0]}
    assert alice.http.post(path, data=form, headers=alice.origin).status_code == 404
    assert len(root.get_json("/users.json", user="bob")["tokens"]) == 1
    response = root.send_form("/users?user=bob", path)
    assert (response.status_code, response.headers["location"]) == (303, "/users?user=bob")
    assert root.get_json("/users.json", user="bob")["tokens"] == []
    all_tokens = root.get_json("/users.json?user=bob&all=true")["tokens"]
    assert all_tokens[0]["revoked_at"] is not None


def test_users_page_counts_jobs_of_user(daemon: ServedDaemon, root: Person, alice: Person) -> None:
    body = {"request": {"type": "flexible", "total_size": 8}, "command": ["sleep", "600"], "owner": "alice"}
    job = daemon.http.post("/api/v1/jobs", json=body).raise_for_status().json()["id"]
    daemon.http.post(f"/api/v1/jobs/{job}/hold", json={"reason": "<b>x"}).raise_for_status()
    (line,) = [user for user in root.get_json("/users.json")["users"] if user["user"] == "alice"]
    assert (line["held"], line["active"]) == (1, 0)
    assert [user["user"] for user in alice.get_json("/users.json")["users"]] == ["alice"]
    assert root.get_json("/queue.json", q="user:alice state:held")["jobs"][0]["id"] == job


def test_pages_list_changes_of_job_cluster_and_user_for_operators_only(
    daemon: ServedDaemon, root: Person, alice: Person
) -> None:
    body = {"request": {"type": "flexible", "total_size": 8}, "command": ["sleep", "600"], "owner": "alice"}
    job = daemon.http.post("/api/v1/jobs", json=body).raise_for_status().json()["id"]
    for number in range(MAX_CHANGES + 2):
        order = {"jobs": [job]} if number % 2 else {"jobs": [job], "reason": f"<x-injected> {number}"}
        daemon.http.post(f"/api/v1/jobs/{'release' if number % 2 else 'hold'}", json=order)
    daemon.http.post("/api/v1/clusters/north/drain", json={"reason": "<x-injected>"}).raise_for_status()
    daemon.http.post("/api/v1/clusters/north/resume").raise_for_status()
    assert alice.send_form(f"/queue/confirm?action=hold&job={job}", "/queue/hold").status_code == 200
    page = root.get_json(f"/jobs/{job}.json")["changes"]
    assert len(page["entries"]) == MAX_CHANGES
    assert page["is_newest"]
    older = root.get_json(f"/jobs/{job}.json", changes=page["older"])["changes"]
    assert [entry["action"] for entry in older["entries"]][-2:] == ["hold_jobs", "submit_job"]
    assert (older["older"], older["is_newest"]) == (0, False)
    numbers = [entry["id"] for entry in [*page["entries"], *older["entries"]]]
    assert numbers == sorted(set(numbers), reverse=True)
    changes = root.get_json("/clusters/north.json")["changes"]["entries"]
    assert [(entry["action"], entry["detail"]) for entry in changes[:2]] == [
        ("resume_cluster", ""),
        ("drain_cluster", "<x-injected>"),
    ]
    assert "2:00:00 behind the daemon's" in root.get_page("/clusters/north")
    page_of_user = alice.get_json("/clusters/north.json")
    assert (page_of_user["agent"], page_of_user["certificate"]) == (None, None)
    assert root.get_json("/users.json", user="alice")["changes"]["entries"][0]["target"] == f"job {job}"
    for path in (f"/jobs/{job}", f"/jobs/{job}?changes={page['older']}", "/clusters/north", "/users?user=alice"):
        text = root.get_page(path)
        assert 'id="changes"' in text
        assert "<x-injected>" not in text
        assert "192.0.2." not in text.partition('id="changes"')[2]
        text = alice.get_page(path)
        assert 'id="changes"' not in text
        assert alice.get_json(path.replace("?", ".json?") if "?" in path else f"{path}.json")["changes"] is None
    for wrong in ("-1", "x", str(2**70)):
        root.get_page(f"/jobs/{job}?changes={wrong}", 422)
    daemon.http.post(f"/api/v1/jobs/{job}/cancel", json={"reason": "test"}).raise_for_status()


def test_audit_page_is_filtered_and_newest_first(daemon: ServedDaemon, root: Person) -> None:
    rejection = daemon.http.post("/api/v1/jobs/999/cancel")
    assert rejection.status_code == 404
    newest = root.get_json("/scheduler/audit.json")["entries"]
    assert [entry["id"] for entry in newest] == sorted((entry["id"] for entry in newest), reverse=True)
    (entry,) = root.get_json("/scheduler/audit.json", target="job 999", outcome="refused", since="3600")["entries"]
    assert entry["action"] == "cancel_job"
    first = root.get_json("/scheduler/audit.json", limit=1)
    second = root.get_json(first["table"]["next"].replace("/scheduler/audit?", "/scheduler/audit.json?"))
    assert second["entries"][0]["id"] < first["entries"][0]["id"]
    oldest = root.get_json("/scheduler/audit.json", sort="time", limit=2)
    assert oldest["entries"] == root.get_json("/scheduler/audit.json", sort="time", limit=200)["entries"][:2]
    following = root.get_json(oldest["table"]["next"].replace("/scheduler/audit?", "/scheduler/audit.json?"))["entries"]
    assert following[0]["id"] > oldest["entries"][1]["id"]
    assert root.http.get("/scheduler/audit.csv?columns=action&target=job+999").text == "action\ncancel_job\n"
    assert 'value="job 999"' in root.get_page("/scheduler/audit?target=job+999")
    assert root.http.get("/scheduler/audit?outcome=well").status_code == 422


def test_files_page_shows_bundles_to_owner(daemon: ServedDaemon, alice: Person, root: Person) -> None:
    token = create_token(daemon, "alice")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-tar"}
    sent = daemon.http.post("/api/v1/bundles", content=archive_of(GOOD), headers=headers).raise_for_status().json()
    for person in (alice, root):
        (bundle,) = person.get_json("/files.json")["bundles"]
        assert (bundle["id"], bundle["owners"]) == (sent["id"], ["alice"])
    carol = Person(daemon, create_token(daemon, "carol"))
    files = carol.get_json("/files.json")
    assert (files["bundles"], files["results"]) == ([], {})
    assert carol.http.get("/files?name=gone").status_code == 404
    carol.close()


def test_users_page_shows_shares_in_the_order_of_jobs(tmp_path: Path) -> None:
    past = [Charge("alice", 7200.0, 0.0), Charge("bob", 3600.0, 0.0)]
    shares = FairShares(FairShareSettings(users={"alice": 3.0}), past=past)
    with daemon_in_thread(tmp_path / "koala.db", has_dashboard=True, shares=shares) as daemon:
        person = Person(daemon, daemon.admin_token)
        lines = person.get_json("/users.json")["shares"]
        card = person.get_page("/users").partition("Fair shares")[2].partition("</section>")[0]
        person.close()
    assert [(line["user"], line["target"]) for line in lines] == [("alice", 0.75), ("bob", 0.25)]
    assert card.index(">alice<") < card.index(">bob<")
    assert ("75 %" in card, "25 %" in card) == (True, True)


def test_operator_sets_weight_with_reason_on_page_of_user(tmp_path: Path) -> None:
    shares = FairShares(FairShareSettings(users={"alice": 3.0}), past=[Charge("alice", 7200.0, 0.0)])
    with daemon_in_thread(tmp_path / "koala.db", has_dashboard=True, shares=shares) as daemon:
        root = Person(daemon, daemon.admin_token)
        change = {"weight": "5", "reason": "a <deadline>"}
        answer = root.send_form("/users?user=alice", "/users/alice/weight", **change)
        assert (answer.status_code, answer.headers["location"]) == (303, "/users?user=alice")
        page = root.get_page("/users?user=alice")
        assert 'placeholder="3, as configured"' in page
        assert "a &lt;deadline&gt;" in page.partition("5 <small>set by")[2]
        assert shares.standing("alice", 0.0)[0] == pytest.approx(7200.0 / 5)
        root.send_form("/users?user=alice", "/users/alice/weight", weight="", reason="it has passed")
        assert shares.standing("alice", 0.0)[0] == pytest.approx(7200.0 / 3)
        root.close()


def test_users_page_shows_node_hours_of_more_users_than_tables_have_lines(tmp_path: Path) -> None:
    with daemon_in_thread(tmp_path / "koala.db", has_dashboard=True) as daemon:
        day = day_of(time.time())
        user = {column.name: 0 for column in tables.days.columns} | {"kind": "user", "day": day, "node_seconds": 36.0}
        with make_engine(f"sqlite:///{tmp_path}/koala.db").begin() as connection:
            connection.execute(insert(tables.days), [user | {"name": f"u{n}"} for n in range(MAX_LINES + 1)])
        root = Person(daemon, daemon.admin_token)
        view = root.get_json("/users.json")
        assert view["table"]["total"] > MAX_LINES
        assert view["users"][0]["month_hours"] in (0.0, 0.01)
        root.close()
