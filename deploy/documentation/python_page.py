"""Build the reference of the Python client from the docstrings of its public classes."""

import inspect
from collections.abc import Iterator
from typing import Any

import koalapy
from koalapy.client.executor import GridExecutor, TaskFuture
from koalapy.client.jobs import Explanation
from koalapy.client.notebook import Table

CLASSES = (koalapy.Grid, koalapy.Job, koalapy.Array, Explanation, Table, GridExecutor, TaskFuture, koalapy.GridError)


def public_names() -> dict[str, Any]:
    """Return every public function, class, method and property of the client by its name, such as `Job.wait`."""
    return dict(_list_names())


def page() -> str:
    """Return a section for each public name as Markdown: its signature and docstring."""
    return "\n".join(_section(name, value) for name, value in public_names().items())


def _list_names() -> Iterator[tuple[str, Any]]:
    yield "koalapy.connect", koalapy.connect
    for kind in CLASSES:
        yield kind.__name__, kind
        for name, member in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                yield f"{kind.__name__}.{name}", member


def _section(name: str, value: Any) -> str:
    signature = ""
    if inspect.isfunction(value):
        parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
        shown = inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters])
        signature = f"```text\n{name}{shown}\n```\n\n"
    text = (inspect.getdoc(value) or "").replace("``", "`")
    return f"\n{'###' if inspect.isclass(value) or value is koalapy.connect else '####'} {name}\n\n{signature}{text}\n"
