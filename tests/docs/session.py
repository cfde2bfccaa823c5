"""A shell that runs the commands of one page and compares their output with the page."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.blocks import Command
from tests.grid.grid import MAX_WAIT_S, wait_until

REPEATABLE_COMMAND = re.compile(
    r"koala (clusters|queue|show|explain|network|advisor|advisor record|metrics|alerts)\b(?! (drain|resume))"
)
"""Commands that are repeated until they print the expected output, since a test types faster than a reader."""
NO_PATHS: Mapping[str, str] = {}
JOB = re.compile(r"\bkoala (show|explain|logs|wait|cancel|hold|release|fetch)\b((?: --?[a-z]+)* '?)(\d+)")
COMMAND_WITH_NODE_COUNTS = re.compile(r"koala clusters\b")
"""Commands with compared numbers, since the next command depends on the number of nodes."""
NUMBER, TIME = re.compile(r"\d[\d.,:]*( [kKMG]?B\b)?"), re.compile(r"\d+:\d+")


class Session:
    """Bash in a separate folder. The first job of a page has the number 1, whatever jobs the daemon had before."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        jobs_before: int = 0,
        serving: str = "",
        paths: Mapping[str, str] = NO_PATHS,
    ) -> None:
        """Start bash. ``serving`` is the output of a daemon's start, ``paths`` replace those of a site."""
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
        self.run("set -m")  # each background process is a process group
        # The daemon that a page starts has a separate port here, or already runs.
        self.run(
            f'koala() {{ if [ "$*" = serve ]; then echo \'{serving}\'; elif [ "$1" = serve ]; then shift; '
            'command koala serve --port "$KOALA_PORT" "$@"; else command koala "$@"; fi; }'
        )

    def run(self, text: str) -> tuple[int, str]:
        """Run commands and return their exit code and output."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._typed += 1
        output = self._folder / f".output-{self._typed}"
        self._shell.stdin.write(f"{{\n{text}\n}} >{output} 2>&1 </dev/null\necho $?\n")
        self._shell.stdin.flush()
        code = self._shell.stdout.readline()
        if not code:
            pytest.fail(f"the shell has ended at {text!r}: {output.read_text()}")
        if text.endswith("serve &"):
            wait_until(output.read_text, "what was put into the background to say something")
        return int(code), output.read_text()

    def play(self, command: Command, page: str) -> None:
        """Run a command. Fail unless it succeeds, or fails as the page shows, and prints every expected line."""
        text = JOB.sub(lambda match: f"koala {match[1]}{match[2]}{int(match[3]) + self._jobs_before}", command.text)
        text, *expected_lines = (self._here(line) for line in (text, *command.output_lines))
        fails = any(line.startswith("koala: ") for line in expected_lines)
        varying = TIME if COMMAND_WITH_NODE_COUNTS.match(text) else NUMBER
        code, output, missing_lines = 0, "", list(expected_lines)

        def prints_expected_lines() -> bool:
            nonlocal code, output, missing_lines
            code, output = self.run(text)
            missing_lines = [] if code and not fails else find_missing_lines(expected_lines, output, varying)
            return not missing_lines and (code == 0 or fails)

        if not prints_expected_lines() and REPEATABLE_COMMAND.match(text):
            with suppress(pytest.fail.Exception):  # the difference says more
                wait_until(prints_expected_lines, f"{text!r} to print what the page shows")
        if code and not fails:
            pytest.fail(f"{page}:{command.line}: {text!r} exits with {code}: {output}")
        if missing_lines:
            pytest.fail(f"{page}:{command.line}: {text!r} does not print {missing_lines}, but:\n{output}")

    def _here(self, text: str) -> str:
        """Replace a site's paths by those of this machine."""
        for path, local_path in self._paths.items():
            text = text.replace(path, local_path)
        return text

    def close(self) -> None:
        """End the shell and its background processes."""
        self.run("for group in $(jobs -p); do kill -- -$group; done 2>&-; wait")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(timeout=MAX_WAIT_S)


def find_missing_lines(expected_lines: Sequence[str], output: str, varying: re.Pattern[str] = NUMBER) -> list[str]:
    """Return the expected lines that the output lacks, without comparing ``varying`` parts."""
    printed_lines = [normalize_line(line, varying) for line in output.splitlines()]
    return [
        line
        for line in expected_lines
        if not any(matches_line(normalize_line(line, varying), printed_line) for printed_line in printed_lines)
    ]


def matches_line(expected: str, printed: str) -> bool:
    """Return whether a line is the expected one; ``…`` matches anything."""
    parts = [re.escape(part) for part in expected.split("…")]
    return re.fullmatch(".*".join(parts), printed) is not None


def normalize_line(line: str, varying: re.Pattern[str] = NUMBER) -> str:
    """Replace the parts of a line that differ between runs: ``varying``, checksums, user names, blanks."""
    line = re.sub(r"\b[0-9a-f]{8}[0-9a-f]*\b", "#", line)
    line = re.sub(rf"\b({re.escape(os.environ.get('USER', 'root'))}|root|ada)\b", "USER", line)
    line = re.sub(r"data in [^)]*", "data in FOLDER", line)
    line = varying.sub("#", line)
    return re.sub(r"\s+", " ", line).strip()
