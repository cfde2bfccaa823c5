"""The pages Users, Files and Audit."""

from collections.abc import Iterator

import pytest

from tests.daemon.archives import GOOD, archive_of
from tests.daemon_in_process import ServedDaemon
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
    daemon.http.post(f"/api/v1/jobs/{job}/hold").raise_for_status()
    (line,) = [user for user in root.get_json("/users.json")["users"] if user["user"] == "alice"]
    assert (line["held"], line["active"]) == (1, 0)
    assert [user["user"] for user in alice.get_json("/users.json")["users"]] == ["alice"]
    assert root.get_json("/queue.json", q="user:alice state:held")["jobs"][0]["id"] == job


def test_audit_page_is_filtered_and_newest_first(daemon: ServedDaemon, root: Person) -> None:
    rejection = daemon.http.post("/api/v1/jobs/999/cancel")
    assert rejection.status_code == 404
    newest = root.get_json("/audit.json")["entries"]
    assert [entry["id"] for entry in newest] == sorted((entry["id"] for entry in newest), reverse=True)
    (entry,) = root.get_json("/audit.json", target="job 999", outcome="refused", since="3600")["entries"]
    assert entry["action"] == "cancel_job"
    first = root.get_json("/audit.json", limit=1)
    second = root.get_json(first["table"]["next"].replace("/audit?", "/audit.json?"))
    assert second["entries"][0]["id"] < first["entries"][0]["id"]
    oldest = root.get_json("/audit.json", sort="time", limit=2)
    assert oldest["entries"] == root.get_json("/audit.json", sort="time", limit=200)["entries"][:2]
    following = root.get_json(oldest["table"]["next"].replace("/audit?", "/audit.json?"))["entries"]
    assert following[0]["id"] > oldest["entries"][1]["id"]
    assert root.http.get("/audit.csv?columns=action&target=job+999").text == "action\ncancel_job\n"
    assert 'value="job 999"' in root.get_page("/audit?target=job+999")
    assert root.http.get("/audit?outcome=well").status_code == 422


def test_files_page_shows_bundles_to_owner(daemon: ServedDaemon, alice: Person, root: Person) -> None:
    token = create_token(daemon, "alice")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-tar"}
    sent = daemon.http.post("/api/v1/bundles", content=archive_of(GOOD), headers=headers).raise_for_status().json()
    for person in (alice, root):
        (bundle,) = person.get_json("/files.json")["bundles"]
        assert (bundle["id"], bundle["owners"]) == (sent["id"], ["alice"])
    carol = Person(daemon, create_token(daemon, "carol"))
    files = carol.get_json("/files.json")
    assert (files["bundles"], files["results"]) == ([], [])
    assert carol.http.get("/files?name=gone").status_code == 404
    carol.close()
