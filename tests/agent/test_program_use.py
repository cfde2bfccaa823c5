"""The choice between the measurements of runners and of the resource manager's accounting."""

from pathlib import Path

import pytest

from koalapy.agent.components.component import Component, select_use, sum_usages
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.port import JobUse, LrmJob, LrmJobState
from koalapy.model.reports import ProgramUse

MEASURED = sum_usages([{"cpu": 30.0, "processors": 4, "seconds": 10.0, "memory": 7}] * 2)
UNKNOWN = sum_usages([])


@pytest.mark.parametrize(
    ("accounted", "nodes"),
    [
        (None, 2),
        (JobUse(0.0, 90.0, 9, 2), 2),
        (JobUse(80.0, 90.0, 9, 2), 2),
        (JobUse(80.0, 90.0, 9), 3),
        (JobUse(900.0, 90.0, 9, 1), 2),
        (JobUse(20.0, 90.0, 9, 3), 3),
    ],
    ids=[
        "no accounting",
        "nothing gathered",
        "what runners explain",
        "nodes not said",
        "one node of two",
        "less than measured",
    ],
)
def test_use_of_runners_is_kept(accounted: JobUse | None, nodes: int) -> None:
    assert select_use(MEASURED, accounted, nodes) == MEASURED == ProgramUse(2, 60.0, 80.0, 7)


@pytest.mark.parametrize(
    ("accounted", "nodes", "use"),
    [
        (JobUse(70.0, 120.0, 5, 3), 3, ProgramUse(3, 70.0, 120.0, 7, True)),
        (JobUse(100.0, 120.0, 9, 2), 2, ProgramUse(2, 100.0, 120.0, 9, True)),
        (JobUse(100.0), 2, ProgramUse(2, 100.0, 80.0, 7, True)),
        (JobUse(100.0, 120.0, 2**60, 9), 3, ProgramUse(3, 100.0, 120.0, 7, True)),
    ],
    ids=["more nodes", "more processor time", "only processor time", "impossible amounts"],
)
def test_more_complete_accounting_is_used(accounted: JobUse, nodes: int, use: ProgramUse) -> None:
    assert select_use(MEASURED, accounted, nodes) == use


def test_accounting_stands_alone_only_if_available_time_is_known() -> None:
    assert select_use(UNKNOWN, JobUse(5.0, 20.0, None, 1), 1) == ProgramUse(1, 5.0, 20.0, None, True)
    assert select_use(UNKNOWN, JobUse(5.0), 1) is None


def test_component_reports_accounted_use_also_after_a_restart(tmp_path: Path) -> None:
    folder = Spool(tmp_path).make_folder("grid", "7.1.0")
    component = Component("grid", "7.1.0", folder, 1, lrm_job="12")
    component.plan = {"launcher": "processes", "head": "7.1.0"}
    folder.note_entry(submit={"size": 1}, lrm="12", open=component.plan)
    component.on_job_ended(LrmJob("12", component.name, LrmJobState.ENDED, exit_code=137, use=JobUse(5.0, 20.0, 9, 1)))
    use = ProgramUse(1, 5.0, 20.0, 9, True)
    assert component.current_status().use == use
    assert Component.load_journal("grid", "7.1.0", folder).current_status().use == use
