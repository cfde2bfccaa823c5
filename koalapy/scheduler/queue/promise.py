"""What jobs of low priority are promised after a long wait: those of high priority delay them no more.

Else a stream of jobs of high priority could keep them waiting for ever.
"""

from koalapy.model.job import Job, Priority
from koalapy.scheduler.rules import Rules


def is_promised(job: Job, rules: Rules, now: float) -> bool:
    """Whether a job of low priority has waited so long, until now or until its live attempt was placed, that it is not
    preempted, and that nodes which are kept for it are offered to nobody else."""
    if rules.low_patience is None or now - job.submitted_at < rules.low_patience:
        return False
    if job.spec.priority is not Priority.LOW or job.spec.internal:
        return False
    attempt = job.attempt if job.state.is_active else None
    waited_until = now if attempt is None else attempt.placed_at
    return waited_until - job.submitted_at >= rules.low_patience
