"""The scheduler's book of each cluster: what it reported, what was promised since, how often it failed."""

from collections.abc import Iterable, Mapping

from koalapy.model.cluster import ClusterState, ClusterView, Drain, GridView, Link
from koalapy.model.job import Token
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ClusterName


class ClusterBook:
    """One cluster. Nodes are counted; which ones a component gets is the cluster's own business."""

    def __init__(self, name: ClusterName, speed: float = 1.0, profile: ClusterProfile | None = None) -> None:
        self.name = name
        self.speed = speed
        self.profile = profile or ClusterProfile()
        self.total = 0
        self.background = 0
        self.down = 0
        self.connected = False
        self.last_heard: float | None = None
        self.disconnected_because = "its agent has not connected yet"
        self.errors = 0
        self.unusable = False
        self.trials = 0
        """Probations that failed since it became unusable: each makes the next pause longer."""
        self.drained: Drain | None = None
        self.note = ""
        self.problem = ""
        """Why its agent cannot ask the resource manager; empty when it can."""
        self.live: dict[Token, int] = {}
        """Size in nodes of each component that may hold nodes here."""
        self.grew = False
        """Whether nodes became available here since the grid was last asked."""
        self._idle = 0
        self._holding: frozenset[Token] = frozenset()
        self._promised = 0

    def report(
        self, total: int, idle: int, background: int, down: int, holding: frozenset[Token], problem: str = ""
    ) -> None:  # fmt: skip
        before = self.available if not self.problem or problem else 0
        self.problem = problem
        self.total, self._idle, self.background, self.down = total, idle, background, down
        self._holding = holding
        self._promised = sum(size for token, size in self.live.items() if token not in holding)
        self.grew |= self.available > before

    def promise(self, token: Token, size: int) -> None:
        """Nodes are given to a component; they stop being available now, not when the cluster says so."""
        self.live[token] = size
        if token not in self._holding:
            self._promised += size

    def release(self, token: Token) -> None:
        """The component has ended; nodes that the last report counted as its own stay unavailable until the next."""
        before = self.available
        size = self.live.pop(token, 0)
        if token not in self._holding:
            self._promised -= size
        self.grew |= self.available > before

    @property
    def available(self) -> int:
        """Idle nodes as reported, less those promised to components that the report does not yet count."""
        return max(0, self._idle - self._promised)

    @property
    def reported_idle(self) -> int:
        return self._idle

    @property
    def used(self) -> int:
        """Nodes that components of ours have or were promised."""
        return sum(self.live.values())

    @property
    def state(self) -> ClusterState:
        if self.drained is not None:
            return ClusterState.DRAINED
        if not self.connected:
            return ClusterState.UNREACHABLE
        if self.unusable:
            return ClusterState.UNUSABLE
        return ClusterState.UNREACHABLE if self.problem else ClusterState.USABLE

    @property
    def why(self) -> str:
        """Why nothing is placed here, in the words an operator would use; empty when usable."""
        if self.drained is not None:
            by = f"by {self.drained.by}" if self.drained.by else "by an operator"
            return f"{by}: {self.drained.reason}" if self.drained.reason else by
        if not self.connected:
            return self.problem or self.disconnected_because
        return self.note if self.unusable else self.problem

    def view(self) -> ClusterView:
        return ClusterView(self.name, self.total, self.available, self.state, self.speed, self.why)


class GridBook:
    """All clusters by name, and the links between them."""

    def __init__(self, clusters: Iterable[ClusterBook], links: Mapping[tuple[str, str], Link] | None = None) -> None:
        self._books = {book.name: book for book in sorted(clusters, key=lambda b: b.name)}
        self._links = dict(links or {})

    def __getitem__(self, name: ClusterName) -> ClusterBook:
        return self._books[name]

    def __contains__(self, name: object) -> bool:
        return name in self._books

    def books(self) -> list[ClusterBook]:
        return list(self._books.values())

    def take_growth(self) -> bool:
        """Whether there may be more room anywhere than when this was last asked."""
        grown = [book for book in self._books.values() if book.grew]
        for book in grown:
            book.grew = False
        return bool(grown)

    def view(self) -> GridView:
        return GridView(tuple(book.view() for book in self._books.values()), self._links)
