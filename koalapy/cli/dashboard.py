"""``koala dashboard``: the daemon's pages in a browser that need not be told a token."""

import sys
import webbrowser
from typing import Annotated

from koalapy.cli.arguments import Option
from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.options import DEFAULT_URL, Token, Url


def dashboard(
    open_it: Annotated[bool, Option("--open", help="in a browser of this machine")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """An address that logs a browser in as you: good once, and for a minute."""
    client = Client(url, token)
    found = client.post("/api/v1/login-codes")
    where = f"{client.url}{found['path']}"
    if not open_it:
        print(where)
        if sys.stdout.isatty():
            print("koala: open it in a browser within a minute, once", file=sys.stderr)
    elif not webbrowser.open(where):
        raise CliError("no browser can be started here", Exit.FAILED, "leave --open out, and take the address")
