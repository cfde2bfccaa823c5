"""Charts over time: values that a script draws by uPlot, and that the page also has as a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from koalapy.model.history import USES, UseSums
from koalapy.model.request import ClusterName

Unit = Literal["count", "share", "seconds", "rate"]
"""The unit of a chart: shares from 0 to 1, bytes per second, or numbers."""
Mark = tuple[float, str]
"""An event at a time in seconds since the epoch, and its description."""
COLOURS = {"ours": "running", "withheld": "phase-held"}
"""The names of the colours of uses that are not named as the use itself."""
TITLES = {"ours": "jobs", "local": "local users"}
"""The titles of uses that are not named as the use itself."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A value in each slot of a chart; None for a slot without a value."""

    name: str
    values: Sequence[float | None]
    colour: str = ""
    """Name of a colour of the style sheet; empty for the next one of a series."""

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the same slots."""

    title: str
    at: Sequence[float]
    """Starts of the slots in seconds since the epoch."""
    length: float
    """Seconds of a slot."""
    curves: Sequence[Curve]
    unit: Unit = "count"
    stacked: bool = False
    marks: Sequence[Mark] = ()

    @property
    def has_values(self) -> bool:
        return any(value is not None for curve in self.curves for value in curve.values)


def use_chart(title: str, sums: UseSums, cluster: ClusterName = "", marks: Sequence[Mark] = ()) -> Chart:
    """Return the nodes of a cluster, by default of all clusters, by use. Uses without any node are left out."""
    means = {name: sums.means(name, cluster) for name in USES}
    curves = [
        Curve(TITLES.get(name, name), values, COLOURS.get(name, name))
        for name, values in means.items()
        if any(values) or name in ("ours", "idle")
    ]
    return Chart(title, sums.starts, sums.length, curves, stacked=True, marks=marks)


def render_chart(chart: Chart) -> Markup:
    """Return a chart as JSON for an attribute in single quotation marks, from which the script draws it."""
    content = {name: getattr(chart, name) for name in ("length", "unit", "stacked", "marks")} | {"at": list(chart.at)}
    content["curves"] = [{"name": curve.name, "values": curve.values, "colour": curve.colour} for curve in chart.curves]
    return htmlsafe_json_dumps(content, dumps=json.dumps, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes by state: those of ``NodeUse``, with the used ones as running or claimed components."""

    running: int = 0
    claimed: int = 0
    local: int = 0
    down: int = 0
    idle: int = 0
    withheld: int = 0
    unknown: int = 0

    @property
    def ours(self) -> int:
        return self.running + self.claimed

    @property
    def total(self) -> int:
        return sum(self.by_state.values())

    @property
    def by_state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def used_shares(self) -> list[tuple[str, float, float]]:
        """Return the states of nodes that are not idle, each with the percent of the nodes before it and in it."""
        counts = [(state, count) for state, count in self.by_state.items() if count and state != "idle"]
        shares = [100 * count / self.total for _, count in counts]
        starts = accumulate(shares, initial=0.0)
        return [(state, start, share) for (state, _), start, share in zip(counts, starts, shares, strict=False)]

    def __str__(self) -> str:
        """Return the states that nodes are in: ``12 running, 3 idle``."""
        names = {"local": "of local users"}
        return ", ".join(f"{count} {names.get(use, use)}" for use, count in self.by_state.items() if count) or "none"
