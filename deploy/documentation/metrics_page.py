"""Build the reference of `/metrics` from the daemon's metrics and the enumerations of their labels."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client.core import Metric

from koalapy.api.monitoring import Figures, list_metrics
from koalapy.daemon.alerts.health import HealthReport
from koalapy.daemon.engine.engine import Outbox
from koalapy.daemon.observability.figures import JobFigures
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.placement import RefusalKind
from koalapy.model.reports import LrmOperation
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure

LABEL_VALUES: Mapping[str, type[StrEnum]] = {
    "`reason` of `koala_refusals_total`": RefusalKind,
    "`cause` of `koala_claims_failed_total`": ClaimFailure,
    "`cause` of `koala_attempts_failed_total`": AttemptFailure,
    "`operation` of `koala_lrm_calls_total`": LrmOperation,
}
"""Enumerations of label values, by the label and its metric."""
EMPTY_FIGURES = Figures(
    now=0.0,
    jobs=JobFigures({}, {}, internal=0, staging=0, missing=0, by_site={}),
    clusters=(),
    outbox=Outbox((), 1),
    health=HealthReport("ok", True, (), (), "1", 1, 0, 0, {}),
    checks=(),
    alerts=(),
    waiting_events=0,
    instruments=Instruments(),
)


def page() -> str:
    """Return the table of metrics, and a table for each label with fixed values, as Markdown."""
    lines = ["\n| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(metric) for metric in list_metrics(EMPTY_FIGURES)]
    for title, values in LABEL_VALUES.items():
        meanings = member_docstrings(values)
        lines += [f"\n### {title}\n", "| value | meaning |", "| --- | --- |"]
        lines += [f"| `{value}` | {meanings[value.name]} |" for value in values]
    return "\n".join([*lines, ""])


def member_docstrings(enumeration: type[StrEnum]) -> dict[str, str]:
    """Return the docstrings of an enumeration's members, by name."""
    return dict(_member_docstrings(enumeration))


def _member_docstrings(enumeration: type[StrEnum]) -> Iterator[tuple[str, str]]:
    body = ast.parse(textwrap.dedent(inspect.getsource(enumeration))).body[0]
    assert isinstance(body, ast.ClassDef)
    for assignment, docstring in zip(body.body, body.body[1:], strict=False):
        match assignment, docstring:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(ast.Constant(str() as text)):
                yield name, " ".join(text.replace("``", "`").split())


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in getattr(metric, "_labelnames", ()))
    return f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |"
