"""What is run: the commands and variables of a job and of its components."""

from collections.abc import Sequence

from koalapy.model.errors import reject
from koalapy.model.job import JobSpec
from koalapy.model.request import Environment, FlexibleRequest
from koalapy.validation.limits import Limits


def check_program(spec: JobSpec, limits: Limits) -> None:
    """Every component has a command, and commands and variables are such as a process can be given."""
    _check_command("command", spec.command)
    _check_environment("environment", spec.environment)
    if isinstance(spec.request, FlexibleRequest):
        if not spec.command:
            reject("command", [], "is empty", "give the program to run and its arguments")
        return
    for index, component in enumerate(spec.request.components):
        field = f"request.components[{index}]"
        _check_environment(f"{field}.environment", component.environment)
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
        if "\0" in value:
            reject(f"{field}.{name}", value, f"is {value!r}, with a NUL in it", "leave out the NUL")
