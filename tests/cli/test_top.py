"""``koala top``: clusters, queue and one job on a terminal, live, while daemon and terminal change."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from koalapy.cli.terminal.top import Top, alert_lines
from koalapy.client.client import Client
from koalapy.client.errors import Exit
from koalapy.client.timeouts import ClientTimeouts
from koalapy.daemon.auth.identities import Identities
from koalapy.model.identity import Identity, Role
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import FAST_KOALA, Terminal
from tests.cli.test_process import environment
from tests.identities import administrators

TOP = [*FAST_KOALA, "top"]
MAX_CHANGES = 600
WIDE = (100, 30)
EVE = "token-of-eve-for-tests"


class Opened:
    """``koala top`` without a terminal: its page after each answer of the daemon."""

    def __init__(self, server: Server, size: tuple[int, int], limit: int, token: str) -> None:
        self._news = threading.Event()
        client = Client(server.url, token, timeouts=ClientTimeouts(min_look_pause_s=0.05))
        self.size, self.top = size, Top(client, everyone=True, limit=limit, wake=self._news.set)

    @property
    def page(self) -> str:
        return "\n".join(line.text for line in self.top.page_lines(*self.size))

    def press_keys(self, *keys: str) -> None:
        for key in keys:
            self.top.page_lines(*self.size)
            self.top.press_key(key)

    def shows(self, *texts: str, without: str = "") -> str:
        """Wait until the page has these texts."""
        for _ in range(MAX_CHANGES):
            page = self.page
            if all(text in page for text in texts) and not (without and without in page):
                return page
            self._news.wait(0.1)
            self._news.clear()
        raise AssertionError(f"{texts} without {without!r} in\n{self.page}")


@contextmanager
def opened(server: Server, *, size: tuple[int, int] = WIDE, limit: int = 200, token: str = TOKEN) -> Iterator[Opened]:
    shown = Opened(server, size, limit, token)
    yield shown
    shown.top.close()


def submitted(koala: Koala, name: str, *command: str) -> None:
    assert koala("submit", "--flexible", "2", "--name", name, "--", *(command or ("program",))).code == 0


def test_top_shows_clusters_queue_and_reasons_and_each_change(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    with opened(server) as top:
        shown = top.shows("first", "north", "3 errors in a row", "job 1 is queued: too few idle nodes")
        assert shown.startswith(f"koala top {server.url} ada, admin ")
        submitted(koala, "second")
        koala("hold", "1", "--reason", "not before Monday")
        top.shows("second", "held", "not before Monday")
        koala("cancel", "1")
        top.shows("second", without="first")


def test_cursor_stays_on_its_job_when_others_come(koala: Koala, server: Server) -> None:
    for number in range(5):
        submitted(koala, f"job-{number}")
    with opened(server) as top:
        top.shows("job-0")
        top.press_keys("j", "down")
        koala("hold", "3", "--reason", "mine")
        top.shows("job 3 is held: mine")
        submitted(koala, "newer")
        top.shows("newer", "job 3 is held: mine")
        koala("cancel", "3")
        top.shows(without="job-2")
        top.press_keys("end")
        top.shows("job 1 is queued")


def test_page_of_a_job_shows_what_it_waits_for_and_its_output(koala: Koala, server: Server) -> None:
    submitted(koala, "waits")
    submitted(koala, "runs", "start", "its words", "\x1b[2J\x07")
    with opened(server, size=(100, 70)) as top:
        top.shows("waits")
        top.press_keys("j", "enter")
        top.shows("job 1 waits: too few idle nodes", "submitted", "+0.", without="All/mine")
        koala("hold", "1", "--reason", "later")
        top.shows("held: later")
        top.press_keys("escape", "k", "enter")
        top.shows("start its words")
        top.press_keys("o")
        shown = top.shows("output, as it comes", "its words ?[2J?")
        assert "\x1b" not in shown
        top.size = (100, 12)
        top.press_keys("G")
        top.shows("its words ?[2J?", without="command")
        top.press_keys("home")
        top.shows("command", without="output, ")
        top.press_keys("q")
        top.shows("All/mine")


def test_jobs_are_chosen_by_word_and_cluster_and_owner(koala: Koala, server: Server) -> None:
    submitted(koala, "alpha")
    submitted(koala, "beta")
    with opened(server) as top:
        top.shows("alpha", "Jobs of all users: 2")
        top.press_keys("/", *"ALX", "erase", "P", "enter")
        top.shows("Jobs of all users with 'alp': 1", without="beta")
        top.press_keys("enter")
        top.shows("job 1 waits")
        top.press_keys("escape", "escape")
        top.shows("beta")
        top.press_keys("tab", "enter")
        top.shows("Jobs of all users on north: ")
        top.press_keys("enter", "a")
        top.shows("Jobs of ada: ", without="on north: ")


def test_top_with_more_waiting_jobs_than_the_limit_says_so(koala: Koala, server: Server) -> None:
    submitted(koala, "runs", "start")
    for number in range(3):
        submitted(koala, f"waits-{number}")
    with opened(server, limit=2) as top:
        top.shows("3; more jobs wait, --limit shows them", "runs", "waits-2", "waits-1", without="waits-0")


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 5), (1, 1)])
def test_top_on_a_small_terminal_is_no_error(koala: Koala, server: Server, size: tuple[int, int]) -> None:
    submitted(koala, "first")
    with opened(server, size=size) as top:
        top.press_keys("enter")
        top.size = WIDE
        top.shows("job 1")


def test_names_of_jobs_are_shown_without_control_codes(koala: Koala, server: Server) -> None:
    submitted(koala, "[red]x[/red]")
    record = server.service.records[1]
    server.service.records[2] = replace(
        record, id=2, spec=replace(record.spec, name="a\x1b[2Jb\n[b]"), reason="\x1b]0;x\x07"
    )
    with opened(server) as top:
        assert "\x1b" not in top.shows("[red]x[/red]", "a?[2Jb [b]", "?]0;x?")


def test_daemon_that_is_away_leaves_the_last_page_with_its_age(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    with opened(server) as top:
        top.shows("first")
        server.end()
        top.shows("AS IT WAS 0:", "NO DAEMON ANSWERS", "first")
        top.press_keys("enter")
        top.shows("no daemon answers at")
        top.press_keys("escape")
        server.start()
        top.shows("koala top http", "first", without="AS IT WAS")


def test_top_with_a_revoked_token_ends(koala: Koala, server: Server) -> None:
    with opened(server) as top:
        server.end()
        server.identities = administrators("another")
        server.start()
        top.shows("NO VALID TOKEN WAS SENT")
        assert top.top.is_over
        assert top.top.feed.ended is not None
        assert top.top.feed.ended.code is Exit.NOT_ALLOWED


def test_jobs_of_others_are_shown_to_users_without_details(koala: Koala, server: Server) -> None:
    submitted(koala, "secret", "start", "secret words")
    server.end()
    server.identities = Identities({EVE: Identity("eve", Role.USER, "a test")})
    server.start()
    with opened(server, token=EVE) as top:
        top.shows("running", without="secret")
        top.press_keys("enter")
        top.shows("job 1: only its owner and operators see more")
        top.press_keys("o")
        assert "secret" not in top.shows("output, ")


def test_alerts_stand_first_and_are_bounded() -> None:
    alert = {"severity": "critical", "target": "cluster north", "summary": "its agent\nis away", "remedy": "start it"}
    assert alert_lines([alert]) == ["CRITICAL cluster north: its agent is away. start it"]
    assert alert_lines([alert] * 9)[3:] == ["and 6 more: koala alerts"]


def on_terminal(server: Server, *words: str, **more: str) -> Terminal:
    return Terminal([*TOP, *words], environment(server.url, **more), 80, 24)


@pytest.mark.processes
def test_keys_on_a_terminal_move_the_cursor_and_open_a_job(koala: Koala, server: Server) -> None:
    submitted(koala, "first")
    submitted(koala, "second")
    with on_terminal(server, "--all", NO_COLOR="1") as terminal:
        assert "\x1b[?1049h" in terminal.expect("first")
        terminal.type("\x1b[B\r")
        terminal.expect("job 1 waits: too few idle nodes")
        terminal.type("\x1bq")
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.printed
        codes = {code for found in re.findall("\x1b\\[([0-9;]*)m", terminal.printed) for code in found.split(";")}
        assert codes == {"0", "1", "7"}, "no colours; reversed where the cursor is"


@pytest.mark.processes
def test_ctrl_c_ends_top_without_an_error(koala: Koala, server: Server) -> None:
    with on_terminal(server) as terminal:
        terminal.expect("north")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.printed


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_top_gives_the_terminal_back(koala: Koala, server: Server, number: int) -> None:
    with on_terminal(server) as terminal:
        terminal.expect("north")
        os.kill(terminal.pid, number)
        assert terminal.end() == -number
        assert "\x1b[?1049l" in terminal.printed


@pytest.mark.processes
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_top_where_nothing_can_be_drawn_names_the_alternative(server: Server, term: str) -> None:
    if term == "dumb":
        with on_terminal(server, TERM=term) as terminal:
            assert terminal.end() == 2
            told = terminal.printed
    else:
        done = subprocess.run(TOP, capture_output=True, text=True, timeout=60, env=environment(server.url, TERM=term))
        told = done.stderr
        assert (done.returncode, done.stdout) == (2, "")
    assert told.strip() == "koala: koala top needs a terminal; use koala queue --watch instead"
