"""A submission as the command that makes it."""

import shlex
from collections.abc import Iterator
from typing import Any

from koalapy.cli.submission import brings_files

Json = dict[str, Any]
PLAIN = {
    "policy": "--policy",
    "coallocation": "--coallocation",
    "speed_ratio_min": "--speed-ratio-min",
    "claiming": "--claiming",
    "claim_threshold": "--claim-threshold",
    "priority": "--priority",
    "processes_per_node": "--ppn",
    "name": "--name",
    "launcher": "--launcher",
    "walltime": "--walltime",
    "output": "--output",
    "max_restarts": "--max-restarts",
    "max_placement_tries": "--max-placement-tries",
    "max_claiming_tries": "--max-claiming-tries",
    "application": "--application",
    "communication": "--communication",
}
"""Fields with an option of one value."""


def command_for(body: Json, here: str) -> str | None:
    """``koala submit …`` for a body, run in the folder ``here``; None when it takes a file to say it."""
    request = _request(body["request"])
    if request is None or not body.get("command") or body.get("bundle"):
        return None
    words = ["koala", "submit", *request]
    for field, option in PLAIN.items():
        if body.get(field) not in (None, ""):
            value = body[field]
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    # Where files are brought, the folder of these is where the program starts, and not the one that one is in.
    goes_by_itself = body.get("workdir_optional") and body.get("workdir") == here and not brings_files(body)
    if body.get("workdir") is not None and not goes_by_itself:
        words += ["--chdir", body["workdir"]]
    words += _repeated(body)
    text = shlex.join([*words, "--", *body["command"]])
    return text if text.isprintable() else None


def _request(request: Json) -> list[str] | None:
    if request["type"] == "flexible":
        words = ["--flexible", str(request["total_size"])]
        for field, option in (("min_component_size", "--min-component"), ("max_components", "--max-components")):
            words += [option, str(request[field])] if request.get(field) is not None else []
        for sizes in request.get("split_options") or []:
            words += ["--split", ",".join(str(size) for size in sizes)]
        return words
    components = request["components"]
    if any(component.keys() - {"size", "cluster"} for component in components):
        return None
    if request["type"] == "nonfixed":
        return ["--nonfixed", ",".join(str(component["size"]) for component in components)]
    return ["--fixed", ",".join(f"{component['cluster']}:{component['size']}" for component in components)]


def _repeated(body: Json) -> Iterator[str]:
    for field, option in (("environment", "--env"), ("policy_options", "--policy-option")):
        for name, value in (body.get(field) or {}).items():
            yield from (option, f"{name}={value}")
    for file in body.get("inputs") or []:
        options = [":partitioned"] if file.get("distribution") == "partitioned" else []
        yield from ("--input", "".join([file["file"], *options, f":as={file['as']}" if file.get("as") else ""]))
    for pattern in body.get("collect") or []:
        yield from ("--collect", pattern)
    for code in body.get("retry_on_exit") or []:
        yield from ("--retry-on-exit", str(code))
