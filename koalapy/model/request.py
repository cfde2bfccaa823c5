"""Requests for nodes: fixed, non-fixed and flexible (semantics 2)."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal

from koalapy.model.field import Bounds, Field, Length, TextForm
from koalapy.model.node_requirement import Excluded, Gpus, NodeCores, NodeFeatures, NodeMemory, OptionalNodeWord
from koalapy.model.wording import format_list

MAX_COMPONENTS = 10_000
"""Maximum components of one job, whatever the configuration allows."""
MAX_WORDS = 10_000
"""Maximum words of a command, or variables of an environment."""
MAX_ENTRIES = 1000
"""Maximum inputs of a component, or patterns of result files."""
MAX_OPTIONS = 100
"""Maximum options of a policy, or options to split a request."""
MAX_NAME_LENGTH = 200
MAX_PATH_LENGTH = 4096
MAX_LOGICAL_NAME_LENGTH = 1000
MAX_CLUSTER_NAME_LENGTH = 100

Name = Annotated[str, Length(MAX_NAME_LENGTH, one_line=True)]
FileName = Annotated[str, Length(MAX_PATH_LENGTH)]
LogicalName = Annotated[str, Length(MAX_LOGICAL_NAME_LENGTH, minimum=1, one_line=True)]
ClusterName = Annotated[str, Length(MAX_CLUSTER_NAME_LENGTH, minimum=1)]
Command = Annotated[tuple[str, ...], Length(MAX_WORDS), TextForm("the program, then its arguments")]
"""A program and its arguments."""
OwnCommand = Annotated[tuple[str, ...], Length(MAX_WORDS, minimum=1), TextForm("the program, then its arguments")]
"""The command of one component."""
Environment = Annotated[tuple[tuple[str, str], ...], Length(MAX_WORDS), TextForm("variables and their values")]
"""Names and values, sorted by name."""
NodeCount = Annotated[int, Bounds(minimum=1, hint="ask for at least 1 node")]
Positive = Annotated[int, Bounds(minimum=1)]
NotNegative = Annotated[int, Bounds(minimum=0)]
Split = Annotated[tuple[NodeCount, ...], Length(MAX_COMPONENTS, minimum=1)]

MAX_GRACE = 86400
"""Maximum seconds of grace, whatever the configuration allows."""


class LinkUse(StrEnum):
    """The path of MPI messages between the nodes of two clusters."""

    ANY = "any"
    """Direct, or relayed if the nodes do not reach each other."""
    DIRECT = "direct"
    RELAYED = "relayed"


class WarningSignal(StrEnum):
    """Signals that a program can catch and that do not suspend it by default, since it could not end then."""

    TERM = "TERM"
    INT = "INT"
    HUP = "HUP"
    QUIT = "QUIT"
    USR1 = "USR1"
    USR2 = "USR2"
    ALRM = "ALRM"
    XCPU = "XCPU"
    CONT = "CONT"
    URG = "URG"
    WINCH = "WINCH"


@dataclass(frozen=True, slots=True)
class StopWarning:
    """A signal to all processes of a program, and their grace in seconds before the stop."""

    signal: WarningSignal
    grace: Annotated[float, Bounds(above=0, maximum=MAX_GRACE, hint=f"give more than 0 and up to {MAX_GRACE} seconds")]

    def __str__(self) -> str:
        return f"{self.signal}@{int(self.grace) if self.grace == int(self.grace) else self.grace}"


RequestType = Literal["fixed", "nonfixed", "flexible"]
Distribution = Literal["whole", "partitioned"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A logical file of the replica catalogue that a component needs before it can start (semantics 10).

    ``size`` (bytes that the component gets) and ``sites`` (clusters with a replica) are set at submission. Of a
    ``partitioned`` input, which is a folder, each component gets one entry, its ``part``.
    """

    name: Annotated[LogicalName, Field(json="file")]
    size: Annotated[int, Field(is_settable=False)] = 0
    sites: Annotated[tuple[ClusterName, ...], Field(is_settable=False)] = ()
    distribution: Distribution = "whole"
    part: FileName | None = None
    """Entry of the folder that this component gets."""
    target: Annotated[Name, Field(json="as")] = ""
    """File name in the component's folder; by default the last part of the logical name."""

    @property
    def file_name(self) -> str:
        return self.target or self.name.rstrip("/").rpartition("/")[2]


Inputs = Annotated[tuple[InputFile, ...], Length(MAX_ENTRIES)]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files of the submitter for every execution site: an archive in the daemon's store, identified by its SHA-256."""

    id: str
    size: int
    """Bytes of the archive."""
    files: int


@dataclass(frozen=True, slots=True)
class ComponentRequest:
    """A requested component: its size in nodes, and the settings that differ from those of the job."""

    size: NodeCount
    cluster: ClusterName | None = None
    command: OwnCommand | None = None
    environment: Environment = ()
    output: FileName | None = None
    error: FileName | None = None
    inputs: Inputs = ()
    cores: NodeCores | None = None
    memory: NodeMemory | None = None
    gpus: Gpus | None = None
    features: NodeFeatures = ()
    """Added to those of the job, as ``exclude`` is."""
    partition: OptionalNodeWord = ""
    account: OptionalNodeWord = ""
    qos: OptionalNodeWord = ""
    exclude: Excluded = ()


def has_settings(component: ComponentRequest) -> bool:
    """Return whether a component has settings other than its size and cluster."""
    return replace(component, size=1, cluster=None) != ComponentRequest(1)


Components = Annotated[tuple[ComponentRequest, ...], Length(MAX_COMPONENTS, minimum=1)]


@dataclass(frozen=True, slots=True)
class FixedRequest:
    """A request with sizes and clusters; the scheduler chooses only the time."""

    type: Literal["fixed"] = field(default="fixed", kw_only=True, repr=False)
    components: Components

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)


@dataclass(frozen=True, slots=True)
class NonFixedRequest:
    """A request with sizes; the scheduler chooses the cluster of each component."""

    type: Literal["nonfixed"] = field(default="nonfixed", kw_only=True, repr=False)
    components: Components

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)


@dataclass(frozen=True, slots=True)
class FlexibleRequest:
    """A request with a total size; the scheduler chooses components and clusters within the bounds.

    ``max_components=None`` allows as many components as there are usable clusters. Each of the ``split_options`` is
    tried in order as a non-fixed request.
    """

    type: Literal["flexible"] = field(default="flexible", kw_only=True, repr=False)
    total_size: NodeCount
    min_component_size: NodeCount = 1
    max_components: Annotated[int, Bounds(minimum=1, maximum=MAX_COMPONENTS)] | None = None
    split_options: Annotated[tuple[Split, ...], Length(MAX_OPTIONS)] = ()


Request = FixedRequest | NonFixedRequest | FlexibleRequest


def shape_of(request: Request) -> tuple[object, ...]:
    """Return the properties of a request that affect placement: requests with the same shape get the same result
    (semantics 4)."""
    if isinstance(request, FlexibleRequest):
        return (
            "flexible",
            request.total_size,
            request.min_component_size,
            request.max_components,
            request.split_options,
        )
    return (request.type, *((c.size, c.cluster, c.inputs) for c in request.components))


def format_request(request: Request) -> str:
    """Return a request as text: ``flexible 6 (max_components 2)``, ``nonfixed 4,2`` or ``fixed north:2,south:4``."""
    if not isinstance(request, FlexibleRequest):
        sizes = [f"{c.cluster}:{c.size}" if c.cluster else str(c.size) for c in request.components]
        return f"{request.type} {format_list(sizes, separator=',')}"
    bounds = []
    if request.min_component_size != 1:
        bounds.append(f"min_component_size {request.min_component_size}")
    if request.max_components is not None:
        bounds.append(f"max_components {request.max_components}")
    if request.split_options:
        bounds.append(f"split {format_list(['+'.join(map(str, option)) for option in request.split_options])}")
    return f"flexible {request.total_size}" + (f" ({format_list(bounds)})" if bounds else "")
