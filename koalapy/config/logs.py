"""Configure logging, one line per event on standard error as text or JSON, and describe the actions of log lines."""

import contextlib
import faulthandler
import json
import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog

from koalapy.config.settings import LogFormat, LogLevel, unknown_variables
from koalapy.model.job import parse_token

MAX_TRACEBACK_LENGTH = 10_000
"""Characters of a traceback in a log line; the last ones are kept."""
FIRST = ("timestamp", "level", "action", "event")
Event = MutableMapping[str, Any]


class Unfailing:
    """Standard error that ignores write errors: losing a line is better than ending the daemon."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: LogLevel = "info", form: LogFormat = "console", **always: str) -> None:
    """Configure the logging of this process.

    ``level`` is the lowest level that is logged. ``always`` are fields of every line, such as the cluster of an agent.
    """
    min_level = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            lambda _, __, event: _add_fields(event, always),
            _as_json
            if form == "json"
            else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing())),
    )
    logging.basicConfig(handlers=[Libraries()], level=max(min_level, logging.WARNING), force=True)
    logging.captureWarnings(True)
    # It warns every two seconds while a periodic task is still running when it is due again.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)


def watch_out_for_crashes() -> None:
    """Write the stack of every thread when this process crashes or a watchdog ends it (SIGABRT)."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
        faulthandler.enable()


class Libraries(logging.Handler):
    """A handler that logs the records of libraries in the format of koalapy."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - a library may pass any objects as arguments
            message = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        details = {} if error is None else {"exc_info": error}
        structlog.get_logger().log(record.levelno, message, action="library", library=record.name, **details)


def _add_fields(event: Event, always: Mapping[str, str]) -> Event:
    """Add the fields of every line, the job of a token, and the traceback of an error."""
    for name, value in always.items():
        event.setdefault(name, value)
    token = event.get("token", event.get("component"))
    if isinstance(token, str) and "job" not in event:
        with contextlib.suppress(ValueError):
            event["job"] = parse_token(token).job
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        event.setdefault("error", repr(error))
        event["traceback"] = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_LENGTH:]
    return event


def _as_json(_: object, __: str, event: Event) -> str:
    """Format an event as a JSON object in one line. Values that JSON cannot hold are written as ``repr``."""
    ordered = {name: event[name] for name in FIRST if name in event} | dict(event)
    try:
        return json.dumps(ordered, default=repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        plain = {
            name: value if isinstance(value, str | int | bool | None) else repr(value)
            for name, value in ordered.items()
        }
        return json.dumps({str(name): value for name, value in plain.items()})


def warn_of_unknown_variables() -> None:
    """Log the ``KOALA_`` variables of the environment that nothing reads."""
    if names := unknown_variables():
        log = structlog.get_logger()
        log.warning("nothing reads these variables", action="variables-unknown", variables=", ".join(names))


MEANINGS: Mapping[str, str] = {
    "accounting-silent": "Grid Engine's accounting does not answer. The agent asks again for the end of the job.",
    "address-not-written": "The agent cannot write the file by which runners find it.",
    "agent-connected": "An agent has connected.",
    "agent-connection-failed": "The daemon closed an agent's connection after an error. The agent connects again.",
    "agent-disconnected": "An agent has disconnected, or does not respond.",
    "agent-down": "An embedded agent has ended or did not start. The daemon tries again after `pause` seconds.",
    "agent-ends": "The agent stops. Jobs continue.",
    "agent-error": "A bug in the agent while it called the resource manager. Report it.",
    "agent-message-invalid": "An agent sent an invalid message, and was disconnected.",
    "agent-oversteps": "An agent's message concerns a job of another cluster, and was ignored. Examine that host.",
    "agent-rejected": "The daemon rejected an agent's connection.",
    "agent-serves": "The agent has started, with this number of running components.",
    "alert": "An alert has begun. See [alerts](alerts.md).",
    "alert-check-failed": "A bug in a check for alerts. The other checks continue. Report it.",
    "alert-over": "An alert has ended.",
    "audit-changed": "A stored audit entry was deleted or changed. `koala audit-log --verify` names it.",
    "audit-entry": "An audit entry that could not be stored. This line is its only copy.",
    "audit-head": "The last audit entry, logged hourly. Keep it for `koala audit-log --verify --known-head`.",
    "audit-not-tidied": "Expired audit entries were not removed, or the last one was not read. The daemon tries again.",
    "audit-not-written": "The database did not store an audit entry. The daemon tries again.",
    "background-started": "An experiment occupies nodes as a local user.",
    "cancel-failed": "The resource manager did not cancel a job. The agent tries again.",
    "certificate-refused": "The new certificate files are invalid. The daemon keeps the old certificate.",
    "certificate-renewed": "The daemon uses a new certificate.",
    "change-not-done": "A user received an answer with an unknown outcome. The change was not made.",
    "checksum-wrong": "A received file has a wrong checksum. The agent tries another source.",
    "command-not-noted": "The agent cannot store a command, and does not execute it.",
    "command-refused": "An agent rejected a command.",
    "component-ended": "A component has ended.",
    "component-submitted": "A component was submitted to the resource manager.",
    "connection-not-accepted": "The operating system has no resources for another connection.",
    "daemon-away": "The agent cannot reach the daemon. Running jobs continue.",
    "daemon-back": "The agent reaches the daemon again.",
    "daemon-ends": "The daemon stops. `critical`: without a clean stop, since the database does not answer.",
    "daemon-forgotten": "The agent removes the remains of another daemon after `forget_after` without contact.",
    "daemon-not-forgotten": "The agent cannot remove the remains of another daemon.",
    "daemon-not-noted": "The agent cannot store the daemon's identity, and obeys it only afterwards.",
    "daemon-serves": "The daemon has started.",
    "database-away": "The database is unavailable. The daemon retries accepted changes, and rejects new ones.",
    "database-back": "The database is available again, after this many seconds.",
    "database-lacks-changes": "The database lacks changes that an earlier daemon acknowledged, such as new jobs.",
    "database-restored": "The database is older than an agent's commands, as after a restored backup.",
    "disk-back": "The disks have free space again.",
    "disk-full": "A disk is full. The daemon is not ready, or no jobs are placed on the cluster.",
    "disk-low": "A disk is nearly full.",
    "duplicate-jobs": "The resource manager has several jobs of one component. The agent cancels all but one.",
    "duty-failed": "A periodic task of the daemon failed. It runs again at its next time.",
    "event-refused": "The scheduler rejected an event, such as an outdated action.",
    "files-served": "The agent serves files to other sites at this address.",
    "folder-not-removed": "The remains of a job cannot be removed.",
    "folders-not-swept": "The agent cannot list an account's folders to remove expired ones.",
    "folders-swept": "The agent removed the remains of old jobs or killed runners.",
    "forecast-failed": "A periodic forecast failed. See [what if](what-if.md).",
    "impostor": "A process claimed to be a job's runner, and was rejected. See [security](security.md).",
    "job-changed": "A job has started, ended or returned to the queue. `debug`: any change of state.",
    "job-numbers-raised": "An agent reports a higher job number than the database. New jobs get numbers above it.",
    "job-numbers-unknown": "The file `job-numbers` is missing or unreadable. The next job gets a number above all that "
    "may have been used.",
    "job-unattended": "An interactive job had no client for a minute, and is cancelled.",
    "jobs-as-root": "The agent and all its jobs run as root.",
    "journal-not-written": "The agent cannot write a journal. It tries again.",
    "lease-lost": "Another daemon has taken the database's lease. This daemon stops, or stands by.",
    "lease-not-noted": "The agent cannot store the time of the daemon's last answer.",
    "lease-over": "A component's lease has expired without contact to the daemon. The agent ends it.",
    "lease-watched": "The clocks of two daemons differ. This one waits `s` seconds for a sign of life of the other.",
    "left-file-not-removed": "A file of a runner cannot be removed, as in a read-only folder. It stays.",
    "left-files-lost": "The files of runners in an account's folder cannot be fetched. Output or results are missing.",
    "library": "A message of a library.",
    "local-address": "Clients and agents on other machines learn the `url` of this daemon, which they do not reach.",
    "login": "A user attested by an agent received a token.",
    "login-broken-off": "A client disconnected during its login.",
    "login-refused": "The agent attests no account, or the daemon rejects the login.",
    "login-socket": "The path of the login socket. `warning`: some users cannot use it.",
    "logins-over": "Tokens were revoked because the configuration of logins has changed.",
    "loop-hangs": "The daemon's event loop hangs at `where`, innermost call first.",
    "loop-moves": "The event loop runs again.",
    "lrm-back": "The resource manager answers again.",
    "lrm-lost": "The resource manager does not answer.",
    "lrm-refuses": "The resource manager rejected a job through no fault of the job. The agent waits `pause` seconds.",
    "lrm-takes-no-jobs": "The resource manager answers, but accepts no jobs.",
    "measurement-failed": "A link could not be measured.",
    "measurement-not-cancelled": "A measurement job could not be cancelled.",
    "measurement-not-kept": "The database did not store a measurement. The daemon tries again.",
    "no-locks": "The file system supports no locks. Make sure that only one agent uses the directory.",
    "nodes-reserved": "The agent has reserved nodes by its resource manager.",
    "notification-broken": "A bug while sending a notification. It is sent again. Report it.",
    "notification-dropped": "A notification was dropped: too many wait for this user, or for operators if empty.",
    "notification-failed": "A notification failed for good.",
    "notification-retried": "A notification failed, and is sent again later.",
    "notification-tested": "An operator has sent a test notification; `answer` is that of the receiver.",
    "notifications-not-kept": "The database did not store notifications. They may be sent twice after a restart.",
    "notified": "A notification was sent by mail or webhook.",
    "oidc-keys-missing": "The OpenID provider's keys cannot be fetched. The daemon uses the known keys.",
    "open-files-low": "The limit of open files is too low for many runners.",
    "output-kept-again": "Output is stored again.",
    "output-not-kept": "Output cannot be stored. Programs that write output wait.",
    "page-failed": "An open page of the dashboard cannot be rendered. Its browsers ask for it again.",
    "policy-broken": "A policy returned an invalid placement, which was ignored.",
    "question-failed": "A request of the daemon or of another site failed.",
    "record-damaged": "A part of the event recording is unreadable. See [replay](replay.md).",
    "record-ended": "The event recording has stopped until the next start. See [replay](replay.md).",
    "record-lost": "A component's record is missing or damaged. The agent ends the component; its job runs again.",
    "record-unreadable": "The record of a component or stage cannot be read.",
    "relay-attempt-lost": "A hub or head has lost a connection with streams of an attempt, which restarts.",
    "relay-attempt-over": "The relayed links of a job have ended, after so many streams and bytes.",
    "relay-away": "The daemon cannot reach the hub, or an agent its head. It tries again.",
    "relay-certificate-refused": "The new certificate files of a relay are invalid. It keeps the old certificate.",
    "relay-files-few": "A relay may open too few files for its limit of streams. Raise `LimitNOFILE` in its unit.",
    "relay-hub-away": "A head cannot reach the hub. It tries again.",
    "relay-hub-connected": "A head has connected to the hub.",
    "relay-refused": "A runner's message for another job was not relayed.",
    "relay-rejected": "A hub or head accepts no streams of an attempt, whose entry is invalid. Its relayed links fail.",
    "relay-serves": "A hub or head of relayed links has started.",
    "relay-site": "Relayed links of a site have become possible, or are no longer.",
    "relay-stream-refused": "A hub or head has refused a stream or a connection; `kind` is the label in its metrics.",
    "replica-not-noted": "The database did not store the state of a replica.",
    "replica-not-verified": "A replica could not be verified.",
    "replica-spoiled": "A replica is missing or has changed, and is not used.",
    "request-failed": "A bug in the daemon while it answered a request. Report it.",
    "reservation-changed": "A reservation of nodes was made or has ended, or a cluster does not answer about it.",
    "reservation-released": "The agent has released reserved nodes.",
    "results-lost": "Results of a component did not reach the daemon.",
    "retention-done": "Expired data was removed.",
    "retention-failed": "Some expired data could not be removed. The daemon tries again.",
    "rsync-failed": "The agent cannot run rsync, so files do not go to other sites.",
    "runner-message-invalid": "A node sent an invalid message or read none, and was disconnected.",
    "runner-refused": "The agent rejected a runner that belongs to no job here.",
    "stage-failed": "The files of a component could not be staged.",
    "stands-by": "The daemon answers reads until it may take over from the active one.",
    "stream-ended": "A terminal, or a client's input of a program, has ended.",
    "stream-opened": "A user has opened a terminal on a node, or sends input to a program.",
    "subprocess-failed": "A computation in a child process failed, such as a forecast. Report it.",
    "takes-over": "A standby daemon becomes active; `reason` says what it saw of the previous one, `active`.",
    "token-made": "The daemon created an administrator's token.",
    "token-not-registered": "Commands of this account do not find the daemon's token. Set `KOALA_TOKEN`.",
    "token-not-stored": "The database did not store changes of tokens. The daemon tries again.",
    "transfer-cut": "A transfer was interrupted. It continues from there.",
    "transfer-not-accepted": "The agent could not accept a connection of another site.",
    "variables-unknown": "Nothing reads these `KOALA_` variables. Agents log this, too.",
    "version-unknown": "The version of the resource manager or of Open MPI is unknown.",
}
"""One or two sentences for each action, as Markdown."""

_NOTIFICATION = ("channel", "job", "to", "what")
_ALERT = ("kind", "severity", "target")

MAPPED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "alert": _ALERT,
    "alert-over": _ALERT,
    "impostor": ("lrm_job", "token"),
    "job-changed": ("attempt", "before", "clusters", "exit_code", "job", "reason", "state", "user"),
    "library": ("error", "library", "traceback"),
    "notification-failed": _NOTIFICATION,
    "notification-retried": _NOTIFICATION,
    "notified": _NOTIFICATION,
}
"""Fields that log calls pass as a mapping, so that they cannot be read from the call."""
