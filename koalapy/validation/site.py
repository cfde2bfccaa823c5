"""Check the needs of a job on its clusters other than nodes: accounts, folders and the Open MPI series."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from koalapy.model.cluster import check_cluster
from koalapy.model.errors import UsageError, reject
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.profile import (
    RUNTIME,
    component_folders,
    describe_missing_folders,
    explain_conflict,
    find_folder_placeholders,
    folder_names,
    job_folders,
    texts_of,
)
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest
from koalapy.model.users import owner_rejection_reason
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.nodes import restrict_to_nodes

MAX_NAMED = 5
"""Maximum clusters that a hint names."""


def check_accounts(spec: JobSpec, limits: Limits) -> None:
    """Reject a job on clusters that its owner may not use, or of an owner that may use none."""
    closed = limits.accounts.closed_to(spec.owner)
    if not closed:
        return
    open_to_it = [cluster.name for cluster in limits.clusters if cluster.name not in closed]
    way_out = f"have the grid's administrators give {spec.owner} an account in users.{spec.owner}.accounts"
    if not open_to_it:
        reject("owner", spec.owner, f"is {spec.owner}, who may use no cluster of this grid", way_out)
    if isinstance(spec.request, FixedRequest):
        for index, component in enumerate(spec.request.components):
            if (name := component.cluster or "") in closed:
                problem = f"is {name}, but {limits.accounts.rejection_reason(spec.owner, name)}"
                hint = f"name {' or '.join(open_to_it[:MAX_NAMED])}, or {way_out}"
                reject(f"request.components[{index}].cluster", name, problem, hint)


def check_home_site(spec: JobSpec, limits: Limits) -> None:
    """Reject a home site that is unknown or closed to the owner.

    Reject also a fixed request with a cluster that does not accept jobs of the home site.
    """
    home = spec.home_site
    if not home:
        return
    check_cluster(home, [cluster.name for cluster in limits.clusters], "home_site")
    if reason := limits.accounts.rejection_reason(spec.owner, home):
        reject("home_site", home, f"is {home}, but {reason}", "leave it out, or name a cluster that its owner may use")
    if isinstance(spec.request, FixedRequest):
        for index, component in enumerate(spec.request.components):
            name = component.cluster or ""
            if reason := limits.sharing.rejection_reason(home, name):
                problem = f"is {name}, but {reason}"
                reject(f"request.components[{index}].cluster", name, problem, "name other clusters, or no home site")


def check_folders(spec: JobSpec, limits: Limits) -> None:
    """Reject a job with placeholders for folders that its named clusters, or all clusters, do not have."""
    if isinstance(spec.request, FixedRequest):
        profiles = {cluster.name: cluster.profile for cluster in limits.clusters}
        for index, component in enumerate(spec.request.components):
            name = component.cluster or ""
            if missing := component_folders(spec, index) - profiles[name].folders:
                _reject_folder(spec, [index], missing, f"but {describe_missing_folders([name], missing)}")
    elif limits.clusters and not _able(spec, limits):
        needed = job_folders(spec)
        indices = [None] if isinstance(spec.request, FlexibleRequest) else range(len(spec.request.components))
        _reject_folder(spec, indices, needed, f"and no cluster has a {' and a '.join(folder_names(needed))}")


def check_clusters_share(spec: JobSpec, limits: Limits) -> None:
    """Reject a fixed request with clusters that may not run parts of one job.

    The reasons are ``coallocate_with``, for Open MPI programs different series (major versions), and for scripts
    ``accepts_scripts``.
    """
    if not isinstance(spec.request, FixedRequest):
        return
    profiles = {cluster.name: cluster.profile for cluster in limits.clusters}
    names: list[ClusterName] = []
    for index, component in enumerate(spec.request.components):
        names.append(name := component.cluster or "")
        for one_series in (False, spec.launcher is Launcher.OPENMPI):
            if conflict := explain_conflict(set(names), profiles, one_series=one_series):
                hint = "name clusters of one series, or use the launcher processes"
                hint = hint if one_series else "name clusters that allow each other in coallocate_with"
                reject(f"request.components[{index}].cluster", name, f"is {name}, but {conflict}", hint)
        if conflict := explain_conflict(set(names), profiles, one_series=False, is_script=bool(spec.script)):
            hint = "name one cluster, or have the site's operators set accepts_scripts"
            reject(f"request.components[{index}].cluster", name, f"is {name}, but {conflict}", hint)


@contextmanager
def able_clusters(spec: JobSpec, limits: Limits) -> Iterator[Sequence[ClusterLimits]]:
    """Yield the clusters on which a job may run; of a fixed request, all clusters.

    The owner must have access, the needed folders must exist, and the cluster must accept jobs of the home site. A
    ``UsageError`` that is raised within the context is extended by the clusters that were left out.
    """
    able = _able(spec, limits)
    matching = restrict_to_nodes(spec, able)
    try:
        yield matching
    except UsageError as error:
        left_out = sorted({cluster.name for cluster in limits.clusters} - {cluster.name for cluster in able})
        if not left_out and matching == able:
            raise
        closed, away = limits.accounts.closed_to(spec.owner), limits.sharing.closed_to(spec.home_site)
        foreign = [name for name in left_out if name in closed]
        distant = [name for name in left_out if name in away - closed]
        lacking = [name for name in left_out if name not in closed | away]
        reasons = [describe_missing_folders(lacking, job_folders(spec))] if lacking else []
        reasons += [owner_rejection_reason(foreign)] if foreign else []
        reasons += [limits.sharing.home_rejection_reason(distant)] if distant else []
        if matching != able and (requirement := spec.node_requirements[0]) and requirement.of_nodes:
            reasons.append(f"only nodes with {requirement} count")
        message = "; ".join([error.message, *reasons])
        raise UsageError(message, field=error.field, value=error.value, hint=error.hint) from None


def _able(spec: JobSpec, limits: Limits) -> Sequence[ClusterLimits]:
    """Return the clusters that are open to the job and have its folders; all clusters for a fixed request."""
    if isinstance(spec.request, FixedRequest):
        return limits.clusters
    needed = job_folders(spec)
    closed = limits.accounts.closed_to(spec.owner) | limits.sharing.closed_to(spec.home_site)
    return [c for c in limits.clusters if needed <= c.profile.folders and c.name not in closed]


def _reject_folder(spec: JobSpec, indices: Iterable[int | None], missing: frozenset[str], reason: str) -> NoReturn:
    """Reject the first text of these components that needs one of these folders, or a container image."""
    if RUNTIME in missing:
        hint = "name clusters that run containers, or set container_runtime in the cluster's configuration"
        reject("container", spec.container, f"needs a {RUNTIME}, {reason}", hint)
    for field, text in (pair for index in indices for pair in texts_of(spec, index)):
        if used := find_folder_placeholders([text]) & missing:
            folder = min(used)
            hint = f"set {folder} in the cluster's configuration, or write {{{{{folder}}}}} for the text itself"
            reject(field, text, f"needs {{{folder}}}, {reason}", hint)
    raise AssertionError("a folder is needed that no text names")
