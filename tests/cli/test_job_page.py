"""The use of processors and memory on the page of a job."""

from typing import Any

import pytest

from koalapy.cli.terminal.tables import list_use

NODE = {"size": 1, "measured_nodes": 1, "accounted_nodes": 0, "cpu_time": 30.0, "cpu_available": 40.0}
MEASURED = NODE | {"peak_memory": 10**9}
ACCOUNTED = NODE | {"accounted_nodes": 1, "peak_memory": None}


@pytest.mark.parametrize(
    ("components", "memory", "source"),
    [
        ([MEASURED], "1 GB", None),
        ([ACCOUNTED], "unknown", "accounting of the resource manager"),
        ([MEASURED, ACCOUNTED], "1 GB", "accounting of the resource manager for 1 of 2 nodes, runners for the others"),
    ],
)
def test_use_of_job_names_accounting_as_its_source(components: list[Any], memory: str, source: str | None) -> None:
    job: Any = {"components": components, "started_at": "2026-11-26T12:00:00Z", "ended_at": None, "memory": None}
    facts = dict(list_use(job))
    assert facts["CPU used"].startswith("75.0% of ")
    assert (facts["memory used"], facts.get("measured by")) == (memory, source)
