"""The commands that the documentation shows, with what it says that they print."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for folder in ("docs", "experiments") for page in sorted((ROOT / folder).rglob("*.md"))),
]
FENCE = re.compile(r"^( *)```(\w*)$")
MARK = re.compile(r"^ *<!-- (not played|played by): (.+) -->$")
SHELL = ("console", "sh", "bash")


@dataclass(frozen=True, slots=True)
class Command:
    """One command as it is typed, and the lines that are shown below it."""

    text: str
    told: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed in one go; ``mark`` says why the tests of the page do not play it, or which others do."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    mark: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """What stands after each prompt, with the lines that continue it, or its document; then what it prints."""
        lines, at = self.lines, 0
        while at < len(lines):
            start = at
            if not lines[at].startswith(("$ ", "# ")):
                raise ValueError(f"{self}: {lines[at]!r} follows no command")
            typed = [lines[at][2:]]
            document = re.search(r"<<'?(\w+)'?", typed[0])
            while at + 1 < len(lines) and (typed[-1] != document[1] if document else typed[-1].endswith("\\")):
                at += 1
                typed.append(lines[at])
            while at + 1 < len(lines) and lines[at + 1].startswith("> "):
                at += 1
                typed.append(lines[at][2:])
            told = []
            at += 1
            while at < len(lines) and not lines[at].startswith("$ "):
                told.append(lines[at])
                at += 1
            yield Command("\n".join(typed), tuple(told), self.line + 1 + start)


def blocks(path: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if fence := FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            marked = MARK.match(lines[at - 1]) if at else None
            within = tuple(line.removeprefix(fence[1]) for line in lines[at + 1 : end])
            mark = (marked[1], marked[2]) if marked else None
            yield Block(path.relative_to(ROOT).as_posix(), at + 1, fence[2], within, mark)
            at = end
        at += 1


SHOWN = [block for page in PAGES for block in blocks(page) if block.language in SHELL]
"""Every block of commands in the documentation."""
