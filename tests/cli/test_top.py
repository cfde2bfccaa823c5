"""``koala top``: clusters, queue and one job on a terminal, live, whatever befalls daemon and terminal."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.top.app import Rows, Top
from koalapy.cli.terminal.top.status import alert_lines
from koalapy.cli.timeouts import ClientTimeouts
from koalapy.daemon.auth.identities import Identities
from koalapy.model.identity import Identity, Role
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import Terminal
from tests.cli.test_process import environment
from tests.identities import administrators

FAST = """
from koalapy.cli.main import main
from koalapy.cli.timeouts import ClientTimeouts
main(ClientTimeouts(min_look_pause_s=0.05, min_live_look_pause_s=0.05))
"""
TOP = [sys.executable, "-c", FAST, "top"]
DEADLINE = 60.0
Opened = Pilot[CliError | int]


@asynccontextmanager
async def opened(server: Server, *, size: tuple[int, int] = (100, 30), limit: int = 200) -> AsyncIterator[Opened]:
    app = Top(Client(server.url, TOKEN, timeouts=ClientTimeouts(min_look_pause_s=0.05)), everyone=True, limit=limit)
    async with app.run_test(size=size) as pilot:
        yield pilot


def page(pilot: Opened) -> str:
    """What stands on the terminal."""
    return "\n".join("".join(segment.text for segment in line) for line in pilot.app.screen._compositor.render_strips())


async def shows(pilot: Opened, *texts: str, without: str = "") -> str:
    end = time.monotonic() + DEADLINE
    while not all(text in page(pilot) for text in texts) or (without and without in page(pilot)):
        assert time.monotonic() < end, f"{texts} without {without!r} in\n{page(pilot)}"
        await pilot.pause(0.02)
    return page(pilot)


def submitted(koala: Koala, name: str, *command: str) -> None:
    assert koala("submit", "--flexible", "2", "--name", name, "--", *(command or ("program",))).code == 0


async def test_the_first_page_shows_clusters_queue_and_reasons_and_each_change(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    async with opened(server) as pilot:
        shown = await shows(pilot, "first", "north", "3 errors in a row", "job 1 is queued: too few idle nodes")
        assert shown.startswith(f"koala top {server.url} ada, admin ")
        submitted(koala, "second")
        koala("hold", "1", "--reason", "not before Monday")
        await shows(pilot, "second", "held", "not before Monday")
        koala("cancel", "1")
        await shows(pilot, "second", without="first")


async def test_cells_are_whole_even_where_they_are_drawn_before_the_table_has_come_to_rest(server: Server) -> None:
    async with opened(server) as pilot:
        await shows(pilot, "north")
        rows = pilot.app.query_one("#clusters", Rows)
        narrow = ["x", *["-"] * (len(tables.CLUSTERS) - 1)]
        for changed in (["x", "a wide kind", *narrow[2:]], ["a wide name", *narrow[1:]], narrow):
            rows.show([narrow, ["y", *narrow[1:]]])
            await pilot.pause()
            rows.show([changed, ["y", *narrow[1:]]])
            at_once = page(pilot).splitlines()[1:4]
            assert re.split(r"  +", at_once[1].strip())[:2] == changed[:2]
            assert at_once[0].index("KIND") == at_once[1].index(changed[1]) == at_once[2].index("-")


async def test_the_cursor_stays_on_its_job_when_others_come(koala: Koala, server: Server) -> None:
    for number in range(5):
        submitted(koala, f"job-{number}")
    async with opened(server) as pilot:
        await shows(pilot, "job-0")
        await pilot.press("j", "j")
        koala("hold", "3", "--reason", "mine")
        await shows(pilot, "job 3 is held: mine")
        submitted(koala, "newer")
        await shows(pilot, "newer", "job 3 is held: mine")
        koala("cancel", "3")
        await shows(pilot, without="job-2")


async def test_a_job_has_a_page_with_what_it_waits_for_and_its_output(koala: Koala, server: Server) -> None:
    submitted(koala, "waits")
    submitted(koala, "runs", "start", "its words", "\x1b[2J\x07")
    async with opened(server, size=(100, 70)) as pilot:
        await shows(pilot, "waits")
        await pilot.press("j", "enter")
        await shows(pilot, "job 1 waits: too few idle nodes", "submitted", "+0.", without="All/mine")
        koala("hold", "1", "--reason", "later")
        await shows(pilot, "held: later")
        await pilot.press("escape", "k", "enter")
        await shows(pilot, "start its words")
        await pilot.press("o")
        shown = await shows(pilot, "output, as it comes", "its words ?[2J?")
        assert "\x1b" not in shown
        await pilot.press("q")
        await shows(pilot, "All/mine")


async def test_rows_are_chosen_by_word_and_cluster_and_owner(koala: Koala, server: Server) -> None:
    submitted(koala, "alpha")
    submitted(koala, "beta")
    async with opened(server) as pilot:
        await shows(pilot, "alpha", "Jobs of all users: 2")
        await pilot.press("slash", *"ALP")
        await shows(pilot, "Jobs of all users with 'alp': 1", without="beta")
        await pilot.press("enter", "enter")
        await shows(pilot, "job 1 waits")
        await pilot.press("escape", "escape")
        await shows(pilot, "beta")
        await pilot.press("shift+tab", "enter")
        await shows(pilot, "Jobs of all users on north: ")
        await pilot.press("enter", "a")
        await shows(pilot, "Jobs of ada: ", without="on north: ")


async def test_more_jobs_than_are_shown_are_told_of(koala: Koala, server: Server) -> None:
    for number in range(4):
        submitted(koala, f"job-{number}")
    async with opened(server, limit=2) as pilot:
        await shows(pilot, "2; more jobs wait, --limit shows them", "job-3", without="job-0")


async def test_top_with_more_newer_waiting_jobs_than_the_limit_shows_all_running_jobs(
    koala: Koala, server: Server
) -> None:
    for number in range(3):
        submitted(koala, f"runs-{number}", "start")
    for number in range(4):
        submitted(koala, f"waits-{number}")
    async with opened(server, limit=2) as pilot:
        await shows(pilot, "runs-0", "runs-1", "runs-2", "waits-3", "waits-2", without="waits-1")


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 5), (1, 1)])
async def test_a_small_terminal_is_no_error(koala: Koala, server: Server, size: tuple[int, int]) -> None:
    submitted(koala, "first")
    async with opened(server, size=size) as pilot:
        await pilot.pause()
        await pilot.press("enter")
        await pilot.resize_terminal(100, 30)
        await shows(pilot, "job 1")


async def test_what_others_have_named_is_shown_as_it_is(koala: Koala, server: Server) -> None:
    submitted(koala, "[red]x[/red] [@click=app.quit]")
    record = server.service.records[1]
    server.service.records[2] = replace(
        record, id=2, spec=replace(record.spec, name="a\x1b[2Jb\n[b]"), reason="\x1b]0;x\x07"
    )
    async with opened(server) as pilot:
        shown = await shows(pilot, "[red]x[/red] [@click=app.quit]", "a?[2Jb [b]", "?]0;x?")
        assert "\x1b" not in shown


async def test_a_daemon_that_is_away_leaves_what_was_known_with_its_age(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    async with opened(server) as pilot:
        await shows(pilot, "first")
        server.end()
        await shows(pilot, "AS IT WAS 0:", "no daemon answers", "first")
        await pilot.press("enter")
        await shows(pilot, "no daemon answers at")
        await pilot.press("escape")
        server.start()
        await shows(pilot, "koala top http", "first", without="AS IT WAS")


async def test_a_token_that_is_revoked_ends_it(koala: Koala, server: Server) -> None:
    async with opened(server) as pilot:
        server.end()
        server.identities = administrators("another")
        server.start()
        end = time.monotonic() + DEADLINE
        while pilot.app.return_value is None:
            assert time.monotonic() < end
            await pilot.pause(0.02)
        assert isinstance(pilot.app.return_value, CliError)
        assert pilot.app.return_value.code is Exit.NOT_ALLOWED


async def test_of_others_jobs_a_user_sees_little(koala: Koala, server: Server) -> None:
    submitted(koala, "secret", "start", "secret words")
    server.end()
    server.identities = Identities({"token-of-eve-for-tests": Identity("eve", Role.USER, "a test")})
    server.start()
    app = Top(Client(server.url, "token-of-eve-for-tests"), everyone=True, limit=9)
    async with app.run_test(size=(100, 30)) as pilot:
        await shows(pilot, "running", without="secret")
        await pilot.press("enter")
        await shows(pilot, "job 1: it is somebody else's")
        await pilot.press("o")
        await pilot.pause()
        assert "secret" not in page(pilot)


def test_what_is_wrong_stands_first_and_is_bounded() -> None:
    alert = {"severity": "critical", "target": "cluster north", "summary": "its agent\nis away", "remedy": "start it"}
    assert alert_lines([alert]) == ["CRITICAL cluster north: its agent is away. start it"]
    assert alert_lines([alert] * 9)[3:] == ["and 6 more: koala alerts"]


def on_terminal(server: Server, *words: str, **more: str) -> Terminal:
    return Terminal([*TOP, *words], environment(server.url, **more), 80, 24)


@pytest.mark.processes
@pytest.mark.parametrize("key", ["q", "\x03"])
def test_a_key_ends_it_and_gives_the_terminal_back(koala: Koala, server: Server, key: str) -> None:
    submitted(koala, "first")
    with on_terminal(server, "--all") as terminal:
        assert "\x1b[?1049h" in terminal.expect("first")
        terminal.type(key)
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.printed


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_gives_the_terminal_back(koala: Koala, server: Server, number: int) -> None:
    with on_terminal(server) as terminal:
        terminal.expect("north")
        os.kill(terminal.pid, number)
        assert terminal.end() == -number
        assert "\x1b[?1049l" in terminal.printed


@pytest.mark.processes
def test_without_colours_there_are_none(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    with on_terminal(server, "--all", NO_COLOR="1") as terminal:
        terminal.expect("first")
        terminal.type("q")
        assert terminal.end() == 0
        codes = {code for found in re.findall("\x1b\\[([0-9;]*)m", terminal.printed) for code in found.split(";")}
        assert codes <= {"", "0", "1", "2", "4", "7", "39", "49"}, "only bold, dim, underlined, reversed and the usual"
        assert "7" in codes, "where the cursor is"


@pytest.mark.processes
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_where_nothing_can_be_drawn_it_says_what_to_use(server: Server, term: str) -> None:
    if term == "dumb":
        with on_terminal(server, TERM=term) as terminal:
            assert terminal.end() == 2
            told = terminal.printed
    else:
        done = subprocess.run(TOP, capture_output=True, text=True, timeout=60, env=environment(server.url, TERM=term))
        told = done.stderr
        assert (done.returncode, done.stdout) == (2, "")
    assert told.strip() == "koala: koala top needs a terminal of its own; elsewhere, koala queue --watch"
