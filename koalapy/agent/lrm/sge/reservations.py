"""Reserve nodes of Grid Engine by ``qrsub``, for jobs of some accounts."""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.port import Finding, ReservationOrder
from koalapy.agent.lrm.sge.answers import AdvanceReservation, read_reservations
from koalapy.agent.lrm.sge.commands import Layout, SgeCommands
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.model.job_sizes import NodeReservation
from koalapy.model.reports import MAX_RESERVATIONS, ListedState

RESERVATIONS_MAX_AGE_S = 10.0
"""Age at which snapshots read the reservations again."""
_RIGHT_HINT = "qconf -au {} arusers; see docs/clusters.md, Reserved nodes"
_BUSY_HINT = "choose another time or fewer nodes: qstat and qrstat -u '*' list what has them"
_DENIED = re.compile(r"permission|not allowed|privileges|arusers", re.IGNORECASE)
_GRANTED = re.compile(r"advance reservation ([0-9]+) has been granted", re.IGNORECASE)


@dataclass(slots=True)
class SgeReservations:
    """The advance reservations of a Grid Engine cluster. Methods raise ``SiteError``."""

    commands: SgeCommands
    settings: SiteSettings
    account: str
    """That of the agent."""
    native_options: Sequence[str]
    """The configured options of jobs."""
    read_at: float = float("-inf")
    """When ``known`` was read, in monotonic seconds."""
    known: tuple[AdvanceReservation, ...] = ()
    _hosts: dict[str, frozenset[str]] = field(default_factory=dict)
    """The hosts of reservations by id, which never change."""

    async def find_all(self) -> tuple[AdvanceReservation, ...]:
        """Return all present and coming reservations, also those of others."""
        listed = read_reservations((await self.commands.run_checked("qrstat", "-u", "*", "-xml")).output)
        if new := [each.id for each in listed if each.id not in self._hosts]:
            details = (await self.commands.run_checked("qrstat", "-ar", ",".join(new), "-xml")).output
            self._hosts |= {each.id: each.hosts for each in read_reservations(details)}
        self._hosts = {each.id: self._hosts[each.id] for each in listed if each.id in self._hosts}
        self.known = tuple(replace(each, hosts=self._hosts.get(each.id, frozenset())) for each in listed)
        return self.known

    async def find(self, name: str) -> AdvanceReservation | None:
        """Return the reservation of that name; None if there is none."""
        return next((each for each in await self.find_all() if each.name == name), None)

    async def create(self, order: ReservationOrder, layout: Layout, now: float) -> Sequence[str]:
        """Reserve nodes and return their names; if the reservation exists, those it has."""
        if "-ar" in self.native_options:
            raise SiteRejected(
                "jobs of koalapy run in an advance reservation, and Grid Engine reserves no nodes within one",
                hint="leave the cluster out, or have -ar removed from its native_specification",
            )
        if (existing := await self.find(order.name)) is not None:
            return sorted(existing.hosts)
        words = ["-N", order.name, "-e", _format_time(order.ends)]
        if order.begins > now:
            words += ["-a", _format_time(order.begins)]
        words += ["-pe", self.settings.parallel_environment, str(order.nodes * layout.slots)]
        if self.settings.queue:
            words += ["-q", self.settings.queue]
        if any(order.accounts):  # else only the account that makes it may use it
            words += ["-u", ",".join(account or self.account for account in order.accounts)]
        words += [word for pair in pairwise(self.native_options) if pair[0] == "-l" for word in pair]
        answer = await self.commands.run("qrsub", *words)
        if answer.code or not _GRANTED.search(answer.text):
            raise self._error("qrsub", answer.error_text("qrsub"))
        if (made := await self.find(order.name)) is None:
            raise SiteUnavailable(f"qrstat does not show the reservation {order.name}")
        return sorted(made.hosts)

    async def delete(self, name: str, jobs: Collection[str]) -> None:
        """Delete a reservation, if it exists. Raise ``SiteUnavailable`` if one of the ``jobs``, by id, is in it."""
        if (reservation := await self.find(name)) is None:
            return
        if jobs:
            # Grid Engine ends the jobs of a reservation with it.
            description = (await self.commands.run("qstat", "-j", ",".join(sorted(jobs)))).text
            if re.search(rf"^ar_id:\s*{reservation.id}\s*$", description, re.MULTILINE):
                raise SiteUnavailable(f"jobs use the reservation {name}", hint="it is released after their end")
        answer = await self.commands.run("qrdel", reservation.id)
        if answer.code and await self.find(name) is not None:
            raise self._error("qrdel", answer.error_text("qrdel"))

    async def check_right(self) -> Finding:
        """Check whether the agent may reserve nodes, by Grid Engine's lists of accounts."""
        subject, right = "reservations", ""
        try:
            await self.commands.run_checked("qrstat", "-u", "*", "-xml")
            for option in ("-sm", "-so", "-su arusers"):
                answer = await self.commands.run("qconf", *option.split())
                if self.account in re.split(r"[\s,]+", answer.text):
                    right = option
        except SiteError as error:
            return Finding(subject, True, f"not possible: {error.message}", error.hint)
        if right:
            return Finding(subject, True, f"permitted to {self.account}")
        text = f"not permitted, so no nodes are reserved: {self.account} is not in the list arusers"
        return Finding(subject, True, text, _RIGHT_HINT.format(self.account))

    def _error(self, command: str, text: str) -> SiteRejected:
        """Return the rejection of a command about reservations, with a remedy."""
        hint = _RIGHT_HINT.format(self.account) if _DENIED.search(text) else _BUSY_HINT
        return SiteRejected(f"{command}: {text}", hint=hint)


def report_reservations(
    reservations: Sequence[AdvanceReservation], states: Mapping[str, ListedState]
) -> tuple[NodeReservation, ...]:
    """Return the reservations of some of a cluster's nodes, the earliest first."""
    reports = [
        NodeReservation(each.name or f"ar {each.id}", len(hosts), idle, each.begins, each.ends)
        for each in reservations
        if (hosts := each.hosts & states.keys())
        for idle in [sum(states[host] == "idle" for host in hosts)]
    ]
    return tuple(sorted(reports, key=lambda report: (report.begins, report.name))[:MAX_RESERVATIONS])


def _format_time(seconds: float) -> str:
    """Return a time as Grid Engine's commands read it, local and rounded to seconds."""
    return time.strftime("%Y%m%d%H%M.%S", time.localtime(round(seconds)))
