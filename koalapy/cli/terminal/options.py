"""Options and arguments that several commands have."""

import json
from typing import Annotated, Any

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.system.tls import CA_FILE

DEFAULT_URL = "http://127.0.0.1:8642"
MAX_WAIT_SECONDS = 10**9
"""Seconds."""

ABOUT_CA_FILE = "PEM file of authorities, one of which signed the daemon's certificate"
CA = Option("--ca-file", envvar=CA_FILE, help=ABOUT_CA_FILE)
Url = Annotated[str, Option("--url", envvar="KOALA_URL", help="where the daemon is", beside=CA)]
Token = Annotated[str | None, Option("--token", envvar="KOALA_TOKEN", help="what to show it")]
AsJson = Annotated[bool, Option("--json", help="the daemon's JSON, for programs")]
Watch = Annotated[bool, Option("--watch", help="go on showing it as it changes, until Ctrl-C")]
Job = Annotated[int, Argument(help="the job's id", completes="jobs")]
Jobs = Annotated[list[int], Argument(help="ids of jobs", completes="active jobs")]
Timeout = Annotated[float | None, Option("--timeout", help="seconds to wait at most", min=0, max=MAX_WAIT_SECONDS)]
Why = Annotated[str, Option("--reason", help="why; kept in the job's timeline", may_be_empty=True)]


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
