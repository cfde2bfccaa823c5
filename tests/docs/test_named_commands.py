"""What the documentation names is there: commands with their options wherever they stand, states, tests."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from koalapy import __version__
from koalapy.cli.main import KOALA
from koalapy.cli.terminal.arguments import Commands, root_of
from koalapy.model.job import JobState
from tests.docs.blocks import PAGES, ROOT, SHOWN, blocks

ROOT_COMMAND = root_of("koala", KOALA, __version__)
WORDS = re.compile(r"\bkoala ([^`\n]*)")
END = re.compile(r"\s(--\s|&|\||>|<|;|\$\(|#)|\s--$|[;)]")


def test_every_block_says_what_it_is() -> None:
    """So that no command hides in one."""
    assert [str(block) for page in PAGES for block in blocks(page) if not block.language] == []


def test_every_block_is_played_or_says_why_not() -> None:
    for block in SHOWN:
        if block.mark and block.mark[0] == "played by":
            file, _, test = block.mark[1].partition("::")
            assert (ROOT / file).is_file(), block
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), block
        elif block.mark:
            assert len(block.mark[1]) > 20, block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_is_named_is_there(page: Path) -> None:
    """In running text and tables, where nobody plays it, with every option."""
    assert [told for named in sorted(set(named_in(page))) if (told := problem(named))] == []


def named_in(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`(koala [^`\n]+)`", text)
    typed = [line.strip() for line in text.splitlines() if re.match(r"\s*(\$|#) koala ", line)]
    for span in (*spans, *typed):
        words = WORDS.search(span)
        assert words is not None
        yield END.split(words[1], maxsplit=1)[0].strip()


def problem(named: str) -> str:
    """What is wrong with the words after ``koala``; empty when nothing is."""
    command: click.Command = ROOT_COMMAND
    words = named.replace("[", " ").replace("]", " ").split()
    while words and isinstance(command, Commands):
        below = command.get_command(click.Context(command), words[0])
        if below is None:
            if command is ROOT_COMMAND and not words[0].startswith("-"):
                return f"koala {named}: there is no such command"
            break  # some groups are commands themselves
        command, words = below, words[1:]
    known = {
        name for one in command.params if isinstance(one, click.Option) for name in (*one.opts, *one.secondary_opts)
    }
    known |= {"-h", "--help", "--version", "--show-completion"}
    given = {word.partition("=")[0].rstrip(",.") for word in words if re.match(r"--?[a-z]", word)}
    return f"koala {named}: no {', '.join(sorted(given - known))}" if given - known else ""


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("submit --flexibel 4", "no --flexibel"),
        ("cluster drain north", "no such command"),
        ("queue --user alice -x", "no -x"),
        ("clusters drain north --why x", "no --why"),
    ],
)
def test_what_is_not_there_is_found(named: str, wrong: str) -> None:
    assert wrong in problem(named)


def test_who_comes_from_slurm_finds_every_state() -> None:
    page = (ROOT / "docs" / "coming-from-slurm.md").read_text(encoding="utf-8")
    assert [state for state in JobState if f"`{state}`" not in page.partition("## States")[2]] == []
