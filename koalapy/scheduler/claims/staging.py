"""Orders for a component's stage: the folder to which its files are brought, on its own cluster."""

from koalapy.model.job import Attempt, Component, Job
from koalapy.model.quantities import bytes_text
from koalapy.model.wording import listed
from koalapy.scheduler.effects import StageComponent, UnstageComponent
from koalapy.scheduler.ledger import Ledger

MIN_MEASURED_SECONDS = 0.5
"""Seconds of a transfer from which on its speed tells how long the rest will take."""


def begin(ledger: Ledger, job: Job, component: Component, now: float) -> None:
    """Have a component's files brought to its cluster."""
    if not component.staging:
        return
    ledger.command(StageComponent(component.cluster, job.stage_token(component)))
    files = job.spec.inputs_of(component.request_index)
    away = [(f, s) for f, s in zip(files, component.sources, strict=False) if s != component.cluster]
    if away:
        what = listed([f"{file.name} ({bytes_text(file.size)}) from {source}" for file, source in away])
        about = f", about {component.transfer_time:.3g} s" if component.transfer_time else ""
        ledger.note(job, now, "transfer", f"{what} to {component.cluster}{about}", component)


def end(ledger: Ledger, job: Job, component: Component) -> None:
    """A component's files are not wanted any more on its cluster."""
    if component.staging:
        ledger.command(UnstageComponent(component.cluster, job.stage_token(component)))


def expected_end(attempt: Attempt, now: float) -> float | None:
    """When all transfers will be over, by how far they are; None while that tells nothing."""
    ends = (_expected_end(component, now) for component in attempt.gang)
    return max((end for end in ends if end is not None), default=None)


def _expected_end(component: Component, now: float) -> float | None:
    if component.staging_since is None or component.staged_at is not None:
        return None
    passed, there, size = now - component.staging_since, component.staged, component.stage_size
    return now + passed * (size - there) / there if passed >= MIN_MEASURED_SECONDS and 0 < there < size else None
