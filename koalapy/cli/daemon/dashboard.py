"""``koala dashboard``: open the daemon's pages in a browser without entering a token."""

import os
import sys
import webbrowser
from html import escape
from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.client.errors import CliError, Exit, printable
from koalapy.system.files import open_own_folder, write_private_file
from koalapy.system.local_token import account_directory

PAGE = "dashboard.html"


def open_dashboard(
    open_it: Annotated[bool, Option("--open", help="open it in a browser of this machine")] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Print an address that logs a browser in as you, once within a minute."""
    client = daemon.client()
    login_code = client.post("/api/v1/login-codes")
    address = f"{client.url}{login_code['path']}"
    if not open_it:
        print(printable(address))
        if sys.stdout.isatty():
            print("koala: open it in a browser within a minute, once", file=sys.stderr)
    elif not webbrowser.open(_write_redirect_page(address).as_uri()):
        raise CliError("no browser could be started", Exit.FAILED, "run it without --open, and open the address")


def _write_redirect_page(address: str) -> Path:
    """Write a private file that redirects a browser to an address. Raise ``CliError`` if this fails.

    Other accounts of the machine can read the arguments of a browser process, and would see a token in them.
    """
    folder = account_directory("browser")
    try:
        if folder is None:
            raise OSError("the account has no home")
        descriptor = open_own_folder(folder, make=True)
        try:
            text = (
                f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}"><title>koala</title>\n'
            )
            os.close(write_private_file(PAGE, descriptor, text))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise CliError(
            f"cannot create a file that only your account can read: {error}",
            Exit.FAILED,
            "run it without --open, and open the address",
        ) from error
    return folder / PAGE
