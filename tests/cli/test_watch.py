"""``--watch``: in place on a terminal, change by change elsewhere, whatever befalls the daemon and the terminal."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.cli.terminal.screen import ENTER, LEAVE, fit_lines
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import FAST_KOALA, Terminal
from tests.cli.test_process import environment
from tests.identities import administrators

KOALA = FAST_KOALA


def submitted(koala: Koala, name: str, command: str = "program") -> None:
    assert koala("submit", "--flexible", "2", "--name", name, "--", command).code == 0


def watching(server: Server, *words: str, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*KOALA, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(server.url, USER="ada", LOGNAME="ada", **more),
    )


def on_terminal(server: Server, *words: str, columns: int = 80, rows: int = 24, **more: str) -> Terminal:
    return Terminal([*KOALA, *words], environment(server.url, **more), columns, rows)


@pytest.mark.processes
def test_a_terminal_shows_each_change_in_its_place_and_is_given_back(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    with on_terminal(server, "queue", "--watch", "--all") as terminal:
        assert terminal.expect("first").startswith(ENTER)
        submitted(koala, "second")
        assert "\x1b[H" in terminal.expect("second")
        terminal.type("\x03")
        assert terminal.end() == 130
        *_, after = terminal.printed.split(LEAVE)
        assert "second" in after, "what was shown last stays"
        assert "\x1b" not in after


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(koala: Koala, server: Server, number: int) -> None:
    with on_terminal(server, "clusters", "--watch") as terminal:
        terminal.expect("north")
        os.kill(terminal.pid, number)
        assert terminal.end() == -number
        assert terminal.printed.count(ENTER) == terminal.printed.count(LEAVE) == 1


@pytest.mark.processes
def test_lines_are_cut_to_a_terminal_that_becomes_smaller(koala: Koala, server: Server) -> None:
    for number in range(9):
        submitted(koala, f"job-number-{number}")
    with on_terminal(server, "queue", "--watch", "--all", columns=100) as terminal:
        terminal.expect("job-number-0")
        terminal.resize(40, 6)
        page = terminal.expect("\x1b\\[Hand|and \\d+ more lines")
        *_, drawn = page.split("\x1b[H")
        lines = drawn.replace("\x1b[K", "").replace("\x1b[J", "").splitlines()
        assert len(lines) == 6
        assert max(len(line) for line in lines) <= 40


@pytest.mark.processes
def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(server: Server) -> None:
    words = " ".join(f"'{word}'" for word in [*KOALA, "clusters", "--watch"])
    shell = environment(server.url, PS1="ready> ", HISTFILE="")
    with Terminal(["bash", "--norc", "-i"], shell) as terminal:
        terminal.expect("ready> ")
        terminal.type(f"{words}\n")
        terminal.expect("south")
        terminal.type("\x1a")
        terminal.expect(
            f"{LEAVE.replace('[', chr(92) + '[').replace('?', chr(92) + '?')}[^\x00]*Stopped[^\x00]*ready> "
        )
        terminal.type("fg\n")
        terminal.expect("49h[^\x00]*south")
        terminal.type("\x03")
        terminal.expect("ready> ")
        terminal.type("echo it=$?; exit\n")
        terminal.expect("it=130")


@pytest.mark.processes
@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_gets_one_page_after_the_other(koala: Koala, server: Server, term: str) -> None:
    submitted(koala, "first")
    with on_terminal(server, "queue", "--watch", "--all", TERM=term) as terminal:
        terminal.expect("first")
        submitted(koala, "second")
        terminal.expect("second")
        assert "\x1b" not in terminal.printed


@pytest.mark.processes
def test_a_pipe_gets_a_line_for_each_job_that_has_changed(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    submitted(koala, "second")
    process = watching(server, "queue", "--watch", "--all", "-o", "ndjson")
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["name"] for _ in range(2)] == ["first", "second"]
    assert koala("hold", "2").code == 0
    told = json.loads(process.stdout.readline())
    assert (told["id"], told["state"]) == (2, "held")
    assert koala("cancel", "1").code == 0
    told = json.loads(process.stdout.readline())
    assert (told["id"], told["state"]) == (1, "cancelled"), "its end, though what is over was not asked for"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130


@pytest.mark.processes
def test_a_daemon_that_is_away_is_waited_for_and_what_is_shown_is_told_to_be_old(koala: Koala, server: Server) -> None:
    piped = watching(server, "clusters", "--watch")
    assert piped.stdout is not None
    assert piped.stderr is not None
    while "south" not in piped.stdout.readline():
        pass
    with on_terminal(server, "clusters", "--watch") as terminal:
        terminal.expect("south")
        server.end()
        assert "still watching" in piped.stderr.readline()
        terminal.expect("As it was 0:\\d\\d ago: no daemon answers")
        server.service.south = replace(server.service.south, reason="came back")
        server.start()
        terminal.expect("live")
        terminal.expect("came back")
    assert piped.stderr.readline() == "koala: the daemon is back\n"
    while "came back" not in piped.stdout.readline():
        pass
    piped.kill()
    piped.communicate(timeout=60)


@pytest.mark.processes
def test_a_token_that_is_revoked_ends_it_with_its_error(koala: Koala, server: Server) -> None:
    with on_terminal(server, "clusters", "--watch") as terminal:
        terminal.expect("south")
        server.end()
        server.identities = administrators("another")
        server.start()
        assert terminal.end() == 4
        assert terminal.printed.split(LEAVE)[-1].rstrip().splitlines()[-1].startswith("koala: no valid token was sent")


@pytest.mark.processes
def test_a_daemon_that_never_was_is_told_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [*KOALA, "queue", "--watch"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment("http://127.0.0.1:1", KOALA_TOKEN=TOKEN),
    )
    assert (done.returncode, done.stdout) == (5, "")


@pytest.mark.parametrize(
    "words", [("queue", "--json"), ("queue", "-o", "json"), ("queue", "-q"), ("clusters", "--json")]
)
def test_what_ends_nowhere_is_refused(koala: Koala, words: tuple[str, ...]) -> None:
    done = koala(*words, "--watch")
    assert (done.code, done.out) == (2, "")
    assert "and --watch cannot be given together" in done.err


def test_what_has_no_room_is_counted() -> None:
    assert fit_lines(["one", "two", "three"], 80, 2) == ["one", "and 2 more lines"]
    assert fit_lines(["one", "two"], 2, 9) == ["o~", "t~"]
