"""What a scheduler still keeps: every job that is named anywhere in it, and the size of everything it holds."""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from koalapy.model.job import JobId, parse_token

FIRST_JOB: JobId = 7 * 10**17
"""Jobs that are called so, or a little more, are told from all other numbers."""
MOST_JOBS = 10**9
A_FEW = 30
OURS = ("koalapy.", "sortedcontainers.")

Found = tuple[str, object]
"""Where something is, by the names of what leads there, and it."""


def everything(root: object) -> Iterator[Found]:
    """All that can be reached from there, each once: numbers and texts each time."""
    seen: set[int] = set()
    waiting: deque[Found] = deque([(type(root).__name__, root)])
    while waiting:
        path, each = waiting.popleft()
        if isinstance(each, int | str):
            yield path, each
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        waiting.extend(_parts(path, each))


def _parts(path: str, each: object) -> Iterator[Found]:
    if isinstance(each, Mapping):
        for key, value in each.items():
            yield f"{path}[key]", key
            yield f"{path}[]", value
    elif isinstance(each, list | tuple | deque | AbstractSet):
        for value in each:
            yield f"{path}[]", value
    elif type(each).__module__.startswith(OURS):
        names = [*getattr(each, "__dict__", ())]
        names += [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in names:
            if hasattr(each, name):
                yield f"{path}.{name}", getattr(each, name)


def jobs_named(root: object) -> dict[str, set[JobId]]:
    """Where in it jobs are named, by their ids or by tokens of their components."""
    named: dict[str, set[JobId]] = {}
    for path, each in everything(root):
        job = _job_of(each)
        if job is not None and FIRST_JOB <= job < FIRST_JOB + MOST_JOBS:
            named.setdefault(path, set()).add(job)
    return named


def _job_of(each: object) -> JobId | None:
    if isinstance(each, str):
        try:
            return parse_token(each).job
        except ValueError:
            return None
    return each if isinstance(each, int) else None


def sizes(root: object) -> dict[str, int]:
    """How much is in every container, all that are found in the same way together."""
    counted: dict[str, int] = {}
    for path, each in everything(root):
        if isinstance(each, Mapping | list | deque | set):
            counted[path] = counted.get(path, 0) + len(each)
    return counted


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, Any]:
    """What holds more than before, and more than a few for each cluster."""
    return {path: (before.get(path, 0), size) for path, size in now.items() if size > before.get(path, 0) + A_FEW}
