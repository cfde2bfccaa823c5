"""Command lines as they are read: by signatures, with errors in plain words."""

import itertools
import string
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.arguments import Argument, Group, Option
from koalapy.cli.arguments.completion import SCRIPTS, candidates, install, script
from koalapy.cli.arguments.dispatch import run
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.main import KOALA
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
    words: Annotated[list[str] | None, Argument(rest=True)] = None,
    size: Annotated[float, Option("-s", "--size")] = 1.0,
    shape: Annotated[list[Shape] | None, Option(envvar="TEST_SHAPE")] = None,
    fill: Annotated[bool, Option("--fill/--no-fill", help="inside")] = True,
    quiet: Annotated[bool, Option("-q", "--quiet")] = False,
    target: Annotated[Path | None, Option("-o", "--output")] = None,
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
    run("t", ROOT, words, "1")
    (found,) = CALLS
    return found


def refused(*words: str) -> str:
    CALLS.clear()
    with pytest.raises(CliError) as error:
        run("t", ROOT, words, "1")
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
    assert called("draw", "cat", "dog", "-s", "-1", "--x")["words"] == ["dog", "-s", "-1", "--x"], (
        "the program's own words"
    )
    assert called("draw", "-s", "-1", "--", "--size", "--", "-q")["words"] == ["--", "-q"]
    assert run("t", ROOT, ["draw", "x"], "1") == 7


def test_options_before_a_subcommand_are_its_own_by_default() -> None:
    assert called("things", "-s", "3", "add", "1", "2")["size"] == 3.0
    assert called("things", "-s", "3", "add", "-s", "4", "1")["size"] == 4.0
    assert called("things", "add", "1", "-s", "5", "2") == {"numbers": [1, 2], "size": 5.0}
    assert called("things", "--size", "3")["size"] == 3.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("drew",), "there is no command t drew; did you mean t draw? see t --help"),
        (("things", "ad"), "there is no command t things ad; did you mean t things add? see t things --help"),
        (("draw",), "WHAT is missing; see t draw --help"),
        (("draw", "--layers", "x", "y"), "--layers is 'x', no whole number; see t draw --help"),
        (("draw", "--layers", "10", "y"), "--layers is 10, but must be at most 9; see t draw --help"),
        (("draw", "--layers=0", "y"), "--layers is 0, but must be at least 1; see t draw --help"),
        (("draw", "-s", "nan", "y"), "--size is 'nan', no number; see t draw --help"),
        (("draw", "--size", "1e999", "y"), "--size is '1e999', no number; see t draw --help"),
        (("draw", "--color", "x"), "t draw has no option --color; did you mean --colour? see t draw --help"),
        (("draw", "-z"), "t draw has no option -z; see t draw --help"),
        (("draw", "--size"), "--size needs a value; see t draw --help"),
        (("draw", "--quiet=no"), "--quiet takes no value, but 'no' is given; see t draw --help"),
        (("draw", "--shape", "oval", "y"), "--shape is 'oval'; known: round, square; see t draw --help"),
        (("things", "--all", "add", "1"), "t things add has no option --all, which stands before it; see t things add "
         "--help"),
        (("things", "add", "1", "x"), "NUMBER is 'x', no whole number; see t things add --help"),
        (("things", "add"), "NUMBER is missing; see t things add --help"),
    ],
)  # fmt: skip
def test_an_error_names_the_word_and_the_commands_own_help(words: tuple[str, ...], says: str) -> None:
    assert refused(*words) == says


WORDS = st.text(string.printable, max_size=8) | st.sampled_from(
    ["draw", "things", "add", "--size", "-s", "-q", "--", "-", "1", "--fill", "--no-fill", "--layers=3", "--shape"]
)


@given(st.lists(WORDS, max_size=6).filter(lambda words: not words or not words[0].startswith("--install")))
def test_whatever_is_written_runs_or_is_refused_in_one_line(words: list[str]) -> None:
    CALLS.clear()
    said, code = "", 0
    try:
        code = run("t", ROOT, words, "1")
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


def test_what_a_shell_may_complete() -> None:
    def after(*words: str) -> list[str]:
        return candidates(KOALA, "koala", words[:-1], words[-1])

    assert after("su") == ["submit"]
    assert after("clusters", "d") == ["drain"]
    assert after("--v") == ["--version"]
    assert after("queue", "--state", "run") == ["running"]
    assert after("network", "measure", "--no") == ["--no-wait"]
    assert after("submit", "--flex") == ["--flexible"]
    assert after("submit", "--", "--flex") == after("submit", "--name", "--flex") == []
    assert "--embedded" not in after("agent", "--")


def test_every_shells_completion_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias x=y")
    for shell, _ in itertools.product(SCRIPTS, range(2)):
        assert shell in install(shell)
    assert (tmp_path / ".bashrc").read_text() == "alias x=y\nsource ~/.bash_completions/koala.sh\n"
    assert (tmp_path / ".bash_completions/koala.sh").read_text() == script("bash")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    with pytest.raises(CliError, match="completion is not for tcsh"):
        install("")
