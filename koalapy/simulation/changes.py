"""Rules and jobs with something changed, as somebody wants to try it."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec
from koalapy.model.wording import known_names
from koalapy.policies.registry import Registry
from koalapy.scheduler.rules import Rules


def changed_rules(rules: Rules, changes: Mapping[str, Any]) -> Rules:
    """With some parameters changed; ``UsageError`` for what is none, or is out of range."""
    known = asdict(rules)
    for name in changes.keys() - known.keys():
        raise UsageError(f"there is no rule {name}", field=f"rules.{name}", value=name, hint=known_names(name, known))
    try:
        changed: Rules = TypeAdapter(Rules).validate_python(known | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else next(iter(changes), "")
        raise UsageError(
            f"{name} cannot be {changes.get(name)!r}: {first['msg']}", field=f"rules.{name}", value=changes.get(name)
        ) from error
    return changed


def is_served(policy: str, spec: JobSpec, policies: Registry) -> bool:
    """Whether a policy places what the job asks for; ``UsageError`` where there is none of that name."""
    return spec.request.type in policies.get(policy).serves


def placed_by(policy: str, spec: JobSpec, policies: Registry) -> JobSpec:
    """The job by another policy, where there is one and it serves what the job asks for."""
    if not policy or not is_served(policy, spec, policies):
        return spec
    return replace(spec, policy=policy, policy_options=())
