"""Format the rows of experiments as text and as JSON."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from experiments.experiment import Row
from experiments.runs import Outcome
from koalapy.workload.tables import markdown_table

Json = dict[str, Any]


def format_table(rows: Sequence[Row], unit: str = "") -> str:
    """Return a Markdown table, with columns for the paper and the interval if a row has them."""
    has_paper, has_interval = any(row.paper is not None for row in rows), any(row.low != row.high for row in rows)
    header = ["", *(["paper"] if has_paper else []), "ours", *(["95 % interval"] if has_interval else [])]
    header += ["difference"] if has_paper else []
    lines = []
    for row in rows:
        line = [row.label, *([format_number(row.paper)] if has_paper else []), format_number(row.ours)]
        if has_interval:
            line.append(f"{format_number(row.low)} – {format_number(row.high)}" if row.low != row.high else "-")
        if has_paper:
            line.append(format_difference(row))
        lines.append(line)
    header[0] = unit
    return markdown_table(header, lines)


def format_number(value: float | None) -> str:
    """Format with five digits, or all digits before the point; ``-`` for None."""
    if value is None or not isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    digits = max(0, 5 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:.{digits}f}"


def format_difference(row: Row) -> str:
    """Return the difference from the paper's number in percent."""
    if row.paper is None or not isfinite(row.ours):
        return "-"
    if row.ours == row.paper:
        return "equal"
    return f"{(row.ours - row.paper) / abs(row.paper):+.2%}" if row.paper else format_number(row.ours)


def export_json(outcomes: Sequence[Outcome]) -> Json:
    """Return all rows in one list, each with the name of its experiment, and the provenance."""
    rows: list[Json] = []
    summaries: list[Json] = []
    for outcome in outcomes:
        experiment, stored = outcome.experiment, outcome.stored
        about: Json = {
            "name": experiment.name,
            "title": experiment.title,
            "unit": experiment.unit,
            "problems": list(outcome.problems),
        }
        if stored is not None:
            rows += [
                {
                    "experiment": experiment.name,
                    "label": row.label,
                    "paper": _finite_or_none(row.paper),
                    "ours": _finite_or_none(row.ours),
                    "low": _finite_or_none(row.low),
                    "high": _finite_or_none(row.high),
                }
                for row in experiment.build_rows(stored.results)
            ]
            about |= {
                "cells": len(stored.results),
                "repetitions": count_repetitions(outcome),
                "seconds": round(sum(result.seconds for result in stored.results), 3),
                "made_by": stored.made_by.as_json(),
            }
        summaries.append(about)
    return {"rows": rows, "experiments": summaries}


def count_repetitions(outcome: Outcome) -> int:
    """Return the number of seeds."""
    return len({result.cell.seed for result in outcome.stored.results}) if outcome.stored else 0


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
