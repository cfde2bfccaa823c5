"""The exceptions that koalapy raises on purpose.

KoalaError
├── UsageError        a field of the request is invalid
│   └── TooLargeError   the request has too many bytes
├── NotFoundError     no such job, cluster or policy
├── ConflictError     the state of the object does not allow the operation (cancel a finished job, …)
│   └── LimitReached    a user or group has reached a limit
├── TokenRejected     a token is invalid
├── ForbiddenError    the caller may not do this
│   ├── NotLoggedIn     the caller is not authenticated
│   └── NeverAllowed    the request alone exceeds a limit
├── BusyError         try again after ``retry_after`` seconds
├── FullError         the disk or a quota is full
├── StoreUnavailable  the database does not respond; try again
│   └── DatabaseDamaged the database cannot be read
├── LeaseLost         another daemon has taken over the database
└── SiteError         a cluster rejected the call or did not respond
    ├── SiteUnavailable   try again
    └── SiteRejected      the same call will fail again
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from math import inf
from typing import Any, ClassVar, Literal, NoReturn, Self


class ProblemCode(StrEnum):
    """The code of a problem in a REST response, with its HTTP status and meaning.

    Codes are never renamed, since clients depend on them.
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
    NOT_LOGGED_IN = "not-logged-in", 401, "no valid token was sent"
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
    DAEMON_STANDBY = "daemon-standby", 503, "the daemon stands by for another one; `active` is that one's address"
    NOT_READY = "not-ready", 503, "the daemon takes no jobs now, or does not answer"
    OVERLOADED = "overloaded", 503, "the daemon serves as many requests as it can"
    STORAGE_FULL = "storage-full", 507, "there is no room for what was sent"


class KoalaError(Exception):
    """Base class of the exceptions of koalapy.

    ``field`` and ``value`` identify the error, ``hint`` says how to correct it.
    """

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
    """A field of the request is invalid; nothing was stored."""

    default_code = ProblemCode.INVALID_VALUE


@contextmanager
def naming_item(name: Callable[[], str]) -> Iterator[None]:
    """Name an item of a list in the field and message of an error raised within the context.

    ``name`` returns the item at that time, such as ``jobs[3]``.
    """
    try:
        yield
    except KoalaError as error:
        if error.code.status < 500:
            item = name()
            separator = "." if error.field and error.message.startswith(error.field) else ": "
            error.message = f"{item}{separator}{error.message}"
            error.field = f"{item}.{error.field}" if error.field else item
        raise


def reject(field: str, value: object, problem: str, hint: str) -> NoReturn:
    """Raise ``UsageError`` for a field. The message is the field's name and the problem."""
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


class TooLargeError(UsageError):
    """The request has too many bytes; nothing of it was stored."""

    default_code = ProblemCode.BODY_TOO_LARGE


class NotFoundError(KoalaError):
    """The requested object does not exist."""

    default_code = ProblemCode.NOT_FOUND


class ConflictError(KoalaError):
    """The state of the object does not allow the operation."""

    default_code = ProblemCode.CONFLICT


class ForbiddenError(KoalaError):
    """The caller may not do this; nothing was done."""

    default_code = ProblemCode.FORBIDDEN


class NotLoggedIn(ForbiddenError):
    """The caller is not authenticated."""

    default_code = ProblemCode.NOT_LOGGED_IN


class TokenRejected(KoalaError):
    """A token is invalid; the message gives the reason to the caller."""

    default_code = ProblemCode.NOT_LOGGED_IN


class LimitReached(ConflictError):
    """A user or group has reached a limit; try again when less is in use."""

    default_code = ProblemCode.LIMIT_EXCEEDED


class NeverAllowed(ForbiddenError):
    """The request alone exceeds a limit of a user or group."""

    default_code = ProblemCode.ABOVE_LIMIT


class BusyError(KoalaError):
    """The daemon cannot serve the request now; try again after ``retry_after`` seconds."""

    default_code = ProblemCode.BUSY

    def __init__(self, message: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class FullError(KoalaError):
    """The disk or a quota is full; nothing of the request was stored."""

    default_code = ProblemCode.STORAGE_FULL


class StoreUnavailable(KoalaError):
    """The database is locked, full or unreachable; the transaction was rolled back."""

    default_code = ProblemCode.STORE_UNAVAILABLE


class DatabaseDamaged(StoreUnavailable):
    """The database is damaged and cannot be read; an operator must restore a backup."""

    default_code = ProblemCode.DATABASE_DAMAGED


class LeaseLost(KoalaError):
    """Another daemon has taken over the database; this one must stop."""

    default_code = ProblemCode.DAEMON_REPLACED


class SiteError(KoalaError):
    """The resource manager of a cluster failed or rejected a call."""

    default_code = ProblemCode.CLUSTER_FAILED


class SiteUnavailable(SiteError):
    """The resource manager did not respond; the same call may succeed later."""

    default_code = ProblemCode.CLUSTER_UNAVAILABLE


class SiteFault(StrEnum):
    """What the rejection of a cluster concerns. An unknown code, from a later agent, becomes ``UNKNOWN``."""

    # A job that the resource manager rejects: see ``Fault`` of its port
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
    """The cluster rejected the call, and will reject the same call again."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = None,
        hint: str = "",
        fault: SiteFault = SiteFault.REFUSED,
        sizes: Literal["", "few", "many"] = "",
    ) -> None:
        """``sizes``: whether a job is rejected for its number of nodes, which is too small or too large."""
        super().__init__(message, field=field, value=value, hint=hint)
        self.fault, self.sizes = fault, sizes


NUMBER_BOUNDS = (
    ("less_than_equal", "le", "at most", operator.le),
    ("less_than", "lt", "less than", operator.lt),
    ("greater_than_equal", "ge", "at least", operator.ge),
    ("greater_than", "gt", "more than", operator.gt),
)
"""For each bound: the type of pydantic's error, its name in constraints and error contexts, its text, and its test."""
CORRECTIONS = {
    "int_type": ("not an integer", "give a whole number"),
    "int_parsing": ("not an integer", "give a whole number"),
    "int_from_float": ("not an integer", "give a whole number"),
    "finite_number": ("no finite number", "give a number"),
    "string_type": ("not a text", "write it as a text, in quotes"),
    "list_type": ("not a list", "give a list"),
    "dict_type": ("not an object", "give names and values"),
    "bool_parsing": ("neither true nor false", "use true or false"),
    "float_parsing": ("not a number", "give a number"),
    "float_type": ("not a number", "give a number"),
    "date_parsing": ("no date", "write it as 2026-11-01"),
    "date_from_datetime_parsing": ("no date", "write it as 2026-11-01"),
    "string_unicode": ("no Unicode text", "remove lone surrogates"),
}
"""The problem and the hint, by type of error."""
SAME = {
    "dataclass_type": "dict_type",
    "model_type": "dict_type",
    "mapping_type": "dict_type",
    "tuple_type": "list_type",
    "set_type": "list_type",
    "frozen_set_type": "list_type",
    "bool_type": "bool_parsing",
}
"""Types of errors that have the same explanation as another type."""
BOUNDS = {
    **{kind: (name, f"give {bound} {{}}") for kind, name, bound, _ in NUMBER_BOUNDS},
    "string_too_long": ("max_length", "give at most {} characters"),
    "string_too_short": ("min_length", "give at least {} characters"),
    "too_long": ("max_length", "give at most {}"),
    "enum": ("expected", "use {}"),
    "literal_error": ("expected", "use {}"),
}
"""The value of the error's context that the hint names, and the hint."""


def explain_error(kind: str, context: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the problem and the hint for an error of pydantic.

    The problem is empty if the hint explains it. Both are empty for other types: their own messages suffice.
    """
    kind = SAME.get(kind, kind)
    if kind in CORRECTIONS:
        return CORRECTIONS[kind]
    if kind not in BOUNDS:
        return "", ""
    name, text = BOUNDS[kind]
    bound = (context or {})[name]
    if bound == inf:
        return CORRECTIONS["finite_number"]
    return "", text.format(f"{bound:.15g}" if isinstance(bound, float) else bound)


def describe_bounds(constraint: Any, broken_by: Any = None) -> Iterator[str]:
    """Yield the bounds of a constraint of ``annotated_types`` as text: all, or those that a value violates."""
    for _, name, text, holds in NUMBER_BOUNDS:
        bound = getattr(constraint, name, None)
        if bound is not None and (broken_by is None or not holds(broken_by, bound)):
            yield "finite" if bound == inf else f"{text} {bound:.15g}"
