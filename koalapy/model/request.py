"""What a user asks for: fixed, non-fixed and flexible requests (semantics 2)."""

from dataclasses import dataclass
from typing import Literal

ClusterName = str
Environment = tuple[tuple[str, str], ...]
RequestType = Literal["fixed", "nonfixed", "flexible"]


Distribution = Literal["whole", "partitioned"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A logical file of the replica catalogue that a component needs before it can start (semantics 10).

    ``size`` in bytes of what the component gets, and ``sites``, the clusters that had a replica, are filled in when the
    job is submitted. Of a ``partitioned`` one, a folder, each component gets one entry, its ``part``.
    """

    name: str
    size: int = 0
    sites: tuple[ClusterName, ...] = ()
    distribution: Distribution = "whole"
    part: str | None = None
    """The entry of the folder that this component gets."""
    target: str = ""
    """What it is called in the component's folder; by default the last part of its logical name."""

    @property
    def file_name(self) -> str:
        return self.target or self.name.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files of the submitter for every execution site: an archive that the daemon keeps, named by its SHA-256."""

    id: str
    size: int
    """Bytes of the archive."""
    files: int


@dataclass(frozen=True, slots=True)
class ComponentRequest:
    """One component a user spelled out: its size in nodes, and what differs from the job's own program."""

    size: int
    cluster: ClusterName | None = None
    command: tuple[str, ...] | None = None
    environment: Environment = ()
    output: str | None = None
    inputs: tuple[InputFile, ...] = ()


@dataclass(frozen=True, slots=True)
class FixedRequest:
    """Sizes and clusters are given; the scheduler chooses only the moment."""

    components: tuple[ComponentRequest, ...]

    @property
    def type(self) -> RequestType:
        return "fixed"

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)


@dataclass(frozen=True, slots=True)
class NonFixedRequest:
    """Sizes are given; the scheduler chooses the cluster of each component."""

    components: tuple[ComponentRequest, ...]

    @property
    def type(self) -> RequestType:
        return "nonfixed"

    @property
    def total_size(self) -> int:
        return sum(c.size for c in self.components)


@dataclass(frozen=True, slots=True)
class FlexibleRequest:
    """Only the total is given; the scheduler chooses components and clusters within the bounds.

    ``max_components=None`` means as many as there are usable clusters. With ``split_options`` each option is tried
    in order as a non-fixed request.
    """

    total_size: int
    min_component_size: int = 1
    max_components: int | None = None
    split_options: tuple[tuple[int, ...], ...] = ()

    @property
    def type(self) -> RequestType:
        return "flexible"


Request = FixedRequest | NonFixedRequest | FlexibleRequest


def shape_of(request: Request) -> tuple[object, ...]:
    """What placement depends on: two requests of one shape are placed or refused alike (semantics 4)."""
    if isinstance(request, FlexibleRequest):
        return (
            "flexible",
            request.total_size,
            request.min_component_size,
            request.max_components,
            request.split_options,
        )
    return (request.type, *((c.size, c.cluster, c.inputs) for c in request.components))
