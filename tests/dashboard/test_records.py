"""The pages Users, Files and Audit: limits and tokens, replicas and what users sent, who did what."""

from collections.abc import Iterator

import pytest

from tests.daemon.archives import GOOD, archive_of
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, token_of


@pytest.fixture(scope="module")
def root(daemon: ServedDaemon) -> Iterator[Person]:
    person = Person(daemon, daemon.admin_token)
    yield person
    person.close()


@pytest.fixture(scope="module")
def alice(daemon: ServedDaemon) -> Iterator[Person]:
    person = Person(daemon, token_of(daemon, "alice"))
    yield person
    person.close()


def test_a_token_is_revoked_by_who_may(daemon: ServedDaemon, root: Person, alice: Person) -> None:
    token_of(daemon, "bob")
    own = alice.told("/users.json")["tokens"]
    assert {token["user"] for token in own} == {"alice"}
    assert alice.see("/users").count("this browser") == 1
    bobs = root.told("/users.json", user="bob")["tokens"]
    assert {token["user"] for token in bobs} == {"bob"}
    path = f"/users/tokens/{bobs[0]['id']}/revoke"
    form = {"csrf": alice.see("/users").partition('name="csrf" value="')[2].partition('"')[0]}
    assert alice.http.post(path, data=form, headers=alice.origin).status_code == 404
    assert len(root.told("/users.json", user="bob")["tokens"]) == 1
    done = root.send("/users?user=bob", path)
    assert (done.status_code, done.headers["location"]) == (303, "/users?user=bob")
    assert root.told("/users.json", user="bob")["tokens"] == []
    again = root.told("/users.json?user=bob&all=true")["tokens"]
    assert again[0]["revoked_at"] is not None


def test_what_users_have_just_now_leads_to_their_jobs(daemon: ServedDaemon, root: Person, alice: Person) -> None:
    body = {"request": {"type": "flexible", "total_size": 8}, "command": ["sleep", "600"], "owner": "alice"}
    job = daemon.http.post("/api/v1/jobs", json=body).raise_for_status().json()["id"]
    daemon.http.post(f"/api/v1/jobs/{job}/hold").raise_for_status()
    (line,) = [one for one in root.told("/users.json")["users"] if one["user"] == "alice"]
    assert (line["held"], line["active"]) == (1, 0)
    assert [one["user"] for one in alice.told("/users.json")["users"]] == ["alice"]
    assert root.told("/queue.json", q="user:alice state:held")["jobs"][0]["id"] == job


def test_the_audit_is_filtered_and_told_newest_first(daemon: ServedDaemon, root: Person) -> None:
    refused = daemon.http.post("/api/v1/jobs/999/cancel")
    assert refused.status_code == 404
    newest = root.told("/audit.json")["entries"]
    assert [one["id"] for one in newest] == sorted((one["id"] for one in newest), reverse=True)
    (one,) = root.told("/audit.json", target="job 999", outcome="refused", since="3600")["entries"]
    assert one["action"] == "cancel_job"
    first = root.told("/audit.json", limit=1)
    second = root.told(first["next"].replace("/audit?", "/audit.json?"))
    assert second["entries"][0]["id"] < first["entries"][0]["id"]
    assert 'value="job 999"' in root.see("/audit?target=job+999")
    assert root.http.get("/audit?outcome=well").status_code == 422


def test_files_are_shown_to_who_sent_them(daemon: ServedDaemon, alice: Person, root: Person) -> None:
    token = token_of(daemon, "alice")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-tar"}
    sent = daemon.http.post("/api/v1/bundles", content=archive_of(GOOD), headers=headers).raise_for_status().json()
    for person in (alice, root):
        (bundle,) = person.told("/files.json")["bundles"]
        assert (bundle["id"], bundle["owners"]) == (sent["id"], ["alice"])
    carol = Person(daemon, token_of(daemon, "carol"))
    told = carol.told("/files.json")
    assert (told["bundles"], told["results"]) == ([], [])
    assert carol.http.get("/files?name=gone").status_code == 404
    carol.close()
