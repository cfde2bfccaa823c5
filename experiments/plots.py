"""Colours, lines and style of the papers' figures."""

from typing import Any

# The colours of Okabe and Ito can be distinguished with colour blindness.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
LINES = [(BLUE, "-"), (RED, "--"), (GREEN, "-."), (PURPLE, ":"), (ORANGE, "-"), (SKY, "--")]
STYLE: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "svg.hashsalt": "koala",
    "hatch.linewidth": 0.6,
}
