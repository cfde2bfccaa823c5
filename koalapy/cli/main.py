"""The ``koala`` command."""

import errno
import os
import sys

from koalapy import __version__
from koalapy.cli.startup import is_interrupt
from koalapy.cli.terminal.arguments import Group, root_options, run_command
from koalapy.cli.terminal.streams import OutputLost, give_up_standard_streams, open_standard_streams
from koalapy.client.errors import Exit, GridError, of_koala
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.errors import KoalaError

EPILOG = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage or a request that can never work · 3 not found · "
    "4 not allowed now · 5 daemon unreachable · 6 timeout · 130 interrupted. "
    "With --wait, and for koala wait: the job's own exit code."
)
KOALA = Group(
    "Run one parallel job on several clusters at the same time.",
    {
        "submit": "koalapy.cli.jobs.submit:submit_job",
        "run": "koalapy.cli.jobs.shell:run_job",
        "shell": "koalapy.cli.jobs.shell:open_shell",
        "mpirun": "koalapy.cli.jobs.shell:start_program",
        "queue": "koalapy.cli.jobs.queue:list_jobs",
        "show": "koalapy.cli.jobs.show:show_job",
        "logs": "koalapy.cli.jobs.waiting:show_logs",
        "wait": "koalapy.cli.jobs.waiting:wait_for_jobs",
        "cancel": "koalapy.cli.jobs.jobs:cancel_jobs",
        "hold": "koalapy.cli.jobs.jobs:hold_jobs",
        "release": "koalapy.cli.jobs.jobs:release_jobs",
        "priority": "koalapy.cli.jobs.jobs:change_priority",
        "change": "koalapy.cli.jobs.change:change_job",
        "explain": "koalapy.cli.jobs.explain:explain_job",
        "what-if": "koalapy.cli.jobs.explain:what_if",
        "reserve": "koalapy.cli.clusters.reservations:reserve_group",
        "clusters": "koalapy.cli.clusters.grid:clusters_group",
        "top": "koalapy.cli.clusters.grid:show_top",
        "alerts": "koalapy.cli.clusters.grid:alerts_group",
        "history": "koalapy.cli.jobs.history:show_history",
        "usage": "koalapy.cli.jobs.history:show_usage",
        "network": "koalapy.cli.clusters.network:network_group",
        "advisor": "koalapy.cli.jobs.advisor:advisor_group",
        "replicas": "koalapy.cli.files:replicas_group",
        "fetch": "koalapy.cli.files:fetch_results",
        "dashboard": "koalapy.cli.auth:open_dashboard",
        "login": "koalapy.cli.auth:log_in",
        "logout": "koalapy.cli.auth:log_out",
        "whoami": "koalapy.cli.auth:show_identity",
        "token": "koalapy.cli.auth:token_group",
        "limits": "koalapy.cli.auth:show_limits",
        "share": "koalapy.cli.auth:show_shares",
        "audit": "koalapy.cli.daemon.audit:audit_grid",
        "audit-log": "koalapy.cli.daemon.record:audit_log",
        "serve": "koalapy.cli.daemon.processes:start_daemon",
        "agent": "koalapy.cli.daemon.processes:start_agent",
        "relay": "koalapy.cli.daemon.processes:relay_group",
        "check": "koalapy.cli.daemon.processes:check_host",
        "local-run": "koalapy.cli.daemon.processes:local_run",
        "demo": "koalapy.cli.daemon.processes:show_demo",
        "backup": "koalapy.cli.daemon.processes:back_up",
        "restore": "koalapy.cli.daemon.processes:restore_data",
        "workload": "koalapy.cli.workload:workload_group",
        "export": "koalapy.cli.daemon.record:export_record",
        "replay": "koalapy.cli.daemon.record:replay_export",
    },
    epilog=EPILOG,
    options=root_options(__version__),
)


def main(timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
    """Run a command and exit. Print an error as one line on standard error, with a documented exit code."""
    open_standard_streams()
    try:
        code = _run_command(timeouts)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OutputLost as error:
        give_up_standard_streams()
        # A reader that closed the pipe needs no message.
        if error.errno != errno.EPIPE:
            print(f"koala: cannot write the output: {(error.strerror or '').lower()}", file=sys.stderr)
        code = Exit.FAILED
    except Exception as error:
        if not is_interrupt(error):
            raise
        code = Exit.INTERRUPTED
    sys.exit(code)


def _run_command(timeouts: ClientTimeouts) -> int:
    """Run the command of this process and return its exit code. Print an error on standard error."""
    try:
        return run_command("koala", KOALA, sys.argv[1:], timeouts)
    except (GridError, KoalaError) as error:
        cli_error = of_koala(error) if isinstance(error, KoalaError) else error
        try:
            print(f"koala: {cli_error}", file=sys.stderr)
        except OutputLost:  # only the exit code can report the error
            give_up_standard_streams()
        return cli_error.code
    except FileNotFoundError:
        try:
            os.getcwd()
        except FileNotFoundError:
            print("koala: the current folder was deleted; change to another with cd", file=sys.stderr)
            return Exit.USAGE
        raise


if __name__ == "__main__":
    main()
