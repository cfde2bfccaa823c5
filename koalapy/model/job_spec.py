"""The specification of a job: each of its fields is defined here once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any

from koalapy.model.array import MAX_LINE_LENGTH, MAX_LINES, ArrayFail, TaskIndices
from koalapy.model.dependency import NO_DEPENDENCIES, Dependencies, ResultInputs
from koalapy.model.field import Bounds, Field, Length, TextForm
from koalapy.model.job_state import Priority as Priority
from koalapy.model.node_requirement import (
    NO_REQUIREMENT,
    Excluded,
    Gpus,
    NodeCores,
    NodeFeatures,
    NodeMemory,
    NodeRequirement,
    OptionalNodeWord,
    combine_requirements,
    has_requirement,
)
from koalapy.model.request import (
    MAX_ENTRIES,
    MAX_OPTIONS,
    MAX_PATH_LENGTH,
    Bundle,
    Command,
    ComponentRequest,
    Environment,
    FileName,
    FlexibleRequest,
    InputFile,
    Inputs,
    LinkUse,
    Name,
    NotNegative,
    Positive,
    Request,
    StopWarning,
    format_request,
)
from koalapy.model.times import MAX_TIME

MAX_URL_LENGTH = 2000
MAX_SCRIPT_BYTES = 1024 * 1024
INTERPRETER = "#!/bin/bash"


def find_script_error(text: str) -> tuple[str, str] | None:
    """Return what is wrong with a script, and what to do; None if nothing is."""
    first_line = text.partition("\n")[0]
    if (size := len(text.encode(errors="replace"))) > MAX_SCRIPT_BYTES:
        return f"has {size} bytes, more than {MAX_SCRIPT_BYTES}", "put data into files, and send them by --stage"
    if "\0" in text:
        return "is a program, not a script", "put -- before the command"
    if "\r\n" in text or first_line.endswith("\r"):
        return "has Windows line ends, which its interpreter cannot read", "convert it, for example by dos2unix"
    if not first_line.startswith("#!") or not first_line[2:].strip():
        return "does not begin with #! and an interpreter", f"begin it with the line {INTERPRETER}"
    if re.match(r"#!\s*\S+\s+#", first_line):
        return "has a comment in its first line, which the interpreter gets as a file name", "move the comment"
    if not first_line[2:].strip().startswith("/"):
        interpreter = first_line[2:].split()[0]
        return f"names the interpreter {interpreter} without its path", f"write its path, as in {INTERPRETER}"
    return None


class Launcher(StrEnum):
    """The method that starts the program on the claimed nodes."""

    OPENMPI = "openmpi"
    PROCESSES = "processes"


class MailType(StrEnum):
    """An event of a job that its owner can be notified of."""

    BEGIN = "begin"
    """The job runs, also after a restart."""
    END = "end"
    """The job has ended in any state."""
    FAIL = "fail"
    """The job has failed."""
    WAITING = "waiting"
    """The job has waited for long."""


class ClaimingMode(StrEnum):
    """Whether a claim starts all components at once or those that it can get (semantics 5)."""

    ATOMIC = "atomic"
    INCREMENTAL = "incremental"


MAX_PROCESSES_PER_NODE = 8192
"""Linux supports no machine with more processors."""
MAX_DURATION = 100 * 365 * 86400
"""Seconds; 100 years."""

MAX_BANDWIDTH = 1e15
"""Bytes per second."""

PolicyOptions = Annotated[tuple[tuple[str, str], ...], Length(MAX_OPTIONS), TextForm("names and values")]
"""Names and values, sorted by name."""
Coallocation = Annotated[int, Bounds(minimum=1), TextForm("never, allowed, or a number")]
"""Maximum number of clusters that may be combined; 1 disables co-allocation."""
Duration = Annotated[
    float, Bounds(above=0, maximum=MAX_DURATION, hint="give more than 0 seconds"), TextForm("seconds, 90m, 1:30:00")
]
PointInTime = Annotated[
    float,
    Bounds(above=0, maximum=MAX_TIME, hint="give a time before the year 2242"),
    TextForm("2026-12-01T16:00, 16:00, tomorrow, now+1h"),
]
"""Seconds since the epoch."""
Lease = Annotated[
    float,
    Bounds(minimum=0, maximum=MAX_DURATION, hint="give more than 0 seconds, or none"),
    TextForm("seconds, 40m, or none"),
]
"""Seconds; 0 (``NO_LEASE``) means no lease."""
Share = Annotated[float, Bounds(minimum=0, maximum=1, hint="give a fraction from 0 to 1")]
Ratio = Annotated[float, Bounds(above=0, maximum=1, hint="give a fraction above 0 and up to 1")]
RunTimeShare = Annotated[float, Bounds(minimum=0, maximum=1, hint="give a fraction of the run time from 0 to 1")]
PerNodeBandwidth = Annotated[
    float, Bounds(minimum=0, maximum=MAX_BANDWIDTH), TextForm("bytes per second, 100MB, 1Gbit")
]
ProcessCount = Annotated[
    int, Bounds(minimum=1, maximum=MAX_PROCESSES_PER_NODE, excess_note="more than any node has processors")
]
Script = Annotated[str, Length(MAX_SCRIPT_BYTES)]
ExitCode = Annotated[int, Bounds(minimum=1, maximum=255, hint="give exit codes from 1 to 255")]
Pattern = Annotated[str, Length(MAX_PATH_LENGTH), TextForm("as out/*.csv")]
"""A pattern of files below a folder."""
Lines = Annotated[tuple[Annotated[str, Length(MAX_LINE_LENGTH)], ...], Length(MAX_LINES), TextForm("lines of a file")]


class _RequirementCache:
    """A slot for what the nodes of a job must have, which is no field of the job."""

    __slots__ = ("_requirements",)
    _requirements: tuple[NodeRequirement | None, ...]


@dataclass(frozen=True, slots=True)
class JobSpec(_RequirementCache):
    """A submission. Nothing of it changes while the job exists, except ``CHANGEABLE_FIELDS`` of a waiting job.

    The fields define the REST API, the stored form, job files and the options of ``koala submit``, in this order. Their
    types and ``Field`` annotations hold all bounds and help texts.
    """

    request: Request
    command: Command = ()
    policy: Annotated[Name, Field("placement policy")] = ""
    policy_options: Annotated[
        PolicyOptions, Field("option of the policy, NAME=VALUE; repeatable", "--policy-option")
    ] = ()
    """Options of the policy, such as ``("metric", "bandwidth")``."""
    coallocation: Annotated[Coallocation | None, Field("never, allowed, or the maximum number of clusters")] = None
    """None: no limit on the number of clusters."""
    speed_ratio_min: Annotated[
        Ratio | None, Field("minimum speed of the slowest cluster relative to the fastest, 0 to 1")
    ] = None
    """Clusters are combined only if the slowest has at least this fraction of the speed of the fastest."""
    claiming: Annotated[
        ClaimingMode | None,
        Field("claim all components at once, or as nodes become available; default: the daemon's setting"),
    ] = None
    claim_threshold: Annotated[
        Share | None, Field("incremental: fraction of components that must be startable, 0 to 1")
    ] = None
    """T: the fraction of components that must be startable before an incremental claim starts any."""
    priority: Annotated[Priority, Field("default: low")] = Priority.LOW
    processes_per_node: Annotated[ProcessCount | None, Field("MPI processes on each node", "--ppn")] = None
    cpus_per_rank: Annotated[
        NodeCores | None, Field("processors of each MPI process; it is bound to them, and OMP_NUM_THREADS is set")
    ] = None
    share: Annotated[bool, Field("accept part of each node, beside other jobs; needs --cores or --cpus-per-rank")] = (
        False
    )
    """Whether other jobs may use the remaining cores of its nodes, on clusters with the setting ``share``."""
    name: Annotated[Name, Field("name of the job")] = ""
    owner: Annotated[Name, Field("owner of the job, for operators; default: you")] = ""
    home_site: Annotated[Name, Field("cluster that the job is accounted to")] = ""
    """By default the home site of the login that submitted it, or of its owner; empty if neither has one."""
    environment: Annotated[
        Environment, Field("environment variable NAME=VALUE, or NAME for its current value; repeatable", "--env")
    ] = ()
    launcher: Annotated[Launcher, Field("default: openmpi")] = Launcher.OPENMPI
    walltime: Annotated[Duration | None, Field("time limit of the program: 90s, 90m, 1h30m or 1:30:00")] = None
    """Seconds; None: no limit."""
    warning: Annotated[
        StopWarning | None, Field("signal before the program is stopped, e.g. TERM@30 for 30 s before", "--signal")
    ] = None
    """Signal to the program before it is stopped at its walltime, or to free nodes for other jobs."""
    lease: Annotated[
        Lease | None, Field("how long the job continues while a cluster is unreachable: 90s, 40m, or none")
    ] = None
    """Seconds that components continue while the daemon is silent; then they end and the job is retried.

    None: as configured for each cluster.
    """
    output: Annotated[
        FileName | None,
        Field("file for the output on a site; %j %a %c %N %r %x: job, index, cluster, node, rank, name", short="-o"),
    ] = None
    error: Annotated[FileName | None, Field("separate file for the error stream; patterns as --output", short="-e")] = (
        None
    )
    label: Annotated[bool, Field("begin each line of output with its rank")] = False
    container: Annotated[
        FileName | None, Field("run the program in this container image: a file or folder on the execution site")
    ] = None
    """Path on the nodes. Only clusters with the setting ``container_runtime`` get such a job."""
    workdir: Annotated[FileName | None, Field("working directory; default: the current one", "--chdir")] = None
    workdir_optional: bool = False
    """Whether the program runs in another folder if ``workdir`` does not exist. True if the submitter did not choose
    ``workdir``."""
    max_restarts: Annotated[NotNegative | None, Field("maximum retries after infrastructure failures")] = None
    max_placement_tries: Annotated[Positive | None, Field("fail after so many placement tries")] = None
    max_claiming_tries: Annotated[Positive | None, Field("fail after so many claiming tries")] = None
    retry_on_exit: Annotated[
        tuple[ExitCode, ...], Length(255), Field("exit code of the program after which the job is retried; repeatable")
    ] = ()
    inputs: Annotated[Inputs, Field("logical input file, NAME[:partitioned][:as=FILE]; repeatable", "--input")] = ()
    """Inputs of every component of a flexible request; components of other requests have their own."""
    result_inputs: Annotated[
        ResultInputs,
        Field("result file of another job, JOB:FILE[:as=NAME] or JOB[INDEX]:FILE; repeatable", "--input-from"),
    ] = ()
    """Collected files of other jobs for every component. The job starts when those jobs have succeeded."""
    bundle: Annotated[Bundle | None, Field("local file or folder to upload; repeatable", "--stage")] = None
    """Uploaded files of the submitter for every component."""
    collect: Annotated[
        tuple[Pattern, ...],
        Length(MAX_ENTRIES),
        Field("pattern of result files to collect, e.g. 'out/*.csv'; repeatable"),
    ] = ()
    """Patterns of the result files that are collected when the program has ended."""
    application: Annotated[Name, Field("application name, for learned run times; default: the program's name")] = ""
    """Name under which run times are compared and learned."""
    communication: Annotated[RunTimeShare | None, Field("share of communication in the run time, 0 to 1")] = None
    """Declared share of communication in the program's run time on one cluster."""
    per_node_bandwidth: Annotated[
        PerNodeBandwidth | None, Field("bytes per second that each node exchanges with all others, e.g. 100MB")
    ] = None
    """Bytes per second between each of its nodes and all others; None: unknown."""
    memory: Annotated[NodeMemory | None, Field("minimum memory of each node, e.g. 16GB")] = None
    cores: Annotated[NodeCores | None, Field("minimum cores of each node")] = None
    gpus: Annotated[Gpus | None, Field("minimum GPUs of each node: a number, or a100:2")] = None
    features: Annotated[NodeFeatures, Field("feature that each node must have; repeatable", "--feature")] = ()
    partition: Annotated[OptionalNodeWord, Field("partition of Slurm, or queue of Grid Engine, with the nodes")] = ""
    account: Annotated[OptionalNodeWord, Field("account that the resource managers charge; default: the site's")] = ""
    qos: Annotated[OptionalNodeWord, Field("quality of service of Slurm; default: the site's")] = ""
    exclude: Annotated[Excluded, Field("cluster or node not to use, e.g. north or n[1-3]; repeatable")] = ()
    """Names of clusters, and of nodes on any cluster."""
    array: Annotated[
        TaskIndices | None, Field("run a task for each index: 1-200, 0-100:5 or 3,7,9; 1-200%16: at most 16 at once")
    ] = None
    each_line: Annotated[Lines, Field("run a task for each line of this file, in KOALA_ARRAY_LINE")] = ()
    """The task with index 1 gets the first line. With ``array``, only the lines of its indices."""
    array_fail: Annotated[ArrayFail, Field("after the first failed task of an array; default: continue")] = (
        ArrayFail.CONTINUE
    )
    interactive: bool = False
    """Whether the program reads the standard input of a client, as with ``koala run``. The job is cancelled when no
    client has been connected to its input for a minute."""
    after: Annotated[
        Dependencies,
        Field("start after other jobs: JOB[:ok|failed|any]; A,B for both, A?B for one of them; repeatable", "--after"),
    ] = NO_DEPENDENCIES
    """The jobs that must end before this one may start."""
    begin: Annotated[
        PointInTime | None, Field("start not before this time: 16:00, tomorrow, 2026-12-01T16:00, now+1h")
    ] = None
    """Time before which the job is not placed."""
    deadline: Annotated[PointInTime | None, Field("time by which the job must have ended; same forms as --begin")] = (
        None
    )
    """Time at which the job is ended. It fails earlier if it can no longer run for its walltime until then."""
    reservation: Annotated[Name, Field("run on the nodes of this reservation: koala reserve list")] = ""
    """Name of a reservation, which gives the job all of its nodes."""
    script: Script = ""
    """Text of a script that runs once, on the head node, in place of the command on every node. ``command`` is its name
    and its arguments."""
    mail_type: Annotated[
        tuple[MailType, ...], Length(10), Field("event to notify about: begin, end, fail or waiting; repeatable")
    ] = ()
    """Events that cause notifications by mail and webhook; by default the end of the job."""
    mail_user: Annotated[Name, Field("mail address to notify")] = ""
    webhook: Annotated[str, Length(MAX_URL_LENGTH, one_line=True), Field("URL to notify")] = ""
    links: Annotated[LinkUse, Field("paths of MPI messages between clusters; default: any")] = LinkUse.ANY
    """Direct links, relayed links, or direct ones where the nodes reach each other and relayed ones elsewhere."""
    internal: Annotated[bool, Field(is_settable=False)] = False
    """Whether it is the daemon's own job, such as a network measurement, which is excluded from statistics of users'
    jobs."""

    def with_fields(self, **changes: Any) -> "JobSpec":
        """Return a copy with other values of some fields. ``dataclasses.replace`` takes three times as long."""
        values = list(_VALUES(self))
        for name, value in changes.items():
            values[_PLACES[name]] = value
        return JobSpec(*values)

    def inputs_of(self, request_index: int | None) -> tuple[InputFile, ...]:
        """Return the inputs of a component."""
        component = self.component(request_index)
        return component.inputs if component else self.inputs

    @property
    def all_inputs(self) -> tuple[InputFile, ...]:
        """Return the inputs of all components."""
        components = () if isinstance(self.request, FlexibleRequest) else self.request.components
        return (*self.inputs, *(file for component in components for file in component.inputs))

    def has_stage(self, request_index: int | None) -> bool:
        """Return whether a component needs its own folder, for files that are transferred to it or collected from
        it."""
        return bool(self.bundle or self.collect or self.result_inputs or self.inputs_of(request_index))

    def node_requirement(self, request_index: int | None) -> NodeRequirement | None:
        """Return what each node of a component must have, and its account; None if nothing is required."""
        requirements = self._find_requirements()
        if not requirements:
            return None
        return requirements[0 if request_index is None or len(requirements) == 1 else request_index + 1]

    def _find_requirements(self) -> tuple[NodeRequirement | None, ...]:
        """Return the requirement of the job, then that of each component; empty if nothing is required.

        It is computed once, since the scheduler asks for it several times for each placement.
        """
        try:
            return self._requirements
        except AttributeError:
            components = () if isinstance(self.request, FlexibleRequest) else self.request.components
            requirements: tuple[NodeRequirement | None, ...] = ()
            # Rare, and tested fast.
            if self.cpus_per_rank or has_requirement(self) or any(map(has_requirement, components)):
                requirements = tuple(map(self._requirement_of, (None, *components)))
                requirements = requirements if any(requirements) else ()
            object.__setattr__(self, "_requirements", requirements)
            return requirements

    def _requirement_of(self, component: ComponentRequest | None) -> NodeRequirement | None:
        requirement = combine_requirements(self, component)
        cores = max(self.cores_of_ranks, (requirement and requirement.cores) or 0)
        if not cores:
            return requirement
        return replace(requirement or NO_REQUIREMENT, cores=cores, share=self.share)

    @property
    def cores_of_ranks(self) -> int:
        """Return how many processors the ranks of a node request together; 0 if they request none.

        Without ``processes_per_node`` a site has as many ranks as fit, but at least one.
        """
        return (self.cpus_per_rank or 0) * (self.processes_per_node or 1)

    def ranks_per_node(self, default: int, request_index: int | None = None) -> int:
        """Return the MPI processes on each node of a component.

        ``default``: the number at its site for one processor each; a job that shares nodes has one for each of its
        cores.
        """
        if self.share and (requirement := self.node_requirement(request_index)) is not None:
            default = requirement.cores or default
        return self.processes_per_node or max(1, default // (self.cpus_per_rank or 1))

    @property
    def node_requirements(self) -> tuple[NodeRequirement | None, ...]:
        """Return what decides which nodes serve each component: one entry if that is the same for all, none if all
        nodes serve."""
        all_requirements = self._find_requirements()
        if not all_requirements:
            return ()
        requirements = all_requirements[1:] or all_requirements
        parts = tuple(requirement and requirement.matching_part for requirement in requirements)
        if len(set(parts)) > 1:
            return parts
        return () if parts[0] is None else parts[:1]

    def output_files(self, request_index: int | None) -> tuple[FileName | None, FileName | None]:
        """Return the files for the output and for the error stream of a component."""
        component = self.component(request_index)
        return (component and component.output) or self.output, (component and component.error) or self.error

    def separates_streams(self, request_index: int | None) -> bool:
        """Return whether the error stream of a component is kept apart from its output."""
        return self.interactive or self.label or bool(self.output_files(request_index)[1])

    def component(self, request_index: int | None) -> ComponentRequest | None:
        """Return the request of a component by its index; None for a flexible request or without an index.

        Also None if only an earlier attempt, before a change of the request, had so many components.
        """
        if request_index is None or isinstance(self.request, FlexibleRequest):
            return None
        if request_index >= len(self.request.components):
            return None
        return self.request.components[request_index]


CHANGEABLE_FIELDS = (
    "request",
    "policy",
    "policy_options",
    "coallocation",
    "speed_ratio_min",
    "priority",
    "processes_per_node",
    "links",
)
"""The fields that may change while a job waits: they decide where it may be placed, not what it runs."""


def describe_changes(old: JobSpec, new: JobSpec) -> str:
    """Return what differs in ``CHANGEABLE_FIELDS``, as text: ``priority low to high``. Empty if nothing does."""
    texts = []
    for name in CHANGEABLE_FIELDS:
        old_value, new_value = getattr(old, name), getattr(new, name)
        if old_value != new_value:
            texts.append(f"{name} {_format_value(old_value)} to {_format_value(new_value)}")
    return ", ".join(texts)


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{name}={text}" for name, text in value) or "none"
    return format_request(value) if hasattr(value, "total_size") else "default" if value is None else str(value)


_VALUES = attrgetter(*(field.name for field in fields(JobSpec)))
_PLACES = {field.name: place for place, field in enumerate(fields(JobSpec))}


SET_BY_RUNNERS = (
    "ARRAY_COUNT",
    "ARRAY_INDEX",
    "ARRAY_JOB",
    "ARRAY_LINE",
    "CLUSTER",
    "CLUSTER_INDEX",
    "CLUSTER_LIST",
    "CLUSTER_NODES",
    "COMPONENT",
    "COMPONENT_NODES",
    "COMPONENT_TOKEN",
    "CONTAINER_RUNTIME",
    "GENERATION",
    "HEAD_HOST",
    "HEAD_PORT",
    "HOST",
    "HOSTFILE",
    "HOSTS",
    "JOB",
    "JOB_ID",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "MPIRUN",
    "MPI_INTERFACE",
    "MPI_PARAMETERS",
    "MPI_PORTS",
    "MPI_PREFIX",
    "MPI_SERIES",
    "NODE",
    "NODELIST",
    "NODES",
    "NODE_INDEX",
    "PPN",
    "RANK",
    "SIZE",
    "SLOTS",
    "STAGE",
)
"""Variables that runners set or read on each node and programs inherit."""
OF_RUNNERS = ("AGENT_FILE", "COMPONENT_NAME", "LEASE", "LRM_PIPE", "SECRET_PIPE", "SPOOL")
"""Variables that runners read and programs do not inherit."""


class OutputStream(StrEnum):
    OUTPUT = "output"
    ERROR = "error"
    MARKED = "marked"
    """Both, in order, with marks by which a client divides them."""


PATTERNS = {
    "j": "the job's id",
    "A": "the array's id",
    "a": "its index in the array",
    "c": "the cluster",
    "N": "the node",
    "r": "the rank",
    "x": "the job's name",
    "%": "a percent sign",
}
"""Meanings of the letters that may follow ``%``."""
_PATTERN = re.compile("%(.?)", re.DOTALL)
_NOT_IN_NAME = re.compile(r"[^\w.+=@-]")


def describe_patterns() -> str:
    """Return the patterns with their meanings, for a hint."""
    return ", ".join(f"%{letter} for {meaning}" for letter, meaning in PATTERNS.items())


def find_unknown_pattern(name: str) -> str:
    """Return the first pattern in a file name that has no meaning; empty if all have one."""
    return next((match[0] for match in _PATTERN.finditer(name) if match[1] not in PATTERNS), "")


def escape_percent(text: str) -> str:
    """Return a text in the form that yields it as part of a pattern."""
    return text.replace("%", "%%")


def fill_pattern(name: str, values: Mapping[str, str]) -> str:
    """Replace the patterns with a letter in ``values``. ``%N``, ``%r`` and ``%%`` stay, since a runner replaces them.

    Characters that are special in file names or shells become ``_``, so that a value is a part of one name.
    """
    return _PATTERN.sub(lambda match: _NOT_IN_NAME.sub("_", values[match[1]]) if match[1] in values else match[0], name)
