"""Parse the commands in the documentation and the output shown below them."""

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
    """One command, and the output lines shown below it."""

    text: str
    output_lines: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``mark`` names the test that plays it, or the reason for having none."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    mark: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """Yield the command after each prompt, with its continuation lines or here document, and its output."""
        lines, index = self.lines, 0
        while index < len(lines):
            start = index
            if not lines[index].startswith(("$ ", "# ")):
                raise ValueError(f"{self}: {lines[index]!r} follows no command")
            typed = [lines[index][2:]]
            document = re.search(r"<<'?(\w+)'?", typed[0])
            while index + 1 < len(lines) and (typed[-1] != document[1] if document else typed[-1].endswith("\\")):
                index += 1
                typed.append(lines[index])
            while index + 1 < len(lines) and lines[index + 1].startswith("> "):
                index += 1
                typed.append(lines[index][2:])
            output_lines = []
            index += 1
            while index < len(lines) and not lines[index].startswith("$ "):
                output_lines.append(lines[index])
                index += 1
            yield Command("\n".join(typed), tuple(output_lines), self.line + 1 + start)


def blocks(path: Path) -> Iterator[Block]:
    """Yield all fenced blocks of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        if fence := FENCE.match(lines[index]):
            end = next(n for n in range(index + 1, len(lines)) if lines[n].strip() == "```")
            marked = MARK.match(lines[index - 1]) if index else None
            within = tuple(line.removeprefix(fence[1]) for line in lines[index + 1 : end])
            mark = (marked[1], marked[2]) if marked else None
            yield Block(path.relative_to(ROOT).as_posix(), index + 1, fence[2], within, mark)
            index = end
        index += 1


SHOWN = [block for page in PAGES for block in blocks(page) if block.language in SHELL]
"""All blocks of commands in the documentation."""
