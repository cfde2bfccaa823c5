"""Completion by shells: what may come next, and the scripts by which bash, zsh and fish ask for it.

They set ``_KOALA_COMPLETE``, ``COMP_WORDS`` (a word a line) and ``COMP_CWORD``, the number of the one to complete.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from koalapy.cli.arguments.declare import Command, Group, Option, Parameter
from koalapy.cli.arguments.dispatch import VERSION
from koalapy.cli.errors import CliError, Exit

SCRIPTS = {
    "bash": """\
_koala_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _KOALA_COMPLETE=complete_bash "$1" ) )
}
complete -o default -F _koala_completion koala
""",
    "zsh": """\
#compdef koala
_koala_completion() {
    local -a found
    found=("${(@f)$(env COMP_WORDS="${(pj:\\n:)words}" COMP_CWORD=$((CURRENT-1)) _KOALA_COMPLETE=complete_zsh koala)}")
    if [[ -n "$found" ]]; then compadd -- $found; else _files; fi
}
compdef _koala_completion koala
""",
    "fish": """\
function __koala_completion
    set -l words (commandline -opc) (commandline -ct)
    env COMP_WORDS=(string join \\n -- $words | string collect) COMP_CWORD=(math (count $words) - 1) \\
        _KOALA_COMPLETE=complete_fish koala
end
complete -c koala -a '(__koala_completion)'
""",
}
FILES = {
    "bash": "~/.bash_completions/koala.sh", "zsh": "~/.zfunc/_koala", "fish": "~/.config/fish/completions/koala.fish",
}  # fmt: skip
"""Where the scripts are put."""
STARTED = {
    "bash": ("~/.bashrc", "source ~/.bash_completions/koala.sh"),
    "zsh": ("~/.zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
}
"""What a shell must read at its start to find them."""


def script(shell: str) -> str:
    """That of a shell, by default the one of this account. ``CliError`` for others."""
    return SCRIPTS[_known(shell)]


def install(shell: str) -> str:
    """Put it where the shell finds it; says what was done."""
    name = _known(shell)
    path = Path(FILES[name]).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPTS[name], encoding="utf-8")
        if name in STARTED:
            start, line = Path(STARTED[name][0]).expanduser(), STARTED[name][1]
            told = start.read_text(encoding="utf-8", errors="surrogateescape") if start.exists() else ""
            if line not in told.splitlines():
                with start.open("a", encoding="utf-8") as file:
                    file.write(f"{'' if told.endswith(chr(10)) or not told else chr(10)}{line}\n")
    except OSError as error:
        said = f"cannot write {error.filename or path}: {error.strerror}"
        raise CliError(said, Exit.FAILED, f"koala --show-completion {name} prints the script") from error
    return f"{name} completes koala's commands from its next start ({path})"


def _known(shell: str) -> str:
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SCRIPTS:
        raise CliError(f"completion is not for {name or 'this shell'}", Exit.USAGE, f"known: {', '.join(SCRIPTS)}")
    return name


def asked_for() -> tuple[list[str], str]:
    """The words before the one to complete, and what there is of it."""
    told = os.environ.get("COMP_WORDS", "")
    words = told.split("\n") if "\n" in told else told.split()
    number = os.environ.get("COMP_CWORD", "")
    at = int(number) if number.isdecimal() else len(words) - 1
    return words[1:at], words[at] if at < len(words) else ""


def candidates(root: Group, name: str, before: Sequence[str], begun: str) -> list[str]:
    """What may stand where ``begun`` does, in order; nothing where it is for the user to say."""
    path, here, words = name, root, list(before)
    while (at := next((i for i, word in enumerate(words) if word in here.commands), None)) is not None:
        below = here.find(path, word := words[at])
        words = words[at + 1 :]
        if not isinstance(below, Group):
            return sorted(set(_of_command(below.parameters(), words, begun)))
        path, here = f"{path} {word}", below
    options = _options(Command(path, here.default).parameters() if here.default else [])
    known = [*options, "--help", *([VERSION] if here is root else [])] if begun.startswith("-") else here.commands
    return sorted(one for one in known if one.startswith(begun))


def _of_command(parameters: Sequence[Parameter], words: Sequence[str], begun: str) -> Iterator[str]:
    if "--" in words:
        return
    options = _options(parameters)
    if words and (asked := options.get(words[-1])) is not None and not asked.is_flag:
        yield from (choice for choice in asked.choices if choice.startswith(begun))
    elif begun.startswith("-"):
        yield from (name for name in [*options, "--help"] if name.startswith(begun))


def _options(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    shown = [p for p in parameters if isinstance(p.spec, Option) and not p.spec.hidden]
    return {name: p for p in shown for name in (*p.names, *p.opposites)}
