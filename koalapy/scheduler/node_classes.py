"""What is known of the kinds of nodes that one cluster has, and which of them were promised."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from koalapy.model.cluster import NodeClass, of_so_many
from koalapy.model.job import Token
from koalapy.model.reports import NodeClassReport


@dataclass(slots=True, eq=False)
class NodeClasses:
    """As a cluster's agent reported them; none of one whose nodes are all alike, or of an agent of before there were
    any."""

    _classes: tuple[NodeClass, ...] = ()
    _asked_for: dict[Token, str] = field(default_factory=dict)
    """The class that a component asks for, of those that ask for one."""

    def report(self, classes: tuple[NodeClassReport, ...], speed: float) -> None:
        """Take in what its agent says; ``speed`` is the power of those of which it says none."""
        known = {each.name: each for each in classes}.values()  # no two of one name, whatever an agent says
        self._classes = tuple(
            NodeClass(each.name, min(each.idle, each.total), each.power or speed, each.memory, each.total)
            for each in known
        )

    def promise(self, token: Token, name: str) -> None:
        """A component has asked for nodes of a class."""
        if name:
            self._asked_for[token] = name

    def release(self, token: Token) -> None:
        """A component has ended."""
        self._asked_for.pop(token, None)

    def asked_by(self, token: Token) -> str:
        """The class that a component asks for; empty: none."""
        return self._asked_for.get(token, "")

    def reported_idle(self, name: str) -> int:
        return sum(each.idle for each in self._classes if each.name == name)

    def idle(
        self, idle: int, awaiting: Mapping[Token, int], doubted: tuple[str, int] | None = None
    ) -> tuple[NodeClass, ...]:
        """The classes of so many idle nodes, less those that were promised to components that the report does not yet
        count, and those of a class that are ``doubted``. Who asked for no class is thought to get what resource
        managers give first."""
        if not self._classes:
            return ()
        promised = dict[str, int]((doubted,) if doubted else ())
        for token, name in self._asked_for.items():
            promised[name] = promised.get(name, 0) + awaiting.get(token, 0)
        left = tuple(
            replace(each, idle=max(0, each.idle - gone)) if (gone := promised.get(each.name, 0)) else each
            for each in self._classes
        )
        return of_so_many(left, idle)


def is_more(now: tuple[NodeClass, ...], before: tuple[NodeClass, ...]) -> bool:
    """Whether there are more nodes of some class, or of a better one."""
    known = {(each.name, each.power, each.memory): each.idle for each in before}
    return any(each.idle > known.get((each.name, each.power, each.memory), 0) for each in now)
