"""What each cluster means for a job that waits: what is idle there, who has the rest, and why that is not enough."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.explanation import ClusterFinding
from koalapy.model.job import JobId
from koalapy.model.moment import clock
from koalapy.model.placement import ClusterReason, Placement
from koalapy.model.request import ClusterName, FixedRequest, Request
from koalapy.model.wording import listed, nodes
from koalapy.scheduling.grid import ClusterBook


@dataclass(frozen=True, slots=True)
class Kept:
    """Nodes that are not offered to a job, by cluster, since they are kept for another one, if for any."""

    by: JobId | None
    nodes: Mapping[ClusterName, int]


def finding_of(
    book: ClusterBook, idle: int, *, gives: int = 0, reason: str = "", missing: int | None = None
) -> ClusterFinding:
    return ClusterFinding(
        book.name, book.state, book.total, idle, book.used, book.background, book.down, gives, reason, missing
    )


def findings(
    request: Request,
    books: Sequence[ClusterBook],
    view: GridView,
    placement: Placement | None,
    refused: Sequence[ClusterReason],
    kept: Kept,
    now: float,
) -> Iterator[ClusterFinding]:
    """Of every cluster that the request could have to do with; ``kept``: what is kept from it."""
    reasons = {reason.cluster: reason for reason in refused}
    named = {c.cluster for c in request.components} if isinstance(request, FixedRequest) else None
    for book in books:
        if named is not None and book.name not in named:
            continue
        seen = view.get(book.name)
        idle = seen.idle if seen is not None else 0
        gives = placement.nodes_on(book.name) if placement is not None else 0
        said = reasons.get(book.name)
        why = not_usable(book, now) or (said.reason if said is not None else "") or _when_placed(placement, gives)
        if book.is_open and (holders := _holders(book, idle, kept.by)):
            why = f"{why or f'{idle} of {book.total} nodes idle'} ({holders})"
        missing = said.missing if said is not None and book.is_open else None
        if missing is not None:
            missing = _more_idle(book, idle + missing + kept.nodes.get(book.name, 0))
        yield finding_of(book, idle, gives=gives, reason=why, missing=missing)


def _more_idle(book: ClusterBook, available: int) -> int | None:
    """How many more nodes would have to be idle for so many to be available; None where they cannot come: those that
    are idle already, kept for another job or in doubt, do not, and a limit stays."""
    more = available - book.surplus
    may_come = book.idle + more <= book.total and (book.limit is None or available < book.limit.size)
    return more if may_come else None


def not_usable(book: ClusterBook, now: float) -> str:
    """Why nothing is placed on a cluster, with since when; empty when it may be used."""
    if book.state is ClusterState.USABLE:
        return ""
    if book.drained is not None:
        return f"drained since {clock(book.drained.at, now)} {book.why}"
    if book.state is ClusterState.UNREACHABLE:
        since = "" if book.connected or book.last_heard is None else f" since {clock(book.last_heard, now)}"
        return f"unreachable{since}: {book.why}"
    if book.state is ClusterState.UNUSABLE:
        again = "" if book.probation_at is None else f"; to be tried again at {clock(book.probation_at, now)}"
        return f"{book.why}{again}"
    return book.why


def _when_placed(placement: Placement | None, gives: int) -> str:
    if placement is None:
        return ""
    return f"{nodes(gives)} would be taken here" if gives else "not needed"


def _holders(book: ClusterBook, idle: int, kept_for: JobId | None) -> str:
    """Who has the nodes that are not idle: ``local users have 2, our jobs 1, 1 is down``."""
    texts: list[str] = []
    for who, count in (("local users", book.background), ("our jobs", book.used)):
        if count:
            texts.append(f"{who} {'' if texts else 'have '}{count}")
    if book.down:
        texts.append(f"{book.down} {'is' if book.down == 1 else 'are'} down")
    texts += [f"{book.name} {each}" for each in (book.limit, book.doubt) if each is not None]
    texts += book.notices
    if idle < book.available and kept_for is not None:
        texts.append(f"{book.available - idle} kept for job {kept_for}")
    return ", ".join(texts)


def sufficient(found: Sequence[ClusterFinding]) -> list[str]:
    """What more idle nodes on one cluster would do, the fewest first."""
    lacking: list[tuple[int, ClusterName]] = [(f.missing, f.cluster) for f in found if f.missing]
    return [f"{nodes(count, 'more idle')} in {name}" for count, name in sorted(lacking)]


def listed_where(placement: Placement) -> str:
    """``north (4 nodes), south (2 nodes)``; components on one cluster together."""
    names = dict.fromkeys(component.cluster for component in placement.components)
    return listed([f"{name} ({nodes(placement.nodes_on(name))})" for name in names])
