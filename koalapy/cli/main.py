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
        name: Lazy(f"koalapy.cli.{where}")
        for name, where in {
            "submit": "submit:submit",
            "queue": "queue:queue",
            "show": "commands:show",
            "logs": "waiting:logs",
            "wait": "waiting:wait",
            "cancel": "commands:cancel",
            "hold": "commands:hold",
            "release": "commands:release",
            "priority": "commands:priority",
            "explain": "explain:explain",
            "what-if": "what_if:what_if",
            "clusters": "grid:clusters_group",
            "top": "top.command:top",
            "alerts": "alerts:alerts",
            "metrics": "grid:metrics",
            "history": "history:history",
            "sharing": "sharing:sharing_group",
            "network": "network:network_group",
            "advisor": "advisor:advisor_group",
            "replicas": "files:replicas_group",
            "fetch": "files:fetch",
            "dashboard": "dashboard:dashboard",
            "login": "login:login",
            "logout": "login:logout",
            "whoami": "login:whoami",
            "token": "token:token_group",
            "limits": "limits:limits",
            "audit-log": "audit:audit_log",
            "serve": "processes:serve",
            "agent": "processes:agent",
            "check": "processes:check",
            "local-run": "processes:local_run",
            "demo": "processes:demo",
            "backup": "backup:backup",
            "restore": "backup:restore",
            "workload": "workload:workload_group",
            "experiment": "experiment:experiment_group",
            "export": "record:export",
            "replay": "replay:replay",
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
