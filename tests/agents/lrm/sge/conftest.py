"""Grid Engine's commands as small scripts that answer what a folder holds, and a control that remembers."""

import os
import pwd
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from koalapy.agents.lrm.port import Finding, LrmSubmission

from .test_qstat import ANSWERS

OWNER = pwd.getpwuid(os.geteuid()).pw_name
# Answers with the file named after command and arguments, or else after the command; its exit code is in NAME.code.
SCRIPT = """#!/bin/sh
name=$(basename "$0")
echo "$name $*" >> {folder}/calls
for answer in "{folder}/$name $*" {folder}/$name; do
    if [ -e "$answer" ]; then
        cat "$answer"
        [ ! -e "$answer.code" ] || exit "$(cat "$answer.code")"
        exit 0
    fi
done
echo "$name: nothing to say to $*" >&2
exit 1
"""


class FakeGridEngine:
    """What its commands answer, and what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        for name in ("qstat", "qconf", "qselect", "qacct", "qdel", "qhost"):
            (programs / name).write_text(SCRIPT.format(folder=folder))
            (programs / name).chmod(0o755)
        self.answers("qconf -sp koala", (ANSWERS / "environment.txt").read_text())
        self.answers("qconf -sql", "all.q\n")
        self.answers("qconf -spl", "koala\n")
        self.answers("qconf -sm", "sgeadmin\n")
        self.answers("qconf -sconf", "#global:\nqmaster_params               ENABLE_FORCED_QDEL=true\n")
        self.answers("qselect", "".join(f"all.q@h2-{n}\n" for n in (1, 2, 3, 4)))
        self.shows("idle.xml")

    def answers(self, command: str, text: str, code: int = 0) -> None:
        (self.folder / command).write_text(text)
        if code:
            (self.folder / f"{command}.code").write_text(str(code))

    def hangs(self, command: str) -> Callable[[], None]:
        """Have a command say nothing until what is returned is called."""
        program = self.folder / "bin" / command
        before, pipe = program.read_text(), self.folder / f"{command}.pipe"
        os.mkfifo(pipe)
        program.write_text(before.replace("\nfor", f"\nread _ < {pipe}\nfor", 1))
        # Open for both, so that a word said before anyone reads it is kept.
        said = os.open(pipe, os.O_RDWR)

        def release() -> None:
            program.write_text(before)
            os.write(said, b"\n" * 100)

        return release

    def shows(self, recorded: str, **changes: str) -> None:
        """Have qstat give a recorded answer, with the jobs of koala as ours."""
        text = (ANSWERS / recorded).read_text().replace(">koala</JB_owner>", f">{OWNER}</JB_owner>")
        for old, new in changes.items():
            text = text.replace(old, new)
        self.answers("qstat", text)

    def accounts(self, job: str, name: str, failed: str, exit_status: int, host: str = "h2-1") -> None:
        fields = f"hostname {host}\njobnumber {job}\nowner {OWNER}\njobname {name}\n"
        fields += f"failed {failed}\nexit_status {exit_status}\n"
        path = self.folder / f"qacct -o {OWNER} -j {job}"
        before = path.read_text() if path.exists() else ""
        self.answers(path.name, f"{before}=====\n{fields}ru_wallclock 5s\ncategory -pe koala 2\n")

    def calls(self, command: str) -> list[str]:
        return [line for line in (self.folder / "calls").read_text().splitlines() if line.startswith(command)]


class RememberingControl:
    """Hands in nothing."""

    def __init__(self) -> None:
        self.native: list[list[str]] = []
        self.cancelled: list[str] = []
        self.told = ""
        self.refusal: Exception | None = None

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.native.append(list(native))
        return "7"

    async def cancel(self, job: str, user: str = "") -> None:
        self.cancelled.append(job)

    async def submit_error(self) -> str:
        return self.told

    async def check(self) -> Sequence[Finding]:
        return [Finding("control", True, "remembers")]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGridEngine:
    made = FakeGridEngine(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SGE_ROOT", raising=False)
    return made


@pytest.fixture
def control() -> RememberingControl:
    return RememberingControl()
