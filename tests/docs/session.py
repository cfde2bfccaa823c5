"""A shell in which the commands of one page are typed, in order, and what it is held against."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.blocks import Command
from tests.grid.grid import MAX_WAIT_S, wait_until

LOOKING = re.compile(
    r"koala (clusters|queue|show|explain|network|advisor|advisor record|metrics|alerts)\b(?! (drain|resume))"
)
"""What may be asked again until it says what is told: a reader takes his time, and this does not."""
NOTHING: Mapping[str, str] = {}
DRAWN = set("├─█░▒≈")
JOB = re.compile(r"\bkoala (show|explain|logs|wait|cancel|hold|release|fetch)\b((?: --?[a-z]+)*) (\d+)")
COUNTING = re.compile(r"koala clusters\b")
"""Whose numbers are compared, too: what is typed next hangs on how many nodes somebody has."""
NUMBER, TIME = re.compile(r"\d[\d.,:]*( [kKMG]?B\b)?"), re.compile(r"\d+:\d+")


class Session:
    """Bash in a folder of its own; the page's first job is number 1, whatever the daemon has seen before."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        jobs_before: int = 0,
        serving: str = "",
        paths: Mapping[str, str] = NOTHING,
    ) -> None:
        """``serving``: what the daemon said as it began, for pages that start it; ``paths``: instead of a site's."""
        folder.mkdir(exist_ok=True)
        self._folder, self._jobs_before, self._paths, self._typed = folder, jobs_before, paths, 0
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.run("set -m")  # what is put into the background is a group of its own
        # The daemon that a page starts has a port of its own here, or is there already.
        self.run(
            f'koala() {{ if [ "$*" = serve ]; then echo \'{serving}\'; elif [ "$1" = serve ]; then shift; '
            'command koala serve --port "$KOALA_PORT" "$@"; else command koala "$@"; fi; }'
        )

    def run(self, text: str) -> tuple[int, str]:
        """Exit code and everything printed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._typed += 1
        output = self._folder / f".said-{self._typed}"
        self._shell.stdin.write(f"{{\n{text}\n}} >{output} 2>&1 </dev/null\necho $?\n")
        self._shell.stdin.flush()
        code = self._shell.stdout.readline()
        if not code:
            pytest.fail(f"the shell has ended at {text!r}: {output.read_text()}")
        if text.endswith("serve &"):
            wait_until(output.read_text, "what was put into the background to say something")
        return int(code), output.read_text()

    def play(self, command: Command, where: str) -> None:
        """Type a command; it must do well unless an error is told, and print every line that is told."""
        text = JOB.sub(lambda found: f"koala {found[1]}{found[2]} {int(found[3]) + self._jobs_before}", command.text)
        text, *told = (self._here(line) for line in (text, *command.told))
        fails = any(line.startswith("koala: ") for line in told)
        varying = TIME if COUNTING.match(text) else NUMBER
        code, said, lacking = 0, "", list(told)

        def is_as_told() -> bool:
            nonlocal code, said, lacking
            code, said = self.run(text)
            lacking = [] if code and not fails else missing(told, said, varying)
            return not lacking and (code == 0 or fails)

        if not is_as_told() and LOOKING.match(text):
            with suppress(pytest.fail.Exception):  # the difference says more
                wait_until(is_as_told, f"{text!r} to print what is told")
        if code and not fails:
            pytest.fail(f"{where}:{command.line}: {text!r} exits with {code}: {said}")
        if lacking:
            pytest.fail(f"{where}:{command.line}: {text!r} does not print {lacking}, but:\n{said}")

    def _here(self, text: str) -> str:
        """With the paths of this machine in place of a site's."""
        for path, own in self._paths.items():
            text = text.replace(path, own)
        return text

    def close(self) -> None:
        """End it, and what it has put into the background."""
        self.run("for group in $(jobs -p); do kill -- -$group; done 2>&-; wait")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(timeout=MAX_WAIT_S)


def missing(told: Sequence[str], said: str, varying: re.Pattern[str] = NUMBER) -> list[str]:
    """The told lines that are in nothing that was said; what is ``varying`` and the like is not compared."""
    known = [alike(line, varying) for line in said.splitlines()]
    return [
        line for line in told if not DRAWN & set(line) and not any(fits(alike(line, varying), one) for one in known)
    ]


def fits(told: str, said: str) -> bool:
    """Whether a line is the told one; ``…`` stands for anything."""
    parts = [re.escape(part) for part in told.split("…")]
    return re.fullmatch(".*".join(parts), said) is not None


def alike(line: str, varying: re.Pattern[str] = NUMBER) -> str:
    """A line without what differs from one time to the next: ``varying``, checksums, names of users, blanks."""
    line = re.sub(r"\b[0-9a-f]{8}[0-9a-f]*\b", "#", line)
    line = re.sub(rf"\b({re.escape(os.environ.get('USER', 'root'))}|root|ada)\b", "USER", line)
    line = re.sub(r"data in [^)]*", "data in FOLDER", line)
    line = varying.sub("#", line)
    return re.sub(r"\s+", " ", line).strip()
