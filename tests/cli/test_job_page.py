"""The use of processors and memory on the page of a job."""

from typing import Any

from koalapy.cli.terminal.tables import list_use


def test_use_of_job_is_that_of_its_measured_nodes() -> None:
    measured = {"size": 1, "measured_nodes": 1, "cpu_time": 30.0, "cpu_available": 40.0, "peak_memory": 10**9}
    job: Any = {"components": [measured], "started_at": "2026-11-26T12:00:00Z", "ended_at": None, "memory": None}
    facts = dict(list_use(job))
    assert facts["CPU used"].startswith("75.0% of ")
    assert facts["memory used"] == "1 GB"
