"""The pages Queue and Job: access, filters, actions on many jobs, and hostile output."""

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.dashboard.people import Person, create_token
from tests.grid.embedded import EmbeddedGrid

WIDE = {"type": "flexible", "total_size": 8}
HOSTILE = (
    r"printf '\033[31mred\033[0m <script>document.title=1</script><img src=x onerror=alert(1)>\n';"
    r" printf '\377\376 \342\200\256rtl\n';"
    r" head -c 20000 /dev/zero | tr '\0' 'y'; printf 'no end'"
)


def submit_job(grid: EmbeddedGrid | ServedDaemon, owner: str, **fields: Any) -> int:
    body = {"request": WIDE, "command": ["sleep", "600"], "launcher": "processes", "owner": owner} | fields
    response = grid.http.post("/api/v1/jobs", json=body)
    assert response.status_code == 201, response.text
    return int(response.json()["id"])


def result_of(response: httpx2.Response) -> dict[str, list[int]]:
    """Return the jobs on the page that answers an action on many jobs, by heading."""
    assert response.status_code == 200
    main = response.text.partition("<main")[2]
    sections = re.findall(r"<h2>(\w+)</h2>(.*?)</table>", main, re.DOTALL)
    return {title: [int(job) for job in re.findall(r'data-href="/jobs/(\d+)"', rows)] for title, rows in sections}


@pytest.fixture(scope="module")
def jobs(daemon: ServedDaemon) -> dict[str, int]:
    job_numbers = {
        "alice": submit_job(daemon, "alice", name="wave <1>"),
        "bob": submit_job(daemon, "bob", name="secret"),
    }
    return job_numbers | {"second": submit_job(daemon, "bob", name="other secret")}


@pytest.fixture(scope="module")
def people(daemon: ServedDaemon, jobs: dict[str, int]) -> Iterator[dict[str, Person]]:
    persons = {
        "alice": Person(daemon, create_token(daemon, "alice")),
        "olga": Person(daemon, create_token(daemon, "olga", "operator")),
        "root": Person(daemon, daemon.admin_token),
    }
    yield persons
    for person in persons.values():
        person.close()


PAGES = {
    "/queue": {"alice", "olga", "root"},
    "/queue?q=state:any+-user:x": {"alice", "olga", "root"},
    "/queue/confirm?action=cancel&all=true&q=": {"alice", "olga", "root"},
    "/users": {"alice", "olga", "root"},
    "/users?user=bob": {"olga", "root"},
    "/files": {"alice", "olga", "root"},
    "/scheduler/audit": {"root"},
}


@pytest.mark.parametrize("path", PAGES)
def test_page_access_depends_on_role(people: dict[str, Person], path: str) -> None:
    for name, person in people.items():
        page = person.get_page(path, 200 if name in PAGES[path] else 403)
        twin = person.http.get(path.replace("?", ".json?") if "?" in path else f"{path}.json")
        assert twin.status_code == (200 if name in PAGES[path] else 403)
        if name == "alice":
            assert "secret" not in page
            assert "bob" not in page.replace("/users?user=bob", "")


def test_job_page_redacts_as_the_api_does(people: dict[str, Person], jobs: dict[str, int]) -> None:
    page = people["alice"].get_page(f"/jobs/{jobs['bob']}")
    job_page = people["alice"].get_json(f"/jobs/{jobs['bob']}.json")
    assert job_page["job"] | {"timeline": [], "dependencies": [], "dependents": []} == people["alice"].get_json(
        f"/api/v1/jobs/{jobs['bob']}"
    )
    assert job_page["job"]["redacted"]
    assert not job_page.keys() & {"actions", "timeline", "output", "command"}
    assert "secret" not in page + str(job_page)
    assert "bob" not in page + str(job_page)
    assert people["alice"].http.get(f"/jobs/{jobs['bob']}/output/0").status_code == 403
    own_page = people["alice"].get_json(f"/jobs/{jobs['alice']}.json")
    assert own_page["actions"] == ["cancel", "hold"]
    assert people["olga"].get_json(f"/jobs/{jobs['alice']}.json")["actions"] == ["cancel", "hold", "high"]
    assert (
        people["alice"].http.get("/queue/confirm", params={"action": "high", "all": "true", "q": ""}).status_code == 403
    )
    assert own_page["explanation"]["position"] == 1
    assert "wave &lt;1&gt;" in people["alice"].get_page(f"/jobs/{jobs['alice']}")
    assert people["olga"].get_json(f"/jobs/{jobs['bob']}.json")["job"]["name"] == "secret"
    assert people["olga"].get_page("/jobs/999", 404)


def test_queue_filter_reveals_no_private_fields(people: dict[str, Person], jobs: dict[str, int]) -> None:
    def matching_jobs(name: str, q: str) -> list[int]:
        return [job["id"] for job in people[name].get_json("/queue.json", q=q)["jobs"]]

    assert matching_jobs("olga", "user:bob") == [jobs["bob"], jobs["second"]]
    assert matching_jobs("olga", "name:*secret user:bob,carol") == [jobs["bob"], jobs["second"]]
    assert matching_jobs("alice", "name:*secret") == []
    assert matching_jobs("alice", "-name:nothing") == [jobs["alice"]]
    assert matching_jobs("alice", "size:8 priority:low") == [jobs["alice"], jobs["bob"], jobs["second"]]
    rejection = people["alice"].http.get("/queue", params={"q": "user:bob"})
    assert rejection.status_code == 403
    assert "you are alice" in rejection.text
    wrong = people["alice"].get_page("/queue?q=usr:bob")
    assert "there is no usr in filters" in wrong
    assert "did you mean user?" in wrong


def test_queue_pages_cover_all_jobs_once(people: dict[str, Person], daemon: ServedDaemon, jobs: dict[str, int]) -> None:
    path, job_ids = "/queue?q=state:any&limit=2", list[int]()
    while path:
        queue_page = people["olga"].get_json(path.replace("/queue?", "/queue.json?"))
        assert len(queue_page["jobs"]) <= 2
        job_ids += [job["id"] for job in queue_page["jobs"]]
        path = queue_page["table"]["next"]
    assert job_ids == sorted(
        {job["id"] for job in daemon.http.get("/api/v1/jobs?limit=1000").json()["jobs"]}, reverse=True
    )


def test_queue_action_applies_to_confirmed_jobs(daemon: ServedDaemon, people: dict[str, Person]) -> None:
    olga, alice = people["olga"], people["alice"]
    mine = [submit_job(daemon, "dave", name="many") for _ in range(3)]
    confirm_path = "/queue/confirm?action=hold&all=true&q=user:dave"
    confirmation = olga.get_json(confirm_path.replace("confirm?", "confirm.json?"))
    assert (confirmation["does"], confirmation["count"]) == ("holds", 3)
    empty_confirmation = alice.get_json(f"/queue/confirm.json?action=hold&job={mine[0]}")
    assert (empty_confirmation["jobs"], empty_confirmation["left_out"]) == ([], [[1, "not yours"]])
    assert "forms" not in alice.get_page(f"/queue/confirm?action=hold&job={mine[0]}")
    page = olga.get_page(confirm_path)
    assert "This holds 3 jobs of 1 user." in page
    assert ">Hold 3 jobs of 1 user</button>" in page
    daemon.http.post(f"/api/v1/jobs/{mine[1]}/cancel", json={"reason": "test"}).raise_for_status()
    # Send the earlier form: the state of one of its jobs has changed.
    csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
    assert confirmation["needs_reason"]
    assert 'name="reason" maxlength="1000" autocomplete="off" required' in " ".join(page.split())
    sent = {
        "csrf": csrf,
        "key": confirmation["key"],
        "jobs": confirmation["shown_states"],
        "reason": " ",
        "q": "user:dave",
    }
    assert olga.http.post("/queue/hold", data=sent, headers=olga.origin).status_code == 422
    sent["reason"] = "a flood"
    response = olga.http.post("/queue/hold", data=sent, headers=olga.origin)
    assert result_of(response) == {"Rejected": [mine[1]], "Done": [mine[2], mine[0]]}
    assert [daemon.job(job)["reason"] for job in (mine[0], mine[2])] == ["a flood", "a flood"]
    entries = daemon.http.get("/api/v1/audit", params={"user": "olga", "action": "hold_jobs"}).json()["entries"][-2:]
    assert [(entry["outcome"], entry["target"], entry["detail"]) for entry in entries] == [
        ("done", f"job {mine[2]}", "a flood"),
        ("done", f"job {mine[0]}", "a flood"),
    ]
    for action in ("release", "high", "low", "cancel"):
        confirm_path = f"/queue/confirm?action={action}&all=true&q=user:dave"
        path = "/queue/priority" if action in ("high", "low") else f"/queue/{action}"
        assert olga.send_form(confirm_path, path, reason="as it was").status_code == 200
        expected = {"release": ("queued", "low"), "high": ("queued", "high"), "low": ("queued", "low")}
        for job in (mine[0], mine[2]):
            now = daemon.job(job)
            assert (now["state"], now["priority"]) == expected.get(action, ("cancelled", "low"))


def test_queue_action_on_all_jobs_finds_unfinished_ones_behind_many_ended(
    daemon: ServedDaemon, people: dict[str, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.dashboard.pages.queue.MAX_SELECTED", 1)
    path, jobs = "/queue/confirm.json?action=cancel&all=true&q=user:ivan+state:any", list[int]()
    for left_out in ([], [[1, "only 1 jobs are changed at once, the newest first"]]):
        jobs.append(submit_job(daemon, "ivan"))
        ended = [submit_job(daemon, "ivan") for _ in range(2)]
        daemon.http.post("/api/v1/jobs/cancel", json={"jobs": ended, "reason": "test"}).raise_for_status()
        confirmation = people["olga"].get_json(path)
        assert (confirmation["count"], confirmation["left_out"]) == (1, left_out)
    daemon.http.post("/api/v1/jobs/cancel", json={"jobs": jobs, "reason": "test"}).raise_for_status()


def test_queue_without_a_match_among_examined_jobs_leads_on_to_older_ones(
    daemon: ServedDaemon, people: dict[str, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [submit_job(daemon, "jane", name=name) for name in ("rare", "often", "often")]
    daemon.http.post("/api/v1/jobs/cancel", json={"jobs": jobs, "reason": "test"}).raise_for_status()
    for name in ("FIRST_WINDOW", "WINDOW", "MAX_LOOKED_AT"):
        monkeypatch.setattr(f"koalapy.store.listing.{name}", 2)
    page = people["olga"].get_page("/queue?q=name:rar*+state:over")
    assert "No jobs match" not in page
    link = re.search(r'href="([^"]*)" rel="next"', page)
    assert link is not None
    assert f'id="job-{jobs[0]}"' in people["olga"].get_page(unescape(link[1]))


def test_queue_form_that_is_sent_again_changes_nothing(daemon: ServedDaemon, people: dict[str, Person]) -> None:
    olga, job = people["olga"], submit_job(daemon, "gina")
    page = f"/queue/confirm?action=hold&job={job}&q=user:gina"
    key = olga.get_json(page.replace("?", ".json?"))["key"]
    assert olga.send_form(page, "/queue/hold", key=key).status_code == 422, "no reason, which the user adds"
    assert olga.send_form(page, "/queue/hold", key="of an earlier daemon", reason="x").status_code == 422
    daemon.loop.call_soon_threadsafe(daemon.engine.database.note_failure, "engine", "the database is locked")
    assert olga.send_form(page, "/queue/hold", key=key, reason="x").status_code == 503
    daemon.loop.call_soon_threadsafe(daemon.engine.database.note_success, "engine")
    assert result_of(olga.send_form(page, "/queue/hold", key=key, reason="x")) == {"Done": [job]}
    daemon.http.post(f"/api/v1/jobs/{job}/release").raise_for_status()
    again = olga.send_form(page, "/queue/hold", key=key, reason="x")
    assert (again.status_code, again.headers["location"]) == (303, "/queue?q=user%3Agina")
    assert daemon.job(job)["state"] == "queued"
    assert result_of(olga.send_form(page, "/queue/hold", reason="x")) == {"Done": [job]}, "a new form acts"
    daemon.http.post(f"/api/v1/jobs/{job}/cancel", json={"reason": "test"}).raise_for_status()


@pytest.mark.parametrize("action", ["cancel", "hold", "release", "priority"])
def test_address_of_a_queue_form_leads_to_the_queue(people: dict[str, Person], action: str) -> None:
    answer = people["alice"].http.get(f"/queue/{action}")
    assert (answer.status_code, answer.headers["location"]) == (308, "/queue")


def test_queue_form_with_other_jobs_is_rejected(
    daemon: ServedDaemon, people: dict[str, Person], jobs: dict[str, int]
) -> None:
    alice = people["alice"]
    confirm_path = f"/queue/confirm?action=cancel&job={jobs['alice']}"
    response = alice.send_form(
        confirm_path, "/queue/cancel", jobs=f"{jobs['bob']}:queued,{jobs['alice']}:held,999:queued"
    )
    assert result_of(response) == {"Rejected": [jobs["bob"], jobs["alice"], 999]}
    assert "is not yours" in response.text
    assert "is queued now, and was held when you chose it" in response.text
    for wrong in (
        "",
        "x",
        "1",
        "1:gone",
        f"{2**63}:queued",
        f"-{2**63}:failed",
        ",".join(f"{job}:queued" for job in range(1, 1002)),
    ):
        assert alice.send_form(confirm_path, "/queue/cancel", jobs=wrong).status_code == 422
    alice.get_page(f"/queue/confirm?action=cancel&job={2**63}", 422)
    assert alice.send_form(confirm_path, "/queue/cancel", csrf="x").status_code == 403
    assert alice.send_form(confirm_path, "/queue/cancel", reason="x" * 1001).status_code == 422
    assert daemon.job(jobs["bob"])["state"] == daemon.job(jobs["alice"])["state"] == "queued"


@pytest.fixture(scope="module")
def running_job(grid: EmbeddedGrid) -> int:
    """A running job that uses all nodes."""
    job = submit_job(grid, "root", priority="high", name="runs")
    grid.wait_for_state(job, "running")
    return job


@pytest.mark.usefixtures("running_job")
def test_queue_page_selects_jobs_with_keys(visit: Visit, grid: EmbeddedGrid) -> None:
    jobs = [submit_job(grid, "erin", name=f"run {number}") for number in range(3)]
    page = visit(create_token(grid, "oscar", "operator")).open("/queue?q=user:erin&sort=-id")
    for key in ("j", "x", "j", "x"):
        page.keyboard.press(key)
    assert page.locator("tr[data-here]").get_attribute("id") == f"job-{jobs[1]}"
    # Selection and typed text must survive an update of the page.
    page.get_by_label("Filter", exact=True).fill("user:erin state:waiting")
    grid.http.post(f"/api/v1/jobs/{jobs[0]}/hold", json={"reason": "later"}).raise_for_status()
    page.get_by_text("later").wait_for()
    assert page.locator("input[name=job]:checked").count() == 2
    assert page.get_by_label("Filter", exact=True).input_value() == "user:erin state:waiting"
    assert page.locator("tr[data-here]").count() == 1
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_text("This cancels 2 jobs of 1 user.").wait_for()
    page.get_by_label("Reason").fill("a <b>typo</b>")
    page.get_by_role("button", name="Cancel 2 jobs of 1 user").click()
    page.get_by_text("2 done").wait_for()
    assert {grid.get_job(job)["reason"] for job in jobs[1:]} == {"a <b>typo</b>"}
    assert grid.get_job(jobs[0])["state"] == "held"


@pytest.mark.usefixtures("running_job")
def test_queue_page_without_scripts_holds_job(visit: Visit, grid: EmbeddedGrid) -> None:
    job = submit_job(grid, "fred")
    visitor = visit(create_token(grid, "fred"), java_script_enabled=False)
    page = visitor.open("/queue", live=False)
    page.get_by_label("Filter", exact=True).fill("user:fred")
    page.get_by_role("button", name="Filter").click()
    page.get_by_label(f"select job {job}").check()
    page.get_by_role("button", name="Hold…").click()
    page.get_by_role("button", name="Hold 1 job of 1 user").click()
    page.get_by_role("link", name=str(job), exact=True).click()
    page.get_by_text("held by fred").first.wait_for()
    assert grid.get_job(job)["state"] == "held"


def test_job_page_shows_hostile_output_as_text(visit: Visit, grid: EmbeddedGrid, running_job: int) -> None:
    grid.cancel(running_job)
    command = ["sh", "-c", f"{HOSTILE}; sleep 600"]
    job = submit_job(grid, "greta", request={"type": "flexible", "total_size": 1}, command=command, priority="high")
    page = visit(create_token(grid, "greta")).open(f"/jobs/{job}")
    page.locator("pre.output", has_text="no end").wait_for()
    text = page.locator("pre.output").inner_text()
    assert "red <script>document.title=1</script><img src=x onerror=alert(1)>" in text
    assert "\ufffd\ufffd \ufffdrtl" in text
    assert "\x1b" not in text
    assert page.locator("pre.output script, pre.output img").count() == 0
    assert page.title() == "Job · koala"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("svg.timeline rect.running").count() == 1
    page.get_by_text("As a table").click()
    page.get_by_role("cell", name="claiming").first.wait_for()
    grid.cancel(job)
    page.locator("h1 .state.cancelled").wait_for()
    page.get_by_role("cell", name="claiming").first.wait_for()


def test_queue_page_cancels_many_jobs_at_once(visit: Visit, grid: EmbeddedGrid) -> None:
    for _ in range(40):
        submit_job(grid, "henry")
    page = visit(create_token(grid, "olaf", "operator")).open("/queue?q=user:henry&limit=200")
    assert page.locator("table.jobs tbody tr").count() == 40
    person = Person(grid, create_token(grid, "ollie", "operator"))
    response = person.send_form("/queue/confirm?action=cancel&all=true&q=user:henry", "/queue/cancel", reason="enough")
    assert len(result_of(response)["Done"]) == 40
    person.close()


def test_search_leads_to_job_of_number_and_to_jobs_of_word(people: dict[str, Person], jobs: dict[str, int]) -> None:
    olga = people["olga"]
    answer = olga.http.get("/search", params={"q": f" {jobs['bob']} "})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{jobs['bob']}")
    assert olga.http.get("/search?q=bob").headers["location"] == "/queue?q=bob+state%3Aany"
    assert olga.http.get("/search?q=bob+-state:held").headers["location"] == "/queue?q=bob+-state%3Aheld"
    found = olga.get_json("/queue.json", q="BOB")
    assert {job["user"] for job in found["jobs"]} == {"bob"}
    assert found["clusters"] == []
    assert "north" in olga.get_json("/queue.json", q="nort")["clusters"]
    assert people["alice"].get_json("/queue.json", q="bob")["jobs"] == []


@pytest.mark.parametrize(
    ("person", "q", "completions"),
    [
        ("olga", "user:b", ["user:bob"]),
        ("alice", "user:", ["user:alice"]),
        ("alice", "name:", ['name:"wave <1>"']),
        ("olga", "x -state:held,qu", ["x -state:held,queued"]),
        ("olga", "po", ["policy:"]),
        ("olga", "nor", ["north"]),
        ("olga", "cluster:north,so", ["cluster:north,south"]),
        ("olga", "nothing:", []),
    ],
)
def test_search_is_completed_by_terms_and_visible_values(
    people: dict[str, Person], person: str, q: str, completions: list[str]
) -> None:
    options = people[person].http.get("/search/terms", params={"q": q}).text
    assert [unescape(text) for text in re.findall('<option value="([^"]*)">', options)] == completions
