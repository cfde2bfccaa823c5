"""``koala show``."""

from typing import Annotated

from koalapy.cli.jobs import waiting
from koalapy.cli.jobs.explain import format_expected_start
from koalapy.cli.jobs.jobs import LastJob, find_job
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, refuse_together, show_json
from koalapy.client.client import Client
from koalapy.client.errors import CliError, printable

FORECAST_TIMEOUT_S = 3.0


def show_job(
    job: LastJob = None,
    attempts: Annotated[int, Option(help="number of last attempts to show", min=1, max=10**6)] = 5,
    follow: Annotated[bool, Option("-f", "--follow", help="first show the progress of file transfers")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show a job with its components, attempts and timeline.

    A claim requests the nodes of a component from its cluster. At the barrier, components wait for the others and for
    files. The start delay is the difference between the last and the first estimate of the start.
    """
    refuse_together(json=as_json, follow=follow)
    client = daemon.client()
    number = find_job(client, job)
    if follow:
        waiting.follow_transfers(client, number)
    answer = client.job(number)
    if as_json:
        show_json(answer)
    else:
        under_way = waiting.transfer_lines(answer, unicode=tables.is_unicode())
        print(tables.job_page(answer, client.attempts(number, attempts), under_way))
        if answer["state"] == "queued" and (expected := _expected_start(client, number)):
            print(f"\n{printable(expected)}")


def _expected_start(client: Client, job: int) -> str:
    """Return the expected start of a job as text; empty if the daemon does not respond soon."""
    try:
        forecast = client.get(f"/api/v1/jobs/{job}/forecast", wait=FORECAST_TIMEOUT_S)["expected"]
    except CliError:
        return ""  # the page of the job has been printed
    if forecast is None or forecast["starts"] is None:
        return ""
    return f"expected to start {format_expected_start(forecast)}"
