"""One job on a page of its own: everything that is known of it, live, with its output when that is asked for."""

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.screen import Screen
from textual.widgets import Footer, Static

from koalapy.cli.errors import CliError, printable
from koalapy.cli.files import transfers
from koalapy.cli.jobs import explain
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.feed import Feed
from koalapy.cli.terminal.top.looks import ATTEMPTS, OneJob, Tail, one_job
from koalapy.cli.terminal.top.news import News
from koalapy.cli.terminal.top.status import head

if TYPE_CHECKING:
    from koalapy.cli.terminal.top.app import Top

TICK = 1.0
"""Seconds after which times that go on are drawn anew."""


class JobPage(Screen[None]):
    """Looked at by a feed of its own while it is open."""

    CSS = """
    #job-head { text-style: bold; height: auto; }
    #job-head.stale { text-style: bold reverse; }
    #page { height: 1fr; scrollbar-size: 0 0; }
    #text { width: auto; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", "Back", key_display="Esc"),
        Binding("o", "output", "Output"),
        Binding("j", "scroll('down')", show=False),
        Binding("k", "scroll('up')", show=False),
    ]

    def __init__(self, top: "Top", job: int) -> None:
        super().__init__()
        self._top, self._job = top, job
        self._feed: Feed[OneJob] | None = None
        self._tail: Tail | None = None
        self._failed = ""

    def compose(self) -> ComposeResult:
        yield Static(id="job-head", markup=False)
        with ScrollableContainer(id="page"):
            yield Static("…", id="text", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#page").focus()
        self._top.in_background(self._open)
        self.set_interval(TICK, self.draw)
        self.draw()

    def _open(self) -> None:
        """The first look may wait for the daemon."""
        try:
            feed = Feed(self._top.client, lambda client: one_job(client, self._job), self._wake)
        except CliError as error:
            self._failed = str(error)
        else:
            self._feed = feed
            if not self.is_attached:
                feed.close()
        self._wake()

    def _wake(self) -> None:
        if self.is_attached:
            self.post_message(News())

    def on_news(self) -> None:
        self.draw()

    def on_unmount(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def draw(self) -> None:
        if not self.query("#text"):
            return  # it is being taken down
        feed = self._feed
        line, is_stale = head(feed or self._top.feed, self._top.client.url, self._top.whoami)
        self.query_one("#job-head", Static).update(line)
        self.query_one("#job-head").set_class(is_stale, "stale")
        if feed is not None and feed.ended is not None:
            self._top.exit(feed.ended)
        text = self._failed or (self._page(feed.latest) if feed is not None else "…")
        self.query_one("#text", Static).update(text)

    def _page(self, found: OneJob) -> str:
        if not found.job or found.problem:
            return printable(f"job {self._job}: {found.problem}")
        parts = [explain.page(found.explanation)] if found.explanation is not None else []
        under_way = transfers.lines(found.job, unicode=self._top.unicode)
        parts.append(tables.job_page(found.job, found.attempts, ATTEMPTS, under_way, unicode=self._top.unicode))
        if self._tail is not None:
            lines = [_shown(line) for line in list(self._tail.lines)]
            parts.append("\n".join([f"output, {printable(self._tail.told)}", *lines]))
        return "\n\n".join(parts)

    def action_close(self) -> None:
        self.dismiss()

    def action_output(self) -> None:
        """Show what the job prints, below the page, as it comes."""
        if self._tail is None:
            self._tail = Tail(self._top.client.another(), self._job)
            self._tail.start()
        self.draw()
        self.query_one("#page").scroll_end(animate=False)

    def action_scroll(self, where: str) -> None:
        page = self.query_one("#page")
        page.scroll_down(animate=False) if where == "down" else page.scroll_up(animate=False)


def _shown(line: str) -> str:
    """As a terminal may be given it: nothing in it moves a cursor or changes colours."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in line.rstrip("\r"))
