"""The application name of a job, by which its runs are compared, and the job as lists show it."""

from dataclasses import replace

from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import MAX_NAME_LENGTH, ComponentRequest, FlexibleRequest

INTERPRETERS = dict.fromkeys(("python", "bash", "dash", "sh", "zsh"), "c") | dict.fromkeys(
    ("perl", "ruby", "julia", "Rscript"), "e"
)
"""Interpreters, each with its option for code on the command line."""
WRAPPERS = ("env", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout")
"""Programs that run another program, which therefore do not name an application."""
NO_APPLICATION = "-"
"""Application name that excludes a job from the learning of run times."""


def printable_application_of(spec: JobSpec) -> str:
    """Return the application name that a submission gives or has by its program; empty if it cannot be printed."""
    name = spec.application or application_of(spec)
    return name if name.isprintable() else ""


def application_of(spec: JobSpec) -> str:
    """Return the application name of a job: the given name, or the names of its programs joined by ``+``.

    ``python -m package.module`` is named ``package.module``, a script by its file name. Return an empty text for the
    name ``-``, for code on the command line (``sh -c``), and for programs run by ``env``, ``time`` and the like.
    """
    if spec.application == NO_APPLICATION:
        return ""
    if spec.application:
        return spec.application
    commands = [spec.command] if spec.command else []
    if not isinstance(spec.request, FlexibleRequest):
        commands = [component.command or spec.command for component in spec.request.components]
    names = dict.fromkeys(_program_name(command) for command in commands)
    return "" if "" in names else "+".join(names)[:MAX_NAME_LENGTH]


def _program_name(command: tuple[str, ...]) -> str:
    """Return the name of the program that a command runs; of an interpreter, that of its script or module.

    Return an empty text if the command does not tell, as for wrappers and code in an argument.
    """
    if not command:
        return ""
    name = _file_name(command[0])
    arguments = command[1:]
    if name in WRAPPERS:
        return ""
    code_option = INTERPRETERS.get(name.rstrip("0123456789."))
    if code_option is None:
        return name
    for index, argument in enumerate(arguments):
        if argument == "-m":
            return arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument == "-" or (argument.startswith("-") and not argument.startswith("--") and code_option in argument):
            return ""
        if not argument.startswith("-"):
            return _file_name(argument)
    return ""


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


MAX_PROGRAM_LENGTH = 100


def summarize_job(job: Job) -> Job:
    """Return the job without its commands, variables and files, which may be large and lists do not show."""
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
            array=spec.array,
            internal=spec.internal,
        ),
    )


def program_of(spec: JobSpec) -> str:
    """Return the program of a job's command, cut to ``MAX_PROGRAM_LENGTH`` characters."""
    components = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    command = spec.command or next((component.command for component in components if component.command), ())
    return command[0][:MAX_PROGRAM_LENGTH] if command else ""
