"""Answers to options of Slurm and Grid Engine, and the manual page."""

import re
import subprocess

import click
import pytest

from deploy.documentation.cli_page import commands
from koalapy import __version__
from koalapy.cli.main import KOALA
from koalapy.cli.terminal.foreign_options import FOREIGN_OPTIONS, Unclear, format_options_page
from koalapy.cli.terminal.manual import format_manual, format_pages
from koalapy.client.errors import Exit
from tests.cli.conftest import Koala
from tests.docs.slurm_page import find_commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("submit --nodes 4 -- x", "koala submit has no --nodes; use --flexible 4"),
        ("submit --nodes=4 -- x", "koala submit has no --nodes; use --flexible 4"),
        ("submit --flexible 1 --ntasks-per-node -- x", "koala submit has no --ntasks-per-node; use --ppn 8"),
        ("submit -J study -- x", "koala submit has no -J; use --name study"),
        ("submit -Jstudy -- x", "koala submit has no -J; use --name study"),
        ("submit -terse -- x", "koala submit has no -terse; use the option --quiet of the command"),
        ("submit -t 90 -- x", "koala submit has no -t; for Slurm use --walltime 90m; for Grid Engine use --array 90"),
        ("submit --time=1:30:00 -- x", "koala submit has no --time; use --walltime 90m"),
        ("submit --time -- x", "koala submit has no --time; use --walltime 90m"),
        ("queue -n study", "koala queue has no -n; use --name study"),
        ("cancel --me", "koala cancel has no --me; use --mine"),
        ("submit --mem=8GB -- x", "koala submit has no --mem; use --memory 8GiB, on each node"),
        ("submit --mem=64 -- x", "koala submit has no --mem; use --memory 64MiB, on each node"),
    ],
)
def test_foreign_option_is_answered_with_own_option(koala: Koala, words: str, message: str) -> None:
    ended = koala(*words.split())
    assert (ended.code, ended.out, ended.err) == (Exit.USAGE, "", f"koala: {message}\n")


def test_foreign_option_of_program_is_passed_on(koala: Koala) -> None:
    assert koala("submit", "--flexible", "1", "--", "x", "--nodes", "4").code == 0


def test_unknown_option_with_similar_name_keeps_its_suggestion(koala: Koala) -> None:
    assert "Did you mean" in koala("submit", "--flexibel", "4", "--", "x").err


@pytest.mark.parametrize("path", sorted(FOREIGN_OPTIONS))
def test_answers_name_existing_options(path: str) -> None:
    options = {option for p in commands()[path].params if isinstance(p, click.Option) for option in p.opts}
    answers = [row.split(" | ")[2] for row in format_options_page(commands()).splitlines() if f"`{path}`" in row]
    assert answers
    for answer in answers:
        assert set(re.findall(r"--[a-z][a-z-]+", answer)) <= options
        assert set(re.findall(r"koala [a-z]+", answer)) <= commands().keys()


def test_rows_of_page_for_slurm_users_agree_with_table() -> None:
    for foreign, own in find_commands().values():
        if not foreign.startswith("-"):
            continue
        name, _, value = foreign.replace("=", " ", 1).partition(" ")
        entry = next((option for option in FOREIGN_OPTIONS["koala submit"]["Slurm"] if name in option.names), None)
        try:
            words, _ = entry.translate(value) if entry else ([], "")
        except Unclear:
            continue
        if words:
            own_name = own.replace("-o ", "--output ").split()[0]
            assert own_name in (words[0], "NONE"), (foreign, words, own)


def test_manual_has_every_command_and_option() -> None:
    page = format_manual("koala", KOALA, __version__)
    for path, command in commands().items():
        assert path == "koala" or f".SS {path}\n".replace("-", "\\-") in page
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0].replace("-", "\\-") in page


def test_manual_pages_are_one_for_each_command_and_the_whole() -> None:
    pages = format_pages("koala", KOALA, __version__)
    names = {"-".join(path.split()[:2]) for path in commands()}
    assert pages.keys() == {f"{name}.1" for name in names}
    page = pages["koala-clusters.1"]
    assert f'.TH KOALA-CLUSTERS 1 "" "koala {__version__}" "User Commands"\n' in page
    assert "koala\\-clusters \\- List clusters" in page
    assert {".SS koala clusters\n", ".SS koala clusters drain\n", ".BR koala (1)\n"} <= set(page.splitlines(True))


@pytest.mark.processes
def test_man_prints_source_that_formatter_accepts(koala: Koala) -> None:
    page = koala("--man").out
    assert page.startswith('.TH KOALA 1 "" "koala ')
    try:
        formatted = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("groff is not installed")
    assert (formatted.returncode, formatted.stderr) == (0, "")
    assert "koala submit" in formatted.stdout
