"""Command lines as they are read: by signatures, with errors in plain words."""

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
from koalapy.client.errors import CliError, Exit
from tests.cli.conftest import Koala

CALLS: list[dict[str, Any]] = []


class Shape(StrEnum):
    ROUND = "round"
    SQUARE = "square"


@dataclass(frozen=True)
class Paint:
    colour: Annotated[str, Option(help="a colour")] = "red"
    layers: Annotated[int | None, Option(min=1, max=9)] = None


def draw(
    paint: Paint,
    what: Annotated[str, Argument()],
    words: Annotated[list[str] | None, Argument(takes_rest=True)] = None,
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


def show(size: Annotated[float, Option("-s", "--size")] = 1.0, all_: Annotated[bool, Option("--all")] = False) -> None:
    CALLS.append(locals())


def add(numbers: Annotated[list[int], Argument()], size: Annotated[float, Option("-s", "--size")] = 2.0) -> None:
    CALLS.append(locals())


GROUP = Group("Things.", {"add": add}, default=show)
ROOT = Group("A test.", {"draw": draw, "things": GROUP})


def called(*words: str) -> dict[str, Any]:
    CALLS.clear()
    run_command("t", ROOT, words, "1")
    (found,) = CALLS
    return found


def refused(*words: str) -> str:
    CALLS.clear()
    with pytest.raises(CliError) as error:
        run_command("t", ROOT, words, "1")
    assert error.value.code is Exit.USAGE
    assert not CALLS
    return str(error.value)


def test_options_come_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(
        "draw", "--colour=blue", "-s2.5", "-qo", "x", "--no-fill", "--shape", "SQUARE", "--shape", "round", "cat"
    )
    assert (found["paint"], found["what"], found["words"]) == (Paint("blue"), "cat", None)
    assert (found["size"], found["quiet"], found["fill"], found["target"]) == (2.5, True, False, Path("x"))
    assert found["shape"] == [Shape.SQUARE, Shape.ROUND]
    monkeypatch.setenv("TEST_SHAPE", "square")
    assert called("draw", "cat")["shape"] == [Shape.SQUARE]
    assert called("draw", "cat", "-s", "-1", "--x")["words"] == ["-s", "-1", "--x"], "the program's own words"
    assert called("draw", "-s", "-1", "--", "--size", "--", "-q")["words"] == ["--", "-q"]
    assert run_command("t", ROOT, ["draw", "x"], "1") == 7


def test_an_option_may_be_empty_only_where_that_means_something() -> None:
    assert called("draw", "--note", "", "cat")["note"] == ""
    assert called("draw", "--", "cat", "")["words"] == [""], "a word of the program's"


def test_options_before_a_subcommand_are_its_own_by_default() -> None:
    assert called("things", "-s", "3", "add", "1", "2")["size"] == 3.0
    assert called("things", "-s", "3", "add", "-s", "4", "1")["size"] == 4.0
    assert called("things", "add", "1", "-s", "5", "2") == {"numbers": [1, 2], "size": 5.0}
    assert called("things", "--size", "3")["size"] == 3.0


@pytest.mark.parametrize(
    ("words", "says", "way_out"),
    [
        (("drew",), "No such command 'drew'. Did you mean 'draw'?", "t"),
        (("things", "ad"), "No such command 'ad'. Did you mean 'add'?", "t things"),
        (("draw",), "Missing argument 'WHAT'", "t draw"),
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
def test_an_error_names_the_word_and_the_commands_own_help(words: tuple[str, ...], says: str, way_out: str) -> None:
    said = refused(*words)
    assert says in said
    assert said.lower().endswith(f"see {way_out} --help")
    assert len(said) < 600


WORDS = st.text(string.printable, max_size=8) | st.sampled_from(
    ["draw", "things", "add", "--size", "-s", "-q", "--", "-", "1", "--fill", "--no-fill", "--layers=3", "--shape"]
)


@given(st.lists(WORDS, max_size=6))
def test_whatever_is_written_runs_or_is_refused_in_one_line(words: list[str]) -> None:
    CALLS.clear()
    said, code = "", 0
    try:
        code = run_command("t", ROOT, words, "1")
    except CliError as error:
        said, code = str(error), error.code
    assert "\n" not in said
    assert code in ((Exit.USAGE,) if said else (0, 7))


@given(st.lists(st.text(max_size=9), max_size=5))
def test_what_follows_two_dashes_is_the_programs_word_for_word(words: list[str]) -> None:
    assert called("draw", "--", "cat", *words)["words"] == (words or None)


def test_help_pages_name_every_option_and_fit(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in [()] + [(name,) for name in KOALA.commands] + [("clusters", "drain"), ("network", "measure")]:
        page = koala(*command, "--help")
        assert (page.code, page.err) == (0, "")
        assert page.out.startswith("Usage: koala")
        assert all(len(line) <= 80 for line in page.out.splitlines()), page.out
    assert "--nonfixed" in koala("submit", "-h").out
    assert koala().out == koala("--help").out


def test_the_version(koala: Koala) -> None:
    from koalapy import __version__

    assert (koala("--version").code, koala("--version").out) == (0, f"koala {__version__}\n")


def test_what_a_shell_may_complete(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    def after(*words: str) -> list[str]:
        monkeypatch.setenv("_KOALA_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("koala", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        offered = [line.split(",") for line in koala().out.split()]
        return [word if kind == "plain" else kind for kind, word in offered]

    assert after("su") == ["submit"]
    assert after("clusters", "d") == ["drain"]
    assert after("--v") == ["--version"]
    assert after("queue", "--state", "run") == ["running"]
    assert after("network", "measure", "--no") == ["--no-wait"]
    assert after("submit", "--flex") == ["--flexible"]
    assert after("submit", "--", "--flex") == ["file"], "the program's own, and no option"


@pytest.mark.parametrize("shell", [pytest.param("bash", marks=pytest.mark.processes), "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(koala: Koala, shell: str) -> None:
    assert f"_KOALA_COMPLETE={shell}_complete" in koala("--show-completion", shell).out
    assert "'tcsh' is not one of" in koala("--show-completion", "tcsh").err
