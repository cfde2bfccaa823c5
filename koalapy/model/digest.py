"""Digests by which a repeated submission is recognised (``Idempotency-Key``)."""

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from koalapy.model.job import JobSpec


def hash_key(user: str, key: str) -> str:
    """Hash an ``Idempotency-Key`` with its user, so that no user finds the submissions of another."""
    return hashlib.sha256(f"{user}\n{key}".encode(errors="surrogatepass")).hexdigest()


def hash_spec(spec: JobSpec) -> str:
    """Hash a submission without its default values, so that a field that a later version adds changes no digest."""
    text = json.dumps(_plain(spec), sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


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
    """Return the fields of a dataclass with their defaults. A job's command is always part of its digest."""
    if not is_dataclass(kind):
        return ()
    always = {"command"} if kind is JobSpec else set()
    return tuple((each.name, MISSING if each.name in always else each.default) for each in fields(kind))
