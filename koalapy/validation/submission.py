"""Check a submission before it becomes a job (semantics 2).

Each check raises ``UsageError`` with the field, its value and a hint, or returns nothing. Only the first violation is
reported. ``inputs`` resolves the inputs by the replica catalogue, after ``check_size``.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from koalapy.model.errors import reject
from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import find_folder_placeholders
from koalapy.policies.registry import DEFAULTS
from koalapy.validation.fitting import check_combination, check_fits, check_fits_together
from koalapy.validation.limits import (
    Limits,
    check_accounts,
    check_clusters_share,
    check_folders,
    check_home_site,
    check_node_names,
    check_nodes,
    check_share,
)
from koalapy.validation.request import (
    bytes_of,
    check_array,
    check_command,
    check_components,
    check_counts,
    check_fields,
    check_flexible,
    check_program,
    check_size,
    check_warning,
    measure_fields,
)


def check_policy(spec: JobSpec, limits: Limits) -> None:
    """Reject an unknown policy, unknown options, or a request that the policy does not accept (semantics 3)."""
    limits.policies.resolve(spec.policy, spec.request, spec.policy_options)


def check_placement(spec: JobSpec, limits: Limits) -> None:
    """Reject a job that its policy would not place on the empty grid, since it would wait forever."""
    if reason := limits.refusal_on_empty_grid(spec):
        name = spec.policy or DEFAULTS[spec.request.type]
        hint = "use another policy, ask for smaller components, or allow more clusters"
        reject("policy", name, f"is {name}, which does not place this job even on the empty grid: {reason}", hint)


CHECKS: tuple[Callable[[JobSpec, Limits], None], ...] = (
    check_size,
    check_fields,
    check_program,
    check_array,
    check_warning,
    check_components,
    check_flexible,
    check_accounts,
    check_home_site,
    check_folders,
    check_clusters_share,
    check_node_names,
    check_share,
    check_nodes,
    check_fits,
    check_fits_together,
    check_combination,
    check_policy,
    check_placement,
)


def check_submission(spec: JobSpec, limits: Limits) -> None:
    """Raise ``UsageError`` for the first violation that makes a job impossible on any state of the grid."""
    for check_rule in CHECKS:
        check_rule(spec, limits)


def hash_key(user: str, key: str) -> str:
    """Return the hash of an ``Idempotency-Key`` and its user, so that no user finds submissions of others."""
    return hashlib.sha256(f"{user}\n{key}".encode(errors="surrogatepass")).hexdigest()


def hash_spec(spec: JobSpec) -> str:
    """Return the hash of a submission without its default values, so that new fields of later versions do not change
    it.

    Without ``begin`` and ``deadline``: ``now+1h`` is another time at each retry.
    """
    return _hash_json(_timeless_value(spec))


def hash_batch(specs: Sequence[JobSpec]) -> str:
    """Return the hash of a batch of submissions, which differs from that of any single submission."""
    return _hash_json([_timeless_value(spec) for spec in specs])


def _timeless_value(spec: JobSpec) -> Any:
    return _plain_value(replace(spec, begin=None, deadline=None))


def _hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _plain_value(value: Any) -> Any:
    """Return a value as plain dicts and lists for JSON, without fields that have their defaults."""
    if isinstance(value, tuple):
        return [_plain_value(element) for element in value]
    defaults = _field_defaults(value.__class__)
    if not defaults:
        return value
    plain = {"type": value.type} if hasattr(value, "type") else {}
    for name, default in defaults:
        if (field_value := getattr(value, name)) != default:
            plain[name] = _plain_value(field_value)
    return plain


@cache
def _field_defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Return the fields of a dataclass with their defaults. A job's command is always part of its digest."""
    if not is_dataclass(kind):
        return ()
    always = {"command"} if kind is JobSpec else set()
    return tuple((field.name, MISSING if field.name in always else field.default) for field in fields(kind))


VARYING = ("command", "name")
"""Fields that only ``check_size`` and ``check_program`` read, apart from the folders that a command needs."""
MAX_KINDS, MAX_KIND_BYTES = 256, 16 * 1024
"""Maximum number of accepted kinds of submissions that are kept, and bytes of one."""
_KIND = attrgetter(*(field.name for field in fields(JobSpec) if field.name not in VARYING))


class SubmissionChecks:
    """Checks of submissions, which keep the accepted kinds: the values of all fields that do not vary.

    A submission of an accepted kind, such as a job of a sweep, is checked in part: the other checks have one outcome.
    """

    def __init__(self) -> None:
        self._limits: Limits | None = None
        self._accepted: dict[Hashable, int] = {}
        """The accepted kinds under ``_limits``, with the bytes of their fields."""

    def check(self, spec: JobSpec, limits: Limits) -> None:
        """Raise ``UsageError`` for the first violation, as ``check_submission`` does.

        ``limits`` must be another object whenever the grid has changed for a policy, even if it is equal.
        """
        if limits is not self._limits:
            self._limits = limits
            self._accepted.clear()
        kind = _KIND(spec), bool(spec.command), find_folder_placeholders(spec.command)
        size = self._accepted.get(kind)
        if size is None or self._is_too_large(spec, size, limits):
            check_submission(spec, limits)
            self._keep_kind(kind, spec, limits)
            return
        check_counts(spec, limits)
        check_command("command", spec.command)

    def _is_too_large(self, spec: JobSpec, size: int, limits: Limits) -> bool:
        """Return whether a submission has too many bytes. ``size``: those of its fields that do not vary."""
        return limits.max_bytes is not None and size + bytes_of(spec.command) + bytes_of(spec.name) > limits.max_bytes

    def _keep_kind(self, kind: Hashable, spec: JobSpec, limits: Limits) -> None:
        """Keep the kind of an accepted submission, unless it is large or its policy has an answer for each job."""
        policy = limits.policies.capabilities(spec.policy or DEFAULTS[spec.request.type])
        size = sum(bytes for name, bytes in measure_fields(spec).items() if name not in VARYING)
        if policy.learns or policy.looks_ahead or size > MAX_KIND_BYTES:
            return
        if len(self._accepted) >= MAX_KINDS:
            self._accepted.clear()
        self._accepted[kind] = size
