"""The style sheet: one scale of sizes and distances, readable and colour-blind-safe colours."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import koalapy.dashboard
from koalapy.dashboard.rendering import load_page_files

Rgb = tuple[float, float, float]
Matrix = tuple[Rgb, Rgb, Rgb]

VISION: dict[str, Matrix] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "without red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "without green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "without blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Simulation of full colour blindness on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""
NODE_STATES = ("running", "claimed", "local", "down", "idle", "unknown")
PHASES = ("held", "queued", "placed", "files", "claiming", "claimed", "starting", "running", "stopping")
JOB_COLOURS = 6
"""Number of colours of jobs in ``parts/map.html``."""
MIN_DISTANCE = 0.08
"""Distance of two colours in OKLab; about four just noticeable differences."""


def read_colours(theme: str) -> dict[str, str]:
    """Return the colours of the light or dark theme by name."""
    css = load_page_files()["koala.css"].content.decode()
    light, dark = re.findall(r":root \{(.*?)\n *\}", css, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", light))
    return colours | (dict(re.findall(r"--([\w-]+): (#\w+)", dark)) if theme == "dark" else {})


def linear_rgb(colour: str) -> Rgb:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    red, green, blue = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return to_linear(red), to_linear(green), to_linear(blue)


def to_linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours by WCAG."""
    dark, light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear_rgb(x), strict=True)) for x in (first, second)
    )
    return (light + 0.05) / (dark + 0.05)


def apply(matrix: Matrix, colour: Rgb) -> Rgb:
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, colour, strict=True)))) for row in matrix)
    return red, green, blue


def oklab(colour: Rgb) -> Rgb:
    r, g, b = colour
    l = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)  # noqa: E741
    m = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )


def distance(first: str, second: str, matrix: Matrix) -> float:
    one, other = (oklab(apply(matrix, linear_rgb(colour))) for colour in (first, second))
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast_of_wcag_aa(theme: str) -> None:
    colours = read_colours(theme)
    pairs = [(text, back) for text in ("text", "quiet", "link", "ok", "warn", "bad") for back in ("page", "card")]
    pairs += [("text", f"{kind}-bg") for kind in ("ok", "warn", "bad")]
    pairs += [(kind, f"{kind}-bg") for kind in ("ok", "warn", "bad")] + [("card", "accent")]
    pairs += [("on-dark", "running"), ("on-dark", "down"), ("on-light", "claimed"), ("on-light", "local")]
    minimum = {pair: 3.0 if pair[0] == "on-dark" else 4.5 for pair in pairs}
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < minimum[pair]} == {}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_node_states_neighbouring_phases_and_jobs_of_timeline_differ(theme: str, vision: str) -> None:
    colours = read_colours(theme)
    pairs = [*combinations(NODE_STATES, 2), *pairwise(f"phase-{phase}" for phase in PHASES)]
    pairs += [(f"series-{number}", "local") for number in range(1, JOB_COLOURS + 1)]
    distances = {pair: distance(colours[pair[0]], colours[pair[1]], VISION[vision]) for pair in pairs}
    assert {pair: value for pair, value in distances.items() if value < MIN_DISTANCE} == {}


def test_style_sheet_uses_one_scale_and_named_colours() -> None:
    css = load_page_files()["koala.css"].content.decode()
    rules = re.sub(r":root \{.*?\}|/\*.*?\*/", "", css, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?![-\w]*[^{};]*\{)", rules) == []
    sizes = {size for size in re.findall(r"font-size: ([^;}]+)", rules) if not size.endswith("px")}
    assert sizes <= {"var(--font-xs)", "var(--font-s)", "var(--font-m)", "var(--font-l)", "var(--font-xl)", ".92em"}
    distances = re.findall(r"(?:^|[ ;{])(?:padding|margin|gap)[\w-]*: ([^;}]+)", rules)
    assert {length for value in distances for length in re.findall(r"[\d.]+rem", value)} == set()


def test_lines_of_templates_have_at_most_160_characters() -> None:
    templates = (Path(koalapy.dashboard.__file__).parent / "templates").rglob("*.html")
    texts = {path.name: path.read_text(encoding="utf-8").splitlines() for path in templates}
    assert len(texts) > 30
    long = [(name, number) for name, lines in texts.items() for number, line in enumerate(lines, 1) if len(line) > 160]
    assert long == []


def test_templates_write_tokens_as_the_script_expects_them() -> None:
    templates = (Path(koalapy.dashboard.__file__).parent / "templates").rglob("*.html")
    text = "".join(path.read_text(encoding="utf-8") for path in templates)
    assert text.count('name="csrf"') == text.count('name="csrf" value="{{ csrf }}"') > 10
    assert """.replaceAll('name="csrf" value=""', """ in load_page_files()["koala.js"].content.decode()
