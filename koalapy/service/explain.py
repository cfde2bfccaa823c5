"""Answers to "why?": what the scheduler knows, with the job's history from the store."""

from koalapy.model.explanation import Explanation
from koalapy.model.job import Job, JobSpec
from koalapy.ports import Store
from koalapy.scheduling.explain.explain import explain, explain_submission
from koalapy.service.database import asked
from koalapy.service.engine import Engine


async def explain_job(engine: Engine, store: Store, job: Job) -> Explanation:
    """Why a job is where it is by the time its history has been read."""
    timeline = await asked(store.timeline, job.id)
    return explain(engine.scheduler, engine.scheduler.job(job.id) or job, timeline, engine.clock())


def dry_run(engine: Engine, spec: JobSpec) -> Explanation:
    """What would become of a checked submission; ``BusyError`` when it would be refused for now."""
    engine.scheduler.admit()
    return explain_submission(engine.scheduler, spec, engine.clock())
