"""Where the replicas of files are: a value, as views of the grid keep it, of which another is made at little cost."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from koalapy.model.request import ClusterName

Sites = tuple[ClusterName, ...]


class ReplicaSites(Mapping[str, Sites]):
    """The clusters that have each logical file; empty of one that is nowhere.

    What changed lately lies over what was known before, which is not copied with each change: of n files the copying
    of one change takes as long as that of the square root of n, if all of them change in their turn.
    """

    __slots__ = ("_before", "_lately")

    def __init__(self, before: Mapping[str, Sites] | None = None, lately: Mapping[str, Sites] | None = None) -> None:
        """Neither is changed by anybody from now on."""
        self._before = before or {}
        self._lately = lately or {}

    def __getitem__(self, name: str) -> Sites:
        sites = self._lately.get(name)
        return self._before[name] if sites is None else sites

    def __contains__(self, name: object) -> bool:
        return name in self._lately or name in self._before

    def __iter__(self) -> Iterator[str]:
        return chain(self._before, (name for name in self._lately if name not in self._before))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def changed(self, sites: Mapping[str, Sites]) -> "ReplicaSites":
        """The same with these files where they are now."""
        lately = {**self._lately, **sites}
        if len(lately) ** 2 <= len(self._before):
            return ReplicaSites(self._before, lately)
        return ReplicaSites({**self._before, **lately})

    def without_gone(self, wanted: Collection[str]) -> "ReplicaSites":
        """The same without files that are nowhere, but for those that somebody wants."""
        return ReplicaSites({name: sites for name, sites in self.items() if sites or name in wanted})
