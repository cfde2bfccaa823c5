"""A cluster's nodes as a grid of squares, which say what they do by colour, pattern and letter."""

from dataclasses import asdict, dataclass

from markupsafe import Markup

CELL, GAP, COLUMNS = 14, 2, 32
MAX_SQUARES = 512
"""Of a larger cluster a square stands for several nodes."""
LETTERS = {"running": "r", "claimed": "c", "local": "l", "down": "×", "idle": ""}

WORDS = {"running": "running", "claimed": "claimed", "local": "of local users", "down": "down", "idle": "idle"}


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes by what they do, each in one place: ours running, ours claimed, local users', down, idle."""

    running: int = 0
    claimed: int = 0
    local: int = 0
    down: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return self.running + self.claimed + self.local + self.down + self.idle


def node_grid(counts: NodeCounts, *, stale: bool = False, drained: bool = False) -> Markup:
    """SVG; ``stale``: what is shown is old."""
    each = max(1, -(-counts.total // MAX_SQUARES))
    squares = [kind for kind, count in asdict(counts).items() for _ in range(-(-count // each))]
    rows = max(1, -(-len(squares) // COLUMNS))
    columns = min(COLUMNS, max(1, len(squares)))
    width, height = columns * (CELL + GAP), rows * (CELL + GAP)
    told = ", ".join(f"{count} {WORDS[kind]}" for kind, count in asdict(counts).items() if count) or "no nodes"
    if each > 1:
        told += f"; a square is {each} nodes"
    if stale:
        told += ", as last told"
    classes = " ".join(filter(None, ("nodes", "stale" if stale else "", "drained" if drained else "")))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'<svg class="{classes}" {size} role="img" aria-label="{told}">']
    # There may be thousands, and nothing in them is of anybody's making.
    for index, kind in enumerate(squares):
        x, y = index % COLUMNS * (CELL + GAP), index // COLUMNS * (CELL + GAP)
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="2"/>')
        if LETTERS[kind]:
            parts.append(f'<text x="{x + CELL / 2:g}" y="{y + 10.5}">{LETTERS[kind]}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))
