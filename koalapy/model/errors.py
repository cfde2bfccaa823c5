"""The errors koalapy raises on purpose.

KoalaError
├── UsageError        the request is wrong; says which field, which value, and the way out
│   └── TooLargeError   more bytes than are taken
├── NotFoundError     no such job, cluster or policy
├── ConflictError     the thing exists but is in no state for this (cancel a finished job, …)
│   └── LimitReached    a user or group has as much as they may have
├── TokenRejected      a token is not believed
├── ForbiddenError    who asks may not do that
│   ├── NotLoggedIn     it is not known who asks
│   └── NeverAllowed    more is asked for at once than a user or group may ever have
├── BusyError         refused for now; may be tried again after ``retry_after`` seconds
├── FullError         there is no room for what was sent
├── StoreUnavailable  the database did not answer; may be tried again
│   └── DatabaseDamaged the database cannot be read
├── LeaseLost         another daemon has taken over this database
└── SiteError         a cluster said no or did not answer
    ├── SiteUnavailable   may be tried again
    └── SiteRejected      will not work again as asked
"""

from enum import StrEnum
from typing import ClassVar, NoReturn, Self


class ProblemCode(StrEnum):
    """A kind of problem, for programs: the ``code`` of an answer, with its HTTP status and its meaning.

    Codes are never renamed: programs act on them.
    """

    status: int
    meaning: str

    def __new__(cls, value: str, status: int, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.status, member.meaning = value, status, meaning
        return member

    INVALID_BODY = "invalid-body", 400, "the body is no JSON"
    INCOMPLETE_BODY = "incomplete-body", 400, "the connection ended before the body did"
    INVALID_HOST = "invalid-host", 400, "the request has no `Host` header, or several"
    TLS_EXPECTED = "tls-expected", 400, "the port speaks TLS"
    NOT_LOGGED_IN = "not-logged-in", 401, "no valid token was shown"
    FORBIDDEN = "forbidden", 403, "the caller may not do that"
    ROLE_REQUIRED = "role-required", 403, "the operation is for another role"
    NOT_OWNER = "not-owner", 403, "the job belongs to another user"
    ABOVE_LIMIT = "above-limit", 403, "the request alone is more than its user or group may ever have"
    FOREIGN_ORIGIN = "foreign-origin", 403, "a web page of another origin may have sent the request"
    TLS_REQUIRED = "tls-required", 403, "the daemon speaks no TLS and serves only its proxy and its own machine"
    BACKGROUND_LOAD_DISABLED = "background-load-disabled", 403, "the setting `background_load` is off"
    NOT_FOUND = "not-found", 404, "there is no such route, or no such thing that has no code of its own"
    JOB_NOT_FOUND = "job-not-found", 404, "there is no such job"
    COMPONENT_NOT_FOUND = "component-not-found", 404, "the job has no such component"
    CLUSTER_NOT_FOUND = "cluster-not-found", 404, "there is no such cluster"
    REPLICA_NOT_FOUND = "replica-not-found", 404, "the replica catalogue has no such file, or none on that cluster"
    BUNDLE_NOT_FOUND = "bundle-not-found", 404, "the caller has no such bundle"
    RESULTS_NOT_FOUND = "results-not-found", 404, "the job has no files to fetch, or has none yet"
    TOKEN_NOT_FOUND = "token-not-found", 404, "the caller has no such token"
    RECORD_DISABLED = "record-disabled", 404, "the setting `record.enabled` is off"
    METHOD_NOT_ALLOWED = "method-not-allowed", 405, "the route does not have this method"
    BODY_TIMEOUT = "body-timeout", 408, "the body did not come to its end in time"
    CONFLICT = "conflict", 409, "the state of the job or cluster does not allow the operation"
    IDEMPOTENCY_KEY_REUSED = "idempotency-key-reused", 409, "the `Idempotency-Key` was used for another job"
    REPLICA_DIFFERS = "replica-differs", 409, "the file is another than its good replicas"
    LIMIT_EXCEEDED = "limit-exceeded", 409, "a user or group has as much as it may have at once"
    BODY_TOO_LARGE = "body-too-large", 413, "the body is larger than the daemon takes"
    UNKNOWN_HOST = "unknown-host", 421, "the daemon does not serve the host that the request names"
    INVALID_VALUE = "invalid-value", 422, "a field or parameter is missing, unknown, or has a value that cannot be"
    BUSY = "busy", 429, "the daemon has too much of this to do; `Retry-After` says when to try again"
    RATE_LIMIT_EXCEEDED = "rate-limit-exceeded", 429, "a user or group sent too many requests in a second"
    TOO_MANY_REQUESTS = "too-many-requests", 429, "the user has too many requests under way at once"
    TOO_MANY_WRONG_TOKENS = "too-many-wrong-tokens", 429, "too many wrong tokens came from this address"
    INTERNAL_ERROR = "internal-error", 500, "the daemon made a mistake; its log has the details"
    CLUSTER_FAILED = "cluster-failed", 502, "the cluster's agent or resource manager failed or refused"
    CLUSTER_UNAVAILABLE = "cluster-unavailable", 503, "the cluster's agent or resource manager does not answer"
    PROVIDER_UNAVAILABLE = "provider-unavailable", 503, "the identity provider does not answer"
    STORE_UNAVAILABLE = "store-unavailable", 503, "the database does not answer"
    DATABASE_DAMAGED = "database-damaged", 503, "the database cannot be read"
    DAEMON_REPLACED = "daemon-replaced", 503, "another daemon has taken over the database"
    NOT_READY = "not-ready", 503, "the daemon takes no jobs now, or does not answer"
    OVERLOADED = "overloaded", 503, "the daemon serves as many requests as it can"
    STORAGE_FULL = "storage-full", 507, "there is no room for what was sent"


class KoalaError(Exception):
    """Base of everything koalapy raises on purpose; ``field``, ``value`` and ``hint`` say where and the way out."""

    default_code: ClassVar[ProblemCode] = ProblemCode.INTERNAL_ERROR

    def __init__(
        self, message: str, *, field: str = "", value: object = None, hint: str = "", code: ProblemCode | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.hint = hint
        self.code = code or self.default_code


class UsageError(KoalaError):
    """The caller asked for something that cannot be; nothing was stored."""

    default_code = ProblemCode.INVALID_VALUE


def reject(field: str, value: object, problem: str, hint: str) -> NoReturn:
    """``UsageError`` for a field, whose name begins the message."""
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


class TooLargeError(UsageError):
    """More bytes were sent than are taken; nothing of them was kept."""

    default_code = ProblemCode.BODY_TOO_LARGE


class NotFoundError(KoalaError):
    """There is no such thing."""

    default_code = ProblemCode.NOT_FOUND


class ConflictError(KoalaError):
    """The thing is not in a state that allows this."""

    default_code = ProblemCode.CONFLICT


class ForbiddenError(KoalaError):
    """Who asks is known, and may not do that; nothing was done."""

    default_code = ProblemCode.FORBIDDEN


class NotLoggedIn(ForbiddenError):
    """It is not known who asks."""

    default_code = ProblemCode.NOT_LOGGED_IN


class TokenRejected(KoalaError):
    """A token that is not believed; the text says why, for whoever shows it."""

    default_code = ProblemCode.NOT_LOGGED_IN


class LimitReached(ConflictError):
    """A user or group has as much as they may have; it works again when they have less."""

    default_code = ProblemCode.LIMIT_EXCEEDED


class NeverAllowed(ForbiddenError):
    """More is asked for at once than a user or group may ever have."""

    default_code = ProblemCode.ABOVE_LIMIT


class BusyError(KoalaError):
    """Refused for now."""

    default_code = ProblemCode.BUSY

    def __init__(self, message: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class FullError(KoalaError):
    """No room is left for what was sent; nothing of it was kept."""

    default_code = ProblemCode.STORAGE_FULL


class StoreUnavailable(KoalaError):
    """The database is locked, full or away; nothing of the transaction was kept."""

    default_code = ProblemCode.STORE_UNAVAILABLE


class DatabaseDamaged(StoreUnavailable):
    """The database is damaged and cannot be read; an operator has to put a backup back."""

    default_code = ProblemCode.DATABASE_DAMAGED


class LeaseLost(KoalaError):
    """Another daemon serves this database; this one must end."""

    default_code = ProblemCode.DAEMON_REPLACED


class SiteError(KoalaError):
    """A cluster's local resource manager failed or refused."""

    default_code = ProblemCode.CLUSTER_FAILED


class SiteUnavailable(SiteError):
    """The resource manager did not answer; the same call may work later."""

    default_code = ProblemCode.CLUSTER_UNAVAILABLE


class SiteFault(StrEnum):
    """What the refusal of a cluster concerns. An unknown code, of a later agent, becomes ``UNKNOWN``."""

    # A job that the resource manager refuses: see ``Fault`` of its port
    SITE = "site"
    JOB = "job"
    UNSUITABLE = "unsuitable"
    LIMIT = "limit"
    UNKNOWN = "unknown"
    # A replica
    UNCONFIGURED = "unconfigured"
    OUTSIDE = "outside"
    MISSING = "missing"
    IRREGULAR = "irregular"
    UNREADABLE = "unreadable"
    CHANGED = "changed"
    # A transfer from the cluster
    IN_CLEAR = "in-clear"
    NO_RSYNC = "no-rsync"
    ADDRESS = "address"
    # A question
    INVALID = "invalid"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    LOST = "lost"

    @classmethod
    def _missing_(cls, value: object) -> "SiteFault":
        return cls.UNKNOWN


class SiteRejected(SiteError):
    """The cluster refused; the same call will be refused again."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = None,
        hint: str = "",
        fault: SiteFault = SiteFault.REFUSED,
    ) -> None:
        super().__init__(message, field=field, value=value, hint=hint)
        self.fault = fault
