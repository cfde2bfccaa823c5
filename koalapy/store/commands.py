"""The outbox in SQL: commands, and the plans that all commands of an attempt refer to."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from koalapy.model.job import JobId
from koalapy.ports import Batch, OutboxEntry
from koalapy.protocol.frames import PLAN, Plan
from koalapy.store.database import upsert
from koalapy.store.tables import outbox, plans

PlanKey = tuple[JobId, int]


class PlansInUse:
    """An index of unacknowledged commands by the plan, a job's nodes and programs, that they contain."""

    def __init__(self, entries: Iterable[OutboxEntry] = ()) -> None:
        self._plan_of: dict[int, PlanKey] = {}
        self._commands: dict[PlanKey, set[int]] = defaultdict(set)
        self._add_entries(entries)

    def note(self, batch: Batch) -> None:
        """Update the index from a batch that was stored."""
        self._add_entries(batch.outbox)
        for ident in batch.acknowledged:
            key = self._plan_of.pop(ident, None)
            if key is not None:
                self._commands[key].discard(ident)
                if not self._commands[key]:
                    del self._commands[key]

    def unused_after(self, batch: Batch) -> list[PlanKey]:
        """Return the plans that no command needs any more after a batch is stored."""
        acknowledged = set(batch.acknowledged)
        keys = {key for ident in acknowledged if (key := self._plan_of.get(ident)) is not None}
        added = {plan.key for entry in batch.outbox if (plan := _plan_of(entry)) is not None}
        return [key for key in keys - added if self._commands[key] <= acknowledged]

    def _add_entries(self, entries: Iterable[OutboxEntry]) -> None:
        for entry in entries:
            if (plan := _plan_of(entry)) is not None:
                self._plan_of[entry.id] = plan.key
                self._commands[plan.key].add(entry.id)


def write_commands(connection: Connection, batch: Batch) -> None:
    """Store the commands of a batch, and each plan once."""
    if not batch.outbox:
        return
    new_plans = {plan.key: plan for entry in batch.outbox if (plan := _plan_of(entry)) is not None}
    texts = [{"job_id": plan.job, "generation": plan.generation, "text": plan.text} for plan in new_plans.values()]
    upsert(connection, plans, texts)
    rows = [
        {"id": e.id, "cluster": e.cluster, "payload": _stored_payload(e), "written_at": batch.at} for e in batch.outbox
    ]
    connection.execute(insert(outbox), rows)


def remove_plans(connection: Connection, keys: Iterable[PlanKey]) -> None:
    for job, generation in keys:
        connection.execute(delete(plans).where(plans.c.job_id == job, plans.c.generation == generation))


def commands_of(connection: Connection, rows: Iterable[Mapping[Any, Any]]) -> tuple[OutboxEntry, ...]:
    """Return the commands of outbox rows, with their plans.

    Skip a command without its plan, since it can start nothing; the attempt of its component then ends by its deadline.
    """
    by_key = {
        (row.job_id, row.generation): Plan(row.job_id, row.generation, row.text)
        for row in connection.execute(select(plans))
    }
    commands = []
    for row in rows:
        payload = row["payload"]
        if PLAN in payload:
            plan = by_key.get(tuple(payload[PLAN]))
            if plan is None:
                continue
            payload = payload | {PLAN: plan}
        commands.append(OutboxEntry(row["id"], row["cluster"], payload))
    return tuple(commands)


def _plan_of(entry: OutboxEntry) -> Plan | None:
    plan = entry.payload.get(PLAN)
    return plan if isinstance(plan, Plan) else None


def _stored_payload(entry: OutboxEntry) -> dict[str, Any]:
    plan = _plan_of(entry)
    return entry.payload if plan is None else entry.payload | {PLAN: list(plan.key)}
