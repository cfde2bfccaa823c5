"""A job as lists hold it: without its program, whose commands, variables and files may be large."""

from dataclasses import replace

from koalapy.model.job import Job, JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest

MAX_PROGRAM_LENGTH = 100


def summarize_job(job: Job) -> Job:
    """Return the job with the parts of its specification that lists show."""
    spec = job.spec
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        request = replace(request, components=tuple(ComponentRequest(c.size, c.cluster) for c in request.components))
    return replace(
        job,
        spec=JobSpec(
            request,
            (program_of(spec),),
            policy=spec.policy,
            priority=spec.priority,
            name=spec.name,
            owner=spec.owner,
            home_site=spec.home_site,
            launcher=spec.launcher,
            walltime=spec.walltime,
            application=spec.application,
            internal=spec.internal,
        ),
    )


def program_of(spec: JobSpec) -> str:
    """Return the beginning of the first word of the job's command."""
    own = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    command = spec.command or next((component.command for component in own if component.command), ())
    return command[0][:MAX_PROGRAM_LENGTH] if command else ""
