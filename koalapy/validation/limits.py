"""The clusters and bounds that submissions are checked against, and checks of what a job needs of its clusters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from koalapy.model.array import MAX_ARRAY_SIZE
from koalapy.model.cluster import NodeClass, check_cluster
from koalapy.model.errors import UsageError, reject
from koalapy.model.job_sizes import SizeRanges
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.node_requirement import (
    EXCLUDED,
    MAX_CORES,
    MAX_EXCLUDED_NODES,
    WORD,
    NodeRequirement,
    count_gpus,
    count_hosts,
)
from koalapy.model.profile import (
    RUNTIME,
    ClusterProfile,
    component_folders,
    describe_missing_folders,
    explain_conflict,
    find_folder_placeholders,
    folder_names,
    job_folders,
    texts_of,
)
from koalapy.model.request import (
    MAX_COMPONENTS,
    MAX_GRACE,
    ClusterName,
    ComponentRequest,
    FixedRequest,
    FlexibleRequest,
)
from koalapy.model.users import Accounts, Sharing, owner_rejection_reason
from koalapy.model.wording import format_bytes, format_list, format_nodes, suggest_names
from koalapy.policies.registry import Registry


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster with its size in nodes (None while unknown), relative speed and profile."""

    name: ClusterName
    total: int | None
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    speed: float = 1.0
    node_classes: Sequence[NodeClass] | None = None
    """What its nodes have; None while unknown."""
    job_sizes: SizeRanges = ()
    """The sizes of components that it accepts; empty: any."""

    @property
    def known_classes(self) -> Sequence[NodeClass]:
        """Return its classes, or one of unknown properties for all nodes."""
        return self.node_classes or (NodeClass("", 0, total=self.total or 0),)


@dataclass(frozen=True, slots=True)
class Limits:
    """The clusters, policies, bounds, accounts and sharing rules for submissions. ``max_grace`` is in seconds."""

    clusters: Sequence[ClusterLimits]
    policies: Registry
    max_components: int = MAX_COMPONENTS
    max_grace: float = MAX_GRACE
    accounts: Accounts = field(default_factory=Accounts)
    sharing: Sharing = field(default_factory=Sharing)
    max_array_size: int = MAX_ARRAY_SIZE
    """Maximum tasks of an array."""
    max_bytes: int | None = None
    """Maximum bytes of the texts of a job; None: no limit."""
    refusal_on_empty_grid: Callable[[JobSpec], str] = lambda _: ""
    """Returns the reason why a job's policy would not place it on the empty grid with all clusters usable.

    Empty if it would, or while that is unknown. Links without measurements are assumed to be good.
    """


NodesOf = tuple[ClusterLimits, NodeClass]
"""Nodes of one class on a cluster."""


def check_node_names(spec: JobSpec, limits: Limits) -> None:
    """Reject names of features, partitions, accounts and nodes that could change a resource manager's command."""
    _check_names("", spec)
    for index, component in enumerate(_components(spec)):
        _check_names(f"request.components[{index}].", component)


def check_share(spec: JobSpec, limits: Limits) -> None:
    """Reject a job that shares nodes without saying how many cores it needs, or with components that could share one.

    Two components of a job on one node would be one host to Open MPI.
    """
    if not spec.share:
        return
    request, count = spec.request, max(1, len(_components(spec)))
    if not all((requirement := spec.node_requirement(index)) and requirement.cores for index in range(count)):
        problem = "is true, but the job does not say how many cores it needs of each node"
        reject("share", True, problem, "give --cores, or --cpus-per-rank")
    names = [component.cluster for component in _components(spec)]
    has_options = isinstance(request, FlexibleRequest) and bool(request.split_options)
    if has_options or (count > 1 and (None in names or len(set(names)) < count)):
        problem = "is true, but two components of the job could get the same node"
        hint = "name another cluster for each component, or use --flexible without split options"
        reject("share", True, problem, hint)


def _components(spec: JobSpec) -> Sequence[ComponentRequest]:
    return () if isinstance(spec.request, FlexibleRequest) else spec.request.components


def _check_names(path: str, source: JobSpec | ComponentRequest) -> None:
    hint = "use letters, digits, '_', '.', '+' and '-', as the cluster's administrators did"
    for name_field in ("partition", "account", "qos"):
        if (name := getattr(source, name_field)) and not WORD.fullmatch(name):
            reject(f"{path}{name_field}", name, f"is {name!r}, which no resource manager accepts as a name", hint)
    for index, feature in enumerate(source.features):
        if not WORD.fullmatch(feature):
            problem = f"is {feature!r}, which no resource manager accepts as a name"
            reject(f"{path}features[{index}]", feature, problem, hint)
    total = 0
    for index, name in enumerate(source.exclude):
        if not EXCLUDED.fullmatch(name):
            problem = f"is {name!r}, which names no cluster and no nodes"
            reject(f"{path}exclude[{index}]", name, problem, "give one name, as north, n7 or n[1-3], in each entry")
        try:
            total += count_hosts(name)
        except ValueError:
            problem = f"is {name!r}, which is not a range of nodes"
            reject(f"{path}exclude[{index}]", name, problem, "give numbers in ascending order, as n[1-3]")
    if total > MAX_EXCLUDED_NODES:
        problem = f"stands for {total} nodes; at most {MAX_EXCLUDED_NODES} can be excluded"
        reject(f"{path}exclude", list(source.exclude)[:3], problem, "name fewer nodes, or the clusters to use")


def check_nodes(spec: JobSpec, limits: Limits) -> None:
    """Reject a requirement that no node of the grid meets, with the nearest that exists.

    Clusters of which the nodes are not known yet may have such nodes.
    """
    requirements = spec.node_requirements
    if not requirements:
        return
    _check_ranks(spec, limits)
    for index, component in enumerate(_components(spec)) if _components(spec) else [(None, None)]:
        combined = spec.node_requirement(index)
        if combined is not None and (requirement := combined.matching_part) is not None:
            clusters = limits.clusters
            if isinstance(spec.request, FixedRequest) and component is not None:
                clusters = [cluster for cluster in clusters if cluster.name == component.cluster]
            _check_requirement(requirement, clusters, _field_names(spec, component, index))
        if len(requirements) == 1 and not isinstance(spec.request, FixedRequest):
            return


def _check_ranks(spec: JobSpec, limits: Limits) -> None:
    """Reject ranks that request together more processors than any node has, if those of all nodes are known."""
    core_counts = [node_class.cores for cluster in limits.clusters for node_class in cluster.known_classes]
    if not spec.cores_of_ranks or not core_counts or any(cluster.node_classes is None for cluster in limits.clusters):
        return
    largest, ranks = max(cores or MAX_CORES for cores in core_counts), spec.processes_per_node or 1
    if spec.cores_of_ranks > largest:
        needed = f", so {ranks} ranks need {spec.cores_of_ranks} cores of a node" if ranks > 1 else ""
        problem = f"is {spec.cpus_per_rank}{needed}, but no node has more than {largest} cores"
        hint = f"give at most {largest // ranks}" if ranks <= largest else f"give fewer than {ranks} ranks with --ppn"
        reject("cpus_per_rank", spec.cpus_per_rank, problem, hint)


def _field_names(spec: JobSpec, component: ComponentRequest | None, index: int | None) -> dict[str, str]:
    """Return the name in the request of each property: of the component if it sets it, else of the job."""
    names = [field.name for field in fields(NodeRequirement)]
    return {
        name: f"request.components[{index}].{name}"
        if component is not None and getattr(component, name, None)
        else name
        for name in names
    }


def _check_requirement(
    requirement: NodeRequirement, clusters: Sequence[ClusterLimits], field_names: dict[str, str]
) -> None:
    """Reject a requirement that no node of these clusters meets."""
    allowed = [cluster for cluster in clusters if cluster.name not in requirement.exclude]
    if not allowed:
        excluded = [name for name in requirement.exclude if name in {cluster.name for cluster in clusters}]
        problem = f"has {format_list(excluded)}, and no other cluster remains for the job"
        reject(field_names["exclude"], excluded, problem, "exclude fewer clusters")
    if any(cluster.node_classes is None for cluster in allowed):
        return
    nodes = [(cluster, node_class) for cluster in allowed for node_class in cluster.known_classes]
    unmet = [set(requirement.unmet(node_class)) for _, node_class in nodes]
    if not all(unmet):
        return
    never_met = set.intersection(*unmet)
    names = [field.name for field in fields(NodeRequirement) if field.name in (never_met or set.union(*unmet))]
    no_cluster = "no other cluster" if len(allowed) < len(clusters) else "no cluster"
    subject = f"{allowed[0].name} has no node" if len(allowed) == 1 else f"{no_cluster} has nodes"
    no_gpus = f"{allowed[0].name} reports no GPUs" if len(clusters) == 1 else f"{no_cluster} reports GPUs"
    if len(names) == 1 or never_met:
        _reject_property(names[0], requirement, nodes, subject, no_gpus, field_names[names[0]])
    nearest = min(zip(unmet, nodes, strict=True), key=lambda pair: (len(pair[0]), -pair[1][1].total))
    cluster, node_class = nearest[1]
    has = format_list([_describe_property(name, node_class, requirement) for name in names if name in nearest[0]])
    problem = f"is {_value_of(names[0], requirement)}, but {subject} with {requirement} together"
    hint = f"nearest: {cluster.name} has {has} on {format_nodes(node_class.total)}"
    reject(field_names[names[0]], _value_of(names[0], requirement), problem, hint)


def _reject_property(
    name: str, requirement: NodeRequirement, nodes: Sequence[NodesOf], subject: str, no_gpus: str, field_name: str
) -> NoReturn:
    """Reject a property that no node has, with the nearest nodes, or all names that exist."""
    only = NodeRequirement(**{name: getattr(requirement, name)})
    value = _value_of(name, requirement)
    problem = f"is {value}, but {subject} with {only}"
    if name in ("features", "partition"):
        available = {text for _, node_class in nodes for text in _names_of(name, node_class)}
        requested = requirement.features if name == "features" else (requirement.partition,)
        wrong = [text for text in requested if text not in available] or [str(value)]
        reject(field_name, value, problem, suggest_names(wrong[0], available))
    cluster, node_class = max(nodes, key=lambda pair: (_amount(name, pair[1], requirement), pair[1].total))
    total = sum(
        entry.total
        for site, entry in nodes
        if site is cluster and _amount(name, entry, requirement) == _amount(name, node_class, requirement)
    )
    has = _describe_property(name, node_class, requirement)
    hint = f"nearest: {cluster.name} has {has} on {format_nodes(total)}"
    if requirement.gpus and name == "gpus" and not _amount(name, node_class, requirement):
        types = {gpus.type for _, node_class in nodes for gpus in node_class.gpus} - {""}
        hint = f"{no_gpus}; koala clusters show NAME shows what its nodes have"
        hint = suggest_names(requirement.gpus.type, types) if types else hint
    reject(field_name, value, problem, hint)


def _names_of(name: str, node_class: NodeClass) -> tuple[str, ...]:
    return node_class.features if name == "features" else node_class.partitions


def _amount(name: str, node_class: NodeClass, requirement: NodeRequirement) -> int:
    """Return how much of a countable property nodes have."""
    if name == "gpus" and requirement.gpus:
        return count_gpus(node_class.gpus, requirement.gpus.type)
    return (node_class.cores if name == "cores" else node_class.memory) or 0


def _describe_property(name: str, node_class: NodeClass, requirement: NodeRequirement) -> str:
    """Return what nodes have of a property as text."""
    if name == "gpus":
        return format_list([gpus.description for gpus in node_class.gpus]) or "no GPU"
    if name in ("features", "partition"):
        kind, names = name.removesuffix("s"), _names_of(name, node_class)
        return f"{kind}s {format_list(names)}" if names else f"no {kind}"
    amount = _amount(name, node_class, requirement)
    return f"{format_bytes(amount)} of memory" if name == "memory" else f"{amount} cores"


def _value_of(name: str, requirement: NodeRequirement) -> Any:
    value = getattr(requirement, name)
    return list(value) if isinstance(value, tuple) else str(value) if name == "gpus" else value


def restrict_to_nodes(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> Sequence[ClusterLimits]:
    """Return the clusters with only the nodes that the job may get, if all of its components require the same."""
    requirements = spec.node_requirements
    if len(requirements) != 1 or (requirement := requirements[0]) is None:
        return clusters
    restricted = []
    for cluster in clusters:
        total = cluster.total
        if total is not None and cluster.node_classes is not None:
            classes = [node_class for node_class in cluster.known_classes if requirement.is_met_by(node_class)]
            total = min(total, sum(node_class.total for node_class in classes))
        if cluster.name in requirement.exclude:
            total = 0
        if total != 0:
            restricted.append(replace(cluster, total=total))
        elif isinstance(spec.request, FixedRequest):
            restricted.append(replace(cluster, total=0))
    return restricted


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
    for text_field, text in (pair for index in indices for pair in texts_of(spec, index)):
        if used := find_folder_placeholders([text]) & missing:
            folder = min(used)
            hint = f"set {folder} in the cluster's configuration, or write {{{{{folder}}}}} for the text itself"
            reject(text_field, text, f"needs {{{folder}}}, {reason}", hint)
    raise AssertionError("a folder is needed that no text names")
