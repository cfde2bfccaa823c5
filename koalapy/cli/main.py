"""The ``koala`` command."""

import errno
import sys

from koalapy import __version__
from koalapy.cli.arguments import Group, Lazy, run
from koalapy.cli.errors import EPILOG, CliError, Exit
from koalapy.cli.streams import OutputLost, give_up_standard_streams, open_standard_streams
from koalapy.cli.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts

KOALA = Group(
    "One parallel job over several clusters at the same moment.",
    {
        name: Lazy(where)
        for name, where in {
            "submit": "koalapy.cli.submit:submit",
            "queue": "koalapy.cli.queue:queue",
            "show": "koalapy.cli.commands:show",
            "logs": "koalapy.cli.waiting:logs",
            "wait": "koalapy.cli.waiting:wait",
            "cancel": "koalapy.cli.commands:cancel",
            "hold": "koalapy.cli.commands:hold",
            "release": "koalapy.cli.commands:release",
            "priority": "koalapy.cli.commands:priority",
            "explain": "koalapy.cli.explain:explain",
            "what-if": "koalapy.cli.what_if:what_if",
            "clusters": "koalapy.cli.grid:clusters_group",
            "top": "koalapy.cli.top.command:top",
            "alerts": "koalapy.cli.alerts:alerts",
            "metrics": "koalapy.cli.grid:metrics",
            "history": "koalapy.cli.history:history",
            "sharing": "koalapy.cli.sharing:sharing_group",
            "network": "koalapy.cli.network:network_group",
            "advisor": "koalapy.cli.advisor:advisor_group",
            "replicas": "koalapy.cli.files:replicas_group",
            "fetch": "koalapy.cli.files:fetch",
            "dashboard": "koalapy.cli.dashboard:dashboard",
            "login": "koalapy.cli.login:login",
            "logout": "koalapy.cli.login:logout",
            "whoami": "koalapy.cli.login:whoami",
            "token": "koalapy.cli.token:token_group",
            "limits": "koalapy.cli.limits:limits",
            "audit-log": "koalapy.cli.audit:audit_log",
            "serve": "koalapy.cli.processes:serve",
            "agent": "koalapy.cli.processes:agent",
            "check": "koalapy.cli.processes:check",
            "local-run": "koalapy.cli.processes:local_run",
            "demo": "koalapy.cli.processes:demo",
            "backup": "koalapy.cli.backup:backup",
            "restore": "koalapy.cli.backup:restore",
            "workload": "koalapy.cli.workload:workload_group",
            "experiment": "koalapy.cli.experiment:experiment_group",
            "export": "koalapy.cli.record:export",
            "replay": "koalapy.cli.replay:replay",
        }.items()
    },
    epilog=EPILOG,
)


def main(timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
    """Run a command; whatever goes wrong is one line on standard error and a documented exit code."""
    open_standard_streams()
    try:
        code = _run(timeouts)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except OutputLost as error:
        give_up_standard_streams()
        # Who has closed a pipe wants no more of it, and no complaint either.
        if error.errno != errno.EPIPE:
            print(f"koala: cannot write what is to be printed: {(error.strerror or '').lower()}", file=sys.stderr)
        code = Exit.FAILED
    sys.exit(code)


def _run(timeouts: ClientTimeouts) -> int:
    try:
        return run("koala", KOALA, sys.argv[1:], __version__, timeouts)
    except CliError as error:
        try:
            print(f"koala: {error}", file=sys.stderr)
        except OutputLost:  # the exit code is all that is left to tell it by
            give_up_standard_streams()
        return error.code


if __name__ == "__main__":
    main()
