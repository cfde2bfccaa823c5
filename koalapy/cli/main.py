"""The ``koala`` command."""

import errno
import sys

from koalapy import __version__
from koalapy.cli.terminal.arguments import Group, Lazy, run_command
from koalapy.cli.terminal.streams import OutputLost, give_up_standard_streams, open_standard_streams
from koalapy.client.errors import CliError, Exit, of_koala
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
        name: Lazy(where)
        for name, where in {
            "submit": "koalapy.cli.jobs.submit:submit",
            "queue": "koalapy.cli.jobs.queue:queue",
            "show": "koalapy.cli.jobs.jobs:show",
            "logs": "koalapy.cli.jobs.waiting:logs",
            "wait": "koalapy.cli.jobs.waiting:wait",
            "cancel": "koalapy.cli.jobs.jobs:cancel",
            "hold": "koalapy.cli.jobs.jobs:hold",
            "release": "koalapy.cli.jobs.jobs:release",
            "priority": "koalapy.cli.jobs.jobs:priority",
            "explain": "koalapy.cli.jobs.explain:explain",
            "what-if": "koalapy.cli.jobs.explain:what_if",
            "clusters": "koalapy.cli.clusters.grid:clusters_group",
            "top": "koalapy.cli.terminal.top:top",
            "alerts": "koalapy.cli.clusters.grid:alerts",
            "metrics": "koalapy.cli.clusters.grid:metrics",
            "history": "koalapy.cli.jobs.history:history",
            "sharing": "koalapy.cli.clusters.sharing:sharing_group",
            "network": "koalapy.cli.clusters.network:network_group",
            "advisor": "koalapy.cli.jobs.advisor:advisor_group",
            "replicas": "koalapy.cli.files.files:replicas_group",
            "fetch": "koalapy.cli.files.files:fetch",
            "dashboard": "koalapy.cli.daemon.dashboard:dashboard",
            "login": "koalapy.cli.auth.login:login",
            "logout": "koalapy.cli.auth.login:logout",
            "whoami": "koalapy.cli.auth.login:whoami",
            "token": "koalapy.cli.auth.token:token_group",
            "limits": "koalapy.cli.auth.login:limits",
            "audit-log": "koalapy.cli.daemon.audit:audit_log",
            "serve": "koalapy.cli.daemon.processes:serve",
            "agent": "koalapy.cli.daemon.processes:agent",
            "check": "koalapy.cli.daemon.processes:check",
            "local-run": "koalapy.cli.daemon.processes:local_run",
            "demo": "koalapy.cli.daemon.processes:demo",
            "backup": "koalapy.cli.daemon.processes:backup",
            "restore": "koalapy.cli.daemon.processes:restore",
            "workload": "koalapy.cli.workload:workload_group",
            "export": "koalapy.cli.daemon.record:export",
            "replay": "koalapy.cli.daemon.record:replay",
        }.items()
    },
    epilog=EPILOG,
)


def main(timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
    """Run a command and exit. Print an error as one line on standard error, with a documented exit code."""
    open_standard_streams()
    try:
        code = _run(timeouts)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OutputLost as error:
        give_up_standard_streams()
        # A reader that closed the pipe needs no message.
        if error.errno != errno.EPIPE:
            print(f"koala: cannot write the output: {(error.strerror or '').lower()}", file=sys.stderr)
        code = Exit.FAILED
    sys.exit(code)


def _run(timeouts: ClientTimeouts) -> int:
    try:
        return run_command("koala", KOALA, sys.argv[1:], __version__, timeouts)
    except (CliError, KoalaError) as error:
        refused = of_koala(error) if isinstance(error, KoalaError) else error
        try:
            print(f"koala: {refused}", file=sys.stderr)
        except OutputLost:  # only the exit code can report the error
            give_up_standard_streams()
        return refused.code


if __name__ == "__main__":
    main()
