"""Check docstrings, comments and messages for words that say nothing precise: ``python -m tests.check_wording``.

A text names its actor (user, operator, daemon, agent, runner) instead of "somebody", and its action instead of "told".
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "koalapy"
FORBIDDEN = re.compile(
    r"\b(somebody|nobody|anybody|everybody|whoever|whom|is told|are told|was told|were told|who asks|of ours|of theirs"
    r"|for ever|goes away|what they are|stands for others|beside others)\b",
    re.IGNORECASE,
)
EXEMPT = {("agent/lrm/sge/commands.py", "nobody")}
"""Words that are names, by module: the account `nobody`."""


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and word of each forbidden word in comments and strings of a source text."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                for match in FORBIDDEN.finditer(line):
                    yield token.start[0] + offset, match[0]


def main() -> None:
    failed = False
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, text in findings(path.read_text(encoding="utf-8")):
            if (name, text) in EXEMPT:
                continue
            failed = True
            print(f"koalapy/{name}:{line}: {text!r}; name the actor or the action")
    if failed:
        sys.exit(1)
    print("texts of the package use no forbidden word")


if __name__ == "__main__":
    main()
