"""The adapter with fake Slurm commands."""

import asyncio
import os
import pwd
import shlex
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.lrm.slurm.answers import read_columns
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.model.reports import NodeClassReport

from .conftest import COLUMNS, FakeSlurm, column_line, recorded_queue

RUNNING = "167|RUNNING|1500|koala-x-2.1.0\n"


def make_submission(folder: Path, **more: object) -> LrmSubmission:
    fields = {"nodes": 2, "argv": ["/bin/true"], "environment": {}, "workdir": folder, "output": folder / "50%.out"}
    return LrmSubmission(**{"name": "koala-x-9.1.0", **fields, **more})  # type: ignore[arg-type]


async def test_snapshot_counts_each_node_once(slurm: FakeSlurm) -> None:
    snapshot = await slurm.make_lrm().take_snapshot()
    assert {node.name: (node.state, node.reason) for node in snapshot.nodes} == {
        "n1": ("held", ""),
        "n2": ("held", ""),
        "n3": ("local", ""),
        "n4": ("down", "drain+idle: disk"),
    }
    assert replace(snapshot, nodes=()) == LrmSnapshot(
        total=4,
        idle=0,
        background=1,
        down=1,
        jobs=(
            LrmJob("166", "koala-x-1.1.0", LrmJobState.ENDED, ("n1", "n2"), 7),
            LrmJob("167", "koala-x-2.1.0", LrmJobState.RUNNING, ("n1", "n2")),
            LrmJob("169", "koala-x-4.1.0", LrmJobState.QUEUED, reason="Slurm says Resources (it waits for nodes)"),
        ),
        node_classes=(NodeClassReport("", 4, 0, cores=1, partitions=("main",)),),
    )


async def test_snapshot_runs_each_query_once_unless_job_ended(slurm: FakeSlurm) -> None:
    lrm = slurm.make_lrm(partition="main")
    await lrm.take_snapshot()
    await lrm.take_snapshot()
    # The first poll finds the ended job, but may have read its nodes before the end.
    assert [call for call in slurm.list_calls("sinfo") if "--json" in call] == ["--Node --partition=main --json"] * 3
    assert sum("--Format" in call for call in slurm.list_calls("squeue")) == 3


async def test_snapshot_queries_own_jobs_only(slurm: FakeSlurm) -> None:
    await slurm.make_lrm().take_snapshot()
    assert {call.split()[0] for call in slurm.list_calls("squeue")} == {f"--user={own_account()}"}
    assert not any("--json" in call for call in slurm.list_calls("squeue"))


@pytest.mark.parametrize("status", ["9", "0:9"])
async def test_snapshot_reads_signal_of_any_release(slurm: FakeSlurm, status: str) -> None:
    slurm.set_answer("squeue", recorded_queue({166}, status=status), when=COLUMNS)
    (job,) = (await slurm.make_lrm().take_snapshot()).jobs
    assert (job.exit_code, job.lost, job.reason) == (None, True, "killed by signal 9")


@pytest.mark.parametrize("user", ["3000000001", "-1294967295"])
async def test_snapshot_knows_own_jobs_by_large_user_id(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 3_000_000_001)
    slurm.set_answer("squeue", recorded_queue({167}, user=user), when=COLUMNS)
    slurm.set_answer("squeue", f"167|RUNNING|{user}|koala-x-2.1.0\n", when="*%i*")
    lrm = slurm.make_lrm()
    assert [job.id for job in (await lrm.take_snapshot()).jobs] == ["167"]
    assert await lrm.find_job("koala-x-2.1.0") == "167"
    await lrm.cancel_job("167", "koala-x-2.1.0")
    assert slurm.list_calls("scancel") == ["167"]


async def test_squeue_without_own_account_is_unavailable(slurm: FakeSlurm) -> None:
    """Slurm up to 24.05 answers so to an account without a name and with a number of at least 2³¹."""
    slurm.set_answer("squeue", "", errors=f"squeue: error: Invalid user: {own_account()}\n\n")
    lrm = slurm.make_lrm()
    with pytest.raises(SiteUnavailable, match="squeue does not know the account"):
        await lrm.take_snapshot()
    with pytest.raises(SiteUnavailable, match="squeue does not know the account"):
        await lrm.find_job("koala-x-2.1.0")


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ("sinfo: error: unable to find plugin: serializer/json\n", 1),
        ("sinfo: error: cannot find serializer plugin for serializer/json\n", 0),
        ("sinfo: fatal: JSON plugin load failure\n", 1),
    ],
)
async def test_slurm_without_json_plugin_gives_hint(slurm: FakeSlurm, errors: str, code: int) -> None:
    slurm.set_answer("sinfo", "", errors=errors, code=code, when="*--json*")
    with pytest.raises(SiteRejected) as caught:
        await slurm.make_lrm().take_snapshot()
    assert "json-c" in caught.value.hint
    (results,) = [entry for entry in await slurm.make_lrm().check_setup() if entry.subject == "nodes"]
    assert (results.ok, "json-c" in results.hint) == (False, True)


def own_account() -> str:
    try:
        return pwd.getpwuid(1500).pw_name
    except KeyError:
        return "1500"


async def test_snapshot_queries_long_node_lists_separately(slurm: FakeSlurm) -> None:
    names = ",".join(f"rack{n % 7}-node{n}" for n in range(2000))
    lines = [column_line("koala-x-2.1.0", "167", names), column_line("koala-x-3.1.0", "168", "n3")]
    slurm.set_answer("squeue", "".join(lines), when="*--Format*")
    slurm.set_answer("squeue", f"167|{names}\n", when="*--jobs=167 --format=%i?%N*")
    lrm = slurm.make_lrm()
    jobs = {job.id: job.nodes for job in (await lrm.take_snapshot()).jobs}
    assert jobs == {"167": tuple(names.split(",")), "168": ("n3",)}
    slurm.set_answer("squeue", "", when="*--jobs=167 --format=%i?%N*")
    with pytest.raises(SiteUnavailable, match="does not show the nodes of job 167"):
        await lrm.take_snapshot()


OURS = column_line("koala-x-1.1.0", "166", "n1")


@pytest.mark.parametrize(
    ("answer", "jobs"),
    [
        (OURS + OURS[:8500], 1),
        (OURS + OURS[:400], 1),
        (OURS[:8320] + "\n" + OURS[8321:] + OURS, 1),
        (OURS.replace("166", "x66"), 0),
        (OURS.replace("RUNNING", "       ") + OURS, 1),
        (OURS.replace("n1 ", "n[1"), 0),
        (OURS.replace("1500", "15x0") + OURS, 1),
    ],
)
def test_line_of_job_that_cannot_be_read_is_counted(answer: str, jobs: int) -> None:
    read, unreadable = read_columns(answer.encode(), "koala-", {1500})
    assert (len(read), len(unreadable)) == (jobs, 1)


BANNER = "Welcome to west\n*** maintenance on Friday {} ***\n\n"


@pytest.mark.parametrize("queue", ["", OURS])
def test_text_around_columns_is_skipped(queue: str) -> None:
    header = column_line("NAME", "JOBID", state="STATE", user="UID")
    answer = f"{BANNER}{header}{queue}{BANNER}".encode()
    assert read_columns(answer, "koala-", {1500}) == (read_columns(queue.encode(), "koala-", {1500})[0], [])


async def test_snapshot_with_unreadable_line_names_it_and_keeps_other_jobs(slurm: FakeSlurm) -> None:
    slurm.set_answer("squeue", OURS + OURS.replace("166", "x66"), when=COLUMNS)
    snapshot = await slurm.make_lrm().take_snapshot()
    assert [job.id for job in snapshot.jobs] == ["166"]
    assert snapshot.unreadable == 1
    assert snapshot.notices[-1].startswith("squeue prints 1 lines that cannot be read: x66 RUNNING")


@pytest.mark.parametrize("user", ["1999", "21500", "x"])
@pytest.mark.parametrize("newlines", [1, 2, 24])
@pytest.mark.parametrize("says", [OURS.replace("RUNNING", "FAILED "), "koala-x-1.1.0", f"{'koala-x-1.1.0':200}", ""])
def test_name_of_foreign_job_is_no_grid_job(says: str, newlines: int, user: str) -> None:
    """A name with a newline and our prefix must not make the cluster unreachable."""
    grid_jobs = read_columns(OURS.encode(), "koala-", {1500})[0]
    assert [(job.id, job.words, job.nodes) for job in grid_jobs] == [("166", {"RUNNING"}, ("n1",))]
    theirs = column_line("x" + "\n" * newlines + says, "9166", "n9", state="FAILED", status="1792", user=user)
    assert read_columns((theirs + OURS + theirs).encode(), "koala-", {1500})[0] == grid_jobs


@pytest.mark.parametrize(
    ("command", "answer", "text"),
    [
        ("sinfo", "slurm", "sinfo answered no JSON: slurm"),
        ("sinfo", '{"nodes": []}', "sinfo shows no nodes in partition main"),
        ("sinfo", '{"nodes": [{"partitions": ["main"]}]}', "the answer of sinfo cannot be read"),
    ],
)
async def test_invalid_answer_is_unavailable(slurm: FakeSlurm, command: str, answer: str, text: str) -> None:
    slurm.set_answer(command, answer, when="*--json*")
    with pytest.raises(SiteUnavailable, match=text):
        await slurm.make_lrm().take_snapshot()


async def test_submit_passes_options_to_sbatch(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOALA_TOKEN", "secret")
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    monkeypatch.setenv("SLURM_CONF", "/etc/north.conf")
    lrm = slurm.make_lrm(partition="main", account="physics", options=("--qos=low",))
    assert await lrm.submit_job(make_submission(tmp_path, walltime=61.0)) == "171"
    assert slurm.list_calls("sbatch") == [
        f"--parsable --job-name=koala-x-9.1.0 --chdir={tmp_path} --output={tmp_path}/50%%.out --open-mode=append "
        "--nodes=2 --comment=koala-x-9.1.0 --time=0:02:00 --ntasks-per-node=1 --exclusive --no-requeue "
        f"--mem=0 --partition=main --account=physics --qos=low {tmp_path}/launch"
    ]
    environment = slurm.last_environment("sbatch")
    assert environment["SLURM_CONF"] == "/etc/north.conf"
    assert not {"KOALA_TOKEN", "SBATCH_PARTITION"} & environment.keys()
    assert "secret" not in environment.values()


@pytest.mark.parametrize(
    ("options", "has_all_memory"),
    [
        (("--qos=low", "--mem-bind=local"), True),
        (("--mem=4G",), False),
        (("--mem", "4G"), False),
        (("--mem-per-cpu=2G",), False),
        (("--mem-per-gpu=2G",), False),
    ],
)
async def test_submit_requests_all_memory_unless_configured(
    slurm: FakeSlurm, tmp_path: Path, options: tuple[str, ...], has_all_memory: bool
) -> None:
    await slurm.make_lrm(partition="main", options=options).submit_job(make_submission(tmp_path))
    assert ("--mem=0" in slurm.list_calls("sbatch")[0].split()) is has_all_memory


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("TaskPlugin              = task/affinity,task/cgroup\nTaskPluginParam         = autobind=cores\n", True),
        ("TaskPlugin              = task/cgroup\n", True),
        ("TaskPlugin              = task/none\nTaskPluginParam         = (null type)\n", False),
        ("TaskPlugin              = (null)\n", False),
        ("", True),  # the state is unknown
    ],
)
@pytest.mark.processes
async def test_launch_script_disables_binding_only_if_active(
    slurm: FakeSlurm, tmp_path: Path, text: str, bound: bool
) -> None:
    """Otherwise srun would print a warning in the output of each job."""
    await slurm.make_lrm(partition="main").submit_job(make_submission(tmp_path))
    output_file = tmp_path / "asked"
    for name, body in (("scontrol", f"printf %s {shlex.quote(text)}"), ("srun", f'echo "$*" > {output_file}')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{os.environ['PATH']}:/usr/bin:/bin"}
    script = await asyncio.create_subprocess_exec("/bin/sh", str(tmp_path / "launch"), env=environment)
    assert await script.wait() == 0
    assert ("--cpu-bind=none" in output_file.read_text().split()) is bound


@pytest.mark.parametrize(
    ("walltime", "option"),
    [
        (0.2, "--time=0:01:00"),
        (60.0, "--time=0:01:00"),
        (60.5, "--time=0:02:00"),
        (3600.0, "--time=1:00:00"),
        (25 * 3600.0, "--time=25:00:00"),
        (100 * 86400.0, "--time=2400:00:00"),
        (None, ""),
    ],
)
async def test_submit_rounds_walltime_to_minutes(
    slurm: FakeSlurm, tmp_path: Path, walltime: float | None, option: str
) -> None:
    await slurm.make_lrm().submit_job(make_submission(tmp_path, walltime=walltime))
    assert [word for word in slurm.list_calls("sbatch")[0].split() if word.startswith("--time")] == option.split()


async def test_unanswered_submission_is_found_by_name(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.kill_command("sbatch")
    slurm.set_answer("squeue", "171|PENDING|1500|koala-x-9.1.0\n", when="*--name=koala-x-9.1.0*")
    assert await slurm.make_lrm().submit_job(make_submission(tmp_path)) == "171"


async def test_unanswered_submission_without_squeue_is_unavailable(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.kill_command("sbatch")
    slurm.kill_command("squeue")
    with pytest.raises(SiteUnavailable, match="sbatch was killed by signal 9"):
        await slurm.make_lrm().submit_job(make_submission(tmp_path))


async def test_cluster_without_commands_is_rejected(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteRejected, match="cannot run sinfo"):
        await slurm.make_lrm().take_snapshot()
    (finding,) = await slurm.make_lrm().check_setup()
    assert (finding.ok, finding.result) == (False, "not found: sinfo, squeue, srun")


async def test_find_job_of_several_returns_the_active_one(slurm: FakeSlurm) -> None:
    lines = "99|RUNNING|1500|koala-a\n100|FAILED|1500|koala-a\n101|RUNNING|1500|koala-ab\n"
    slurm.set_answer("squeue", lines, when="*--name=koala-a *")
    assert await slurm.make_lrm().find_job("koala-a") == "99"


async def test_find_job_uses_the_accounting(slurm: FakeSlurm) -> None:
    assert await slurm.make_lrm().find_job("koala-a") is None  # no such job
    slurm.set_answer("sacct", "12|CANCELLED by 0|1500|koala-a\n7|COMPLETED|1500|koala-a\n")
    assert await slurm.make_lrm().find_job("koala-a") == "12"


async def test_cancel_of_other_name_is_rejected(slurm: FakeSlurm) -> None:
    slurm.set_answer("squeue", RUNNING, when="*--jobs=167*")
    with pytest.raises(SiteRejected, match=r"job 167 is koala-x-2\.1\.0 of uid 1500, not koala-b"):
        await slurm.make_lrm().cancel_job("167", "koala-b")
    assert slurm.list_calls("scancel") == []


async def test_cancelled_job_ends_as_cancelled(slurm: FakeSlurm) -> None:
    slurm.set_answer("squeue", RUNNING, when="*--jobs=167*")
    lrm = slurm.make_lrm()
    await lrm.cancel_job("167", "koala-x-2.1.0")
    assert slurm.list_calls("scancel") == ["167"]
    slurm.set_answer("squeue", recorded_queue(state="CANCELLED", status="15"), when=COLUMNS)
    ended = {job.id: (job.lost, job.exit_code) for job in (await lrm.take_snapshot()).jobs}
    assert ended == {"166": (True, None), "167": (False, None), "169": (True, None)}


@pytest.mark.parametrize(
    ("output", "errors", "code"),
    [
        ("", "slurm_load_jobs error: Invalid job id specified\n", 1),
        ("167|COMPLETED|1500|koala-x-2.1.0\n", "", 0),
        ("", "", 0),
    ],
)
async def test_cancel_of_ended_job_does_nothing(slurm: FakeSlurm, output: str, errors: str, code: int) -> None:
    slurm.set_answer("squeue", output, errors=errors, code=code, when="*--jobs=*")
    await slurm.make_lrm().cancel_job("167", "koala-x-2.1.0")
    assert slurm.list_calls("scancel") == []


@pytest.mark.parametrize(
    "text", ["Kill job error on job id 167: Invalid job id specified", "Job/step already completing"]
)
async def test_cancel_of_job_that_ends_meanwhile_succeeds(slurm: FakeSlurm, text: str) -> None:
    slurm.set_answer("squeue", RUNNING, when="*--jobs=167*")
    slurm.set_answer("scancel", "", errors=f"scancel: error: {text}\n", code=1)
    await slurm.make_lrm().cancel_job("167", "koala-x-2.1.0")
    assert slurm.list_calls("scancel") == ["167"]


async def test_changes_follow_own_actions_at_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    lrm = slurm.make_lrm(poll_interval=3600.0)
    async with aclosing(lrm.watch_changes()) as changes, asyncio.timeout(60):  # type: ignore[type-var]
        await anext(changes)
        await lrm.submit_job(make_submission(tmp_path))
        await anext(changes)
        following = asyncio.ensure_future(anext(changes))
        await lrm.close()
        with pytest.raises(StopAsyncIteration):
            await following


@pytest.mark.parametrize(("text", "seconds"), [("MessageTimeout          = 45 sec\n", 45.0), ("nonsense", 10.0)])
async def test_settling_time_is_the_message_timeout(slurm: FakeSlurm, text: str, seconds: float) -> None:
    slurm.set_answer("scontrol", f"MaxJobCount = 1\n{text}")
    assert await slurm.make_lrm().settling_time() == seconds
    slurm.kill_command("scontrol")
    assert await slurm.make_lrm().settling_time() == 10.0


async def test_cluster_without_sbatch_has_submit_error(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert (await slurm.make_lrm().take_snapshot()).submit_error == ""
    (tmp_path / "bin" / "sbatch").unlink()
    assert (await slurm.make_lrm().take_snapshot()).submit_error.startswith(
        "not found: sbatch; install Slurm's client commands"
    )
