"""Convert commands of the scheduler to messages for agents, with all data that agents need."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from koalapy.daemon.network.relays import JobRelay
from koalapy.model.job import WALLTIME_ALLOWANCE, Component, Job, JobId, Token, lease_of, parse_token
from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import ClusterProfile
from koalapy.model.replica import Catalogue, StageFile
from koalapy.model.request import ClusterName, InputFile
from koalapy.model.users import Accounts
from koalapy.protocol.frames import PLAN, Plan
from koalapy.protocol.messages import Forget, PlanContext, PlanNode, Stage, StageBundle, Stop, Submit, Unstage
from koalapy.scheduler.effects import (
    Command,
    ForgetComponent,
    OpenBarrier,
    StageComponent,
    StopComponent,
    SubmitComponent,
    UnstageComponent,
)
from koalapy.scheduler.ledger import live

FindRelay = Callable[[Job, Sequence[PlanNode]], JobRelay | None]
"""Returns the relayed links that a job may use, given the nodes of its plan; None if it may use none."""


class CommandMessages:
    """The messages of one batch of commands, with paths and accounts as on each cluster."""

    def __init__(
        self,
        epoch: int,
        profiles: Mapping[ClusterName, ClusterProfile],
        catalogue: Catalogue,
        accounts: Accounts,
        find_job: Callable[[JobId], Job | None] = lambda _: None,
        find_relay: FindRelay = lambda *_: None,
        may_ignore_containers: Callable[[ClusterName], bool] = lambda _: False,
        find_site_name: Callable[[JobSpec], str] = lambda _: "",
    ) -> None:
        """``find_job``: returns an unfinished job, such as the array of a task. ``may_ignore_containers``: returns
        whether the agent of a cluster may run a program without its container image. ``find_site_name``: returns the
        name of a job's reservation for resource managers."""
        self._find_site_name = find_site_name
        self._may_ignore_containers = may_ignore_containers
        self._find_job, self._find_relay = find_job, find_relay
        self._epoch, self._profiles, self._catalogue, self._accounts = epoch, profiles, catalogue, accounts
        self._plans: dict[JobId, tuple[Plan, Token, Callable[[ClusterName], dict[str, Any] | None]]] = {}
        """Plan, head component and ``JobRelay.head_entry`` of jobs with an opening barrier, for all components."""

    def build_message(self, command: Command, job: Job | None, ident: int) -> dict[str, Any]:
        """Return a command as JSON; ``job`` is the job of its component or stage, if known."""
        header: dict[str, Any] = {"id": ident, "epoch": self._epoch, "token": command.token}
        match command:
            case StopComponent():
                header["reason"] = command.reason
                if command.warning is not None:
                    header |= {"signal": command.warning.signal, "grace": command.warning.grace}
                return Stop(**header).model_dump()
            case ForgetComponent():
                return Forget(**header).model_dump()
            case UnstageComponent():
                return Unstage(**header).model_dump()
            case SubmitComponent() if job is not None:
                owner, cluster = job.spec.owner, command.cluster
                # Permissions may have changed since the job was placed there.
                if reason := self._accounts.rejection_reason(owner, cluster):
                    return Stop(**header, reason=reason).model_dump()
                if job.spec.container and self._may_ignore_containers(cluster):
                    reason = f"the agent of {cluster} is too old to run container images: update it"
                    return Stop(**header, reason=reason).model_dump()
                user, reservation = self._accounts.local_user(owner, cluster), self._find_site_name(job.spec)
                return _build_submit(job, header, user, cluster, self._profiles, reservation).model_dump()
            case StageComponent() if job is not None and self._accounts.rejection_reason(
                job.spec.owner, command.cluster
            ):
                return Unstage(**header).model_dump()
            case StageComponent() if job is not None:
                user = self._accounts.local_user(job.spec.owner, command.cluster)
                return (
                    _build_stage(job, command.cluster, self._catalogue, header, user) or Unstage(**header)
                ).model_dump()
            case OpenBarrier() if job is not None:
                if job.id not in self._plans:
                    array = None if job.array_job is None else self._find_job(job.array_job)
                    nodes = plan_nodes(job, self._profiles)
                    relay = self._find_relay(job, nodes)
                    content = _build_plan(job, nodes, self._profiles, relay, array)
                    find_relay_entry = (lambda _: None) if relay is None else cache(relay.head_entry)
                    self._plans[job.id] = Plan.of(content), content["head"], find_relay_entry
                plan, head, find_entry = self._plans[job.id]
                script = {"script": job.spec.script} if job.spec.script and command.token == head else {}
                head_entry = find_entry(command.cluster)
                entry = {} if head_entry is None else {"relay_entry": head_entry}
                return {"type": "open", **header, **script, **entry, PLAN: plan}
        raise ValueError(f"{command} is for a job that is unknown here")


def _build_submit(
    job: Job,
    header: dict[str, Any],
    local_user: str,
    cluster: ClusterName,
    profiles: Mapping[ClusterName, ClusterProfile],
    reservation: str,
) -> Submit:
    """Return the command that submits a component's runner to the resource manager of its cluster."""
    component = live(job).components[parse_token(header["token"]).component]
    requirement = job.spec.node_requirement(component.request_index)
    if requirement is not None:
        excluded_nodes = tuple(name for name in requirement.exclude if name not in profiles)
        requirement = replace(requirement, exclude=excluded_nodes)
    return Submit(
        **header,
        size=component.size,
        name=job.spec.name or f"job-{job.id}",
        walltime=_enforced_walltime(job.spec),
        stage=job.stage_token(component) if component.staging else None,
        collect=list(job.spec.collect),
        local_user=local_user,
        node_class=component.node_class,
        requirement=requirement,
        reservation=reservation,
        lease=lease_of(job.spec.lease, profiles[cluster].lease),
    )


def _enforced_walltime(spec: JobSpec) -> float | None:
    """Return the seconds after which resource manager and runners end a job that the daemon has not ended.

    In a reservation the agent limits them by its end as its resource manager knows it.
    """
    return None if spec.walltime is None else spec.walltime + WALLTIME_ALLOWANCE


def _build_stage(
    job: Job, cluster: ClusterName, catalogue: Catalogue, header: dict[str, Any], local_user: str
) -> Stage | None:
    """Return the files to stage for a component; None if it was moved elsewhere within the same step.

    A replica that is no longer in the catalogue has no path.
    """
    component = job.staged_component_of(header["token"])
    if component is None or component.cluster != cluster:
        return None
    files = job.spec.inputs_of(component.request_index)
    sources = component.sources or (cluster,) * len(files)
    bundle = job.spec.bundle
    return Stage(
        **header,
        files=[_build_stage_file(file, source, catalogue) for file, source in zip(files, sources, strict=True)],
        bundle=StageBundle(id=bundle.id, size=bundle.size) if bundle else None,
        result_names=[result.file_name for result in job.spec.result_inputs],
        local_user=local_user,
    )


def is_replica_needed(
    jobs: Iterable[Job], cluster: ClusterName, source: ClusterName, path: str, catalogue: Catalogue
) -> bool:
    """Return whether a component on a cluster needs the replica at a path of cluster ``source``."""
    for job in jobs:
        for component in job.attempt.components if job.attempt else ():
            if component.cluster == cluster and source in component.sources:
                files = zip(job.spec.inputs_of(component.request_index), component.sources, strict=False)
                for file in (file for file, site in files if site == source):
                    replica = catalogue.get(file.name, source)
                    if replica is not None and path in (replica.path, f"{replica.path}/{file.part}"):
                        return True
    return False


def _build_stage_file(file: InputFile, source: ClusterName, catalogue: Catalogue) -> StageFile:
    """Return the order to copy an input from cluster ``source``.

    The path is empty if the catalogue has no such replica there, or not the requested part.
    """
    replica = catalogue.get(file.name, source)
    part = replica.part(file.part) if replica and file.part else None
    entry = part or replica
    return StageFile(
        name=file.name,
        source=source,
        path=replica.path if replica and (part or not file.part) else "",
        part=file.part,
        target=file.file_name,
        size=entry.size if entry else file.size,
        checksum=entry.checksum if entry else "",
    )


def _array_variables(task: Job, array: Job | None) -> dict[str, str]:
    """Return the environment variables of a task of an array; none for any other job."""
    if task.array_job is None or task.array_index is None:
        return {}
    variables = {"KOALA_ARRAY_JOB": str(task.array_job), "KOALA_ARRAY_INDEX": str(task.array_index)}
    if array is not None:
        variables["KOALA_ARRAY_COUNT"] = str(array.array_size)
        if array.spec.each_line:
            variables["KOALA_ARRAY_LINE"] = array.spec.each_line[task.array_index - 1]
    return variables


def plan_nodes(job: Job, profiles: Mapping[ClusterName, ClusterProfile]) -> list[PlanNode]:
    """Return the nodes of a job's attempt, component by component."""
    nodes: list[PlanNode] = []
    for component in live(job).gang:
        token = job.token(component.index)
        per_node = job.spec.ranks_per_node(profiles[component.cluster].processes_per_node, component.request_index)
        nodes += [
            PlanNode(host=host, cluster=component.cluster, token=token, node=index, slots=per_node)
            for index, host in enumerate(component.hosts)
        ]
    return nodes


def _build_plan(
    job: Job,
    nodes: Sequence[PlanNode],
    profiles: Mapping[ClusterName, ClusterProfile],
    relay: JobRelay | None,
    array: Job | None = None,
) -> dict[str, Any]:
    """Return the part of an ``Open`` that is the same for all components. ``array``: that of a task."""
    variables = _array_variables(job, array)
    attempt = live(job)
    contexts: list[PlanContext] = []
    first = 0
    for component in attempt.gang:
        last = first + len(component.hosts)
        profile = profiles[component.cluster]
        contexts.append(_build_context(job, component, profile, list(range(first, last)), variables))
        first = last
    return {
        "job": job.id,
        "generation": attempt.generation,
        "launcher": job.spec.launcher.value,
        "head": job.token(attempt.head.index),
        "nodes": nodes,
        "contexts": contexts,
        "interactive": job.spec.interactive,
        "walltime": _enforced_walltime(job.spec),
        **({"is_script": True} if job.spec.script else {}),
        **({"cpus_per_rank": job.spec.cpus_per_rank} if job.spec.cpus_per_rank else {}),
        **({"share": True} if job.spec.share else {}),
        **({} if relay is None else {"relay": relay.plan}),
        **_build_warnings(job.spec),
    }


def _build_warnings(spec: JobSpec) -> dict[str, Any]:
    """Return the warning signals before the end of the walltime and of the agent's lease."""
    if spec.warning is None:
        return {}
    signal, grace = spec.warning.signal.value, spec.warning.grace
    of_lease = {"lease_warning": {"signal": signal, "grace": grace}}
    if spec.walltime is None:
        return of_lease
    return of_lease | {"warning": {"signal": signal, "after": max(0.0, spec.walltime - grace), "grace": grace}}


def _build_context(
    job: Job, component: Component, profile: ClusterProfile, nodes: list[int], variables: Mapping[str, str]
) -> PlanContext:
    """Return what a component's runner needs: command, environment and paths as its cluster maps them.

    ``variables``: additional environment variables.
    """
    spec, cluster = job.spec, component.cluster
    component_spec = spec.component(component.request_index)
    values = job.output_values(cluster)
    output, error = (
        name and profile.map_output_file(name, cluster, values) for name in spec.output_files(component.request_index)
    )
    context = PlanContext(
        token=job.token(component.index),
        command=profile.map_command((component_spec and component_spec.command) or spec.command, cluster, job.id),
        environment={
            **dict(spec.environment),
            **dict(component_spec.environment if component_spec else ()),
            **variables,
        },
        workdir=profile.map_path(spec.workdir, cluster, job.id) if spec.workdir else spec.workdir,
        workdir_optional=spec.workdir_optional,
        output=output,
        error=error,
        label=spec.label,
        nodes=nodes,
    )
    if spec.container:
        context["container"] = profile.map_path(spec.container, cluster, job.id)
    return context
