"""The jobs a scheduler has in hand and the one way to change them: checked against the state machine, and noted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from koalapy.model.advice import Advised
from koalapy.model.errors import ConflictError
from koalapy.model.job import (
    TRANSITIONS,
    Attempt,
    Component,
    Job,
    JobId,
    JobState,
    Priority,
    TimelineEntry,
    Token,
    parse_token,
)
from koalapy.model.placement import RefusalKind
from koalapy.scheduling.effects import AttemptFailure, ClaimFailure, Command, Effects
from koalapy.scheduling.owner_use import OwnerUse


class Ledger:
    """Jobs that are not final, and the effects gathered since they were last taken."""

    def __init__(self, use: OwnerUse) -> None:
        """``use`` is told what owners have."""
        self.jobs: dict[JobId, Job] = {}
        self._use = use if use.counts else None
        self._effects = Effects()

    def take(self) -> Effects:
        effects, self._effects = self._effects, Effects()
        return effects

    def get(self, job: JobId) -> Job | None:
        return self.jobs.get(job)

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt that a token names, and its job."""
        return self._named(token, Job.component_of)

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt whose stage a token names, and its job."""
        return self._named(token, Job.staged_component_of)

    def _named(
        self, token: Token, component_of: Callable[[Job, Token], Component | None]
    ) -> tuple[Job, Component] | None:
        try:
            job = self.jobs.get(parse_token(token).job)
        except ValueError:
            return None
        component = component_of(job, token) if job is not None else None
        return (job, component) if job is not None and component is not None else None

    def restore(self, job: Job) -> None:
        """Take up a job of an earlier life."""
        self.jobs[job.id] = job
        if self._use is not None:
            self._use.changed(None, job)

    def put(self, job: Job) -> Job:
        """Keep a job as it is now; a final one leaves the ledger."""
        before = self.jobs.get(job.id)
        if before is not None and before.attempt is not None and before.generation != job.generation:
            self._effects.attempts.append((job.id, before.attempt))
        if self._use is not None:
            self._use.changed(before, job)
        if job.state.is_final:
            self.jobs.pop(job.id, None)
        else:
            self.jobs[job.id] = job
        self._effects.jobs[job.id] = job
        return job

    def change(self, job: Job, **changes: Any) -> Job:
        return self.put(replace(job, **changes))

    def move(
        self, job: Job, state: JobState, now: float, event: str, reason: str = "", *, by: str = "", **changes: Any
    ) -> Job:
        """Change the job's state, if the state machine allows it, with a timeline entry that says why."""
        if state not in TRANSITIONS[job.state]:
            raise ConflictError(f"job {job.id} cannot go from {job.state} to {state}")
        job = self.put(replace(job, state=state, reason=reason, **changes))
        self.note(job, now, event, reason, by=by)
        return job

    def note(
        self, job: Job, now: float, event: str, reason: str = "", component: Component | None = None, *, by: str = ""
    ) -> None:
        """Add a line to the job's timeline; ``by`` is the user whose doing it was, if it was one's."""
        index, cluster = (component.index, component.cluster) if component else (None, None)
        self._effects.timeline.append(
            TimelineEntry(job.id, now, event, job.state, reason, job.generation, index, cluster, by)
        )

    def update_component(self, job: Job, index: int, **changes: Any) -> Job:
        """Change one component of the live attempt."""
        attempt = live(job)
        components = tuple(replace(c, **changes) if c.index == index else c for c in attempt.components)
        return self.change(job, attempt=replace(attempt, components=components))

    def command(self, command: Command) -> None:
        self._effects.commands.append(command)

    def confirm(self, cluster: str) -> None:
        self._effects.confirm.add(cluster)

    def advised(self, given: Advised) -> None:
        self._effects.advised.append(given)

    def scanned(self, queue: Priority, scans: int) -> None:
        self._effects.scans[queue] = scans

    def count_refusals(self, kind: RefusalKind, times: int = 1) -> None:
        self._effects.refusals[kind] += times

    def count_failed_claim(self, cluster: str, why: ClaimFailure) -> None:
        self._effects.claims_failed[cluster, why] += 1

    def count_failed_attempt(self, cluster: str, why: AttemptFailure) -> None:
        self._effects.attempts_failed[cluster, why] += 1

    def warn(self, text: str) -> None:
        self._effects.warnings.append(text)

    @property
    def changed_clusters(self) -> bool:
        """Whether a cluster's state may have changed since the effects were last taken."""
        return bool(self._effects.clusters)

    def cluster_changed(self, name: str) -> None:
        self._effects.clusters.add(name)


def live(job: Job) -> Attempt:
    """The attempt of an active job."""
    if job.attempt is None:
        raise ConflictError(f"job {job.id} has no attempt")
    return job.attempt
