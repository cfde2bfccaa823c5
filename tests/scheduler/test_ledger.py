"""Jobs change in place, invisibly to callers that hold earlier values."""

from collections.abc import Iterator
from functools import partial
from random import Random
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

from koalapy.model.job import Attempt, Component, Job, JobState
from koalapy.model.job_spec import ClaimingMode, JobSpec, Launcher, Priority
from koalapy.model.request import InputFile
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

SIZES = {"north": 8, "south": 6, "west": 4}
JOBS = 60
HINTS = {kind: get_type_hints(kind) for kind in (Job, Attempt, Component)}


class Watched(World):
    """A simulated grid that records all returned jobs with their representation."""

    def __init__(self, *, keeps_effects: bool) -> None:
        self.seen: list[tuple[Job, str]] = []
        self.steps: list[tuple[object, ...]] = []
        rules = Rules(claiming=ClaimingMode.INCREMENTAL, claim_grace=3, plan_after=0)
        super().__init__(SIZES, rules, keeps_effects=keeps_effects)

    def apply_effects(self, effects: Effects) -> Effects:
        self.seen += [(job, repr(job)) for job in effects.jobs.values()]
        self.steps.append((*effects.timeline, *effects.commands, *effects.clusters))
        return super().apply_effects(effects)


def play_history(world: World, seed: int) -> None:
    """Submit jobs of all kinds among local users, disconnects, holds and cancels."""
    chance = Random(seed)
    for number in range(JOBS):
        size = chance.randint(1, 5)
        request = chance.choice(
            (
                flexible(size + 3, max_components=3),
                nonfixed(size, chance.randint(1, 4)),
                fixed(north=size, south=1),
                flexible(size),
            )
        )
        job = world.submit(
            request,
            run_time=chance.choice((1.0, 5.0, 20.0)),
            code=chance.choice((0, 0, 0, 3)),
            priority=chance.choice(list(Priority)),
            launcher=chance.choice(list(Launcher)),
            max_restarts=2,
            inputs=(InputFile("in", 10**9, ("west",)),) if number % 7 == 0 and request.type == "flexible" else (),
        )
        match chance.randint(0, 9):
            case 0:
                world.cancel(job)
            case 1 if world.state(job) == "queued":
                world.hold(job)
                world.release(job)
            case 2:
                world.disconnect("south")
                world.advance(chance.choice((1.0, 10.0)))
                world.connect("south")
            case 3:
                north = world.sites["north"]
                user = north.add_local_user(chance.randint(1, 3))
                world.schedule(15.0, partial(north.remove_local_user, user))
        world.advance(chance.choice((0.0, 1.0, 8.0)))
    world.advance(2000)


def find_wrong_types(value: Job | Attempt | Component) -> Iterator[str]:
    """Yield the fields that hold a value of another type than they declare; the ledger sets them by name."""
    for name, hint in HINTS[type(value)].items():
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        field = getattr(value, name)
        if not isinstance(field, tuple(get_origin(kind) or kind for kind in allowed)):
            yield f"{type(value).__name__}.{name}: {field!r} is no {hint}"
    if isinstance(value, Job) and value.attempt is not None:
        yield from find_wrong_types(value.attempt)
    if isinstance(value, Attempt):
        for component in value.components:
            yield from find_wrong_types(component)


@pytest.mark.parametrize("seed", range(4))
def test_ledger_returned_jobs_never_change(seed: int) -> None:
    world = Watched(keeps_effects=True)
    play_history(world, seed)
    assert len(world.seen) > 5 * JOBS
    assert not {text for job, _ in world.seen for text in find_wrong_types(job)}
    assert [(job.id, repr(job)) for job, _ in world.seen] == [(job.id, snapshot) for job, snapshot in world.seen]


@pytest.mark.parametrize("seed", range(4))
def test_ledger_without_kept_effects_behaves_equally(seed: int) -> None:
    keeping, discarding = Watched(keeps_effects=True), Watched(keeps_effects=False)
    for world in (keeping, discarding):
        play_history(world, seed)
    assert discarding.steps == keeping.steps
    assert discarding.jobs == keeping.jobs
    assert any(job.state.is_final for job in keeping.jobs.values())


def test_query_results_never_change() -> None:
    world = World(SIZES)
    job = world.submit(flexible(4), run_time=10)
    world.advance(1)
    returned_job, returned_jobs = world.queries.job(job), world.queries.jobs()
    component = world.queries.find(world.tokens(job)[0])
    snapshot = repr((returned_job, returned_jobs, component))
    world.advance(100)
    assert repr((returned_job, returned_jobs, component)) == snapshot
    assert world.state(job).is_final


def test_ledger_find_requires_exact_token() -> None:
    components = (Component(0, "north", 1), Component(1, "south", 1))
    attempt = Attempt(3, components, 0.0, nonce="a1")
    spec = JobSpec(flexible(2), ("true",))
    ledger = Ledger(OwnerUse(), lambda _: None)
    ledger.restore(Job(7, spec, 0.0, JobState.CLAIMING, generation=3, attempt=attempt))
    component = ledger.find("7.3.1.a1")
    assert component is not None
    assert component[1] is components[1]
    for token in ("7.3.1", "7.3.1.a2", "7.2.1.a1", "8.3.1.a1", "7.3.2.a1", "07.3.1.a1", "7.03.1.a1"):
        assert ledger.find(token) is None, token
    ledger.change_job(ledger.jobs[7], state=JobState.QUEUED)
    assert ledger.find("7.3.1.a1") is None
