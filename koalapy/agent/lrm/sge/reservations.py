"""Reserve nodes of Grid Engine by ``qrsub``, for jobs of some accounts."""

import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.port import JOB_PREFIX, Finding, ReservationOrder
from koalapy.agent.lrm.sge.answers import AdvanceReservation, read_listing, read_reservations
from koalapy.agent.lrm.sge.commands import Layout, SgeCommands
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable

RESERVATIONS_MAX_AGE_S = 10.0
"""Age at which snapshots read the reservations again."""
JOBS_PER_QUERY = 200
"""Jobs that one call of ``qstat -j`` describes."""
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
    _details: dict[str, AdvanceReservation] = field(default_factory=dict)
    """The reservations with their hosts and users, which never change, by id."""

    async def find_all(self) -> tuple[AdvanceReservation, ...]:
        """Return all present and coming reservations, also those of others."""
        listed = read_reservations((await self.commands.run_checked("qrstat", "-u", "*", "-xml")).output)
        if new := [ar.id for ar in listed if ar.id not in self._details]:
            details = (await self.commands.run_checked("qrstat", "-ar", ",".join(new), "-xml")).output
            self._details |= {ar.id: ar for ar in read_reservations(details)}
        self._details = {ar.id: self._details[ar.id] for ar in listed if ar.id in self._details}
        self.known = tuple(self._details.get(ar.id, ar) for ar in listed)
        return self.known

    async def find_own(self, prefix: str) -> Sequence[AdvanceReservation]:
        """Return the reservations that the agent's account made with a name that begins so. Others' are not ours."""
        return [ar for ar in await self.find_all() if ar.owner == self.account and ar.name.startswith(prefix)]

    async def find(self, name: str) -> AdvanceReservation | None:
        """Return the agent's reservation of that name; None if there is none."""
        return next((ar for ar in await self.find_own(name) if ar.name == name), None)

    def list_uses(self) -> Iterator[tuple[str, Collection[str], float, float]]:
        """Yield name, hosts, begin and end of the reservations that were read last.

        One of another account is named by its number if its name could be one of the daemon's.
        """
        for ar in self.known:
            is_ours = ar.owner == self.account or not ar.name.startswith(JOB_PREFIX)
            yield ar.name if ar.name and is_ours else f"ar {ar.id}", ar.hosts, ar.begins, ar.ends

    async def create(self, order: ReservationOrder, layout: Layout, now: float) -> Sequence[str]:
        """Reserve nodes and return their names; if the reservation exists, those it has."""
        if "-ar" in self.native_options:
            raise SiteRejected(
                "jobs of koalapy run in an advance reservation, and Grid Engine reserves no nodes within one",
                hint="leave the cluster out, or have -ar removed from its native_specification",
            )
        if (existing := await self.find(order.name)) is not None:
            return sorted(existing.hosts)
        arguments = ["-N", order.name, "-e", _format_time(order.ends)]
        if order.begins > now:
            arguments += ["-a", _format_time(order.begins)]
        arguments += ["-pe", self.settings.parallel_environment, str(order.nodes * layout.slots)]
        if self.settings.queue:
            arguments += ["-q", self.settings.queue]
        if any(order.accounts):  # else only the account that makes it may use it
            arguments += ["-u", ",".join(account or self.account for account in order.accounts)]
        arguments += [argument for pair in pairwise(self.native_options) if pair[0] == "-l" for argument in pair]
        answer = await self.commands.run("qrsub", *arguments)
        if answer.code or not _GRANTED.search(answer.text):
            raise self._error("qrsub", answer.error_text("qrsub"))
        if (reservation := await self.find(order.name)) is None:
            raise SiteUnavailable(f"qrstat does not show the reservation {order.name}")
        return sorted(reservation.hosts)

    async def delete(self, name: str) -> None:
        """Delete the agent's reservations of that name. Raise ``SiteUnavailable`` unless no job is seen to use one."""
        for reservation in [ar for ar in await self.find_own(name) if ar.name == name]:
            await self._check_unused(reservation)
            answer = await self.commands.run("qrdel", reservation.id)
            if answer.code and reservation.id in {ar.id for ar in await self.find_all()}:
                raise self._error("qrdel", answer.error_text("qrdel"))

    async def _check_unused(self, reservation: AdvanceReservation) -> None:
        """Raise ``SiteUnavailable`` unless Grid Engine shows that no job of any user is in a reservation.

        Grid Engine kills running jobs of a reservation with it, and removes waiting ones. Jobs that ``qstat`` does not
        find are missing in its answers without an error, so each answer is compared with another.
        """
        options = ("-f", "-g", "t", "-s", "prs", "-u", "*", "-xml")
        listing = read_listing((await self.commands.run_checked("qstat", *options)).output)
        by_host = {instance.host: instance for instance in listing.instances}
        used = {instance.host for instance in listing.instances if instance.used} & reservation.hosts
        is_whole = not listing.unreadable and reservation.hosts and reservation.hosts <= by_host.keys()
        if not is_whole or used - {host for job in listing.jobs for host in job.hosts}:
            raise self._unknown_use(reservation, "qstat does not show all its hosts with their jobs")
        users = reservation.users | {reservation.owner}
        jobs = sorted(
            job.id
            for job in listing.jobs
            if reservation.hosts.intersection(job.hosts) or (not job.hosts and job.owner in users)
        )
        for begin in range(0, len(jobs), JOBS_PER_QUERY):
            batch = jobs[begin : begin + JOBS_PER_QUERY]
            text = (await self.commands.run("qstat", "-j", ",".join(batch))).text
            if re.search(rf"^ar_id: +{reservation.id}\s*$", text, re.MULTILINE):
                hint = "it is released after their end"
                raise SiteUnavailable(f"jobs use the reservation {reservation.name}", hint=hint)
            if missing := set(batch).difference(re.findall(r"^job_number: +([0-9]+)", text, re.MULTILINE)):
                raise self._unknown_use(reservation, f"qstat does not describe job {min(missing)}")

    @staticmethod
    def _unknown_use(reservation: AdvanceReservation, problem: str) -> SiteUnavailable:
        text = f"whether jobs use the reservation {reservation.name} is not known: {problem}"
        return SiteUnavailable(text, hint="it is released once that is known; Grid Engine would kill its jobs with it")

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


def _format_time(seconds: float) -> str:
    """Return a time as Grid Engine's commands read it, local and rounded to seconds."""
    return time.strftime("%Y%m%d%H%M.%S", time.localtime(round(seconds)))
