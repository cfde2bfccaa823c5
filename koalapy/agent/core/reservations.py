"""Answer the daemon's questions about reserved nodes: reserve, release, list."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator

from koalapy.agent.accounts import Accounts
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.lrm.port import JOB_PREFIX, RESERVATION_NAME, Lrm, ReservationOrder
from koalapy.model.bounds import MAX_NODES, Name
from koalapy.model.errors import SiteRejected
from koalapy.model.reports import LrmOperation
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

MAX_ACCOUNTS = 100
MAX_TIME_S = 4e9
"""In the year 2096: resource managers have 32 bits for a time."""
Time = Annotated[float, Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)]


class NamedOrder(BaseModel):
    """An order for the reservation of this name, which goes onto command lines."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=f"^{RESERVATION_NAME.pattern}$")]


class ReserveOrder(NamedOrder):
    """Reserve whole nodes for jobs of the ``accounts``, which are those of ``Submit.local_user``."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    begins: Time
    ends: Time
    accounts: Annotated[list[Name], Field(min_length=1, max_length=MAX_ACCOUNTS)]

    @model_validator(mode="after")
    def _check_times(self) -> "ReserveOrder":
        if self.ends <= self.begins:
            raise ValueError(f"ends is {self.ends:g}, which is not after begins")
        return self


class ListOrder(BaseModel):
    """List the reservations of one daemon, by the prefix of their names."""

    model_config = ConfigDict(strict=True)

    prefix: Annotated[str, Field(pattern=f"^{JOB_PREFIX}[0-9a-f]{{12}}-$")]


class Reservations:
    """Answers the questions ``reserve``, ``unreserve`` and ``reservations``. They raise ``SiteError``.

    The resource manager keeps the reservations, and the daemon knows which it wants. One call runs at a time, so that
    a repeated question finds the reservation that the first one made.
    """

    def __init__(self, lrm: Lrm, monitor: LrmMonitor, accounts: Accounts, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lrm, self._monitor, self._accounts, self._clock = lrm, monitor, accounts, clock
        self._lock = asyncio.Lock()

    async def reserve_nodes(self, payload: Mapping[str, Any]) -> Mapping[str, object]:
        """Reserve nodes as the payload says (``ReserveOrder``); return their names."""
        order = ReserveOrder.model_validate(payload)
        if order.ends <= (now := self._clock.now()):
            hint = "compare the clocks of the daemon and of this host"
            raise SiteRejected(f"by the clock of this host it would have ended {now - order.ends:.0f} s ago", hint=hint)
        accounts = dict.fromkeys(self._accounts.account_for(local_user) for local_user in order.accounts)
        for account in accounts:
            self._accounts.admit(account)
            if account:
                await self._accounts.find_account(account)
        reservation = ReservationOrder(order.name, order.nodes, order.begins, order.ends, tuple(accounts))
        async with self._lock:
            nodes = await self._monitor.call_lrm(LrmOperation.RESERVE, self._lrm.reserve_nodes(reservation))
        log.info("nodes reserved", action="nodes-reserved", name=order.name, nodes=len(nodes))
        self._monitor.request_poll()
        return {"nodes": list(nodes)}

    async def release_reservation(self, payload: Mapping[str, Any]) -> Mapping[str, object]:
        """End the reservation that the payload names (``NamedOrder``), if it exists."""
        order = NamedOrder.model_validate(payload)
        async with self._lock:
            await self._monitor.call_lrm(LrmOperation.RESERVE, self._lrm.release_reservation(order.name))
        log.info("reservation released", action="reservation-released", name=order.name)
        self._monitor.request_poll()
        return {}

    async def list_reservations(self, payload: Mapping[str, Any]) -> Mapping[str, object]:
        """Return the names of the reservations that the payload selects (``ListOrder``)."""
        order = ListOrder.model_validate(payload)
        async with self._lock:
            names = await self._monitor.call_lrm(LrmOperation.RESERVE, self._lrm.list_reservations(order.prefix))
        return {"names": [name for name in names if name.startswith(order.prefix)]}
