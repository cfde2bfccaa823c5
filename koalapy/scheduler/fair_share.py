"""Fair share: the order of users with waiting jobs by their use of nodes, compared with their weights.

Use is counted in node-seconds and decays with a half-life, as in Slurm's classic fair-share factor. Groups with a
weight share the grid first, then the members of each share what the group has.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from koalapy.model.job import Attempt, Job, JobId, JobState
from koalapy.model.limits import Charge, FairShareSettings, NodeUse, ScopeKey, ShareLine
from koalapy.model.reservation import Reservation, ReservationState

LOOKAHEAD_S = 3600.0
"""Seconds that a job is charged in advance: jobs that start at the same time share the nodes by weight, too."""
CHARGED_HALF_LIVES = 10
"""Older use is not charged at the start of a daemon: less than a thousandth of it is left."""

Standing = tuple[float, float]
"""The use of a user's group divided by its weight, and that of the user. The smallest comes first."""
FRONT: Standing = (-1.0, -1.0)
"""Before all users."""


@dataclass(slots=True)
class Account:
    """The use of nodes by a user or by all members of a group."""

    weight: float
    past: float = 0.0
    """Node-seconds of ended attempts, decayed until ``at``."""
    at: float = 0.0
    nodes: float = 0.0
    """Nodes of live attempts; of shared nodes, the parts that they hold."""
    starts: float = 0.0
    """The sum of nodes times start over these attempts."""
    reserved: dict[int, Reservation] = field(default_factory=dict)
    """The advance reservations that are in force, by id."""

    def decay(self, now: float, half_life: float) -> float:
        """Return the decayed use by ended attempts. A clock that was set back takes nothing away."""
        return self.past * float(2.0 ** -(max(0.0, now - self.at) / half_life))

    def charge(self, node_seconds: float, time: float, half_life: float) -> None:
        """Add node-seconds that were used until ``time``."""
        if time < self.at:
            node_seconds *= 2.0 ** -((self.at - time) / half_life)
        else:
            self.past, self.at = self.decay(time, half_life), time
        self.past += node_seconds

    def ratio(self, now: float, half_life: float) -> float:
        """Return the use for each unit of weight; infinite for weight 0."""
        if not self.weight:
            return inf
        running = self.nodes * (now + LOOKAHEAD_S) - self.starts
        reserved = sum(reserved_until(reservation, now + LOOKAHEAD_S) for reservation in self.begun(now))
        return (self.decay(now, half_life) + running + reserved) / self.weight

    def begun(self, now: float) -> list[Reservation]:
        """Return the reservations that keep nodes now."""
        return [entry for entry in self.reserved.values() if entry.begins_at <= now < entry.ends_at]


def reserved_until(reservation: Reservation, time: float) -> float:
    """Return the node-seconds of a reservation from its begin to a time."""
    return reservation.nodes * max(0.0, min(time, reservation.ends_at) - reservation.begins_at)


def charged_nodes(attempt: Attempt) -> float:
    """Return the nodes of an attempt; of shared nodes, the parts that it holds."""
    return sum(component.size * component.node_part for component in attempt.gang)


class FairShares:
    """The use of all users and groups, from the jobs that start and end."""

    def __init__(
        self,
        settings: FairShareSettings | None = None,
        groups_of: Callable[[str], Sequence[str]] = lambda _: (),
        past: Iterable[Charge] = (),
    ) -> None:
        """``groups_of`` returns the groups of a user, of which the first with a weight counts; ``past``: the charged
        use of ended attempts."""
        self.settings, self._groups_of = settings or FairShareSettings(), groups_of
        self._half_life = self.settings.half_life
        self._accounts: dict[ScopeKey, Account] = {}
        self._chains: dict[str, tuple[ScopeKey, ...]] = {}
        """The group, if any, and the account of each user."""
        self._standings: dict[str, Standing] = {}
        """The standings at the time ``_as_of``."""
        self._as_of = 0.0
        self._live: dict[JobId, float] = {}
        """The nodes for which active jobs are charged."""
        self._ended_reservations: set[int] = set()
        for charge in past:
            for key in self._chain(charge.owner):
                self._accounts[key].charge(charge.node_seconds, charge.at, self._half_life)

    def _chain(self, owner: str) -> tuple[ScopeKey, ...]:
        chain = self._chains.get(owner)
        if chain is None:
            settings, user = self.settings, ("user", owner)
            group = next((("group", name) for name in self._groups_of(owner) if name in settings.groups), None)
            chain = self._chains[owner] = (user,) if group is None else (group, user)
            self._accounts.setdefault(user, Account(settings.users.get(owner, 1.0)))
            if group is not None:
                self._accounts.setdefault(group, Account(settings.groups[group[1]]))
        return chain

    def set_weight(self, user: str, weight: float) -> None:
        """Set the weight of a user, which counts from now on."""
        self.settings = replace(self.settings, users=self.settings.users | {user: weight})
        if ("user", user) in self._accounts:
            self._accounts["user", user].weight = weight
        self._standings.clear()

    def standing(self, owner: str, now: float) -> Standing:
        """Return the sort key of a user at a time in seconds: who used least for their weight comes first."""
        if now != self._as_of:
            self._standings.clear()
            self._as_of = now
        standing = self._standings.get(owner)
        if standing is None:
            ratios = [self._accounts[key].ratio(now, self._half_life) for key in self._chain(owner)]
            standing = self._standings[owner] = (ratios[0], ratios[-1])
        return standing

    def update(self, job: Job, was: JobState | None, used: Iterable[NodeUse]) -> None:
        """Count a job that has changed its state from ``was``; None: it is new. ``used``: the nodes that it had. An
        attempt that ends is charged with the node-seconds that it had, but not if the job returns to its queue or the
        infrastructure failed: that work was lost by no fault of the user. Jobs in a reservation are not charged, since
        its owner is."""
        is_active, was_active = job.state.is_active, was is not None and was.is_active
        attempt = job.attempt
        if is_active == was_active or attempt is None or job.spec.internal or job.spec.array is not None:
            return
        if job.spec.reservation:
            return
        sign, size = 1, charged_nodes(attempt)
        if is_active:
            self._live[job.id] = size
        else:
            sign, size = -1, self._live.pop(job.id, size)
        charged = 0.0
        if job.state.is_final and not any(component.infrastructure for component in attempt.components):
            charged = sum(use.nodes * use.part * (use.end - use.start) for use in used)
        for key in self._chain(job.spec.owner):
            account = self._accounts[key]
            account.nodes += sign * size
            account.starts += sign * size * attempt.placed_at
            if charged and job.ended_at is not None:
                account.charge(charged, job.ended_at, self._half_life)
        self._standings.clear()

    def store_reservation(self, reservation: Reservation) -> None:
        """Charge the owner of a reservation for its nodes from its begin to its end, whether jobs use them or not."""
        is_made = reservation.state is ReservationState.MADE
        if reservation.state.is_live is not is_made or reservation.id in self._ended_reservations:
            return
        for key in self._chain(reservation.owner):
            account = self._accounts[key]
            account.reserved.pop(reservation.id, None)
            if is_made:
                account.reserved[reservation.id] = reservation
            elif reservation.state is not ReservationState.FAILED:
                ended_at = min(reservation.changed_at, reservation.ends_at)
                account.charge(reserved_until(reservation, ended_at), ended_at, self._half_life)
        if not is_made:
            self._ended_reservations.add(reservation.id)
        self._standings.clear()

    def lines(self, now: float) -> Iterator[ShareLine]:
        """Yield the use and the target of each group and user, those that come first at the top."""
        owners = sorted(self._chains, key=lambda owner: (self.standing(owner, now), owner))
        uses = {key: account.decay(now, self._half_life) for key, account in self._accounts.items()}
        tops: dict[ScopeKey, list[ScopeKey]] = {}
        for top, *members in map(self._chain, owners):
            tops.setdefault(top, []).extend(members)
        total, weights = sum(uses[key] for key in tops), sum(self._accounts[key].weight for key in tops)
        for top, members in tops.items():
            target = self._accounts[top].weight / weights if weights else 0.0
            within = sum(self._accounts[key].weight for key in members)
            for key in (top, *members):
                account = self._accounts[key]
                part = target if key == top else target * account.weight / within if within else 0.0
                yield ShareLine(
                    user=key[1] if key[0] == "user" else "",
                    group=top[1] if top[0] == "group" else "",
                    weight=account.weight,
                    target=part,
                    share=uses[key] / total if total else 0.0,
                    node_hours=uses[key] / 3600.0,
                    nodes=ceil(round(account.nodes, 6)) + sum(reservation.nodes for reservation in account.begun(now)),
                )
