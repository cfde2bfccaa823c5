"""Reserve nodes of Slurm by ``scontrol``, for jobs of some accounts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.port import JOB_PREFIX, Finding, ReservationOrder
from koalapy.agent.lrm.rejections import reservation_rejection
from koalapy.agent.lrm.slurm.commands import SlurmCommands, own_account
from koalapy.agent.lrm.slurm.limits import Reservation, read_reservations
from koalapy.agent.lrm.slurm.offer import SHOW_RESERVATIONS, Offer, option_value
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.model.wording import format_list

_DENIED = re.compile(r"permission|invalid user id|not authorized|operator|password", re.IGNORECASE)
_NO_NODES = re.compile(r"nodes are busy|node count|node configuration|node not available|many nodes", re.IGNORECASE)
"""Texts after which another partition may have the nodes."""
START_TIME_S = 20.0
"""Seconds in which a job in a reservation must start, so that it ends with it."""
_BUSY_HINT = "choose another time or fewer nodes: squeue and scontrol show reservation list what has them"


@dataclass(frozen=True, slots=True)
class SlurmReservations:
    """The reservations of a Slurm cluster. Methods raise ``SiteError``."""

    commands: SlurmCommands
    native_options: Sequence[str]
    """The configured options of jobs."""

    async def find_all(self) -> dict[str, Reservation]:
        """Return all reservations by name, also those of others. Raise ``SiteUnavailable`` if Slurm shows neither some
        nor that there is none: a missing one counts as removed."""
        text = (await self.commands.run_checked(*SHOW_RESERVATIONS)).text
        if not re.search(r"^(ReservationName=|No reservations in the system)", text, re.MULTILINE):
            raise SiteUnavailable(f"scontrol's answer is not about reservations: {text[:80]!r}")
        return read_reservations(text)

    async def create(self, order: ReservationOrder, offer: Offer, now: float) -> Sequence[str]:
        """Reserve nodes of the first partition that has enough, and return their names.

        If the reservation exists, return those it has.
        """
        if name := option_value(self.native_options, "--reservation"):
            raise SiteRejected(
                f"jobs of koalapy run in Slurm's reservation {name}, and Slurm reserves no nodes within a reservation",
                hint="leave the cluster out, or have --reservation removed from its native_specification",
            )
        if (existing := (await self.find_all()).get(order.name)) is not None:
            return await self._accept(existing, order, offer)
        begins = "now" if order.begins <= now else f"uts{math.floor(order.begins)}"
        fields = [f"StartTime={begins}", f"EndTime=uts{math.ceil(order.ends)}", f"NodeCnt={order.nodes}"]
        fields.append(f"Users={','.join(account or own_account() for account in order.accounts)}")
        if offer.constraint:
            fields.append(f"Features={offer.constraint}")
        rejection = SiteRejected(f"no partition is up in {offer.description}")
        for partition in (partition.name for partition in offer.partitions if partition.is_up):
            answer = await self._run_create(order.name, partition, *fields)
            try:
                if answer.code:
                    raise self._error(answer)
                if (created := (await self.find_all()).get(order.name)) is None:
                    raise SiteUnavailable(f"scontrol does not show the reservation {order.name}")
                return await self._accept(created, order, offer)
            except SiteRejected as error:
                rejection = error
                if not _NO_NODES.search(error.message):
                    break
        raise rejection

    async def longest_walltime(self, name: str, now: float) -> float:
        """Return the seconds in whole minutes that a job may run in a reservation, at least one minute.

        Slurm does not start a longer one on nodes that are reserved again later. Raise ``SiteRejected`` if there is no
        such reservation.
        """
        if (reservation := (await self.find_all()).get(name)) is None or reservation.ends_at is None:
            raise reservation_rejection(f"there is no reservation {name}", name)
        remaining_s = reservation.ends_at - max(now, reservation.begins_at or 0.0) - START_TIME_S
        return max(60.0, remaining_s // 60 * 60)

    async def delete(self, name: str) -> None:
        """Delete a reservation, if it exists. Raise ``SiteUnavailable`` while jobs use it."""
        answer = await self.commands.run("scontrol", "delete", f"ReservationName={name}")
        if answer.code and name in await self.find_all():
            if "in use" in (text := answer.error_text("scontrol")):
                raise SiteUnavailable(f"jobs use the reservation {name}: {text}", hint="it is released after their end")
            raise self._error(answer)

    async def check_right(self, offer: Offer) -> Finding:
        """Check whether the agent may reserve nodes, by a reservation in the past, which Slurm never makes."""
        fields = ("StartTime=uts1000000000", "EndTime=uts1000000060", "NodeCnt=1", f"Users={own_account()}")
        name, subject = f"{JOB_PREFIX}check", "reservations"
        try:
            answer = await self._run_create(name, offer.partitions[0].name, *fields)
        except SiteError as error:
            return Finding(subject, True, f"not possible: {error.message}", error.hint)
        if not answer.code:
            await self.commands.run("scontrol", "delete", f"ReservationName={name}")
        elif _DENIED.search(text := answer.error_text("scontrol")):
            return Finding(subject, True, f"not permitted, so no nodes are reserved: {text}", self._operator_hint)
        return Finding(subject, True, f"permitted to {own_account()}")

    async def _accept(self, reservation: Reservation, order: ReservationOrder, offer: Offer) -> Sequence[str]:
        """Return the nodes of a reservation. Delete it and raise ``SiteRejected`` if they are not as ordered.

        Slurm 22.05 makes one of fewer nodes if too few are free.
        """
        count, excluded = len(reservation.nodes), sorted(reservation.nodes & offer.excluded)
        if count >= order.nodes and not excluded:
            return sorted(reservation.nodes)
        await self.delete(order.name)
        if excluded:
            raise SiteRejected(
                f"Slurm reserved {format_list(excluded)}, which the cluster's native_specification excludes",
                hint="set the cluster's partition to one without them",
            )
        raise SiteRejected(f"Requested nodes are busy: {count} of {order.nodes} are free then", hint=_BUSY_HINT)

    async def _run_create(self, name: str, partition: str, *fields: str) -> CommandResult:
        arguments = ("create", "reservation", f"ReservationName={name}", *fields, f"PartitionName={partition}")
        return await self.commands.run("scontrol", *arguments)

    @property
    def _operator_hint(self) -> str:
        account = own_account()
        return f"sacctmgr modify user {account} set adminlevel=operator; see docs/clusters.md, Reserved nodes"

    def _error(self, answer: CommandResult) -> SiteRejected:
        """Return the rejection of a command about reservations, with a remedy."""
        text = f"scontrol: {answer.error_text('scontrol')}"
        return SiteRejected(text, hint=self._operator_hint if _DENIED.search(text) else _BUSY_HINT)
