"""What the words of DRMAA 1.0 mean to us: its job states and its errors, all of them."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from koalapy.agent.lrm.port import LrmJobState
from koalapy.agent.lrm.refusals import fault_of
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable

STATES: Mapping[str, LrmJobState] = {
    "undetermined": LrmJobState.UNKNOWN,
    "queued_active": LrmJobState.QUEUED,
    "system_on_hold": LrmJobState.QUEUED,
    "user_on_hold": LrmJobState.QUEUED,
    "user_system_on_hold": LrmJobState.QUEUED,
    "running": LrmJobState.RUNNING,
    "system_suspended": LrmJobState.RUNNING,
    "user_suspended": LrmJobState.RUNNING,
    "user_system_suspended": LrmJobState.RUNNING,
    "done": LrmJobState.ENDED,
    "failed": LrmJobState.ENDED,
}
NO_SUCH_JOB = "InvalidJobException"

ERRORS: Mapping[str, type[SiteError]] = {
    "DrmaaException": SiteUnavailable,  # a code that the package does not know
    "AlreadyActiveSessionException": SiteUnavailable,
    "AuthorizationException": SiteRejected,
    "ConflictingAttributeValuesException": SiteRejected,
    "DefaultContactStringException": SiteRejected,
    "DeniedByDrmException": SiteRejected,
    "DrmCommunicationException": SiteUnavailable,
    "DrmsExitException": SiteUnavailable,
    "DrmsInitException": SiteUnavailable,
    "ExitTimeoutException": SiteUnavailable,
    "HoldInconsistentStateException": SiteRejected,
    "IllegalStateException": SiteRejected,
    "InternalException": SiteUnavailable,
    "InvalidArgumentException": SiteRejected,
    "InvalidAttributeFormatException": SiteRejected,
    "InvalidAttributeValueException": SiteRejected,
    "InvalidContactStringException": SiteRejected,
    NO_SUCH_JOB: SiteRejected,
    "InvalidJobTemplateException": SiteRejected,
    "NoActiveSessionException": SiteUnavailable,
    "NoDefaultContactStringSelectedException": SiteRejected,
    "OutOfMemoryException": SiteUnavailable,
    "ReleaseInconsistentStateException": SiteRejected,
    "ResumeInconsistentStateException": SiteRejected,
    "SuspendInconsistentStateException": SiteRejected,
    "TryLaterException": SiteUnavailable,
    "UnsupportedAttributeException": SiteRejected,
    "NoUsage": SiteUnavailable,
    "StopIteration": SiteUnavailable,
}


@dataclass(frozen=True, slots=True)
class DrmaaEnding:
    """How a job ended as DRMAA tells it; all of it unknown when it only knows that the job is gone."""

    job: str
    exit_code: int | None = None
    signal: str = ""
    aborted: bool = False

    @property
    def signal_number(self) -> int | None:
        """What killed it; shells, which stand between, tell of it as an exit code over 128."""
        if self.signal:
            return signal.Signals.__members__.get(self.signal, signal.SIGKILL).value
        return self.exit_code - 128 if self.exit_code is not None and self.exit_code > 128 else None

    @classmethod
    def from_notice(cls, notice: Mapping[str, Any]) -> "DrmaaEnding":
        return cls(notice["job"], notice.get("exit_code"), notice.get("signal", ""), notice.get("aborted", False))


def error_of(name: str, text: str) -> SiteError:
    """The site's error for one of the package's exceptions, in one line."""
    line = " ".join(text.partition(": ")[2].split() if text.startswith("code ") else text.split())
    kind, message = ERRORS.get(name, SiteUnavailable), f"DRMAA: {line or name}"
    # Grid Engine calls a user's limit something to be tried later, as it does a master that is busy.
    if kind is SiteRejected or fault_of(message) == "limit":
        return SiteRejected(message, value=name, fault=SiteFault(fault_of(message)))
    return kind(message, value=name)


def start_error(name: str, text: str, library: str | None) -> SiteError:
    """Why there is no session, by what the worker process said as it ended."""
    line = " ".join(text.split())
    if name == "package":
        return SiteRejected(
            f"the DRMAA package is missing: {line}", hint="pip install 'koalapy[drmaa]'", fault=SiteFault.SITE
        )
    if name == "library":
        return SiteRejected(
            f"the DRMAA library {library or 'libdrmaa'} cannot be loaded: {line}",
            hint="install it (Debian for Grid Engine: gridengine-drmaa1.0) and set the cluster's library to its path",
            fault=SiteFault.SITE,
        )
    return error_of(name, text)
