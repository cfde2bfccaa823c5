"""An sbatch that times out although Slurm accepts the job later: one job is left, with one runner."""

import os
from pathlib import Path

import pytest

from koalapy.agent.core.settings import AgentTimeouts, SiteSettings
from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import running_agent

pytestmark = pytest.mark.processes

T = "7.1.0"
NAME = "koala-test-7.1.0"
# Jobs are files named by their numbers. Submissions become jobs after `late` queries for their name.
SBATCH = """#!/bin/sh
for word; do case $word in --job-name=*) name=${{word#*=}};; esac; done
echo "$name" >> {folder}/sent
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""
SQUEUE = """#!/bin/sh
case "$*" in
*--Format*) exit 0;;
*--name=*) echo asked >> {folder}/asked
    if [ "$(wc -l < {folder}/asked)" -gt {late} ]; then
        number=100
        while read -r name; do number=$((number + 1)); echo "$name" > {folder}/jobs/$number; done < {folder}/sent
    fi;;
esac
for job in {folder}/jobs/*; do
    [ -e "$job" ] || continue
    echo "$(basename "$job")|PENDING|{uid}|$(cat "$job")"
done
"""


@pytest.mark.parametrize(("late", "submissions"), [(1, 1), (3, 2)])
async def test_late_submissions_leave_one_job(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, submissions: int
) -> None:
    folder, programs = tmp_path / "slurm", tmp_path / "bin"
    (folder / "jobs").mkdir(parents=True)
    programs.mkdir()
    answers = Path(__file__).parent / "lrm" / "slurm" / "answers"
    (folder / "sinfo.json").write_bytes((answers / "sinfo-22.05.json").read_bytes())
    texts = {
        "sbatch": SBATCH,
        "squeue": SQUEUE,
        "scontrol": "#!/bin/sh\nexit 1\n",
        "sinfo": f'#!/bin/sh\ncase "$*" in *--json*) cat {folder}/sinfo.json;; esac\n',
        "scancel": f"#!/bin/sh\nrm -f {folder}/jobs/$1\n",
        "sacct": "#!/bin/sh\nexit 1\n",
    }
    for name, text in texts.items():
        script = text.format(folder=folder, late=late, uid=os.getuid()) if name in ("sbatch", "squeue") else text
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    lrm = SlurmLrm(SiteSettings(partition="main"), message_timeout_s=0.05)
    async with running_agent(lrm, daemon, tmp_path / "agent", AgentTimeouts(submit_pause_s=0.01)):
        await daemon.wait_until(lambda: bool(daemon.report()))
        await daemon.submit_component(T)
        waiting = await daemon.wait_for_state(T, "waiting")
        assert waiting["lrm_job"] in os.listdir(folder / "jobs")
        assert (folder / "sent").read_text().split() == [NAME] * submissions
