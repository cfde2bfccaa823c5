"""``koala show``."""

from typing import Annotated

from koalapy.cli.jobs import waiting
from koalapy.cli.jobs.explain import format_expected_start
from koalapy.cli.jobs.jobs import describe_jobs, find_jobs
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, refuse_together, show_json
from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.job_reference import JobReference

FORECAST_TIMEOUT_S = 3.0


def show_job(
    jobs: Annotated[
        list[JobReference] | None,
        Argument(help="ids of jobs, or tasks of an array: 7[3]; default: the job you submitted last", completes="jobs"),
    ] = None,
    attempts: Annotated[int, Option(help="number of last attempts to show", min=1, max=10**6)] = 5,
    follow: Annotated[bool, Option("-f", "--follow", help="first show the progress of file transfers")] = False,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print the state of each job only, one word a line")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show jobs, by default the one you submitted last, with components, attempts and timeline.

    A claim requests the nodes of a component from its cluster. At the barrier, components wait for the others and for
    files. The start delay is the difference between the last and the first estimate of the start.
    """
    refuse_together(json=as_json, follow=follow, quiet=quiet)
    client = daemon.client()
    numbers = find_jobs(client, jobs)
    if quiet:
        states = {answer["job"]: answer["state"] for answer in client.states(numbers)}
        print("\n".join(states[number] or "-" for number in numbers))
        if missing := [number for number, state in states.items() if state is None]:
            raise GridError(f"there is no {describe_jobs(missing)}", Exit.NOT_FOUND, "see koala history")
        return
    if as_json:
        answers = [client.job(number) for number in numbers]
        show_json(answers if len(answers) > 1 else answers[0])
        return
    for index, number in enumerate(numbers):
        print("\n" * bool(index), end="")
        _show_page(client, number, attempts, follow=follow)


def _show_page(client: Client, number: int, attempts: int, *, follow: bool) -> None:
    """Print the page of a job."""
    if follow:
        waiting.follow_transfers(client, number)
    answer = client.job(number)
    under_way = waiting.transfer_lines(answer, unicode=tables.is_unicode())
    print(tables.job_page(answer, client.attempts(number, attempts), under_way))
    if answer["state"] == "queued" and (expected := _expected_start(client, number)):
        print(f"\n{printable(expected)}")


def _expected_start(client: Client, job: int) -> str:
    """Return the expected start of a job as text; empty if the daemon does not respond soon."""
    try:
        forecast = client.get(f"/api/v1/jobs/{job}/forecast", wait=FORECAST_TIMEOUT_S)["expected"]
    except GridError:
        return ""  # the page of the job has been printed
    if forecast is None or forecast["starts"] is None:
        return ""
    return f"expected to start {format_expected_start(forecast)}"
