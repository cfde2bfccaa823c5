"""What is run: the commands and variables of a job and of its components."""

import re
from collections.abc import Sequence

from koalapy.model.errors import reject
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.request import Environment, FlexibleRequest
from koalapy.validation.limits import Limits

RESERVED_VARIABLES = frozenset(
    f"KOALA_{name}"
    for name in (
        "AGENT_FILE",
        "CLUSTER",
        "COMPONENT",
        "COMPONENT_NAME",
        "COMPONENT_NODES",
        "COMPONENT_TOKEN",
        "GENERATION",
        "HOST",
        "HOSTS",
        "JOB",
        "LEASE",
        "NODE",
        "NODES",
        "NODE_INDEX",
        "RUNNER_SECRET",
        "SECRET_PIPE",
        "LRM_PIPE",
        "SPOOL",
        "STAGE",
    )
)
"""Variables that the runner sets or reads on each node."""
SLURM_JOB_NUMBER = re.compile(r"%\d*[jJA]")


def check_program(spec: JobSpec, limits: Limits) -> None:
    """Every component has a command, and commands, variables and files are such as a process can be given."""
    _check_command("command", spec.command)
    _check_processes(spec)
    _check_files(spec)
    _check_environment("environment", spec.environment)
    if isinstance(spec.request, FlexibleRequest):
        if not spec.command:
            reject("command", [], "is empty", "give the program to run and its arguments")
        return
    for index, component in enumerate(spec.request.components):
        field = f"request.components[{index}]"
        _check_environment(f"{field}.environment", component.environment)
        _check_output(f"{field}.output", component.output)
        if component.command is not None and not component.command:
            reject(f"{field}.command", [], "is empty", "leave it out to run the job's own command")
        _check_command(f"{field}.command", component.command or ())
        if component.command is None and not spec.command:
            reject("command", [], f"is empty, and component {index} has none of its own", "give the program to run")


def check_warning(spec: JobSpec, limits: Limits) -> None:
    """A program is warned while it runs, and keeps nobody waiting for longer than is allowed."""
    if spec.warning is None:
        return
    grace, said = spec.warning.grace, str(spec.warning)
    if grace > limits.max_grace:
        problem = f"is {said}, and no job may have more than {limits.max_grace:g} s between its warning and its stop"
        reject("warning", said, problem, f"give at most {spec.warning.signal}@{limits.max_grace:g}")
    if spec.walltime is not None and grace >= spec.walltime:
        problem = f"is {said}, but the walltime is {spec.walltime:g} s: it would be warned before it has begun"
        reject("warning", said, problem, "give fewer seconds, or a longer walltime")


def _check_processes(spec: JobSpec) -> None:
    if spec.launcher is Launcher.PROCESSES and (count := spec.processes_per_node or 1) > 1:
        problem = f"is {count}, but the launcher processes starts the command once on each node"
        reject("processes_per_node", count, problem, "leave it out, or use the launcher openmpi")


def _check_files(spec: JobSpec) -> None:
    if spec.workdir and not spec.workdir.startswith(("/", "{")):
        problem = f"is {spec.workdir!r}, which is not the same folder on every node"
        reject("workdir", spec.workdir, problem, "give an absolute path, or one that begins with {scratch} or {home}")
    _check_output("output", spec.output)


def _check_output(field: str, output: str | None) -> None:
    if output and (pattern := SLURM_JOB_NUMBER.search(output)):
        problem = f"is {output!r}, and {pattern[0]} stands for the job's number in Slurm only"
        reject(field, output, problem, "write {job} in its place")


def _check_command(field: str, command: Sequence[str]) -> None:
    if command and not command[0]:
        reject(f"{field}[0]", "", "is empty", "begin with the program to run")
    for index, word in enumerate(command):
        if "\0" in word:
            reject(f"{field}[{index}]", word, f"is {word!r}, with a NUL in it", "leave out the NUL")


def _check_environment(field: str, environment: Environment) -> None:
    for name, value in environment:
        if not name:
            reject(field, name, "has a variable without a name", "name it, or leave it out")
        if "=" in name or "\0" in name:
            reject(field, name, f"has a variable named {name!r}", "use a name without '=' and NUL")
        if name in RESERVED_VARIABLES:
            reject(f"{field}.{name}", value, "is set by koalapy on each node", "use a variable of another name")
        if "\0" in value:
            reject(f"{field}.{name}", value, f"is {value!r}, with a NUL in it", "leave out the NUL")
