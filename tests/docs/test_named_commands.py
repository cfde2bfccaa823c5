"""Commands, options, states and tests that the documentation names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from koalapy.cli.main import KOALA
from koalapy.cli.terminal.arguments import Group
from koalapy.model.job import JobState
from tests.docs.blocks import PAGES, ROOT, SHOWN, blocks

KOALA_COMMAND = re.compile(r"\bkoala ([^`\n]*)")
COMMAND_END = re.compile(r"\s(--\s|&|\||>|<|;|\$\(|#)|\s--$|[;)]")


def test_every_block_has_a_language() -> None:
    assert [str(block) for page in PAGES for block in blocks(page) if not block.language] == []


def test_every_unplayed_block_names_its_test_or_reason() -> None:
    for block in SHOWN:
        if block.mark and block.mark[0] == "played by":
            file, _, test = block.mark[1].partition("::")
            assert (ROOT / file).is_file(), block
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), block
        elif block.mark:
            assert len(block.mark[1]) > 20, block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_commands_and_options_exist(page: Path) -> None:
    """Commands in text and tables are included, which no test plays."""
    assert [
        command_problem
        for command_text in sorted(set(find_commands(page)))
        if (command_problem := describe_problem(command_text))
    ] == []


def find_commands(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`(koala [^`\n]+)`", text)
    typed = [line.strip() for line in text.splitlines() if re.match(r"\s*(\$|#) koala ", line)]
    for span in (*spans, *typed):
        match = KOALA_COMMAND.search(span)
        assert match is not None
        yield COMMAND_END.split(match[1], maxsplit=1)[0].strip()


def describe_problem(command_text: str) -> str:
    """Return the problem of a command after ``koala``; empty if there is none."""
    command: click.Command = KOALA
    arguments = command_text.replace("[", " ").replace("]", " ").split()
    while arguments and isinstance(command, Group):
        below = command.get_command(click.Context(command), arguments[0])
        if below is None:
            if command is KOALA and not arguments[0].startswith("-"):
                return f"koala {command_text}: there is no such command"
            break  # some groups are commands themselves
        command, arguments = below, arguments[1:]
    known_options = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    known_options |= {"-h", "--help", "--version", "--show-completion"}
    named_options = {
        argument.partition("=")[0].rstrip(",.") for argument in arguments if re.match(r"--?[a-z]", argument)
    }
    return (
        f"koala {command_text}: no {', '.join(sorted(named_options - known_options))}"
        if named_options - known_options
        else ""
    )


@pytest.mark.parametrize(
    ("command_text", "wrong"),
    [
        ("submit --flexibel 4", "no --flexibel"),
        ("cluster drain north", "no such command"),
        ("queue --user alice -x", "no -x"),
        ("clusters drain north --why x", "no --why"),
    ],
)
def test_unknown_command_or_option_is_found(command_text: str, wrong: str) -> None:
    assert wrong in describe_problem(command_text)


def test_slurm_page_lists_every_job_state() -> None:
    page = (ROOT / "docs" / "coming-from-slurm.md").read_text(encoding="utf-8")
    assert [state for state in JobState if f"`{state}`" not in page.partition("## States")[2]] == []
