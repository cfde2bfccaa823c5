"""``koala top``."""

import signal
import sys
from typing import Annotated

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DEFAULT_URL, Token, Url
from koalapy.cli.terminal.width import can_redraw


def top(
    everyone: Annotated[bool, Option("--all", help="begin with the jobs of all users")] = False,
    limit: Annotated[int, Option(help="how many waiting jobs at most, the newest", min=1, max=2000)] = 200,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Show what is wrong, the clusters, the queue and one job, live, on the whole terminal.

    Enter opens a job, or shows only the jobs of a cluster; a shows all users' jobs, / looks for a word, q ends.
    """
    if not (sys.stdin.isatty() and can_redraw(sys.stdout) and can_redraw(sys.stderr)):
        raise CliError("koala top needs a terminal of its own", Exit.USAGE, "elsewhere, koala queue --watch")
    client = Client(url, token)
    from koalapy.cli.terminal.top.app import Top

    app = Top(client, everyone=everyone, limit=limit)
    ended = app.run()
    if isinstance(ended, CliError):
        raise ended
    if isinstance(ended, int):
        signal.signal(ended, signal.SIG_DFL)
        signal.raise_signal(ended)
