"""The worker process with a library that works, rejects, hangs, exits or crashes."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.lrm.drmaa.control import NO_SUCH_JOB, DrmaaControl, DrmaaTimeouts, Unanswered
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agent.lrm.conftest import eventually, is_alive

from .conftest import PACKAGE, FakeLibrary, make_control, make_submission

pytestmark = pytest.mark.processes


QUICK = DrmaaTimeouts(first_restart_s=0.0, max_restart_s=0.0, rejected_s=0.0)


async def hand_in(control: DrmaaControl, folder: Path) -> str:
    return await control.submit_job(folder / "launch", make_submission(folder), ["-pe", "koala", "4", "-ac", "a b"])


async def test_submit_passes_all_attributes(control: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    assert await hand_in(control, tmp_path) == "1"
    (call,) = library.calls("runJob")
    assert json.loads(call.partition(" ")[2]) == {
        "jobName": "koala-a",
        "joinFiles": True,
        "nativeSpecification": '-pe koala 4 -ac "a b"',
        "outputPath": f":{tmp_path}/out",
        "remoteCommand": f"{tmp_path}/launch",
        "workingDirectory": str(tmp_path),
    }


async def test_session_is_shared_and_closed(library: FakeLibrary, tmp_path: Path) -> None:
    control = make_control(library)
    await asyncio.gather(*(hand_in(control, tmp_path) for _ in range(10)))
    await control.close()
    assert len(library.calls("initialize")) == len(library.calls("exit")) == 1
    assert not is_alive(library.pids()[0])


async def test_worker_does_not_inherit_agent_variables(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> None:
    monkeypatch.setenv("KOALA_AGENT_TOKEN", "secret")
    monkeypatch.setenv("SGE_ROOT", "/opt/sge")
    control = make_control(library)
    assert (await control.check_setup())[0].ok
    await control.close()
    reply = json.loads(library.calls("initialize")[0].partition(" ")[2])
    assert {"SGE_ROOT", "GLIBC_TUNABLES"} <= set(reply["environment"])
    assert not [name for name in reply["environment"] if name.startswith("KOALA")]


async def test_rejection_of_library_is_raised(control: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    library.will("runJob", "DeniedByDrmException")
    with pytest.raises(SiteRejected, match="DRMAA: DeniedByDrmException it is"):
        await hand_in(control, tmp_path)
    library.will("runJob", "TryLaterException")
    with pytest.raises(SiteUnavailable):
        await hand_in(control, tmp_path)
    library.will("runJob", "")
    assert await hand_in(control, tmp_path) == "1"
    assert len(library.pids()) == 1


async def test_output_of_library_is_ignored(control: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    library.will("runJob", "chatter")
    assert await hand_in(control, tmp_path) == "1"


async def test_cancel_of_unknown_job_is_no_error(control: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    job = await hand_in(control, tmp_path)
    await control.cancel_job(job)
    await control.cancel_job("999")
    assert library.calls("terminate") == ["terminate 1"]


async def test_read_states_returns_state_or_error(control: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    job = await hand_in(control, tmp_path)
    assert await control.read_states([job, "999"]) == {job: "running", "999": NO_SUCH_JOB}
    library.will("jobStatus", "TryLaterException")
    assert await control.read_states([job]) == {job: "TryLaterException"}


async def test_unknown_error_of_wait_keeps_other_exit_codes(
    control: DrmaaControl, library: FakeLibrary, tmp_path: Path
) -> None:
    odd, second = await hand_in(control, tmp_path), await hand_in(control, tmp_path)
    ended = asyncio.Event()
    control.on_ended(lambda: ended.set() if control.reported_ending(odd) and control.reported_ending(second) else None)
    library.job(odd, "done odd")
    library.job(second, "done exit 3")
    async with asyncio.timeout(60):
        await ended.wait()
    endings = control.reported_ending(odd), control.reported_ending(second)
    assert [entry.exit_code for entry in endings if entry] == [None, 3]
    assert len(library.pids()) == 1


async def test_unknown_error_of_request_is_unanswered(
    control: DrmaaControl, library: FakeLibrary, tmp_path: Path
) -> None:
    library.will("runJob", "ValueError")
    with pytest.raises(Unanswered, match="the DRMAA package failed: ValueError: not of DRMAA"):
        await hand_in(control, tmp_path)
    library.will("runJob", "")
    assert await hand_in(control, tmp_path) == "1"
    assert len(library.pids()) == 1


@pytest.fixture
async def quick(library: FakeLibrary) -> AsyncIterator[DrmaaControl]:
    """Yield a control that restarts a lost library without a pause."""
    control = make_control(library, timeouts=QUICK)
    yield control
    await control.close()


@pytest.mark.parametrize(("how", "message"), [("crash", r"SIGSEGV \(libdrmaa: assertion failed\)"), ("exit", "code 3")])
async def test_library_that_crashes_is_restarted(
    quick: DrmaaControl, library: FakeLibrary, tmp_path: Path, how: str, message: str
) -> None:
    library.will("runJob", how)
    with pytest.raises(Unanswered, match=message):
        await hand_in(quick, tmp_path)
    library.will("runJob", "")
    assert await hand_in(quick, tmp_path) == "1"
    assert len(library.pids()) == 2


async def test_library_that_hangs_is_killed(library: FakeLibrary, tmp_path: Path) -> None:
    control = make_control(library, timeouts=replace(QUICK, request_s=2.0))
    library.will("runJob", "hang")
    with pytest.raises(Unanswered, match="did not answer within 2 s"):
        await hand_in(control, tmp_path)
    library.will("runJob", "")
    assert int(await tried_again(control, tmp_path)) >= 1, "it may be late more than once on a busy machine"
    await control.close()
    assert not [pid for pid in library.pids() if is_alive(pid)]


async def test_library_that_keeps_crashing_is_restarted_later(control: DrmaaControl, library: FakeLibrary) -> None:
    library.will("jobStatus", "crash")
    with pytest.raises(Unanswered):
        await control.read_states(["1"])
    for _ in range(20):
        with pytest.raises(SiteUnavailable, match="restarted in"):
            await control.read_states(["1"])
    assert len(library.pids()) == 1


async def test_unavailable_master_is_retried(quick: DrmaaControl, library: FakeLibrary, tmp_path: Path) -> None:
    library.will("initialize", "DrmCommunicationException")
    with pytest.raises(SiteUnavailable, match="DrmCommunicationException it is"):
        await hand_in(quick, tmp_path)
    library.will("initialize", "")
    assert await hand_in(quick, tmp_path) == "1"


async def test_missing_library_has_hint(library: FakeLibrary) -> None:
    control = make_control(library, path="/no/such/library")
    (finding,) = await control.check_setup()
    assert (finding.ok, "cannot open shared object" in finding.result) == (False, True)
    assert "library" in finding.hint
    await control.close()


@pytest.mark.parametrize(
    ("text", "exit_code", "signal", "aborted"),
    [
        ("done exit 0", 0, "", False),
        ("failed exit 7", 7, "", False),
        ("failed signal SIGKILL", None, "SIGKILL", False),
        ("failed aborted", None, "", True),
        ("failed nothing", None, "", False),
    ],
)
async def test_ended_job_is_reported(
    control: DrmaaControl,
    library: FakeLibrary,
    tmp_path: Path,
    text: str,
    exit_code: int | None,
    signal: str,
    aborted: bool,
) -> None:
    heard = asyncio.Event()
    control.on_ended(heard.set)
    job = await hand_in(control, tmp_path)
    assert control.reported_ending(job) is None
    library.job(job, text)
    async with asyncio.timeout(20):
        await heard.wait()
    ending = control.reported_ending(job)
    assert ending is not None
    assert (ending.exit_code, ending.signal, ending.aborted) == (exit_code, signal, aborted)


AGENT = """
import asyncio, os, sys
from koalapy.agent.lrm.drmaa.control import NO_SUCH_JOB
from koalapy.agent.lrm.drmaa.control import DrmaaControl
async def main():
    control = DrmaaControl(None, environment={"PYTHONPATH": sys.argv[1], "FAKE_DRMAA": sys.argv[2]})
    assert (await control.check_setup())[0].ok
    try:
        async with asyncio.timeout(1 if sys.argv[3] == "hang" else 0.0):
            await control.read_states(["1"])
    except TimeoutError:
        pass
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["", "hang"])
def test_worker_ends_with_its_agent(library: FakeLibrary, how: str) -> None:
    library.will("jobStatus", how)
    subprocess.run(
        [sys.executable, "-c", AGENT, str(PACKAGE), str(library.state), how],
        timeout=60,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    (pid,) = library.pids()
    eventually(lambda: not is_alive(pid))
    assert len(library.calls("exit")) == (0 if how else 1)


async def tried_again(control: DrmaaControl, folder: Path) -> str:
    """Submit a job, and repeat that until the library is available, as the agent does."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(SiteUnavailable):
                return await hand_in(control, folder)


async def test_missing_library_is_a_submit_error(library: FakeLibrary) -> None:
    control = DrmaaControl("/nowhere/libdrmaa.so", environment={"PYTHONPATH": "/nowhere"})
    try:
        reply = await control.submit_error()
        assert "DRMAA" in reply
        assert "; " in reply, "with the way out"
        begun = library.pids()
        assert await control.submit_error() == reply
        assert library.pids() == begun, "no process is started for each look"
    finally:
        await control.close()


async def test_working_library_has_no_submit_error(control: DrmaaControl, library: FakeLibrary) -> None:
    assert await control.submit_error() == ""
    assert await control.submit_error() == ""
    assert len(library.pids()) == 1


async def test_hanging_library_is_a_submit_error(library: FakeLibrary) -> None:
    library.will("initialize", "hang")
    control = make_control(library, timeouts=replace(QUICK, start_wait_s=0.05, start_s=3.0))
    try:
        assert await control.submit_error() == "", "nothing is known yet"
        async with asyncio.timeout(60):
            while not await control.submit_error():
                pass
            library.will("initialize", "")
            while await control.submit_error():
                pass
    finally:
        await control.close()
