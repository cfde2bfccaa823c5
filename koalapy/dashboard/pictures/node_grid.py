"""A cluster's nodes as a grid of squares, which say what they do by colour, pattern and letter."""

from dataclasses import asdict, dataclass

from markupsafe import Markup

CELL, GAP, COLUMNS = 12, 2, 32
MAX_SQUARES = 512
"""Of a larger cluster a square stands for several nodes."""
LETTERS = {"running": "", "claimed": "c", "local": "·", "down": "×", "idle": ""}


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
    width, height = COLUMNS * (CELL + GAP), rows * (CELL + GAP)
    told = ", ".join(f"{count} {kind}" for kind, count in asdict(counts).items() if count) or "no nodes"
    classes = " ".join(filter(None, ("nodes", "stale" if stale else "", "drained" if drained else "")))
    parts = [
        Markup('<svg class="{}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">').format(
            classes, width, height, width, height, told + (", as last heard" if stale else "")
        )
    ]
    for index, kind in enumerate(squares):
        x, y = index % COLUMNS * (CELL + GAP), index // COLUMNS * (CELL + GAP)
        parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="2"/>').format(kind, x, y, CELL, CELL)
        )
        if LETTERS[kind]:
            parts.append(
                Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, x + CELL / 2, y + 9.5, LETTERS[kind])
            )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)
