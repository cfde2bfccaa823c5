"""Which clusters may share one job: each must allow the others, and under Open MPI they must have one series of it."""

from collections.abc import Iterable, Iterator, Mapping

from koalapy.model.profile import ClusterProfile, describe_series_conflict
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list

MAX_SETS = 64
"""Largest sets of clusters that may share a job: for each of them a policy is asked once more."""
Profiles = Mapping[ClusterName, ClusterProfile]


def may_share_job(one: ClusterName, other: ClusterName, profiles: Profiles) -> bool:
    """Return whether both clusters allow the other one in ``coallocate_with``."""
    allowed = (profiles[one].coallocate_with, profiles[other].coallocate_with)
    return one == other or all(
        names is None or name in names for names, name in zip(allowed, (other, one), strict=True)
    )


def partners(name: ClusterName, profiles: Profiles, *, one_series: bool) -> frozenset[ClusterName]:
    """Return the other clusters that may share a job with one; ``one_series``: the job runs under Open MPI."""
    series = profiles[name].mpi.series
    return frozenset(
        other
        for other, profile in profiles.items()
        if other != name and may_share_job(name, other, profiles) and not (one_series and profile.mpi.series != series)
    )


def find_largest_sets(profiles: Profiles, *, one_series: bool) -> Iterator[frozenset[ClusterName]]:
    """Yield the largest sets of clusters of which each may share a job with each other one, in a fixed order."""
    if all(profile.coallocate_with is None for profile in profiles.values()):  # as a rule, and asked of each submission
        by_series: dict[int, list[ClusterName]] = {}
        for name in sorted(profiles):
            by_series.setdefault(profiles[name].mpi.series if one_series else 0, []).append(name)
        yield from map(frozenset, by_series.values())
        return
    near = {name: partners(name, profiles, one_series=one_series) for name in sorted(profiles)}

    def grow(chosen: frozenset[str], possible: frozenset[str], done: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield those with all of ``chosen``, some of ``possible`` and none of ``done`` (Bron and Kerbosch)."""
        if not possible and not done:
            yield chosen
            return
        pivot = max(sorted(possible | done), key=lambda name: len(near[name] & possible))
        for name in sorted(possible - near[pivot]):
            yield from grow(chosen | {name}, possible & near[name], done & near[name])
            possible, done = possible - {name}, done | {name}

    if profiles:
        yield from grow(frozenset(), frozenset(near), frozenset())


def find_sharing_sets(profiles: Profiles, *, one_series: bool) -> tuple[frozenset[ClusterName], ...]:
    """Return the largest sets that may share a job; nothing if all clusters may."""
    sets = tuple(find_largest_sets(profiles, one_series=one_series))
    return sets if len(sets) > 1 else ()


def explain_conflict(names: Iterable[ClusterName], profiles: Profiles, *, one_series: bool) -> str:
    """Say why these clusters may not share a job: their series of Open MPI, or those that do not allow each other."""
    named = sorted(names)
    apart = [(a, b) for i, a in enumerate(named) for b in named[i + 1 :] if not may_share_job(a, b, profiles)]
    said = [f"coallocate_with keeps {format_list([f'{a} and {b}' for a, b in apart])} apart"] if apart else []
    series = {name: profiles[name].mpi.series for name in named}
    if one_series and len(set(series.values())) > 1:
        said.append(describe_series_conflict(series))
    return "; ".join(said)
