"""``koala reserve``: reserve nodes of several clusters for a time."""

from typing import Annotated

from koalapy.cli.jobs.submission import RequestOptions, request_of
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.screen import waiting_for
from koalapy.cli.terminal.tables import format_moment
from koalapy.client.client import in_path
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.submission import with_time_zone
from koalapy.client.tables import Columns
from koalapy.model.wording import format_nodes

PATH = "/api/v1/reservations"
Name = Annotated[str, Argument(help="the reservation's name")]


def reserve_nodes(
    request: RequestOptions,
    begin: Annotated[str | None, Option("--at", help="begin: now, 09:00, tomorrow, 2026-12-01T16:00, now+1h")] = None,
    duration: Annotated[str | None, Option("--for", help="how long: 90m, 2h or 1-00:00:00")] = None,
    name: Annotated[str, Option("--name", help="its name; default: r with a number")] = "",
    users: Annotated[list[str] | None, Option("--user", help="another user of it; repeatable")] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Reserve nodes on all clusters of a request, or on none: koala reserve --at 09:00 --for 2h --flexible 16

    Jobs use them by koala submit --reservation NAME. Without a subcommand this needs --at, --for and a request.
    """
    nodes = request_of(request)
    if begin is None or duration is None or nodes is None:
        hint = (
            "koala reserve --at 09:00 --for 2h --flexible 16, or --fixed or --nonfixed; koala reserve list lists them"
        )
        raise GridError("a reservation needs --at, --for and nodes", Exit.USAGE, hint)
    body = {"request": nodes, "begin": with_time_zone(begin), "duration": duration, "name": name, "users": users or []}
    with waiting_for("asks the clusters"):
        answer = daemon.client().post(PATH, body, patient=True)
    print_answer(answer, as_json, _format_made)


def _format_made(reservation: Json) -> str:
    span = f"from {format_moment(reservation['begins_at'])} to {format_moment(reservation['ends_at'])} UTC"
    use = f"Use it: koala submit --reservation {reservation['name']} …"
    parts = ", ".join(f"{format_nodes(part['nodes'])} of {part['cluster']}" for part in reservation["parts"])
    return f"Reserved {reservation['name']}: {parts}, {span}\n{use}"


COLUMNS: Columns = {
    "NAME": lambda reservation: reservation["name"],
    "STATE": lambda reservation: reservation["state"],
    "USER": lambda reservation: ",".join([reservation["owner"], *reservation["users"]]),
    "BEGINS (UTC)": lambda reservation: format_moment(reservation["begins_at"]),
    "ENDS (UTC)": lambda reservation: format_moment(reservation["ends_at"]),
    "NODES": lambda reservation: ",".join(f"{part['cluster']}:{part['nodes']}" for part in reservation["parts"]),
    "REASON": lambda reservation: reservation["reason"],
}


def list_reservations(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List the reservations that you may use, with those that ended in the last 90 days; operators see all."""
    answer = daemon.client().get(PATH)
    print_answer(answer, as_json, lambda a: tables.format_columns(COLUMNS, a["reservations"]) or "no reservations")


def cancel_reservation(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """End a reservation that no job runs in. Jobs that wait for it fail."""
    answer = daemon.client().delete(f"{PATH}/{in_path(name)}")
    print_answer(answer, as_json, lambda a: f"reservation {a['name']} is {a['state']}")


reserve_group = Group(
    "Reserve nodes of several clusters for a time, on all of them or on none.\n\nExample: koala reserve --at 09:00 "
    "--for 2h --flexible 16. Jobs use the nodes by koala submit --reservation NAME.",
    {"cancel": cancel_reservation, "list": list_reservations},
    default=reserve_nodes,
)
