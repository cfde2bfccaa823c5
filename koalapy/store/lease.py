"""One daemon at a time: a lease row with an epoch that rises with each new holder."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy import Connection, Engine, insert, inspect, select, update
from sqlalchemy.exc import IntegrityError

from koalapy.model.errors import ConflictError, LeaseLost, StoreUnavailable
from koalapy.store.engine import RESTART_HINT, unavailable_is_known
from koalapy.store.tables import lease

log = structlog.get_logger()

LEASE_SECONDS = 30.0
POLL_INTERVAL = 1.0
"""Seconds between two looks at a lease that is watched."""


class Lease:
    """Held by this process from the beginning to ``release``; every transaction that writes checks it."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        check_files: Callable[[], None] = lambda: None,
    ) -> None:
        """``check_files`` raises ``StoreUnavailable`` if what is written would be lost."""
        self._engine, self._clock, self._check_files = engine, clock, check_files
        self._batch = 0
        """The last batch that this process knows to be stored."""
        self._rising = 0
        """The epoch that is being taken, once it may be written."""
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{_boot_of(os.getpid())}"
        odd = self._try_to_acquire()
        if odd is not None:
            self._watch(odd, sleep)
            self._try_to_acquire(dead=odd)

    def _try_to_acquire(self, dead: float | None = None) -> float | None:
        try:
            return self._acquire(dead)
        except IntegrityError:  # another daemon has made the row just now
            return self._acquire(dead)

    def _acquire(self, dead: float | None) -> float | None:
        """Take the lease, or answer its expiry when that is later than any holder would have it by our clock; ``dead``
        is such an expiry of a holder that is known not to renew it. ``ConflictError`` when it is another's.
        """
        with self._engine.begin() as connection:
            row = connection.execute(select(lease).with_for_update()).mappings().first()
            now = self._clock()  # no earlier: whoever holds it may have renewed it while we came here
            if row is None:
                self.instance, self.epoch = uuid.uuid4().hex[:8], 1
                connection.execute(insert(lease).values(id=1, instance=self.instance, **self._mine(now)))
                return None
            expiry: float = row["expires_at"]
            if expiry > now and expiry != dead and _may_live(row["holder"]):
                if expiry > now + LEASE_SECONDS and dead is None:
                    return expiry
                raise _taken(row["holder"])
            self.instance, self.epoch = row["instance"], row["epoch"] + 1
            connection.execute(update(lease).values(**self._mine(now)))
            return None

    def _watch(self, expiry: float, sleep: Callable[[float], None]) -> None:
        """Its holder's clock was ahead of ours, so that only its renewals tell whether it lives: ``ConflictError``."""
        log.warning(
            "the lease ends too late by this machine's clock: it is watched", action="lease-watched", s=LEASE_SECONDS
        )
        for _ in range(int(LEASE_SECONDS / POLL_INTERVAL)):
            sleep(POLL_INTERVAL)
            with self._engine.connect() as connection:
                row = connection.execute(select(lease)).mappings().one()
            if row["expires_at"] != expiry:
                if row["expires_at"] == 0.0:
                    return  # let go
                raise _taken(row["holder"])

    def _mine(self, now: float) -> dict[str, object]:
        return {"epoch": self.epoch, "holder": self.holder, "expires_at": now + LEASE_SECONDS, "batch": 0}

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction of the holder's; ``LeaseLost`` and ``StoreUnavailable``."""
        with self._transaction() as connection:
            self._check(connection)
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Yield a connection, and commit to the files that were opened and still have their names."""
        self._check_files()
        with unavailable_is_known(), self._engine.begin() as connection:
            yield connection
        self._check_files()

    @contextmanager
    def writing_once(self, number: int) -> Iterator[Connection | None]:
        """A transaction that is made once, however often it is tried: None when it was made before.

        Numbers rise with each new one. The answer to a commit may be lost although it was carried out.
        """
        with self._transaction() as connection:
            done = self._check(connection, to_change=True)
            if done >= number:
                yield None
            else:
                connection.execute(update(lease).values(batch=number))
                yield connection
        self._batch = max(self._batch, number)

    def _check(self, connection: Connection, *, to_change: bool = False) -> int:
        """The last batch; ``LeaseLost`` when another daemon has a newer epoch.

        ``StoreUnavailable`` when the content is older than what was committed, as of a copy that was put in its place.
        None can take over before the transaction has ended: the row stays locked until then.
        """
        query = select(lease.c.epoch, lease.c.holder, lease.c.batch).with_for_update(read=not to_change)
        row = connection.execute(query).one()
        if row.epoch < self.epoch or (row.epoch == self.epoch and row.batch < self._batch):
            raise StoreUnavailable("an older copy was put in the database's place", hint=RESTART_HINT)
        if row.epoch != self.epoch and (row.epoch, row.holder) != (self._rising, self.holder):
            raise LeaseLost(f"epoch {row.epoch} has taken over from {self.epoch}")
        return int(row.batch)

    def raise_epoch(self, epoch: int) -> None:
        """Go on with a higher epoch; may be tried again when its fate is unknown. ``LeaseLost``."""
        self._rising = epoch
        with self.writing() as connection:
            connection.execute(update(lease).values(epoch=epoch))
        self.epoch = epoch

    def renew(self, now: float) -> None:
        with self._transaction() as connection:
            self._check(connection, to_change=True)
            connection.execute(update(lease).values(expires_at=now + LEASE_SECONDS))

    def release(self) -> None:
        """Let the next daemon start at once."""
        with self._transaction() as connection:
            connection.execute(update(lease).where(lease.c.epoch == self.epoch).values(expires_at=0.0))


def current_holder(engine: Engine, now: float) -> str:
    """Return the host and process that may hold a database's lease now, empty if none does or there is no lease."""
    with unavailable_is_known(), engine.connect() as connection:
        if not inspect(connection).has_table(lease.name):
            return ""
        row = connection.execute(select(lease.c.holder, lease.c.expires_at)).first()
    if row is None or row.expires_at <= now or not _may_live(row.holder):
        return ""
    return str(row.holder.rsplit(":", 1)[0])


def _taken(holder: str) -> ConflictError:
    return ConflictError(
        f"another daemon ({holder.rsplit(':', 1)[0]}) serves this database",
        hint="end it first, or give this one its own --data-dir",
    )


def _boot_of(pid: int) -> str:
    """When a process of this machine started, in clock ticks; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _may_live(holder: str) -> bool:
    """Whether the holder may still be running: only of a process of this machine can be known that it is not."""
    host, pid, boot = holder.rsplit(":", 2)
    return host != socket.gethostname() or _boot_of(int(pid)) == boot
