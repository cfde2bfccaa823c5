"""The pages of jobs: who finds and sees what, what is done to many at once, and the output of hostile programs."""

from collections.abc import Iterator
from typing import Any

import pytest

from koalapy.dashboard.pages.queue import MAX_OUTCOMES, OutcomeView, _Outcomes
from koalapy.model.errors import NotFoundError
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.dashboard.people import Person, token_of
from tests.grid.embedded import EmbeddedGrid

WIDE = {"type": "flexible", "total_size": 8}
HOSTILE = (
    r"printf '\033[31mred\033[0m <script>document.title=1</script><img src=x onerror=alert(1)>\n';"
    r" printf '\377\376 \342\200\256rtl\n';"
    r" head -c 20000 /dev/zero | tr '\0' 'y'; printf 'no end'"
)


def submit(grid: EmbeddedGrid | ServedDaemon, owner: str, **more: Any) -> int:
    body = {"request": WIDE, "command": ["sleep", "600"], "launcher": "processes", "owner": owner} | more
    answer = grid.http.post("/api/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


@pytest.fixture(scope="module")
def jobs(daemon: ServedDaemon) -> dict[str, int]:
    """Jobs that wait."""
    made = {"alice": submit(daemon, "alice", name="wave <1>"), "bob": submit(daemon, "bob", name="secret")}
    return made | {"second": submit(daemon, "bob", name="other secret")}


@pytest.fixture(scope="module")
def people(daemon: ServedDaemon, jobs: dict[str, int]) -> Iterator[dict[str, Person]]:
    known = {
        "alice": Person(daemon, token_of(daemon, "alice")),
        "olga": Person(daemon, token_of(daemon, "olga", "operator")),
        "root": Person(daemon, daemon.admin_token),
    }
    yield known
    for person in known.values():
        person.close()


PAGES = {
    "/queue": {"alice", "olga", "root"},
    "/queue?q=state:any+-user:x": {"alice", "olga", "root"},
    "/queue/confirm?action=cancel&all=true&q=": {"alice", "olga", "root"},
    "/users": {"alice", "olga", "root"},
    "/users?user=bob": {"olga", "root"},
    "/files": {"alice", "olga", "root"},
    "/audit": {"root"},
}


@pytest.mark.parametrize("path", PAGES)
def test_each_page_is_for_those_of_a_role(people: dict[str, Person], path: str) -> None:
    for who, person in people.items():
        page = person.see(path, 200 if who in PAGES[path] else 403)
        twin = person.http.get(path.replace("?", ".json?") if "?" in path else f"{path}.json")
        assert twin.status_code == (200 if who in PAGES[path] else 403)
        assert ("/audit" in page.partition("</header>")[0]) == (who == "root")
        if who == "alice":
            assert "secret" not in page
            assert "bob" not in page.replace("/users?user=bob", "")


def test_others_jobs_are_shown_as_the_api_shows_them(people: dict[str, Person], jobs: dict[str, int]) -> None:
    page = people["alice"].see(f"/jobs/{jobs['bob']}")
    told = people["alice"].told(f"/jobs/{jobs['bob']}.json")
    assert told["job"] | {"timeline": []} == people["alice"].told(f"/api/v1/jobs/{jobs['bob']}")
    assert told["job"]["redacted"]
    assert not told["actions"]
    assert not told["timeline"]
    assert "secret" not in page + str(told)
    assert "bob" not in page + str(told)
    assert people["alice"].http.get(f"/jobs/{jobs['bob']}/output/0").status_code == 403
    own = people["alice"].told(f"/jobs/{jobs['alice']}.json")
    assert own["actions"] == ["cancel", "hold"]
    assert people["olga"].told(f"/jobs/{jobs['alice']}.json")["actions"] == ["cancel", "hold", "high"]
    assert (
        people["alice"].http.get("/queue/confirm", params={"action": "high", "all": "true", "q": ""}).status_code == 403
    )
    assert own["explanation"]["position"] == 1
    assert "wave &lt;1&gt;" in people["alice"].see(f"/jobs/{jobs['alice']}")
    assert people["olga"].told(f"/jobs/{jobs['bob']}.json")["job"]["name"] == "secret"
    assert people["olga"].see("/jobs/999", 404)


def test_a_filter_tells_nobody_more_than_he_may_see(people: dict[str, Person], jobs: dict[str, int]) -> None:
    def found(who: str, q: str) -> list[int]:
        return [job["id"] for job in people[who].told("/queue.json", q=q)["jobs"]]

    assert found("olga", "user:bob") == [jobs["second"], jobs["bob"]]
    assert found("olga", "name:*secret user:bob,carol") == [jobs["second"], jobs["bob"]]
    assert found("alice", "name:*secret") == []
    assert found("alice", "-name:nothing") == [jobs["alice"]]
    assert found("alice", "size:8 priority:low") == [jobs["second"], jobs["bob"], jobs["alice"]]
    refused = people["alice"].http.get("/queue", params={"q": "user:bob"})
    assert refused.status_code == 403
    assert "you are alice" in refused.text
    wrong = people["alice"].see("/queue?q=usr:bob")
    assert "there is no usr in filters" in wrong
    assert "did you mean user?" in wrong


def test_pages_of_a_filter_hold_everything_once(
    people: dict[str, Person], daemon: ServedDaemon, jobs: dict[str, int]
) -> None:
    path, seen = "/queue?q=state:any&limit=2", list[int]()
    while path:
        told = people["olga"].told(path.replace("/queue?", "/queue.json?"))
        assert len(told["jobs"]) <= 2
        seen += [job["id"] for job in told["jobs"]]
        path = told["next"]
    assert seen == sorted(
        {job["id"] for job in daemon.http.get("/api/v1/jobs?limit=1000").json()["jobs"]}, reverse=True
    )


def test_what_is_done_is_told_before_and_done_to_what_was_shown(
    daemon: ServedDaemon, people: dict[str, Person]
) -> None:
    olga, alice = people["olga"], people["alice"]
    mine = [submit(daemon, "dave", name="many") for _ in range(3)]
    where = "/queue/confirm?action=hold&all=true&q=user:dave"
    told = olga.told(where.replace("confirm?", "confirm.json?"))
    assert told["effect"] == "holds 3 jobs of 1 user"
    assert told["order"] == "Hold 3 jobs of 1 user"
    nothing = alice.told(f"/queue/confirm.json?action=hold&job={mine[0]}")
    assert (nothing["jobs"], nothing["left_out"]) == ([], [{"count": 1, "reason": "not yours"}])
    assert "forms" not in alice.see(f"/queue/confirm?action=hold&job={mine[0]}")
    page = olga.see(where)
    daemon.http.post(f"/api/v1/jobs/{mine[1]}/cancel").raise_for_status()
    # The page that was shown before is sent: one of its jobs has changed meanwhile.
    csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
    sent = {"csrf": csrf, "jobs": told["shown_states"], "reason": "a flood", "q": "user:dave"}
    done = olga.http.post("/queue/hold", data=sent, headers=olga.origin)
    assert done.status_code == 303
    result = olga.told(done.headers["location"] + ".json")
    assert [one["job"] for one in result["done"]] == [mine[2], mine[0]]
    assert [one["job"] for one in result["rejected"]] == [mine[1]]
    assert "<h2>Rejected</h2>" in olga.see(done.headers["location"])
    assert alice.http.get(done.headers["location"]).status_code == 404
    assert [daemon.job(job)["reason"] for job in (mine[0], mine[2])] == ["a flood", "a flood"]
    entry = daemon.http.get("/api/v1/audit", params={"user": "olga", "action": "hold_jobs"}).json()["entries"][-1]
    assert (entry["outcome"], str(mine[0]) in entry["target"]) == ("done", True)
    for action in ("release", "high", "low", "cancel"):
        where = f"/queue/confirm?action={action}&all=true&q=user:dave"
        path = "/queue/priority" if action in ("high", "low") else f"/queue/{action}"
        assert olga.send(where, path, reason="as it was").status_code == 303
        wanted = {"release": ("queued", "low"), "high": ("queued", "high"), "low": ("queued", "low")}
        for job in (mine[0], mine[2]):
            now = daemon.job(job)
            assert (now["state"], now["priority"]) == wanted.get(action, ("cancelled", "low"))


def test_a_form_changes_no_job_of_others_and_none_that_nobody_was_shown(
    daemon: ServedDaemon, people: dict[str, Person], jobs: dict[str, int]
) -> None:
    alice = people["alice"]
    where = f"/queue/confirm?action=cancel&job={jobs['alice']}"
    done = alice.send(where, "/queue/cancel", jobs=f"{jobs['bob']}:queued,{jobs['alice']}:held,999:queued")
    told = alice.told(done.headers["location"] + ".json")
    assert not told["done"]
    assert [one["job"] for one in told["rejected"]] == [jobs["bob"], jobs["alice"], 999]
    assert "is not yours" in told["rejected"][0]["problem"]
    assert "is queued now, and was held when you chose it" in told["rejected"][1]["problem"]
    for wrong in (
        "",
        "x",
        "1",
        "1:gone",
        f"{2**63}:queued",
        f"-{2**63}:failed",
        ",".join(f"{job}:queued" for job in range(1, 1002)),
    ):
        assert alice.send(where, "/queue/cancel", jobs=wrong).status_code == 422
    alice.see(f"/queue/confirm?action=cancel&job={2**63}", 422)
    assert alice.send(where, "/queue/cancel", csrf="x").status_code == 403
    assert alice.send(where, "/queue/cancel", reason="x" * 1001).status_code == 422
    assert daemon.job(jobs["bob"])["state"] == daemon.job(jobs["alice"])["state"] == "queued"


@pytest.fixture(scope="module")
def runs(grid: EmbeddedGrid) -> int:
    """A job that runs and keeps all others waiting."""
    job = submit(grid, "root", priority="high", name="runs")
    grid.wait_for_state(job, "running")
    return job


@pytest.mark.usefixtures("runs")
def test_an_operator_chooses_jobs_with_keys_and_cancels_them(visit: Visit, grid: EmbeddedGrid) -> None:
    jobs = [submit(grid, "erin", name=f"run {number}") for number in range(3)]
    page = visit(token_of(grid, "oscar", "operator")).open("/queue?q=user:erin")
    for key in ("j", "x", "j", "x"):
        page.keyboard.press(key)
    assert page.locator("tr[data-here]").get_attribute("id") == f"job-{jobs[1]}"
    # What is chosen and typed stays while the page changes beneath it.
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


@pytest.mark.usefixtures("runs")
def test_without_a_script_the_queue_is_filtered_and_a_job_held(visit: Visit, grid: EmbeddedGrid) -> None:
    job = submit(grid, "fred")
    visitor = visit(token_of(grid, "fred"), java_script_enabled=False)
    page = visitor.open("/queue", live=False)
    page.get_by_label("Filter", exact=True).fill("user:fred")
    page.get_by_role("button", name="Filter").click()
    page.get_by_label(f"select job {job}").check()
    page.get_by_role("button", name="Hold…").click()
    page.get_by_role("button", name="Hold 1 job of 1 user").click()
    page.get_by_role("link", name=str(job)).click()
    assert page.get_by_text("held by fred").first.is_visible()
    assert grid.get_job(job)["state"] == "held"


def test_hostile_output_is_text_and_comes_while_it_is_shown(visit: Visit, grid: EmbeddedGrid, runs: int) -> None:
    grid.cancel(runs)
    command = ["sh", "-c", f"{HOSTILE}; sleep 600"]
    job = submit(grid, "greta", request={"type": "flexible", "total_size": 1}, command=command, priority="high")
    page = visit(token_of(grid, "greta")).open(f"/jobs/{job}")
    page.locator("pre.output", has_text="no end").wait_for()
    text = page.locator("pre.output").inner_text()
    assert "red <script>document.title=1</script><img src=x onerror=alert(1)>" in text
    assert "\ufffd\ufffd \ufffdrtl" in text
    assert "\x1b" not in text
    assert page.locator("pre.output script, pre.output img").count() == 0
    assert page.title() == "Job · koala"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("svg.lanes rect.running").count() == 1
    page.get_by_text("As a table").click()
    assert page.get_by_role("cell", name="claiming").first.is_visible()
    grid.cancel(job)
    page.locator("h1 .state.cancelled").wait_for()
    assert page.get_by_role("cell", name="claiming").first.is_visible()


def test_a_flood_is_shown_and_ended_at_once(visit: Visit, grid: EmbeddedGrid) -> None:
    for _ in range(40):
        submit(grid, "henry")
    page = visit(token_of(grid, "olaf", "operator")).open("/queue?q=user:henry&limit=200")
    assert page.locator("table.jobs tbody tr").count() == 40
    person = Person(grid, token_of(grid, "ollie", "operator"))
    done = person.send("/queue/confirm?action=cancel&all=true&q=user:henry", "/queue/cancel", reason="enough")
    assert len(person.told(done.headers["location"] + ".json")["done"]) == 40
    person.close()


def test_nobody_makes_what_became_of_others_acts_be_forgotten() -> None:
    kept, view = _Outcomes(), OutcomeView("cancelled", (), (), "")
    first = kept.add("ada", view)
    own = [kept.add("mallory", view) for _ in range(MAX_OUTCOMES)]
    assert kept.get("ada", first) is view
    assert kept.get("mallory", own[-1]) is view
    for forgotten in (own[0], first):
        with pytest.raises(NotFoundError):
            kept.get("mallory", forgotten)
