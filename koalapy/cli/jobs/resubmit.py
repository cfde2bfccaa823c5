"""A submission as the command that makes it."""

import shlex

from koalapy.cli.jobs.job_options import JOB_FIELDS, form_of
from koalapy.cli.jobs.submission import brings_files
from koalapy.client.client import Json


def command_for(body: Json, here: str) -> str | None:
    """``koala submit …`` for a body, run in the folder ``here``; None when it takes a file to say it."""
    request = _request(body["request"])
    if request is None or not body.get("command") or body.get("bundle"):
        return None
    once: list[str] = []
    repeated: list[str] = []
    for name, field in JOB_FIELDS.items():
        if name != "workdir" and (value := body.get(name)) not in (None, "", [], {}):
            form = form_of(field.type)
            for text in form.texts(value):
                (repeated if form.is_repeated else once).extend((field.option, text))
    # Where files are brought, the folder of these is where the program starts, and not the one that one is in.
    goes_by_itself = body.get("workdir_optional") and body.get("workdir") == here and not brings_files(body)
    if body.get("workdir") is not None and not goes_by_itself:
        once += ["--chdir", body["workdir"]]
    text = shlex.join(["koala", "submit", *request, *once, *repeated, "--", *body["command"]])
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
