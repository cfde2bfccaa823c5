"""Watch the lease of another daemon on a PostgreSQL server, to take over once its holder has ended or hangs.

The holder keeps a lock in a separate session (``HolderSession``). The server drops it when the process ends.
"""

from dataclasses import dataclass

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text

from koalapy.model.errors import StoreUnavailable
from koalapy.store.database import IS_LOCKED, LEASE_SECONDS, may_live
from koalapy.store.engine import RETRY_HINT, make_engine, unavailable_is_known
from koalapy.store.opening import alembic_config
from koalapy.store.records import ClusterRecord
from koalapy.store.sql import cluster_from_row
from koalapy.store.tables import clusters, lease

MAX_GAP_S = 5.0
"""Seconds between two reads after which the time before counts for nothing: this process was stopped, or the database
did not answer, so that the holder could not renew its lease either."""
UNLOCKED_SECONDS = 15.0
"""Seconds in which a holder without a lock renews its lease, or it has ended. After a failover the lock exists again
once the holder has given up its connection to the lost server, which takes 10 s."""
# The columns are not named, since an earlier version, which serves during an upgrade, may have others.
_IS_READ_ONLY = "current_setting('transaction_read_only') = 'on' as is_read_only"
_READ_LEASE = text(f"select lease.*, {IS_LOCKED} as is_locked, {_IS_READ_ONLY} from lease")


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What the database says about the lease and its holder."""

    epoch: int
    batch: int
    holder: str
    """Host and process."""
    address: str
    """The URL at which the holder serves; empty if its version does not store it."""
    expires_at: float
    is_locked: bool
    """Whether the holder's session has its lock."""
    may_live: bool
    """Whether the holder may still run; False is known of processes on this machine only."""
    has_schema: bool
    """Whether the database has the tables of this version, so that jobs can be read."""
    clusters: tuple[ClusterRecord, ...] = ()

    @property
    def is_released(self) -> bool:
        return self.expires_at <= 0.0


NO_LEASE = LeaseState(0, 0, "", "", 0.0, is_locked=False, may_live=False, has_schema=False)
"""The state of a database that no daemon has used."""


class LeaseReader:
    """Reads the lease over one session, which blocks. Every failure is ``StoreUnavailable``."""

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url)
        self._connection: Connection | None = None
        self._head = ScriptDirectory.from_config(alembic_config()).get_current_head()

    def read(self) -> LeaseState:
        """Return the present state. After a failure the next call opens a new session."""
        try:
            with unavailable_is_known():
                if self._connection is None:
                    self._connection = self._engine.connect()
                    self._connection.execution_options(isolation_level="AUTOCOMMIT")
                return self._read_state(self._connection)
        except BaseException:
            self.close()
            raise

    def _read_state(self, connection: Connection) -> LeaseState:
        is_used = inspect(connection).has_table(lease.name)
        if not is_used or (row := connection.execute(_READ_LEASE).mappings().first()) is None:
            return NO_LEASE
        if row["is_read_only"]:  # so that the holder cannot renew its lease either, and no daemon can take it
            raise StoreUnavailable("the database accepts no changes: it is read-only", hint=RETRY_HINT)
        has_schema = MigrationContext.configure(connection).get_current_revision() == self._head
        records = connection.execute(select(clusters)).mappings().all() if has_schema else ()
        return LeaseState(
            row["epoch"],
            row["batch"],
            row["holder"].rsplit(":", 1)[0],
            row.get("address", ""),
            row["expires_at"],
            row["is_locked"],
            may_live(row["holder"]),
            has_schema,
            tuple(map(cluster_from_row, records)),
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None


class LeaseWatch:
    """Decides from repeated reads of the lease whether it may be taken. Clocks of other machines do not matter."""

    def __init__(self) -> None:
        self._last: LeaseState | None = None
        self._changed_at = self._read_at = 0.0
        self._was_locked = False

    def forget(self) -> None:
        """Begin anew after a failed read: a restarted server has dropped the lock of a holder that goes on."""
        self._last, self._was_locked = None, False

    def find_reason(self, state: LeaseState, now: float) -> str:
        """Return why the lease may be taken, as of the monotonic time ``now``; empty if its holder seems to live."""
        last, self._last = self._last, state
        has_gap, self._read_at = now - self._read_at > MAX_GAP_S, now
        if last is None or has_gap or (last.epoch, last.expires_at) != (state.epoch, state.expires_at):
            self._changed_at = now
        self._was_locked = state.is_locked or (self._was_locked and last is not None and last.epoch == state.epoch)
        if state.is_released:
            return "it was released"
        if self._was_locked and not state.is_locked:
            return "its session has ended"
        if not (state.may_live or state.is_locked):  # else it is a process of another container
            return "its process has ended"
        limit_s = LEASE_SECONDS if state.is_locked else UNLOCKED_SECONDS
        if now - self._changed_at >= limit_s:
            return f"it was not renewed for {limit_s:g} s"
        return ""
