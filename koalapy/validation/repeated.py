"""Check a submission in part if one that differs in its command and name only was accepted before.

The jobs of a sweep are such submissions. Their checks against the clusters and policies have one outcome.
"""

from collections.abc import Hashable
from dataclasses import fields
from operator import attrgetter

from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import find_folder_placeholders
from koalapy.policies.registry import DEFAULTS
from koalapy.validation.limits import Limits
from koalapy.validation.request import bytes_of, check_command, check_counts, measure_fields
from koalapy.validation.submission import check_submission

VARYING = ("command", "name")
"""Fields that only ``check_size`` and ``check_program`` read, apart from the folders that a command needs."""
MAX_KINDS, MAX_KIND_BYTES = 256, 16 * 1024
"""Maximum number of accepted kinds of submissions that are kept, and bytes of one."""
_KIND = attrgetter(*(field.name for field in fields(JobSpec) if field.name not in VARYING))


class SubmissionChecks:
    """Checks of submissions, which keep the accepted kinds: the values of all fields that do not vary."""

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
