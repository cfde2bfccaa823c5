"""``koala top`` on the terminal: what is wrong, the clusters and the queue; a job on a page of its own."""

import asyncio
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, printable
from koalapy.cli.jobs.submission import nodes_of
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.feed import Feed
from koalapy.cli.terminal.top.job import JobPage
from koalapy.cli.terminal.top.looks import Grid, Query, grid
from koalapy.cli.terminal.top.news import News
from koalapy.cli.terminal.top.status import alert_lines, head
from koalapy.model.wording import nodes

Json = dict[str, Any]
TICK = 1.0
"""Seconds after which times that go on are drawn anew."""
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Rows(DataTable[Text]):
    """A table that keeps its cursor on the same row, wherever that comes to be."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g", "scroll_top", show=False),
        Binding("G", "scroll_bottom", show=False),
    ]

    def __init__(self, header: Sequence[str], name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=False)
        self._header = header
        self._shown: dict[str, list[str]] = {}

    def on_mount(self) -> None:
        for name in self._header:
            self.add_column(Text(name), key=name)

    @property
    def chosen(self) -> str:
        """The key of the row that the cursor is on."""
        keys = list(self._shown)
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else ""

    def show(self, rows: Sequence[Sequence[object]]) -> None:
        """Rows, each by its first cell."""
        wanted = {str(row[0]): [printable(str(cell)) for cell in row] for row in rows}
        self._widen(wanted.values())
        if list(wanted) == list(self._shown):
            for key, cells in wanted.items():
                for name, now, before in zip(self._header, cells, self._shown[key], strict=True):
                    if now != before:
                        self.update_cell(key, name, Text(now), update_width=True)
        else:
            chosen, at = self.chosen, self.scroll_offset
            self.clear()
            for key, cells in wanted.items():
                self.add_row(*(Text(cell) for cell in cells), key=key)
            if chosen in wanted:
                self.move_cursor(row=list(wanted).index(chosen), scroll=False)
                self.scroll_to(at.x, at.y, animate=False)
        self._shown = wanted

    def _widen(self, rows: Collection[Sequence[str]]) -> None:
        """Columns as wide as their cells.

        The table would find this itself, but only once nothing else is to be done; what is drawn before that is
        kept, cut off at the old width, until a cell changes again.
        """
        for at, column in enumerate(self.ordered_columns):
            column.content_width = max(column.label.cell_len, *(Text(row[at]).cell_len for row in rows), 0)


class Top(App[CliError | int]):
    """Ends with an error, or the number of the signal that ended it."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #alerts, #why, #query { height: auto; }
    #head { text-style: bold; }
    #head.stale, #alerts { text-style: bold reverse; }
    #clusters { height: auto; max-height: 30%; }
    #jobs { height: 1fr; }
    #why { max-height: 4; border-top: solid; }
    #looked { display: none; height: 1; border: none; }
    DataTable { scrollbar-size-horizontal: 0; }
    DataTable > .datatable--header { text-style: bold underline; background: ansi_default; color: ansi_default; }
    DataTable > .datatable--cursor { text-style: none; background: ansi_default; color: ansi_default; }
    DataTable:focus > .datatable--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q", priority=False),
        Binding("a", "everyone", "All/mine"),
        Binding("slash", "look_for", "Look for", key_display="/"),
        Binding("escape", "widen", "Show all again", show=False),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    ]

    def __init__(self, client: Client, *, everyone: bool, limit: int) -> None:
        # The terminal's own colours, light or dark, and with NO_COLOR none at all.
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.client = client
        self.unicode = tables.is_unicode()
        self.whoami = client.get("/api/v1/whoami")
        self._query = Query(everyone, limit)
        self._word = ""
        self.feed: Feed[Grid] = Feed(client, lambda asked: grid(asked, self._query), self._wake)

    def _wake(self) -> None:
        if self.is_running:
            self.post_message(News())

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="alerts", markup=False)
        yield Rows(tables.CLUSTERS, "clusters")
        yield Static(id="query", markup=False)
        yield Input(placeholder="a word in any column; Enter keeps it, Esc shows all again", id="looked")
        yield Rows(tables.QUEUE, "jobs")
        yield Static(id="why", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.exit, number)
        self.set_interval(TICK, self.draw)
        self.query_one("#jobs").focus()
        self.draw()

    def on_unmount(self) -> None:
        self.feed.close()

    def on_news(self, _: News) -> None:
        self.draw()

    def draw(self) -> None:
        """What is known now."""
        if self.feed.ended is not None:
            self.exit(self.feed.ended)
            return
        shown, found = self.screen_stack[0], self.feed.latest
        if not shown.query("#why"):
            return  # it is being taken down
        line, is_stale = head(self.feed, self.client.url, self.whoami)
        shown.query_one("#head", Static).update(line)
        shown.query_one("#head").set_class(is_stale, "stale")
        wrong = alert_lines(found.alerts)
        shown.query_one("#alerts", Static).update("\n".join(wrong))
        shown.query_one("#alerts").display = bool(wrong)
        shown.query_one("#clusters", Rows).show([tables.cluster_row(cluster) for cluster in found.clusters])
        rows = [row for job in found.jobs if self._is_looked_for(row := tables.queue_row(job))]
        shown.query_one("#jobs", Rows).show(rows)
        shown.query_one("#query", Static).update(self._about(found, len(rows)))
        self._tell_why()

    def _is_looked_for(self, row: Sequence[object]) -> bool:
        return not self._word or any(self._word in str(cell).lower() for cell in row)

    def _about(self, found: Grid, shown: int) -> str:
        """What the queue shows."""
        everyone, cluster = found.asked
        told = "Jobs of all users" if everyone else f"Jobs of {self.whoami['user']}"
        told += f" on {cluster}" if cluster else ""
        told += f" with {self._word!r}" if self._word else ""
        told += f": {shown}" + ("; more jobs wait, --limit shows them" if found.has_more else "")
        waiting = sum(job["state"] in ("queued", "held") for job in found.jobs)
        asked = sum(nodes_of(job["request"]) for job in found.jobs if job["state"] == "queued")
        told += f" ({waiting} wait for {nodes(asked)})" if waiting and not found.has_more else ""
        is_old = found.asked != (self._query.everyone, self._query.cluster)
        return printable(told + (" …" if is_old else ""))

    def _tell_why(self) -> None:
        """The whole reason of the job that the cursor is on."""
        shown = self.screen_stack[0]
        if not shown.query("#why"):
            return
        chosen = shown.query_one("#jobs", Rows).chosen
        job = next((job for job in self.feed.latest.jobs if str(job["id"]) == chosen), None)
        reason = f"job {job['id']} is {job['state']}: {job['reason']}" if job and job["reason"] else ""
        why = shown.query_one("#why", Static)
        why.update(printable(reason))
        why.display = bool(reason)

    def on_data_table_row_highlighted(self) -> None:
        self._tell_why()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """A job is opened; a cluster shows its jobs only, and all again."""
        chosen = str(event.row_key.value)
        if event.data_table.id == "jobs":
            self.push_screen(JobPage(self, int(chosen)))
        else:
            self._query.cluster = "" if self._query.cluster == chosen else chosen
            self._again()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What is for the queue is not offered on other pages."""
        return action not in ("everyone", "look_for", "widen") or len(self.screen_stack) == 1

    def action_everyone(self) -> None:
        self._query.everyone = not self._query.everyone
        self._again()

    def action_look_for(self) -> None:
        field = self.query_one("#looked", Input)
        field.display = True
        field.focus()

    def action_widen(self) -> None:
        """No word and no cluster any more."""
        field = self.query_one("#looked", Input)
        field.value, field.display, self._word = "", False, ""
        self.query_one("#jobs").focus()
        if self._query.cluster:
            self._query.cluster = ""
            self._again()
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._word = event.value.strip().lower()
        self.draw()

    def on_input_submitted(self) -> None:
        self.query_one("#looked").display = False
        self.query_one("#jobs").focus()

    def _again(self) -> None:
        self.feed.refresh()
        self.draw()

    def in_background(self, what: Callable[[], object]) -> None:
        """What waits for the daemon, while the page goes on."""
        self.run_worker(what, thread=True, exit_on_error=False)
