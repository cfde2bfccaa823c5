"""What it costs to hold nodes for a job that cannot start yet, against what it costs to let them go.

Both prices are node-seconds, so that they can be compared. What is held is lost to others, as far as these have use for
it: a job that waits, or a local user. What is let go may be gone when the job could start, and all of its nodes
start later then. Nodes that nobody else wants are held for nothing, and who would lose nothing lets go. Times in
seconds.
"""

from dataclasses import dataclass

from koalapy.model.wording import nodes, three_digits


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be expected of a job that cannot start at this moment."""

    held: int
    """The nodes that it would hold."""
    seconds: float
    """For how long: until this is looked at again, or a runner has broken."""
    wanted: float
    """How much others want each of them: the chance that somebody has use for it, or how many wait for it."""
    width: int
    """All nodes of the job."""
    later: float
    """Seconds by which it starts later if it lets go, on average."""

    @property
    def holding(self) -> float:
        """Node-seconds that others lose."""
        return self.held * self.seconds * self.wanted

    @property
    def letting_go(self) -> float:
        """Node-seconds that the job loses."""
        return self.width * self.later

    @property
    def holds(self) -> bool:
        """Whether to hold them: never for nothing."""
        return self.holding < self.letting_go

    def __str__(self) -> str:
        return (
            f"to hold {nodes(self.held)} for {three_digits(self.seconds)} s costs {_node_seconds(self.holding)} "
            f"(others want them: {self.wanted:.0%}), to let go {_node_seconds(self.letting_go)} "
            f"({nodes(self.width)} start {three_digits(self.later)} s later on average)"
        )


def waited_for(held: int, asked_for: float, total: int) -> float:
    """How much those who wait want each of the nodes that are held, of a grid with so many in ``total``.

    If they ask for fewer, only so many are wanted; if for more, each is. If they ask for more than the whole grid has,
    one waits for the other, and what is held has all of them start later: as many times as they would fill the grid.
    """
    return min(asked_for / max(1, held), max(1.0, asked_for / max(1, total)))


def later_after_another_try(start: float, lost: float, again: float, breaks: float, seconds: float) -> float:
    """Seconds by which a job starts later, on average, if it lets go and is claimed for again after so many seconds.

    With a chance of ``start`` it would have started; then what it let go is ``lost`` with another, and it queues again,
    which takes it ``again`` seconds. And a runner that ``breaks`` does so later.
    """
    return start * lost * again + breaks * seconds


def later_from_the_queue(start: float, again: float, seconds: float) -> float:
    """Seconds by which a job starts later, on average, if it queues again, rather than to wait so many seconds longer,
    after which it starts with a chance of ``start``, and else queues again all the same."""
    return max(0.0, start * again - seconds)


def _node_seconds(amount: float) -> str:
    return f"{three_digits(amount)} node-seconds"
