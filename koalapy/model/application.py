"""What a job's program is known as, so that its runs can be compared with each other."""

from koalapy.model.job import JobSpec
from koalapy.model.request import FlexibleRequest

INTERPRETERS = ("python", "bash", "dash", "sh", "zsh", "perl", "ruby", "julia", "Rscript")
LONGEST = 200


def application_of(spec: JobSpec) -> str:
    """The name that was given, or the program's own; of coupled programs all; empty when nothing tells it.

    ``python -m package.module`` is known as ``package.module``, a script by its file name. What stands in the command
    itself, as after ``sh -c``, has no name.
    """
    if spec.application:
        return spec.application
    commands = [spec.command] if spec.command else []
    if not isinstance(spec.request, FlexibleRequest):
        commands = [component.command or spec.command for component in spec.request.components]
    names = dict.fromkeys(_program(command) for command in commands)
    return "" if "" in names else "+".join(names)[:LONGEST]


def _program(command: tuple[str, ...]) -> str:
    if not command:
        return ""
    first, *rest = command
    name = _base(first)
    if name.rstrip("0123456789.") not in INTERPRETERS:
        return name
    for place, word in enumerate(rest):
        if word == "-m":
            return rest[place + 1] if place + 1 < len(rest) else ""
        if word == "-" or (word.startswith("-") and not word.startswith("--") and "c" in word):
            return ""
        if not word.startswith("-"):
            return _base(word)
    return ""


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
