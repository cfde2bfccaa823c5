"""``--watch``: redrawn on a terminal, one page or line for each change elsewhere."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from koalapy.cli.clusters.grid import GridState, format_top
from koalapy.cli.terminal import screen
from koalapy.cli.terminal.screen import ENTER, LEAVE, Feed, fit_lines
from koalapy.client.client import Client, JobListing
from koalapy.client.errors import Exit, GridError
from koalapy.client.timeouts import ClientTimeouts
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import FAST_KOALA, Terminal
from tests.cli.test_process import make_environment
from tests.identities import administrators

KOALA = FAST_KOALA


def submit_job(koala: Koala, name: str, command: str = "program") -> None:
    assert koala("submit", "--flexible", "2", "--name", name, "--", command).code == 0


def start_watch(server: Server, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*KOALA, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=make_environment(server.url, USER="ada", LOGNAME="ada", **variables),
    )


def open_terminal(server: Server, *arguments: str, columns: int = 80, rows: int = 24, **variables: str) -> Terminal:
    return Terminal([*KOALA, *arguments], make_environment(server.url, **variables), columns, rows)


@pytest.mark.processes
def test_watch_redraws_page_and_restores_terminal(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    with open_terminal(server, "queue", "--watch", "--all") as terminal:
        assert terminal.expect("first").startswith(ENTER)
        submit_job(koala, "second")
        assert "\x1b[H" in terminal.expect("second")
        terminal.send_text("\x03")
        assert terminal.wait_for_exit() == 130
        *_, remaining_output = terminal.output.split(LEAVE)
        assert "second" in remaining_output, "the last page stays"
        assert "\x1b" not in remaining_output


@pytest.mark.processes
def test_top_shows_clusters_and_queue_until_ctrl_c(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    with open_terminal(server, "top", "--all") as terminal:
        assert "2 nodes" in terminal.expect("north[^\x00]*Jobs: 1, 1 wait for [^\x00]*first")
        submit_job(koala, "second")
        terminal.expect("second")
        terminal.send_text("\x03")
        assert terminal.wait_for_exit() == 0


def test_top_limits_alerts_and_names_further_jobs() -> None:
    alert = {"severity": "critical", "target": "cluster north", "summary": "its agent\nis away", "remedy": "start it"}
    page = format_top(GridState([alert] * 9, [], JobListing([], has_more=True)))
    assert page.startswith("CRITICAL cluster north: its agent is away. start it\n")
    assert (page.count("CRITICAL"), "and 6 more: koala alerts" in page) == (3, True)
    assert "Jobs: 0; more jobs wait, --limit shows them" in page


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_restores_terminal_after_signal(koala: Koala, server: Server, number: int) -> None:
    with open_terminal(server, "clusters", "--watch") as terminal:
        terminal.expect("north")
        os.kill(terminal.pid, number)
        assert terminal.wait_for_exit() == -number
        assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1


@pytest.mark.processes
def test_watch_fits_page_to_resized_terminal(koala: Koala, server: Server) -> None:
    for number in range(9):
        submit_job(koala, f"job-number-{number}")
    with open_terminal(server, "queue", "--watch", "--all", columns=100) as terminal:
        terminal.expect("job-number-0")
        terminal.resize(40, 6)
        page = terminal.expect("\x1b\\[Hand|and \\d+ more lines")
        *_, drawn = page.split("\x1b[H")
        lines = drawn.replace("\x1b[K", "").replace("\x1b[J", "").splitlines()
        assert len(lines) == 6
        assert max(len(line) for line in lines) <= 40


@pytest.mark.processes
def test_watch_restores_terminal_while_suspended(server: Server) -> None:
    command = " ".join(f"'{argument}'" for argument in [*KOALA, "clusters", "--watch"])
    shell = make_environment(server.url, PS1="ready> ", HISTFILE="")
    with Terminal(["bash", "--norc", "-i"], shell) as terminal:
        terminal.expect("ready> ")
        terminal.send_text(f"{command}\n")
        terminal.expect("south")
        terminal.send_text("\x1a")
        terminal.expect(
            f"{LEAVE.replace('[', chr(92) + '[').replace('?', chr(92) + '?')}[^\x00]*Stopped[^\x00]*ready> "
        )
        terminal.send_text("fg\n")
        terminal.expect("49h[^\x00]*south")
        terminal.send_text("\x03")
        terminal.expect("ready> ")
        terminal.send_text("echo it=$?; exit\n")
        terminal.expect("it=130")


@pytest.mark.processes
@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_watch_on_dumb_terminal_prints_pages(koala: Koala, server: Server, term: str) -> None:
    submit_job(koala, "first")
    with open_terminal(server, "queue", "--watch", "--all", TERM=term) as terminal:
        terminal.expect("first")
        submit_job(koala, "second")
        terminal.expect("second")
        assert "\x1b" not in terminal.output


@pytest.mark.processes
def test_watch_to_pipe_prints_each_changed_job(koala: Koala, server: Server) -> None:
    submit_job(koala, "first")
    submit_job(koala, "second")
    process = start_watch(server, "queue", "--watch", "--all", "-o", "ndjson")
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["name"] for _ in range(2)] == ["first", "second"]
    assert koala("hold", "2").code == 0
    job = json.loads(process.stdout.readline())
    assert (job["id"], job["state"]) == (2, "held")
    assert koala("cancel", "1").code == 0
    job = json.loads(process.stdout.readline())
    assert (job["id"], job["state"]) == (1, "cancelled"), "the end of a listed job"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130


@pytest.mark.processes
def test_watch_waits_for_unreachable_daemon_and_shows_age(koala: Koala, server: Server) -> None:
    piped = start_watch(server, "clusters", "--watch")
    assert piped.stdout is not None
    assert piped.stderr is not None
    while "south" not in piped.stdout.readline():
        pass
    with open_terminal(server, "clusters", "--watch") as terminal:
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


def test_change_that_cannot_be_shown_while_daemon_is_away_is_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[tuple[object, str]] = []
    feed = SimpleNamespace(latest="now", trouble=None, ended=None)

    def open_feed(client: object, look: object, wake: Callable[[], None]) -> SimpleNamespace:
        feed.wake = wake
        return feed

    def show(previous: object, now: str) -> None:
        changes.append((previous, now))
        feed.wake()
        if len(changes) == 1:
            raise GridError("no daemon answers", Exit.UNREACHABLE)
        feed.ended = GridError("no access", Exit.NOT_ALLOWED)

    monkeypatch.setattr(screen, "Feed", open_feed)
    with pytest.raises(GridError, match="no access"):
        screen.show_changes(cast(Client, None), lambda _: "", show)
    assert changes == [(None, "now")] * 2


@pytest.mark.processes
def test_watch_with_revoked_token_ends_with_error(koala: Koala, server: Server) -> None:
    with open_terminal(server, "clusters", "--watch") as terminal:
        terminal.expect("south")
        server.end()
        server.identities = administrators("another")
        server.start()
        assert terminal.wait_for_exit() == 4
        assert terminal.output.split(LEAVE)[-1].rstrip().splitlines()[-1].startswith("koala: no valid token was sent")


@pytest.mark.processes
def test_watch_without_daemon_exits_with_5(tmp_path: Path) -> None:
    result = subprocess.run(
        [*KOALA, "queue", "--watch"],
        capture_output=True,
        text=True,
        timeout=60,
        env=make_environment("http://127.0.0.1:1", KOALA_TOKEN=TOKEN),
    )
    assert (result.returncode, result.stdout) == (5, "")


def test_fit_lines_counts_omitted_lines() -> None:
    assert fit_lines(["one", "two", "three"], 80, 2) == ["one", "and 2 more lines"]
    assert fit_lines(["one", "two"], 2, 9) == ["o~", "t~"]


@pytest.mark.processes
def test_feed_of_slow_daemon_leaves_it_nine_tenths_of_the_time() -> None:
    class SlowClient:
        timeouts = ClientTimeouts(min_look_pause_s=0.01, min_live_look_pause_s=0.01)
        looks = 0

        def clone_for_thread(self) -> "SlowClient":
            return self

        def grid_events(self, last: str, timeout: float) -> Iterator[bytes]:
            raise GridError("there is no stream", Exit.NOT_FOUND)

    def look(client: SlowClient) -> None:
        client.looks += 1
        time.sleep(0.2)

    client = SlowClient()
    feed = Feed(client, look, lambda: None)  # type: ignore[arg-type]
    time.sleep(1.5)
    feed.close()
    assert client.looks <= 2
