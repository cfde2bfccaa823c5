"""Options and arguments that several commands have."""

import json
from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8642"

Url = Annotated[str, typer.Option("--url", envvar="KOALA_URL", help="where the daemon is")]
Token = Annotated[str | None, typer.Option("--token", envvar="KOALA_TOKEN", help="what to show it", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="the daemon's JSON, for programs")]
Job = Annotated[int, typer.Argument(help="the job's id")]
Jobs = Annotated[list[int], typer.Argument(help="ids of jobs")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="seconds to wait at most")]
Why = Annotated[str, typer.Option("--reason", help="why; kept in the job's timeline")]


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
