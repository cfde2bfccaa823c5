"""Searches for ended jobs, which read only jobs that can match."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_search import parse_search
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.records import JobFilter, JobPage
from koalapy.store.sql import JobStore
from koalapy.validation.permissions import may_see_all_of
from tests.databases import migrate
from tests.store.jobs import make_batch

SPEC = JobSpec(FlexibleRequest(1), ("true",))


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    migrate(database := make_engine(f"sqlite:///{tmp_path}/koala.db"))
    return JobStore(Database(database))


async def test_find_jobs_by_id_reads_only_these_jobs() -> None:
    filters: list[JobFilter] = []

    async def page(job_filter: JobFilter, **_: bool) -> tuple[list[Any], None]:
        filters.append(job_filter)
        return [], None

    finder = JobFinder(cast("Any", SimpleNamespace(list_page=page)), cast("Any", None), lambda: 0.0)
    await finder.find_jobs(parse_search("state:over id:12,13"), Identity("root", Role.ADMIN, "token 1"))
    assert [job_filter.ids for job_filter in filters] == [(12, 13)]


async def test_find_jobs_with_enough_unfinished_jobs_reads_no_older_ended_jobs() -> None:
    filters: list[JobFilter] = []

    async def page(job_filter: JobFilter, **_: bool) -> tuple[list[Any], None]:
        filters.append(job_filter)
        return [SimpleNamespace(job=Job(28, SPEC, 0.0, JobState.SUCCEEDED))], None

    queries = SimpleNamespace(jobs=lambda: [Job(ident, SPEC, 0.0) for ident in (*range(20, 28), 29, 30)])
    finder = JobFinder(cast("Any", SimpleNamespace(list_page=page)), cast("Any", queries), lambda: 0.0)
    root = Identity("root", Role.ADMIN, "token 1")
    found = await finder.find_jobs(parse_search("state:any"), root, limit=4)
    assert filters[0].first == 25, "the fifth newest"
    assert ([job.id for job in found.jobs], found.next_below) == ([30, 29, 28, 27], 27)
    await finder.find_jobs(parse_search("state:any"), root, limit=10)
    assert filters[1].first == 1


NAMES = ("wave-1", "wave*", "Wave-1", "50%_off", "[x]?", "Été", "")
SEARCHES = (
    "name:wave*",
    "-name:wave*",
    'name:"wave*"',
    "name:*[x]*,50%*",
    "-name:50%_off,wave-1",
    "user:ada,b*",
    "-user:ada",
    "app:python*",
    "-app:python,true",
    "-home:north",
    "home:n*",
    "-priority:high",
    "priority:high,low",
    "cluster:n*",
    "-cluster:north",
    "-cluster:so*,north",
    "cluster:north,south -name:wave*",
    "-policy:worst-fit name:*1",
    "size>1 -user:b*",
    "size>2",
    "size<3",
    "wave",
    "-nor python",
    "any:ADA,*orth",
    "-any:*wave*,50%_off",
    "any:*é*,south",
    "-any:été",
    "ended:1970-01-01 user:ada",
    "ended:1970-01-0* -ended:1970-01-01",
    "ended:1970-01-02",
    "ended>5s",
    "ended>=8s ended<9s",
    "-ended>5s",
)


def draw_ended_job(ident: int, draw: random.Random) -> Job:
    """Return a job that has ended, in some cases before its first attempt."""
    names = draw.sample(("north", "south", "west"), 2)
    request = NonFixedRequest((ComponentRequest(draw.randint(1, 2)), ComponentRequest(1)))
    fixed = FixedRequest(tuple(ComponentRequest(1, cluster=name) for name in names))
    spec = JobSpec(
        draw.choice((request, fixed)),
        (draw.choice(("python", "true", "a.out")),),
        name=draw.choice(NAMES),
        owner=draw.choice(("ada", "bob", "cy")),
        home_site=draw.choice(("", "north", "west")),
        priority=draw.choice(tuple(Priority)),
    )
    generation = draw.choice((0, 1, 2))
    components = tuple(
        Component(index, name, 1, ComponentState.ENDED, superseded=index == 1 and ident % 3 == 0, ended_at=1.0)
        for index, name in enumerate(names)
    )
    attempt = Attempt(generation, components, 0.0) if generation else None
    return Job(
        ident, spec, 0.0, JobState.FAILED, generation=generation, attempt=attempt, ended_at=draw.choice((2.0, 7.0))
    )


@pytest.mark.parametrize("user", ["root", "ada"])
async def test_find_jobs_finds_the_ended_jobs_that_match(store: JobStore, user: str) -> None:
    draw = random.Random(1)
    jobs = {ident: draw_ended_job(ident, draw) for ident in range(1, 60)}
    store.write(make_batch(*jobs.values()))
    pages = cast("Any", SimpleNamespace(_store=store, make_record=lambda job: SimpleNamespace(job=job)))
    pages.list_page = partial(Jobs.list_page, pages)
    finder = JobFinder(pages, cast("Any", SimpleNamespace(jobs=list[Job])), lambda: 10.0)
    caller = Identity(user, Role.ADMIN if user == "root" else Role.USER, "token 1")
    for search in (parse_search(f"state:over {text}") for text in SEARCHES):
        found, below, has_more = list[int](), None, True
        while has_more:
            page = await finder.find_jobs(search, caller, below=below, limit=20)
            found += [job.id for job in page.jobs]
            below, has_more = page.next_below, page.next_below is not None
        assert found == [
            ident
            for ident, job in sorted(jobs.items(), reverse=True)
            if search.matches(job, 10.0, include_private=user == "root" or may_see_all_of(caller, job))
        ], search.text


async def test_find_jobs_that_match_nothing_loads_no_job_and_ends_the_page_early(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million ended jobs a page examines some thousands, and the next page goes on."""
    for name, value in (("FIRST_WINDOW", 10), ("WINDOW", 10), ("MAX_LOOKED_AT", 40)):
        monkeypatch.setattr(f"koalapy.store.listing.{name}", value)
    draw = random.Random(1)
    store.write(make_batch(*(draw_ended_job(ident, draw) for ident in range(1, 101))))
    loaded, requested = list[Any](), list[JobFilter]()

    def page(job_filter: JobFilter) -> JobPage:
        requested.append(job_filter)
        found = store.page(job_filter)
        loaded.extend(found.jobs)
        return found

    pages = cast("Any", SimpleNamespace(_store=SimpleNamespace(page=page)))
    pages.list_page = partial(Jobs.list_page, pages)
    finder = JobFinder(pages, cast("Any", SimpleNamespace(jobs=list[Job])), lambda: 10.0)
    root = Identity("root", Role.ADMIN, "token 1")
    for text in ("name:zz*", "-user:ada,bob,cy", "cluster:zz*"):
        found = await finder.find_jobs(parse_search(f"state:over {text} -name:*"), root, limit=5)
        assert (found.jobs, found.next_below) == ([], 61)
    assert (len(requested), loaded) == (3, [])
