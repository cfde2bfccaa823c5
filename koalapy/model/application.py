"""What a job's program is known as, so that its runs can be compared with each other."""

from dataclasses import replace

from koalapy.model.job import Job, JobSpec
from koalapy.model.request import MAX_NAME_LENGTH, ComponentRequest, FlexibleRequest

INTERPRETERS = dict.fromkeys(("python", "bash", "dash", "sh", "zsh"), "c") | dict.fromkeys(
    ("perl", "ruby", "julia", "Rscript"), "e"
)
"""With the option after which the program itself stands."""
WRAPPERS = ("env", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout")
"""What runs another program: jobs are not alike because of it, and their names stand behind options of its own."""
NO_APPLICATION = "-"
"""What is no application at all, and teaches nothing."""


def name_application(spec: JobSpec) -> JobSpec:
    """The submission with what its program is to be known as, if that can be shown."""
    name = spec.application or application_of(spec)
    return replace(spec, application=name if name.isprintable() else "")


def application_of(spec: JobSpec) -> str:
    """The name that was given (``-`` is none), or the program's own; of coupled programs all; empty if there is none.

    ``python -m package.module`` is known as ``package.module``, a script by its file name. What stands in the command
    itself, as after ``sh -c``, has no name, and neither has what ``env``, ``time`` and the like run.
    """
    if spec.application == NO_APPLICATION:
        return ""
    if spec.application:
        return spec.application
    commands = [spec.command] if spec.command else []
    if not isinstance(spec.request, FlexibleRequest):
        commands = [component.command or spec.command for component in spec.request.components]
    names = dict.fromkeys(_program(command) for command in commands)
    return "" if "" in names else "+".join(names)[:MAX_NAME_LENGTH]


def _program(command: tuple[str, ...]) -> str:
    if not command:
        return ""
    first, *rest = command
    name = _base(first)
    if name in WRAPPERS:
        return ""
    code = INTERPRETERS.get(name.rstrip("0123456789."))
    if code is None:
        return name
    for place, word in enumerate(rest):
        if word == "-m":
            return rest[place + 1] if place + 1 < len(rest) else ""
        if word == "-" or (word.startswith("-") and not word.startswith("--") and code in word):
            return ""
        if not word.startswith("-"):
            return _base(word)
    return ""


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


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
