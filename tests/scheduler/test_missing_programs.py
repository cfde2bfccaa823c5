"""Sites without rsync, to and from which files cannot be transferred."""

import pytest

from koalapy.model.cluster import GridView, Link
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile, NonFixedRequest
from koalapy.policies.network import Transfer, estimate_transfer, immovable_reason
from tests.scheduler.requests import flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

DATA = InputFile("data", 100, ("south",), target="data")


def set_rsync(site: Site, *, is_missing: bool = True) -> None:
    site.missing_programs = frozenset({"rsync"} if is_missing else ())
    site.send_report(site.current_report())


def create_view(*cut_off: str) -> GridView:
    return GridView((), replicas={}, cut_off=frozenset(cut_off))


@pytest.mark.parametrize(
    ("cut_off", "target", "expected"),
    [
        ((), "north", Transfer(1.0, ("south",))),
        (("north",), "north", None),
        (("south",), "north", None),
        (("south",), "south", Transfer(0.0, ("south",))),
        (("east",), "north", Transfer(1.0, ("south",))),
    ],
)
def test_transfer_estimate_needs_rsync_at_both_ends(
    cut_off: tuple[str, ...], target: str, expected: Transfer | None
) -> None:
    view = create_view(*cut_off)
    assert estimate_transfer(target, (DATA,), view, 100.0) == expected
    assert bool(immovable_reason(target, (DATA,), view)) == (expected is None)


@pytest.mark.parametrize(
    ("policy", "kind"), [("", "flexible"), ("", "nonfixed"), ("worst-fit", "nonfixed"), ("close-to-files", "nonfixed")]
)
def test_placement_avoids_site_without_rsync_for_inputs(policy: str, kind: str) -> None:
    def submit_job(world: World, *files: InputFile) -> JobId:
        if kind == "flexible":
            return world.submit(flexible(2, max_components=1), inputs=files, policy=policy, run_time=5)
        request = NonFixedRequest((ComponentRequest(2, inputs=files),))
        return world.submit(request, policy=policy, run_time=5)

    world = World({"north": 8, "south": 2, "west": 4}, links={("south", "west"): Link(bandwidth=1e6)})
    set_rsync(world.sites["north"])
    world.settle()
    first, second, third = submit_job(world, DATA), submit_job(world, DATA), submit_job(world)
    world.advance(4)
    clusters = {world.job(job).attempt.components[0].cluster for job in (first, second)}  # type: ignore[union-attr]
    assert clusters <= {"south", "west"}
    assert world.job(third).attempt is not None, "jobs without files may run anywhere"
    world.advance(60)
    assert {world.state(job) for job in (first, second, third)} == {JobState.SUCCEEDED}
    assert all(world.job(job).restarts == 0 for job in (first, second, third))


def test_waiting_reason_names_missing_rsync() -> None:
    world = World({"north": 8, "south": 2})
    set_rsync(world.sites["north"])
    world.settle()
    job = world.submit(flexible(4, max_components=1), inputs=(DATA,), run_time=5)
    world.advance(1)
    reason = "north has no rsync, by which data would come"
    assert reason in world.queries.waiting_reason(world.job(job))
    assert {
        r.cluster: r.reason
        for r in world.queries.questions.explain(world.job(job).spec, world.queries.view(Priority.LOW))
    }["north"] == reason  # type: ignore[arg-type]
    assert "has no rsync" in world.queries.grid["north"].status_text
    set_rsync(world.sites["north"], is_missing=False)
    world.settle()
    world.advance(1)
    assert world.job(job).attempt is not None


@pytest.mark.parametrize("cluster", ["north", "south"])
def test_fixed_request_without_rsync_waits(cluster: str) -> None:
    world = World({"north": 8, "south": 2})
    set_rsync(world.sites[cluster])
    world.settle()
    request = FixedRequest((ComponentRequest(2, "north", inputs=(DATA,)),))
    job = world.submit(request)
    world.advance(1)
    assert world.state(job) is JobState.QUEUED
    assert f"{cluster}" in world.queries.waiting_reason(world.job(job))
    assert "no rsync" in world.queries.waiting_reason(world.job(job))
