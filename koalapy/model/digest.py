"""What makes two submissions the same, by which a repeated one is known again (``Idempotency-Key``)."""

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from koalapy.model.job import JobSpec

FORM = "2:"
"""How digests begin; those of before there was this form are bare."""
FIELDS_OF_BEFORE = (
    "request",
    "command",
    "name",
    "owner",
    "environment",
    "priority",
    "policy",
    "policy_options",
    "coallocation",
    "speed_ratio_min",
    "claiming",
    "claim_threshold",
    "launcher",
    "processes_per_node",
    "workdir",
    "output",
    "walltime",
    "max_restarts",
    "max_placement_tries",
    "max_claiming_tries",
    "retry_on_exit",
    "inputs",
    "bundle",
    "collect",
    "application",
    "communication",
)


def key_of(user: str, key: str) -> str:
    """What a user's key is kept as: nobody finds another's by it, whatever keys they use."""
    return hashlib.sha256(f"{user}\n{key}".encode(errors="surrogatepass")).hexdigest()


def digest_of(spec: JobSpec) -> str:
    """Of what was sent, without what is as it would be by itself: a field that a later version adds changes none."""
    text = json.dumps(_plain(spec), sort_keys=True)
    return FORM + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:60]


def has_digest(spec: JobSpec, digest: str) -> bool:
    """Whether a submission is the one that a digest was made of, in whichever form that is."""
    return digest == (digest_of(spec) if digest.startswith(FORM) else _digest_of_before(spec))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    defaults = _defaults(value.__class__)
    if not defaults:
        return value
    plain = {"type": value.type} if hasattr(value, "type") else {}
    for name, default in defaults:
        if (one := getattr(value, name)) != default:
            plain[name] = _plain(one)
    return plain


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Of the fields of a class that has any; a command had none when this form was made."""
    if not is_dataclass(kind):
        return ()
    always = {"command"} if kind is JobSpec else set()
    return tuple((each.name, MISSING if each.name in always else each.default) for each in fields(kind))


def _digest_of_before(spec: JobSpec) -> str:
    """As earlier versions made it, for keys that were used with one of them."""
    text = json.dumps({name: repr(getattr(spec, name)) for name in FIELDS_OF_BEFORE}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
