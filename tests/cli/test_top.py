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
from tests.cli.test_process import make_environment
from tests.identities import administrators

TOP = [*FAST_KOALA, "top"]
MAX_CHANGES = 600
WIDE = (100, 30)
EVE = "token-of-eve-for-tests"


class TopView:
    """``koala top`` without a terminal."""

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

    def wait_for_text(self, *texts: str, without: str = "") -> str:
        """Wait until the page has these texts."""
        for _ in range(MAX_CHANGES):
            page = self.page
            if all(text in page for text in texts) and not (without and without in page):
                return page
            self._news.wait(0.1)
            self._news.clear()
        raise AssertionError(f"{texts} without {without!r} in\n{self.page}")


@contextmanager
def open_top(
    server: Server, *, size: tuple[int, int] = WIDE, limit: int = 200, token: str = TOKEN
) -> Iterator[TopView]:
    view = TopView(server, size, limit, token)
    yield view
    view.top.close()


def submit_job(koala: Koala, name: str, *command: str) -> None:
    assert koala("submit", "--flexible", "2", "--name", name, "--", *(command or ("program",))).code == 0


def test_top_shows_clusters_queue_and_changes(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    with open_top(server) as top:
        text = top.wait_for_text("first", "north", "3 errors in a row", "job 1 is queued: too few idle nodes")
        assert text.startswith(f"koala top {server.url} ada, admin ")
        submit_job(koala, "second")
        koala("hold", "1", "--reason", "not before Monday")
        top.wait_for_text("second", "held", "not before Monday")
        koala("cancel", "1")
        top.wait_for_text("second", without="first")


def test_cursor_stays_on_job_when_rows_change(koala: Koala, server: Server) -> None:
    for number in range(5):
        submit_job(koala, f"job-{number}")
    with open_top(server) as top:
        top.wait_for_text("job-0")
        top.press_keys("j", "down")
        koala("hold", "3", "--reason", "mine")
        top.wait_for_text("job 3 is held: mine")
        submit_job(koala, "newer")
        top.wait_for_text("newer", "job 3 is held: mine")
        koala("cancel", "3")
        top.wait_for_text(without="job-2")
        top.press_keys("end")
        top.wait_for_text("job 6 is queued")


def test_job_page_shows_explanation_and_output(koala: Koala, server: Server) -> None:
    submit_job(koala, "waits")
    submit_job(koala, "runs", "start", "its words", "\x1b[2J\x07")
    with open_top(server, size=(100, 70)) as top:
        top.wait_for_text("waits")
        top.press_keys("j", "enter")
        top.wait_for_text("job 1 waits: too few idle nodes", "submitted", "+0.", without="All/mine")
        koala("hold", "1", "--reason", "later")
        top.wait_for_text("held: later")
        top.press_keys("escape", "k", "enter")
        top.wait_for_text("start its words")
        top.press_keys("o")
        text = top.wait_for_text("output, as it comes", "its words ?[2J?")
        assert "\x1b" not in text
        top.size = (100, 12)
        top.press_keys("G")
        top.wait_for_text("its words ?[2J?", without="command")
        top.press_keys("home")
        top.wait_for_text("command", without="output, ")
        top.press_keys("q")
        top.wait_for_text("All/mine")


def test_top_filters_jobs_by_text_cluster_and_owner(koala: Koala, server: Server) -> None:
    submit_job(koala, "alpha")
    submit_job(koala, "beta")
    with open_top(server) as top:
        top.wait_for_text("alpha", "Jobs of all users: 2")
        top.press_keys("/", *"ALX", "erase", "P", "enter")
        top.wait_for_text("Jobs of all users with 'alp': 1", without="beta")
        top.press_keys("enter")
        top.wait_for_text("job 1 waits")
        top.press_keys("escape", "escape")
        top.wait_for_text("beta")
        top.press_keys("tab", "enter")
        top.wait_for_text("Jobs of all users on north: ")
        top.press_keys("enter", "a")
        top.wait_for_text("Jobs of ada: ", without="on north: ")


def test_top_with_more_waiting_jobs_than_the_limit_says_so(koala: Koala, server: Server) -> None:
    submit_job(koala, "runs", "start")
    for number in range(3):
        submit_job(koala, f"waits-{number}")
    with open_top(server, limit=3) as top:
        top.wait_for_text("3; more jobs wait, --limit shows them", "runs", "waits-0", "waits-1", without="waits-2")


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 5), (1, 1)])
def test_top_fits_small_terminal(koala: Koala, server: Server, size: tuple[int, int]) -> None:
    submit_job(koala, "first")
    with open_top(server, size=size) as top:
        top.press_keys("enter")
        top.size = WIDE
        top.wait_for_text("job 1")


def test_top_replaces_control_codes_in_names(koala: Koala, server: Server) -> None:
    submit_job(koala, "[red]x[/red]")
    record = server.service.records[1]
    server.service.records[2] = replace(
        record, id=2, spec=replace(record.spec, name="a\x1b[2Jb\n[b]"), reason="\x1b]0;x\x07"
    )
    with open_top(server) as top:
        assert "\x1b" not in top.wait_for_text("[red]x[/red]", "a?[2Jb [b]", "?]0;x?")


def test_top_with_unreachable_daemon_shows_age_of_page(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    with open_top(server) as top:
        top.wait_for_text("first")
        server.end()
        top.wait_for_text("AS IT WAS 0:", "NO DAEMON ANSWERS", "first")
        top.press_keys("enter")
        top.wait_for_text("no daemon answers at")
        top.press_keys("escape")
        server.start()
        top.wait_for_text("koala top http", "first", without="AS IT WAS")


def test_top_with_revoked_token_ends(koala: Koala, server: Server) -> None:
    with open_top(server) as top:
        server.end()
        server.identities = administrators("another")
        server.start()
        top.wait_for_text("NO VALID TOKEN WAS SENT")
        assert top.top.is_over
        assert top.top.feed.ended is not None
        assert top.top.feed.ended.code is Exit.NOT_ALLOWED


def test_top_hides_details_of_jobs_of_other_users(koala: Koala, server: Server) -> None:
    submit_job(koala, "secret", "start", "secret words")
    server.end()
    server.identities = Identities({EVE: Identity("eve", Role.USER, "a test")})
    server.start()
    with open_top(server, token=EVE) as top:
        top.wait_for_text("running", without="secret")
        top.press_keys("enter")
        top.wait_for_text("job 1: only its owner and operators see more")
        top.press_keys("o")
        assert "secret" not in top.wait_for_text("output, ")


def test_alert_lines_are_limited() -> None:
    alert = {"severity": "critical", "target": "cluster north", "summary": "its agent\nis away", "remedy": "start it"}
    assert alert_lines([alert]) == ["CRITICAL cluster north: its agent is away. start it"]
    assert alert_lines([alert] * 9)[3:] == ["and 6 more: koala alerts"]


def open_terminal(server: Server, *options: str, **variables: str) -> Terminal:
    return Terminal([*TOP, *options], make_environment(server.url, **variables), 80, 24)


@pytest.mark.processes
def test_top_keys_move_cursor_and_open_job(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    submit_job(koala, "second")
    with open_terminal(server, "--all", NO_COLOR="1") as terminal:
        assert "\x1b[?1049h" in terminal.expect("first")
        terminal.send_text("\x1b[B\r")
        terminal.expect("job 2 waits: too few idle nodes")
        terminal.send_text("\x1bq")
        assert terminal.wait_for_exit() == 0
        assert "\x1b[?1049l" in terminal.output
        codes = {
            code for codes_text in re.findall("\x1b\\[([0-9;]*)m", terminal.output) for code in codes_text.split(";")
        }
        assert codes == {"0", "1", "7"}, "no colours; reversed where the cursor is"


@pytest.mark.processes
def test_top_ctrl_c_exits_with_0(koala: Koala, server: Server) -> None:
    with open_terminal(server) as terminal:
        terminal.expect("north")
        terminal.send_text("\x03")
        assert terminal.wait_for_exit() == 0
        assert "\x1b[?1049l" in terminal.output


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_restores_terminal_after_signal(koala: Koala, server: Server, number: int) -> None:
    with open_terminal(server) as terminal:
        terminal.expect("north")
        os.kill(terminal.pid, number)
        assert terminal.wait_for_exit() == -number
        assert "\x1b[?1049l" in terminal.output


@pytest.mark.processes
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_top_without_usable_terminal_names_queue_watch(server: Server, term: str) -> None:
    if term == "dumb":
        with open_terminal(server, TERM=term) as terminal:
            assert terminal.wait_for_exit() == 2
            message = terminal.output
    else:
        result = subprocess.run(
            TOP, capture_output=True, text=True, timeout=60, env=make_environment(server.url, TERM=term)
        )
        message = result.stderr
        assert (result.returncode, result.stdout) == (2, "")
    assert message.strip() == "koala: koala top needs a terminal; use koala queue --watch instead"
