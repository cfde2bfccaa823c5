"""One daemon at a time: a lease row with an epoch that rises with each new holder."""

import os
import socket
import uuid

from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import IntegrityError

from koalapy.model.errors import ConflictError, LeaseLost
from koalapy.store.tables import lease

LEASE_SECONDS = 30.0


class Lease:
    """Held by this process from ``acquire`` to ``release``; every transaction checks it."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{_boot_of(os.getpid())}"
        try:
            self._acquire(now)
        except IntegrityError:  # another daemon has made the row just now
            self._acquire(now)

    def _acquire(self, now: float) -> None:
        with self._engine.begin() as connection:
            row = connection.execute(select(lease).with_for_update()).mappings().first()
            if row is None:
                self.instance, self.epoch = uuid.uuid4().hex[:8], 1
                connection.execute(insert(lease).values(id=1, instance=self.instance, **self._mine(now)))
                return
            if row["expires_at"] > now and _may_live(row["holder"]):
                raise ConflictError(
                    f"another daemon ({row['holder'].rsplit(':', 1)[0]}) serves this database",
                    hint="end it first, or give this one its own --data-dir",
                )
            self.instance, self.epoch = row["instance"], row["epoch"] + 1
            connection.execute(update(lease).values(**self._mine(now)))

    def _mine(self, now: float) -> dict[str, object]:
        return {"epoch": self.epoch, "holder": self.holder, "expires_at": now + LEASE_SECONDS}

    def check(self, connection: Connection, *, to_change: bool = False) -> None:
        """``LeaseLost`` when another daemon has a newer epoch; to be called in each writing transaction.

        None can take over before the transaction has ended: the row stays locked until then.
        """
        epoch = connection.execute(select(lease.c.epoch).with_for_update(read=not to_change)).scalar_one()
        if epoch != self.epoch:
            raise LeaseLost(f"epoch {epoch} has taken over from {self.epoch}")

    def renew(self, now: float) -> None:
        with self._engine.begin() as connection:
            self.check(connection, to_change=True)
            connection.execute(update(lease).values(expires_at=now + LEASE_SECONDS))

    def release(self) -> None:
        """Let the next daemon start at once."""
        with self._engine.begin() as connection:
            connection.execute(update(lease).where(lease.c.epoch == self.epoch).values(expires_at=0.0))


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
