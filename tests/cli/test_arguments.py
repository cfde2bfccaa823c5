"""Parsing of command lines by signatures, and usage errors."""

import string
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.main import KOALA
from koalapy.cli.terminal.arguments import Argument, Group, Option, run_command
from koalapy.client.errors import Exit, GridError
from tests.cli.conftest import Koala

CALLS: list[dict[str, Any]] = []


class Shape(StrEnum):
    ROUND = "round"
    SQUARE = "square"


@dataclass(frozen=True)
class Paint:
    colour: Annotated[str, Option(help="a colour")] = "red"
    layers: Annotated[int | None, Option(min=1, max=9)] = None


def draw_shape(
    paint: Paint,
    subject: Annotated[str, Argument()],
    arguments: Annotated[list[str] | None, Argument(takes_rest=True)] = None,
    size: Annotated[float, Option("-s", "--size")] = 1.0,
    shape: Annotated[list[Shape] | None, Option(envvar="TEST_SHAPE")] = None,
    fill: Annotated[bool, Option("--fill/--no-fill", help="inside")] = True,
    quiet: Annotated[bool, Option("-q", "--quiet")] = False,
    target: Annotated[Path | None, Option("-o", "--output")] = None,
    label: Annotated[list[str] | None, Option()] = None,
    note: Annotated[str, Option(may_be_empty=True)] = "-",
) -> int:
    """Draw something."""
    CALLS.append(locals())
    return 7


def show_things(
    size: Annotated[float, Option("-s", "--size")] = 1.0, all_: Annotated[bool, Option("--all")] = False
) -> None:
    CALLS.append(locals())


def add_numbers(
    numbers: Annotated[list[int], Argument()], size: Annotated[float, Option("-s", "--size")] = 2.0
) -> None:
    CALLS.append(locals())


GROUP = Group("Things.", {"add": add_numbers}, default=show_things)
ROOT = Group("A test.", {"draw": draw_shape, "things": GROUP})


def call_command(*arguments: str) -> dict[str, Any]:
    CALLS.clear()
    run_command("t", ROOT, arguments)
    (call,) = CALLS
    return call


def run_invalid(*arguments: str) -> str:
    CALLS.clear()
    with pytest.raises(GridError) as error:
        run_command("t", ROOT, arguments)
    assert error.value.code is Exit.USAGE
    assert not CALLS
    return str(error.value)


def test_options_are_parsed_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_command(
        "draw", "--colour=blue", "-s2.5", "-qo", "x", "--no-fill", "--shape", "SQUARE", "--shape", "round", "cat"
    )
    assert (call["paint"], call["subject"], call["arguments"]) == (Paint("blue"), "cat", None)
    assert (call["size"], call["quiet"], call["fill"], call["target"]) == (2.5, True, False, Path("x"))
    assert call["shape"] == [Shape.SQUARE, Shape.ROUND]
    monkeypatch.setenv("TEST_SHAPE", "square")
    assert call_command("draw", "cat")["shape"] == [Shape.SQUARE]
    assert call_command("draw", "cat", "-s", "-1", "--x")["arguments"] == ["-s", "-1", "--x"], "the program's own words"
    assert call_command("draw", "-s", "-1", "--", "--size", "--", "-q")["arguments"] == ["--", "-q"]
    assert run_command("t", ROOT, ["draw", "x"]) == 7


def test_empty_option_is_accepted_if_declared() -> None:
    assert call_command("draw", "--note", "", "cat")["note"] == ""
    assert call_command("draw", "--", "cat", "")["arguments"] == [""], "an argument of the program"


def test_options_before_subcommand_are_passed_to_it() -> None:
    assert call_command("things", "-s", "3", "add", "1", "2")["size"] == 3.0
    assert call_command("things", "-s", "3", "add", "-s", "4", "1")["size"] == 4.0
    assert call_command("things", "add", "1", "-s", "5", "2") == {"numbers": [1, 2], "size": 5.0}
    assert call_command("things", "--size", "3")["size"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "says", "help_path"),
    [
        (("drew",), "No such command 'drew'. Did you mean 'draw'?", "t"),
        (("things", "ad"), "No such command 'ad'. Did you mean 'add'?", "t things"),
        (("draw",), "Missing argument 'SUBJECT'", "t draw"),
        (("draw", "--layers", "x", "y"), "Invalid value for '--layers': 'x' is not a valid whole number", "t draw"),
        (("draw", "--layers", "10", "y"), "'--layers': 10 is not in the range 1<=x<=9", "t draw"),
        (("draw", "--layers=0", "y"), "'--layers': 0 is not in the range 1<=x<=9", "t draw"),
        (("draw", "-s", "nan", "y"), "'nan' is not a finite number", "t draw"),
        (("draw", "--size", "1e999", "y"), "'1e999' is not a finite number", "t draw"),
        (("draw", "--color", "x"), "No such option '--color'. Did you mean '--colour'?", "t draw"),
        (("draw", "-z"), "No such option '-z'", "t draw"),
        (("draw", "--size"), "requires an argument", "t draw"),
        (("draw", "--quiet=no"), "'--quiet' does not take a value", "t draw"),
        (("draw", "--shape", "oval", "y"), "'oval'; known: round, square", "t draw"),
        (("things", "--all", "add", "1"), "t things add has no option --all, which stands before it", "t things"),
        (("things", "add", "1", "x"), "Invalid value for 'NUMBER...': 'x' is not a valid whole number", "t things add"),
        (("things", "add"), "Missing argument 'NUMBER...'", "t things add"),
        (("draw", "-s", "x" * 9999, "y"), "xxx…", "t draw"),
        (("draw", "--colour=", "y"), "Invalid value for '--colour': it is empty: give a value, or leave", "t draw"),
        (("draw", "--label", "a", "--label", "", "y"), "Invalid value for '--label': it is empty", "t draw"),
        (("draw", "-o", "", "y"), "Invalid value for '-o' / '--output': it is empty", "t draw"),
    ],
)
def test_usage_error_names_argument_and_help_page(arguments: tuple[str, ...], says: str, help_path: str) -> None:
    message = run_invalid(*arguments)
    assert says in message
    assert message.lower().endswith(f"see {help_path} --help")
    assert len(message) < 600


WORDS = st.text(string.printable, max_size=8) | st.sampled_from(
    ["draw", "things", "add", "--size", "-s", "-q", "--", "-", "1", "--fill", "--no-fill", "--layers=3", "--shape"]
)


@given(st.lists(WORDS, max_size=6))
def test_any_command_line_runs_or_prints_one_line(arguments: list[str]) -> None:
    CALLS.clear()
    message, code = "", 0
    try:
        code = run_command("t", ROOT, arguments)
    except GridError as error:
        message, code = str(error), error.code
    assert "\n" not in message
    assert code in ((Exit.USAGE,) if message else (0, 7))


@given(st.lists(st.text(max_size=9), max_size=5))
def test_arguments_after_two_dashes_reach_program_unchanged(arguments: list[str]) -> None:
    assert call_command("draw", "--", "cat", *arguments)["arguments"] == (arguments or None)


def test_help_pages_fit_80_columns(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in [()] + [(name,) for name in KOALA.subcommands] + [("clusters", "drain"), ("network", "measure")]:
        page = koala(*command, "--help")
        assert (page.code, page.err) == (0, "")
        assert page.out.startswith("Usage: koala")
        assert all(len(line) <= 80 for line in page.out.splitlines()), page.out
    assert "--nonfixed" in koala("submit", "-h").out
    assert koala().out == koala("--help").out


def test_version_option_prints_version(koala: Koala) -> None:
    from koalapy import __version__

    assert (koala("--version").code, koala("--version").out) == (0, f"koala {__version__}\n")


def test_bash_completion_offers_commands_and_options(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(*arguments: str) -> list[str]:
        monkeypatch.setenv("_KOALA_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("koala", *arguments)))
        monkeypatch.setenv("COMP_CWORD", str(len(arguments)))
        offered = [line.split(",") for line in koala().out.split()]
        return [argument if kind == "plain" else kind for kind, argument in offered]

    assert complete("su") == ["submit"]
    assert complete("clusters", "d") == ["drain"]
    assert complete("--v") == ["--version"]
    assert complete("queue", "--state", "run") == ["running"]
    assert complete("network", "measure", "--no") == ["--no-wait"]
    assert complete("submit", "--flex") == ["--flexible"]
    assert complete("submit", "--", "--flex") == ["file"], "the program's own, and no option"


@pytest.mark.parametrize("shell", [pytest.param("bash", marks=pytest.mark.processes), "zsh", "fish"])
def test_show_completion_prints_script_for_shell(koala: Koala, shell: str) -> None:
    assert f"_KOALA_COMPLETE={shell}_complete" in koala("--show-completion", shell).out
    assert "'tcsh' is not one of" in koala("--show-completion", "tcsh").err
