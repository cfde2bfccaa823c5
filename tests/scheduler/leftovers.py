"""Find job ids and containers anywhere in a scheduler, to detect state that is never deleted."""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from koalapy.model.job import JobId, parse_token

FIRST_JOB: JobId = 7 * 10**17
"""Job ids start here, so that they differ from all other numbers."""
MAX_JOBS = 10**9
GROWTH_MARGIN = 30
WALKED_MODULES = ("koalapy.", "sortedcontainers.")

PathAndValue = tuple[str, object]
"""A path of attribute names and the value at it."""


def walk_objects(root: object) -> Iterator[PathAndValue]:
    """Yield every reachable value with its path: numbers and strings at each path, other objects once."""
    visited_ids: set[int] = set()
    waiting: deque[PathAndValue] = deque([(type(root).__name__, root)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, int | str):
            yield path, value
            continue
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        yield path, value
        waiting.extend(_parts(path, value))


def _parts(path: str, container: object) -> Iterator[PathAndValue]:
    if isinstance(container, Mapping):
        for key, value in container.items():
            yield f"{path}[key]", key
            yield f"{path}[]", value
    elif isinstance(container, list | tuple | deque | AbstractSet):
        for value in container:
            yield f"{path}[]", value
    elif type(container).__module__.startswith(WALKED_MODULES):
        names = [*getattr(container, "__dict__", ())]
        names += [name for kind in type(container).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in names:
            if hasattr(container, name):
                yield f"{path}.{name}", getattr(container, name)


def find_job_references(root: object) -> dict[str, set[JobId]]:
    """Return the jobs referenced by id or by component token, by path."""
    paths: dict[str, set[JobId]] = {}
    for path, value in walk_objects(root):
        job = _job_of(value)
        if job is not None and FIRST_JOB <= job < FIRST_JOB + MAX_JOBS:
            paths.setdefault(path, set()).add(job)
    return paths


def _job_of(value: object) -> JobId | None:
    if isinstance(value, str):
        try:
            return parse_token(value).job
        except ValueError:
            return None
    return value if isinstance(value, int) else None


def container_sizes(root: object) -> dict[str, int]:
    """Return the total length of all containers, by path."""
    counted: dict[str, int] = {}
    for path, value in walk_objects(root):
        if isinstance(value, Mapping | list | deque | set):
            counted[path] = counted.get(path, 0) + len(value)
    return counted


def grown_containers(old_sizes: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return old and new sizes of containers that grew by more than ``GROWTH_MARGIN``, by path."""
    return {
        path: (old_sizes.get(path, 0), size)
        for path, size in sizes.items()
        if size > old_sizes.get(path, 0) + GROWTH_MARGIN
    }
