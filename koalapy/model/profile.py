"""What a job meets on a cluster: its folders, where it has the submitter's paths, its Open MPI; and what a job needs.

``{scratch}``, ``{home}``, ``{cluster}`` and ``{job}`` stand for the cluster's own values; ``{{scratch}}`` is
``{scratch}`` itself, and ``${home}`` a variable of the shell's. All other braces are the program's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

from annotated_types import Ge, Le, Predicate

from koalapy.model.job import MAX_DURATION, MAX_PROCESSES_PER_NODE, JobId, JobSpec
from koalapy.model.request import ClusterName, FlexibleRequest
from koalapy.model.wording import format_list

FOLDERS = ("scratch", "home")
"""What not every cluster has."""
NONE: frozenset[str] = frozenset()

_PLACEHOLDER = re.compile(r"\$\{\{?\w+\}|\{\{(scratch|home|cluster|job)\}\}|\{(scratch|home|cluster|job)\}")
_PATH_WORD = re.compile(r"([\w.-]+=)?(/[^\s;|&<>$`]*)")


class MpiSeries(IntEnum):
    """Major version of Open MPI."""

    FOUR = 4
    FIVE = 5


@dataclass(frozen=True, slots=True)
class Mpi:
    """Open MPI on one cluster, as far as a job's place depends on it."""

    series: MpiSeries = MpiSeries.FIVE
    """Major version; all clusters of one job must have the same."""


def _absolute(paths: Mapping[str, str]) -> bool:
    for path in (*paths, *paths.values()):
        if not path.startswith("/"):
            raise ValueError(f"{path} is not an absolute path")
    return True


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """One cluster as programs find it: what the configuration says of it, under ``clusters.NAME``."""

    processes_per_node: Annotated[int, Ge(1), Le(MAX_PROCESSES_PER_NODE)] = 1
    """MPI processes on each node, where a job does not say."""
    scratch: str | None = None
    """Folder for large files; ``{scratch}`` in commands, working directories and output files."""
    home: str | None = None
    """Home folder of the jobs' user; ``{home}`` in commands, working directories and output files."""
    paths: Annotated[Mapping[str, str], Predicate(_absolute)] = field(default_factory=dict)
    """Where this cluster has what the submitter calls ``/a/b``: longest match of whole folder names first."""
    mpi: Mpi = Mpi()
    coallocate_with: tuple[ClusterName, ...] | None = None
    """Clusters whose nodes may be in one job with this one's, if they allow this one, too. By default all."""
    lease: Annotated[float, Ge(0), Le(MAX_DURATION)] | None = None
    """Seconds for which components here go on while the daemon is silent, before they end and their jobs are tried
    again, or ``none``; by default as ``lease`` says for all clusters."""

    @property
    def folders(self) -> frozenset[str]:
        """Which of ``FOLDERS`` it has."""
        return frozenset(name for name in FOLDERS if getattr(self, name) is not None)

    def map_path(self, text: str, cluster: ClusterName, job: JobId) -> str:
        """A path of the job's as this cluster has it."""
        return self._fill(self._mapped(text), cluster, job)

    def map_command(self, command: Sequence[str], cluster: ClusterName, job: JobId) -> list[str]:
        """A command as it is run here. A word is mapped that is a path as a whole, or a name, ``=`` and a path.

        One with blanks or the shell's own characters is none: it may be a script, of which only a part would be mapped.
        """
        return [self._fill(self._mapped_word(word), cluster, job) for word in command]

    def _mapped(self, path: str) -> str:
        """By the longest of ``paths`` whose whole folder names the path begins with."""
        for folder in sorted(self.paths, key=len, reverse=True):
            own = folder.rstrip("/")
            if path == own or path.startswith(f"{own}/"):
                return self.paths[folder].rstrip("/") + path[len(own) :] or "/"
        return path

    def _mapped_word(self, word: str) -> str:
        match = _PATH_WORD.fullmatch(word) if self.paths else None
        return (match[1] or "") + self._mapped(match[2]) if match else word

    def _fill(self, text: str, cluster: ClusterName, job: JobId) -> str:
        """Placeholders replaced; one for a folder that there is not stays, for no job is placed that needs it."""
        if "{" not in text:
            return text
        values = {"scratch": self.scratch, "home": self.home, "cluster": cluster, "job": str(job)}

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            return (values[match[2]] if match[2] else None) or match[0]

        return _PLACEHOLDER.sub(replacement, text)


def find_folder_placeholders(texts: Iterable[str]) -> frozenset[str]:
    """Which of ``FOLDERS`` there are placeholders of."""
    # Asked at every try, of texts that may be long and full of braces.
    likely = [text for text in texts if any(f"{{{folder}}}" in text for folder in FOLDERS)]
    return frozenset(match[2] for text in likely for match in _PLACEHOLDER.finditer(text)) & frozenset(FOLDERS)


def texts_of(spec: JobSpec, index: int | None = None) -> Iterator[tuple[str, str]]:
    """The texts in which a component's placeholders are replaced, by their fields; of a flexible request all alike."""
    own, place = spec.component(index), f"request.components[{index}]."
    command, field = (own.command, f"{place}command") if own and own.command else (spec.command, "command")
    yield from ((f"{field}[{number}]", word) for number, word in enumerate(command))
    yield "workdir", spec.workdir or ""
    yield (f"{place}output", own.output) if own and own.output else ("output", spec.output or "")


def component_folders(spec: JobSpec, index: int | None = None) -> frozenset[str]:
    """The folders that a cluster must have for a component."""
    return find_folder_placeholders(text for _, text in texts_of(spec, index))


def job_folders(spec: JobSpec) -> frozenset[str]:
    """The folders that a cluster must have for any component of the job."""
    # Asked for every job at every try, and almost none has a placeholder.
    if "{" not in "".join((*spec.command, spec.workdir or "", spec.output or "")):
        if isinstance(spec.request, FlexibleRequest) or not any(c.command or c.output for c in spec.request.components):
            return NONE
    elif isinstance(spec.request, FlexibleRequest):
        return component_folders(spec)
    different = {(component.command, component.output): i for i, component in enumerate(spec.request.components)}
    return NONE.union(*(component_folders(spec, index) for index in different.values()))


def describe_missing_folders(clusters: Sequence[ClusterName], folders: Iterable[str]) -> str:
    """``cluster south has no scratch folder``, ``clusters east, south have no scratch folder``."""
    which = " or ".join(sorted(folders))
    if len(clusters) == 1:
        return f"cluster {clusters[0]} has no {which} folder"
    return f"clusters {format_list(clusters)} have no {which} folder"


def describe_series_conflict(series: Mapping[ClusterName, int]) -> str:
    """``north has Open MPI 5, south 4: a job runs under one series``; the clusters of one series together."""
    groups: dict[int, list[ClusterName]] = {}
    for name in sorted(series):
        groups.setdefault(series[name], []).append(name)
    texts: list[str] = []
    for number, names in groups.items():
        have = "" if texts else "has Open MPI " if len(names) == 1 else "have Open MPI "
        texts.append(f"{format_list(names, separator=' and ')} {have}{number}")
    return f"{', '.join(texts)}: a job runs under one series"


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
