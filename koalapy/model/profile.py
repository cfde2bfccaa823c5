"""Cluster profiles (folders, path mapping, Open MPI), and the placeholders and folders that jobs need.

``{scratch}``, ``{home}``, ``{cluster}`` and ``{job}`` are replaced by the values of the cluster. ``{{scratch}}`` yields
the text ``{scratch}``, and ``${home}`` is a shell variable. All other braces are left unchanged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Literal

from annotated_types import Ge, Le, Predicate

from koalapy.model.job import JobId
from koalapy.model.job_spec import MAX_DURATION, MAX_PROCESSES_PER_NODE, JobSpec, escape_percent, fill_pattern
from koalapy.model.request import ClusterName, FlexibleRequest
from koalapy.model.wording import format_list

FOLDERS = ("scratch", "home")
"""Placeholders of folders, which a cluster may lack."""
RUNTIME = "container runtime"
"""What a cluster must have besides folders for a job with a container image."""
NONE: frozenset[str] = frozenset()

_PLACEHOLDER = re.compile(r"\$\{\{?\w+\}|\{\{(scratch|home|cluster|job)\}\}|\{(scratch|home|cluster|job)\}")
_PATH_WORD = re.compile(r"([\w.-]+=)?(/[^\s;|&<>$`]*)")


class MpiSeries(IntEnum):
    """A major version of Open MPI."""

    FOUR = 4
    FIVE = 5


@dataclass(frozen=True, slots=True)
class Mpi:
    """Properties of Open MPI on one cluster that affect the placement of jobs."""

    series: MpiSeries = MpiSeries.FIVE
    """Major version; all clusters of a job must have the same one."""


def _absolute(paths: Mapping[str, str]) -> bool:
    """Return True if all paths are absolute; else raise ``ValueError``."""
    for path in (*paths, *paths.values()):
        if not path.startswith("/"):
            raise ValueError(f"{path} is not an absolute path")
    return True


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """The properties of a cluster for programs, configured under ``clusters.NAME``."""

    processes_per_node: Annotated[int, Ge(1), Le(MAX_PROCESSES_PER_NODE)] = 1
    """MPI processes on each node, for jobs that do not set it."""
    scratch: str | None = None
    """Folder for large files; the value of ``{scratch}`` in commands, working directories and output files."""
    home: str | None = None
    """Home folder of the jobs' user; the value of ``{home}`` in commands, working directories and output files."""
    paths: Annotated[Mapping[str, str], Predicate(_absolute)] = field(default_factory=dict)
    """Path mapping from the submitter's paths to paths on this cluster. The longest match of complete folder names
    applies."""
    mpi: Mpi = Mpi()
    container_runtime: Literal["apptainer", "charliecloud"] | None = None
    """Program that runs container images on the nodes: ``apptainer`` (or Singularity) or ``charliecloud``. Without one,
    jobs with ``--container`` run on other clusters. Daemon and agent need the same value."""
    accepts_scripts: bool | None = None
    """Whether a script that runs at another site may choose the programs of its job on this cluster. By default only on
    embedded clusters. Scripts of jobs on this cluster alone are always accepted."""
    coallocate_with: tuple[ClusterName, ...] | None = None
    """Clusters that may share a job with this one, if they also allow this one. By default all."""
    node_start_limit: Annotated[float, Ge(0), Le(MAX_DURATION)] = 900.0
    """Maximum seconds that a job, with its nodes on other clusters, waits for the start of nodes of this cluster.
    Likewise for its input files once all its nodes have reported. Then the attempt ends as an error of this
    cluster."""
    lease: Annotated[float, Ge(0), Le(MAX_DURATION)] | None = None
    """Seconds that components on this cluster continue while the daemon is silent; then they end and their jobs are
    retried. ``none``: no limit. By default the setting ``lease`` for all clusters."""

    @property
    def folders(self) -> frozenset[str]:
        """Return the names in ``FOLDERS`` that the cluster has, and ``RUNTIME`` if it runs container images."""
        names = frozenset(name for name in FOLDERS if getattr(self, name) is not None)
        return names | {RUNTIME} if self.container_runtime else names

    def map_path(self, text: str, cluster: ClusterName, job: JobId) -> str:
        """Return a path of a job as a path on this cluster."""
        return self._fill_placeholders(self._map_prefix(text), cluster, job)

    def map_output_file(self, name: str, cluster: ClusterName, values: Mapping[str, str]) -> str:
        """Return the name of a job's output file on this cluster, in which only ``%N``, ``%r`` and ``%%`` remain.

        ``values``: texts for the other patterns, by letter.
        """
        escaped = replace(
            self,
            scratch=self.scratch and escape_percent(self.scratch),
            home=self.home and escape_percent(self.home),
            paths={path: escape_percent(local_path) for path, local_path in self.paths.items()},
        )
        return fill_pattern(escaped.map_path(name, cluster, 0), values)

    def map_command(self, command: Sequence[str], cluster: ClusterName, job: JobId) -> list[str]:
        """Return a command as it runs on this cluster. A word is mapped if it is a path, or a name, ``=`` and a path.

        A word with blanks or shell characters is not mapped, since only a part of a script would be mapped.
        """
        return [self._fill_placeholders(self._map_argument(argument), cluster, job) for argument in command]

    def _map_prefix(self, path: str) -> str:
        """Map a path by the longest entry of ``paths`` that it begins with, in complete folder names."""
        for folder in sorted(self.paths, key=len, reverse=True):
            prefix = folder.rstrip("/")
            if path == prefix or path.startswith(f"{prefix}/"):
                return self.paths[folder].rstrip("/") + path[len(prefix) :] or "/"
        return path

    def _map_argument(self, argument: str) -> str:
        match = _PATH_WORD.fullmatch(argument) if self.paths else None
        return (match[1] or "") + self._map_prefix(match[2]) if match else argument

    def _fill_placeholders(self, text: str, cluster: ClusterName, job: JobId) -> str:
        """Replace placeholders.

        One for a missing folder is left unchanged, since no job that needs it is placed here.
        """
        if "{" not in text:
            return text
        values = {"scratch": self.scratch, "home": self.home, "cluster": cluster, "job": str(job)}

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            return (values[match[2]] if match[2] else None) or match[0]

        return _PLACEHOLDER.sub(replacement, text)


def find_folder_placeholders(texts: Iterable[str]) -> frozenset[str]:
    """Return the names in ``FOLDERS`` with placeholders in texts."""
    # Called at every placement try, with texts that may be long and contain many braces.
    likely = [text for text in texts if any(f"{{{folder}}}" in text for folder in FOLDERS)]
    return frozenset(match[2] for text in likely for match in _PLACEHOLDER.finditer(text)) & frozenset(FOLDERS)


def texts_of(spec: JobSpec, index: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the texts of a component with placeholders, as (field, text).

    All components of a flexible request have the same.
    """
    component, place = spec.component(index), f"request.components[{index}]."
    command, field = (
        (component.command, f"{place}command") if component and component.command else (spec.command, "command")
    )
    yield from ((f"{field}[{number}]", argument) for number, argument in enumerate(command))
    yield "workdir", spec.workdir or ""
    yield "container", spec.container or ""
    for name, file in zip(("output", "error"), spec.output_files(index), strict=True):
        yield f"{place}{name}" if component and getattr(component, name) else name, file or ""


def component_folders(spec: JobSpec, index: int | None = None) -> frozenset[str]:
    """Return the folders that a cluster must have for a component, and ``RUNTIME`` for a container image."""
    folders = find_folder_placeholders(text for _, text in texts_of(spec, index))
    return folders | {RUNTIME} if spec.container else folders


def job_folders(spec: JobSpec) -> frozenset[str]:
    """Return the folders that a cluster must have for any component of the job."""
    # Called for every job at every placement try; almost no job has a placeholder.
    if spec.container is None and "{" not in "".join(
        (*spec.command, spec.workdir or "", spec.output or "", spec.error or "")
    ):
        if isinstance(spec.request, FlexibleRequest) or not any(
            c.command or c.output or c.error for c in spec.request.components
        ):
            return NONE
    elif isinstance(spec.request, FlexibleRequest):
        return component_folders(spec)
    different = {(c.command, c.output, c.error): i for i, c in enumerate(spec.request.components)}
    return NONE.union(*(component_folders(spec, index) for index in different.values()))


def describe_missing_folders(clusters: Sequence[ClusterName], folders: Iterable[str]) -> str:
    """Return a text such as ``cluster south has no scratch folder``."""
    names = " or ".join(folder_names(folders))
    if len(clusters) == 1:
        return f"cluster {clusters[0]} has no {names}"
    return f"clusters {format_list(clusters)} have no {names}"


def folder_names(folders: Iterable[str]) -> list[str]:
    """Return the names of folders in messages, and ``RUNTIME`` as it is."""
    return [name if name == RUNTIME else f"{name} folder" for name in sorted(folders)]


def describe_series_conflict(series: Mapping[ClusterName, int]) -> str:
    """Return a text such as ``north has Open MPI 5, south 4: a job runs under one series``.

    A series is a major version of Open MPI; clusters are grouped by it.
    """
    groups: dict[int, list[ClusterName]] = {}
    for name in sorted(series):
        groups.setdefault(series[name], []).append(name)
    texts: list[str] = []
    for number, names in groups.items():
        have = "" if texts else "has Open MPI " if len(names) == 1 else "have Open MPI "
        texts.append(f"{format_list(names, separator=' and ')} {have}{number}")
    return f"{', '.join(texts)}: a job runs under one series"


MAX_SETS = 64
"""Maximum number of largest sets of clusters that may share a job; each set costs one more call of the policy."""
Profiles = Mapping[ClusterName, ClusterProfile]


def may_share_job(first: ClusterName, second: ClusterName, profiles: Profiles, *, is_script: bool = False) -> bool:
    """Return whether both clusters allow the other one in ``coallocate_with``, and accept the job's script if any."""
    if is_script and first != second and not all(accepts_scripts(profiles[name]) for name in (first, second)):
        return False
    allowed = (profiles[first].coallocate_with, profiles[second].coallocate_with)
    return first == second or all(
        names is None or name in names for names, name in zip(allowed, (second, first), strict=True)
    )


def accepts_scripts(profile: ClusterProfile) -> bool:
    """Return whether a script at another site may choose the programs of its job on a cluster."""
    return profile.accepts_scripts is not False


def partners(
    name: ClusterName, profiles: Profiles, *, one_series: bool, is_script: bool = False
) -> frozenset[ClusterName]:
    """Return the other clusters on which parts of the same job may run.

    ``one_series``: the job runs under Open MPI, so clusters need the same series (major version). ``is_script``: it has
    a script, which its clusters must accept.
    """
    series = profiles[name].mpi.series
    return frozenset(
        candidate
        for candidate, profile in profiles.items()
        if candidate != name
        and may_share_job(name, candidate, profiles, is_script=is_script)
        and not (one_series and profile.mpi.series != series)
    )


def find_largest_sets(
    profiles: Profiles, *, one_series: bool, is_script: bool = False
) -> Iterator[frozenset[ClusterName]]:
    """Yield the largest sets of clusters on which parts of one job may run, in a fixed order.

    ``one_series``: the job runs under Open MPI, so clusters need the same series (major version). ``is_script``: it has
    a script, which its clusters must accept.
    """
    every = profiles.values()
    if all(p.coallocate_with is None and (accepts_scripts(p) or not is_script) for p in every):  # the usual case
        by_series: dict[int, list[ClusterName]] = {}
        for name in sorted(profiles):
            by_series.setdefault(profiles[name].mpi.series if one_series else 0, []).append(name)
        yield from map(frozenset, by_series.values())
        return
    near = {name: partners(name, profiles, one_series=one_series, is_script=is_script) for name in sorted(profiles)}
    yield from find_cliques(near)


def find_cliques(near: Mapping[ClusterName, frozenset[ClusterName]]) -> Iterator[frozenset[ClusterName]]:
    """Yield the largest sets of clusters that are all near to each other, in a fixed order."""

    def grow(chosen: frozenset[str], possible: frozenset[str], excluded: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield the sets with all of ``chosen``, some of ``possible`` and none of ``excluded`` (Bron and Kerbosch)."""
        if not possible and not excluded:
            yield chosen
            return
        pivot = max(sorted(possible | excluded), key=lambda name: len(near[name] & possible))
        for name in sorted(possible - near[pivot]):
            yield from grow(chosen | {name}, possible & near[name], excluded & near[name])
            possible, excluded = possible - {name}, excluded | {name}

    if near:
        yield from grow(frozenset(), frozenset(near), frozenset())


def find_sharing_sets(
    profiles: Profiles, *, one_series: bool, is_script: bool = False
) -> tuple[frozenset[ClusterName], ...]:
    """Return the sets of ``find_largest_sets``; nothing if all clusters may run parts of one job."""
    sets = tuple(find_largest_sets(profiles, one_series=one_series, is_script=is_script))
    return sets if len(sets) > 1 else ()


def explain_conflict(
    names: Iterable[ClusterName], profiles: Profiles, *, one_series: bool, is_script: bool = False
) -> str:
    """Return why clusters may not run parts of one job: Open MPI series, ``coallocate_with`` or ``accepts_scripts``.

    Empty if they may.
    """
    sorted_names = sorted(names)
    apart = [
        (a, b) for i, a in enumerate(sorted_names) for b in sorted_names[i + 1 :] if not may_share_job(a, b, profiles)
    ]
    reasons = [f"coallocate_with keeps {format_list([f'{a} and {b}' for a, b in apart])} apart"] if apart else []
    series = {name: profiles[name].mpi.series for name in sorted_names}
    if one_series and len(set(series.values())) > 1:
        reasons.append(describe_series_conflict(series))
    closed = [name for name in sorted_names if not accepts_scripts(profiles[name])]
    if is_script and closed and len(sorted_names) > 1:
        does = "does" if len(closed) == 1 else "do"
        reasons.append(f"{format_list(closed)} {does} not accept scripts together with other clusters")
    return "; ".join(reasons)
