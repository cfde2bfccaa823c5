"""From a command line to what runs."""

from collections.abc import Mapping, Sequence

from koalapy.cli.arguments.declare import Command, Group, Option
from koalapy.cli.arguments.parse import refuse, split, values

VERSION = "--version"
COMPLETES = "_KOALA_COMPLETE"
"""The variable by which a shell's script asks for completion."""
INSTALL, SHOW = "--install-completion", "--show-completion"
EXTRA = (
    (VERSION, "print koala's version"),
    (f"{INSTALL} [SHELL]", "have the shell complete commands: bash, zsh or fish; default: yours"),
    (f"{SHOW} [SHELL]", "print what that would install"),
)
"""Options of the whole command."""


def run(name: str, root: Group, words: Sequence[str], version: str) -> int:
    """Run what the words ask for and give its exit code; ``CliError`` for a command line that makes no sense."""
    first, more = (words[0], words[1:]) if words else ("", [])
    if first == VERSION:
        print(f"{name} {version}")
        return 0
    if first in (INSTALL, SHOW):
        from koalapy.cli.arguments import completion

        shell = more[0] if more else ""
        print(completion.install(shell) if first == INSTALL else completion.script(shell).rstrip())
        return 0
    return _group(name, root, words, {}, EXTRA)


def complete(name: str, root: Group) -> int:
    """Print what a shell's script has asked for, a line each."""
    from koalapy.cli.arguments import completion

    print("\n".join(completion.candidates(root, name, *completion.asked_for())))
    return 0


def _group(
    path: str, group: Group, words: Sequence[str], inherited: Mapping[str, list[str]],
    extra: Sequence[tuple[str, str]] = (),
) -> int:  # fmt: skip
    own = Command(path, group.default) if group.default else None
    found = split(path, own.parameters() if own else [], words, is_group=True)
    given = {**inherited, **found.given}
    if found.asks_for_help or not (found.left or own):
        from koalapy.cli.arguments.pages import of_group

        print(of_group(path, group, extra))
        return 0
    if not found.left:
        assert own is not None
        return own.call(values(own, found, inherited)) or 0
    name, *rest = found.left
    if name not in group.commands:
        from difflib import get_close_matches

        near = get_close_matches(name, group.commands, 1)
        refuse(path, f"there is no command {path} {name}", f"did you mean {path} {near[0]}?" if near else "")
    below = group.find(path, name)
    if isinstance(below, Command):
        known = {p.name for p in below.parameters() if isinstance(p.spec, Option)}
        if foreign := [p.label for p in (own.parameters() if own else []) if p.name in found.given.keys() - known]:
            refuse(below.path, f"{below.path} has no option {foreign[0]}, which stands before it")
    if isinstance(below, Group):
        return _group(f"{path} {name}", below, rest, given)
    return _command(below, rest, given)


def _command(command: Command, words: Sequence[str], inherited: Mapping[str, list[str]]) -> int:
    found = split(command.path, command.parameters(), words)
    if found.asks_for_help:
        from koalapy.cli.arguments.pages import of_command

        print(of_command(command))
        return 0
    return command.call(values(command, found, inherited)) or 0
