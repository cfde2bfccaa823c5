"""Options and arguments shared by several commands."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import click

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.client.access import DEFAULT_URL
from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.job_reference import JobReference
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.tls import CA_FILE, split_urls

T = TypeVar("T")
MAX_WAIT_S = 10**9

ABOUT_CA_FILE = "PEM file with the authority of the daemon's certificate"
ABOUT_URL = f"URL of the daemon, or several with commas between; default: {DEFAULT_URL}"
AsJson = Annotated[bool, Option("--json", help="print JSON")]
Watch = Annotated[bool, Option("--watch", help="show changes until Ctrl-C")]
Job = Annotated[JobReference, Argument(help="the job's id, or a task of an array: 7[3]", completes="jobs")]
Jobs = Annotated[
    list[JobReference] | None, Argument(help="ids of jobs, or tasks of an array: 7[3-9]", completes="active jobs")
]
Timeout = Annotated[float | None, Option("--timeout", help="timeout in seconds", min=0, max=MAX_WAIT_S)]
Why = Annotated[str, Option("--reason", help="reason, shown in the job's timeline", may_be_empty=True)]
OwnersWhy = Annotated[
    str, Option("--reason", help="reason, shown to the jobs' owners; required for jobs of others", may_be_empty=True)
]


@dataclass(frozen=True, slots=True)
class Address:
    """The options that select a daemon and the authority of its certificate."""

    url: Annotated[str | None, Option("--url", envvar="KOALA_URL", help=ABOUT_URL)] = None
    ca_file: Annotated[str | None, Option("--ca-file", envvar=CA_FILE, help=ABOUT_CA_FILE)] = None

    def __post_init__(self) -> None:
        if self.ca_file is not None:
            os.environ[CA_FILE] = self.ca_file  # every connection of this command reads it there

    @property
    def urls(self) -> list[str]:
        """Return the URLs that are given, as saved logins have them."""
        return [url.rstrip("/") for url in split_urls(self.url or "")]


@dataclass(frozen=True, slots=True)
class Daemon(Address):
    """The options that select a command's daemon and its token."""

    token: Annotated[str | None, Option("--token", envvar="KOALA_TOKEN", help="token for the daemon")] = None

    def client(self) -> Client:
        return Client(self.url, self.token, timeouts=current_timeouts(), report=_report_line)


def current_timeouts() -> ClientTimeouts:
    """Return the timeouts passed to ``koalapy.cli.main.main``."""
    context = click.get_current_context(silent=True)
    return (context.find_object(ClientTimeouts) if context else None) or DEFAULT_TIMEOUTS


def _report_line(line: str) -> None:
    """Print a line about a wait, above the block drawn on the terminal."""
    from koalapy.cli.terminal.screen import Block  # slow to import, and most commands do not wait

    Block.report(line)


DAEMON, ADDRESS = Daemon(), Address()
"""Default values of parameters in signatures. The command line passes other objects."""


class ReasonPrompt:
    """Sends orders with their reason, and asks for it once on the terminal if the daemon requires one."""

    def __init__(self, client: Client, reason: str) -> None:
        self._client, self._reason = client, reason

    def post(self, path: str, body: Json) -> Json:
        """Send an order with the reason. Raise ``GridError`` if one is required and there is no terminal to ask on."""
        return self.send(partial(self._client.post, path), body)

    def send(self, method: Callable[[Json], T], body: Json) -> T:
        """Send an order by a method of the client, as ``post`` does."""
        try:
            return method({**body, "reason": self._reason})
        except GridError as error:
            if error.field != "reason" or self._reason.strip() or not sys.stdin.isatty():
                raise
        print("Reason, which others will see: ", end="", file=sys.stderr, flush=True)
        self._reason = sys.stdin.readline().strip()
        return method({**body, "reason": self._reason})


def refuse_together(**flags: bool) -> None:
    """Raise ``GridError`` if two of the options are given, since one would be ignored."""
    options = [f"--{name.replace('_', '-')}" for name, is_given in flags.items() if is_given]
    if len(options) > 1:
        raise GridError(f"{options[1]} and {options[0]} cannot be given together", Exit.USAGE, "drop one")


def print_answer(answer: T, as_json: bool, page: Callable[[T], str]) -> None:
    """Print a response of the daemon as JSON, or formatted by ``page``."""
    if as_json:
        show_json(answer)
    else:
        print(page(answer))


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
