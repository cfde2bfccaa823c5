"""From options to the body of a submission."""

import os
import re
from pathlib import Path

from koalapy.cli.jobs import job_file
from koalapy.cli.jobs.job_options import JOB_FIELDS, number
from koalapy.client.client import Json
from koalapy.client.errors import CliError, Exit
from koalapy.model.wording import is_utf8


def _numbers(option: str, text: str) -> list[int]:
    numbers = [each for part in text.split(",") if (each := number(part)) is not None]
    if len(numbers) != text.count(",") + 1:
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4")
    return numbers


def _fixed(text: str) -> list[Json]:
    components = []
    for part in text.split(","):
        cluster, colon, given = part.rpartition(":")
        size = number(given)
        if not colon or not cluster or size is None:
            raise CliError(f"--fixed is {text!r}", Exit.USAGE, "give clusters and sizes: --fixed north:2,south:4")
        components.append({"cluster": cluster, "size": size})
    return components


def request_of(
    flexible: int | None = None,
    nonfixed: str | None = None,
    fixed: str | None = None,
    min_component: int | None = None,
    max_components: int | None = None,
    split: list[str] | None = None,
) -> Json | None:
    """The request that the options describe; None when they describe none."""
    given = [o for o, v in (("--flexible", flexible), ("--nonfixed", nonfixed), ("--fixed", fixed)) if v is not None]
    if len(given) > 1:
        raise CliError(f"{' and '.join(given)} cannot be given together", Exit.USAGE, "choose one kind of request")
    bounds = {"min_component_size": min_component, "max_components": max_components}
    bounds_given: Json = {name: value for name, value in bounds.items() if value is not None}
    if split:
        bounds_given["split_options"] = [_numbers("--split", sizes) for sizes in split]
    if flexible is not None:
        return {"type": "flexible", "total_size": flexible, **bounds_given}
    if bounds_given:
        raise CliError(
            "--min-component, --max-components and --split are for flexible requests", Exit.USAGE, "add --flexible N"
        )
    if nonfixed is not None:
        return {"type": "nonfixed", "components": [{"size": n} for n in _numbers("--nonfixed", nonfixed)]}
    return {"type": "fixed", "components": _fixed(fixed)} if fixed is not None else None


def brings_files(body: Json) -> bool:
    """Whether components have folders of their own, in which their programs start."""
    request = body.get("request")
    components = request.get("components") if isinstance(request, dict) else None
    own = [c.get("inputs") for c in components if isinstance(c, dict)] if isinstance(components, list) else []
    return any([body.get("inputs"), body.get("bundle"), body.get("stage"), body.get("collect"), *own])


def paths_to_stage(body: Json, file: Path | None, given: list[str]) -> list[str]:
    """What is to be sent along: what the options say, or the job file, whose paths are relative to its folder."""
    told = body.pop("stage", None)
    if given or told is None:
        return given
    if not isinstance(told, list) or not all(isinstance(path, str) for path in told):
        raise CliError("stage of the job file is no list of paths", Exit.USAGE, "give files and folders")
    return [str((file or Path()).parent / path) for path in told]


def body_of(file: Path | None, options: Json, environment: dict[str, str]) -> Json:
    """What a job file says, overridden by what the options say."""
    body = job_file.read(file) if file else {}
    if (workdir := options.get("workdir")) and not workdir.startswith(("/", "{")):
        options = options | {"workdir": os.path.abspath(workdir)}
    by_name = {"environment": environment, "policy_options": options.get("policy_options") or {}}
    body |= {name: value for name, value in options.items() if value not in (None, []) and name not in by_name}
    for field, given in by_name.items():
        of_file = body.get(field) or {}
        if given and not isinstance(of_file, dict):
            raise CliError(f"{field} of the job file is no object", Exit.USAGE, "give names and values")
        if given:
            body[field] = of_file | given
    if options.get("workdir"):
        body.pop("workdir_optional", None)  # said of the file's
    if "workdir" not in body and not brings_files(body) and (here := _here()):
        body |= {"workdir": here, "workdir_optional": True}
    if "request" not in body:
        raise CliError("no nodes are asked for", Exit.USAGE, "give --flexible N, --nonfixed N,N or --fixed CLUSTER:N")
    return body


def checked_key(key: str) -> str:
    """An idempotency key as a header takes it; ``CliError``."""
    if not key.strip() or not key.isprintable() or not is_utf8(key):
        hint = "give letters, digits and signs, the same at each try"
        raise CliError("--idempotency-key is blank, or has what no header takes", Exit.USAGE, hint)
    return key


def _here() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


REQUEST_OPTIONS = {
    "request.total_size": "--flexible",
    "request.min_component_size": "--min-component",
    "request.max_components": "--max-components",
    "request.split_options": "--split",
}


def in_terms_of_options(error: CliError, body: Json, options: Json) -> CliError:
    """A refusal by the daemon, said of the options that the user gave; as it is, where a file said it."""
    field, request = error.field, body["request"]
    first = re.split(r"[.\[]", field)[0]
    if not field or options.get(first) is None or not error.message.startswith(field):
        return error
    if component := re.match(r"request\.components\[(\d+)\]\.(\w+)", field):
        index, what = component.groups()
        named = f"--{request['type']}: {what} of component {index}"
    elif split := re.match(r"request\.split_options\[(\d+)\]", field):
        named = f"--split {','.join(str(size) for size in request['split_options'][int(split[1])])}"
    elif field == "request.components":
        named = f"--{request['type']}: the components"
    elif field in REQUEST_OPTIONS:
        named = REQUEST_OPTIONS[field]
    elif first in JOB_FIELDS:
        option = JOB_FIELDS[first].option
        named = f"{option} {field.removeprefix(f'{first}.')}" if field.startswith(f"{first}.") else option
    else:
        return error
    return CliError(f"{named}{error.message[len(field) :]}", error.code, error.hint, field)
