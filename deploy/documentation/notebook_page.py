"""Build a page of a notebook: its text, and its code with the stored outputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page(path: Path) -> str:
    """Return a notebook as Markdown, with a link to the file at its end."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in _list_parts(cell)]
    return "\n\n".join([*parts, f"[Download the notebook]({path.name})"]) + "\n"


def _list_parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = {"text/plain": output.get("text", ""), **output.get("data", {})}
        text = "".join(data.get("text/html") or data["text/plain"]).rstrip()
        yield f"<div>{text}</div>" if "text/html" in data else f"```text\n{text}\n```"
