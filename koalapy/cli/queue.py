"""``koala queue``."""

import json
import sys
from enum import StrEnum
from typing import Annotated

from koalapy.cli import tables
from koalapy.cli.arguments import Option
from koalapy.cli.client import Client
from koalapy.cli.errors import printable
from koalapy.cli.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.model.job import JobState


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"


def queue(
    everyone: Annotated[bool, Option("--all", help="jobs of all users")] = False,
    user: Annotated[str | None, Option(help="jobs of this user; default: you")] = None,
    state: Annotated[list[JobState] | None, Option(help="jobs in this state, final ones too")] = None,
    name: Annotated[str | None, Option(help="jobs of this name")] = None,
    cluster: Annotated[str | None, Option(help="jobs with a component there")] = None,
    limit: Annotated[int, Option(help="how many at most", min=1)] = 100,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print bare ids")] = False,
    form: Annotated[Format, Option("-o", "--output", help="how to print")] = Format.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """List jobs, newest first: yours that are not over, or what the options ask for.

    A job is queued until clusters are chosen for it; then it is placed, claiming while these are asked for its nodes,
    and starting once it has all of them. It is unknown while one of its clusters is out of reach.
    """
    mine = True if not user and not everyone else None
    query = {"mine": mine, "owner": user, "state": state, "name": name, "cluster": cluster}
    client = Client(url, token)
    jobs, more = client.jobs(limit, active=None if state else True, **query)
    if not jobs and cluster:
        client.cluster(cluster)  # says so if there is none
    if as_json or form is Format.JSON:
        show_json({"jobs": jobs})
    elif form is Format.NDJSON:
        for job in jobs:
            print(json.dumps(job))
    elif quiet:
        for job in jobs:
            print(job["id"])
    else:
        print(tables.queue(jobs, wide=form is Format.WIDE))
        if not jobs:
            print(
                f"koala: {printable(_none(user or ('yours' if mine else ''), state, name, cluster))}", file=sys.stderr
            )
    if more:
        print(f"koala: only the newest {limit} are shown; --limit shows more", file=sys.stderr)


def _none(owner: str, state: list[JobState] | None, name: str | None, cluster: str | None) -> str:
    """What was looked for in vain."""
    told = f"there are no jobs of {owner}" if owner else "there are no jobs"
    told += f" named {name}" if name else ""
    told += f" with a component on {cluster}" if cluster else ""
    return told + (f" in the state {' or '.join(state)}" if state else " that are not over")
