"""A fake DRMAA package in the real worker process."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.lrm.port import LrmSubmission

PACKAGE = Path(__file__).with_name("package")


class FakeLibrary:
    """Controls the fake library, and returns its calls."""

    def __init__(self, state: Path) -> None:
        self.state = state
        state.mkdir()

    def will(self, operation: str, behaviour: str) -> None:
        """Make an operation raise the named error, crash, exit, hang or print; an empty string makes it succeed."""
        (self.state / operation).write_text(behaviour)

    def job(self, job: str, text: str) -> None:
        fresh = self.state / "fresh"
        fresh.write_text(text)
        fresh.rename(self.state / f"job-{job}")

    def calls(self, begin: str = "") -> list[str]:
        path = self.state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(begin)]

    def pids(self) -> list[int]:
        """Return the process IDs of all workers that began a session."""
        return [json.loads(line.partition(" ")[2])["pid"] for line in self.calls("initialize")]


@pytest.fixture
def library(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path / "library")


@pytest.fixture
async def control(library: FakeLibrary) -> AsyncIterator[DrmaaControl]:
    control = make_control(library)
    yield control
    await control.close()


def make_control(library: FakeLibrary, **changes: Any) -> DrmaaControl:
    environment = {"PYTHONPATH": str(PACKAGE), "FAKE_DRMAA": str(library.state)}
    return DrmaaControl(changes.pop("path", None), environment=environment, **changes)


def make_submission(folder: Path, name: str = "koala-a", **changes: Any) -> LrmSubmission:
    fields: dict[str, Any] = {
        "nodes": 1,
        "argv": ["true"],
        "environment": {"A": "b"},
        "workdir": folder,
        "output": folder / "out",
    }
    return LrmSubmission(name, **(fields | changes))
