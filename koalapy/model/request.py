"""What a user asks for: fixed, non-fixed and flexible requests (semantics 2)."""

from dataclasses import dataclass
from typing import Literal

ClusterName = str
Environment = tuple[tuple[str, str], ...]
RequestType = Literal["fixed", "nonfixed", "flexible"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file a component needs before it can start: its size in bytes, and the clusters that have it (file sites)."""

    name: str
    size: int
    sites: tuple[ClusterName, ...]


@dataclass(frozen=True, slots=True)
class ComponentRequest:
    """One component a user spelled out: its size in nodes, and what differs from the job's own program."""

    size: int
    cluster: ClusterName | None = None
    command: tuple[str, ...] | None = None
    environment: Environment = ()
    output: str | None = None
    input: InputFile | None = None


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
    return (request.type, *((c.size, c.cluster, c.input) for c in request.components))
