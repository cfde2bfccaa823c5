"""The use of nodes by a program, as its runners measure it."""

from pathlib import Path

from koalapy.agent.components.component import Component
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.port import LrmJob, LrmJobState
from koalapy.model.reports import ProgramUse


def test_component_reports_use_of_measured_nodes_also_after_a_restart(tmp_path: Path) -> None:
    folder = Spool(tmp_path).make_folder("grid", "7.1.0")
    component = Component("grid", "7.1.0", folder, 3, lrm_job="12")
    component.plan = {"launcher": "processes", "head": "7.1.0"}
    folder.note_entry(submit={"size": 3}, lrm="12", open=component.plan)
    result = {"code": 0, "error": "", "infrastructure": False, "stopped": False, "host": "127.0.1.1", "name": "n1"}
    for node, memory in ((0, 7), (2, 5)):
        usage = {"cpu": 30.0, "processors": 4, "seconds": 10.0, "memory": memory}
        component.record_result(node, result | {"usage": usage})
    assert component.current_status().use is None
    component.on_job_ended(LrmJob("12", component.name, LrmJobState.ENDED, exit_code=137))
    assert component.current_status().use == ProgramUse(2, 60.0, 80.0, 7)
    assert Component.load_journal("grid", "7.1.0", folder).current_status().use == ProgramUse(2, 60.0, 80.0, 7)
