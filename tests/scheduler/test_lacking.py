"""Sites without the program by which files move: known before a job is placed, and told."""

import pytest

from koalapy.model.cluster import GridView, Link
from koalapy.model.job import JobId, JobState, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile, NonFixedRequest
from koalapy.model.transfer import Transfer, estimate_transfer, immovable_reason
from tests.scheduler.requests import flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

DATA = InputFile("data", 100, ("south",), target="data")


def lacks_rsync(site: Site, *, lacks: bool = True) -> None:
    site.missing_programs = frozenset({"rsync"} if lacks else ())
    site.send_report(site.current_report())


def grid(*cut_off: str) -> GridView:
    return GridView((), replicas={}, cut_off=frozenset(cut_off))


@pytest.mark.parametrize(
    ("cut_off", "to", "answer"),
    [
        ((), "north", Transfer(1.0, ("south",))),
        (("north",), "north", None),
        (("south",), "north", None),
        (("south",), "south", Transfer(0.0, ("south",))),
        (("east",), "north", Transfer(1.0, ("south",))),
    ],
)
def test_what_can_be_brought_where(cut_off: tuple[str, ...], to: str, answer: Transfer | None) -> None:
    view = grid(*cut_off)
    assert estimate_transfer(to, (DATA,), view, 100.0) == answer
    assert bool(immovable_reason(to, (DATA,), view)) == (answer is None)


@pytest.mark.parametrize(
    ("policy", "kind"), [("", "flexible"), ("", "nonfixed"), ("worst-fit", "nonfixed"), ("close-to-files", "nonfixed")]
)
def test_a_site_without_rsync_gets_no_job_whose_files_are_elsewhere(policy: str, kind: str) -> None:
    def submit(world: World, *files: InputFile) -> JobId:
        if kind == "flexible":
            return world.submit(flexible(2, max_components=1), inputs=files, policy=policy, run_time=5)
        request = NonFixedRequest((ComponentRequest(2, inputs=files),))
        return world.submit(request, policy=policy, run_time=5)

    world = World({"north": 8, "south": 2, "west": 4}, links={("south", "west"): Link(bandwidth=1e6)})
    lacks_rsync(world.sites["north"])
    world.settle()
    first, second, third = submit(world, DATA), submit(world, DATA), submit(world)
    world.advance(4)
    where = {world.job(job).attempt.components[0].cluster for job in (first, second)}  # type: ignore[union-attr]
    assert where <= {"south", "west"}
    assert world.job(third).attempt is not None, "what needs no files may run anywhere"
    world.advance(60)
    assert {world.state(job) for job in (first, second, third)} == {JobState.SUCCEEDED}
    assert all(world.job(job).restarts == 0 for job in (first, second, third))


def test_who_waits_for_that_is_told_so_and_goes_on_when_it_is_mended() -> None:
    world = World({"north": 8, "south": 2})
    lacks_rsync(world.sites["north"])
    world.settle()
    job = world.submit(flexible(4, max_components=1), inputs=(DATA,), run_time=5)
    world.advance(1)
    why = "north has no rsync, by which data would come"
    assert why in world.queries.waiting_reason(world.job(job))
    assert {
        r.cluster: r.reason
        for r in world.queries.policy_calls.reasons(world.job(job).spec, world.queries.view(Priority.LOW))
    }["north"] == why  # type: ignore[arg-type]
    assert "has no rsync" in world.queries.grid["north"].status_text
    lacks_rsync(world.sites["north"], lacks=False)
    world.settle()
    world.advance(1)
    assert world.job(job).attempt is not None


@pytest.mark.parametrize("lacking", ["north", "south"])
def test_a_fixed_request_that_wants_what_cannot_be(lacking: str) -> None:
    world = World({"north": 8, "south": 2})
    lacks_rsync(world.sites[lacking])
    world.settle()
    request = FixedRequest((ComponentRequest(2, "north", inputs=(DATA,)),))
    job = world.submit(request)
    world.advance(1)
    assert world.state(job) is JobState.QUEUED
    assert f"{lacking}" in world.queries.waiting_reason(world.job(job))
    assert "no rsync" in world.queries.waiting_reason(world.job(job))
