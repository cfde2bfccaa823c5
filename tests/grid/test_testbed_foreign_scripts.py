"""Job scripts as in public repositories, translated and run on the resource managers that they were written for."""

from collections import Counter
from pathlib import Path

from tests.cli.foreign_scripts import PROGRAM_TEXT, PROGRAMS, SCRIPTS
from tests.grid.testbed import Testbed


def test_translated_scripts_run_on_their_resource_managers(testbed: Testbed, tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / name).write_text(PROGRAM_TEXT)
        (tmp_path / name).chmod(0o755)
    stage = [word for name in PROGRAMS for word in ("--stage", str(tmp_path / name))]
    jobs = {}
    for script in SCRIPTS:
        (tmp_path / "job.sh").write_text(script.changed_text)
        others = ["east"] if "#SBATCH" in script.text else ["north", "south"]
        options = [word for cluster in others for word in ("--exclude", cluster)]
        submitted = testbed.run_koala("submit", "--translate", "-q", *options, *stage, str(tmp_path / "job.sh"))
        assert submitted.returncode == 0, submitted.stderr
        jobs[int(submitted.stdout)] = script
    for ident, script in jobs.items():
        job = testbed.wait_for_end(ident)
        tasks = testbed.http.get("/api/v1/jobs", params={"array": ident}).json()["jobs"] if job["tasks"] else [job]
        output = "".join(testbed.read_output(task["id"]) for task in tasks)
        assert job["state"] == "succeeded", (script.name, output)
        assert Counter(output.splitlines()) == {
            line.replace("JOB", str(ident)): count for line, count in script.printed.items()
        }, script.name
    testbed.wait_until_idle()
