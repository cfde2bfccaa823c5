"""A report of a real run, as it is sent to a daemon."""

import json
from pathlib import Path
from typing import Any

from koalapy.cli.workload.workload_reports import sent_of

RUN = Path(__file__).parents[2] / "docs" / "experiments" / "live" / "worst-fit"


def whole_report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RUN / "report.json").read_text())
    return found


def report_to_send(**run: Any) -> dict[str, Any]:
    """With what is said otherwise of its run."""
    sent = sent_of(whole_report())
    return sent | {"run": sent["run"] | run}
