"""One DRMAA session per account: started on demand, ended when idle or when there are too many."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.accounts import Account, Accounts, RunAs, SwitchMethod
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.drmaa.control import IDLE_TIMEOUT_S, DrmaaAccounts, DrmaaControl, drmaa_control
from koalapy.agent.lrm.port import DrmaaEnding, JobControl, LrmSubmission
from koalapy.model.errors import SiteRejected
from tests.virtual_time import VirtualClock, VirtualTimeLoop

Become = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]
PEOPLE = {
    name: Account(name, uid, uid, (uid,), f"/home/{name}", "/bin/sh")
    for name, uid in (("ann", 2001), ("ben", 2002), ("cat", 2003))
}


class FakeControl(JobControl):
    """A control that only records its account."""

    controls: list["FakeControl"] = []  # noqa: RUF012

    def __init__(self, library: str | None, *, become: Become | None = None) -> None:
        self.library, self.become = library, become
        self.jobs: list[str] = []
        self.cancelled: list[str] = []
        self.endings: dict[str, DrmaaEnding] = {}
        self.listeners: list[Callable[[], None]] = []
        self.closed = False
        self.controls.append(self)

    @property
    def account(self) -> str:
        """Return the account in the command line of the worker."""
        if self.become is None:
            return "agent"
        command, environment = self.become(["worker"], {"HOME": "/root", "PATH": "/bin"})
        assert command[-1] == "worker"
        assert environment["HOME"] == f"/home/{environment['USER']}"
        return f"{environment['USER']} {command[command.index('--reuid') + 1]}"

    async def close(self) -> None:
        self.closed = True

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        self.jobs.append(f"{self.controls.index(self)}{len(self.jobs)}")
        return self.jobs[-1]

    async def cancel_job(self, job: str, user: str = "") -> None:
        self.cancelled.append(job)

    async def read_states(self, jobs: Sequence[str], user: str = "") -> dict[str, str]:
        return dict.fromkeys(jobs, self.account)

    def on_ended(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self.endings.get(job)


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> list[FakeControl]:
    monkeypatch.setattr(FakeControl, "controls", [])
    return FakeControl.controls


@pytest.fixture
def accounts() -> dict[str, Account]:
    return dict(PEOPLE)


@pytest.fixture
async def control(
    controls: list[FakeControl], accounts: dict[str, Account], virtual_loop: VirtualTimeLoop
) -> DrmaaAccounts:
    """Return sessions for at most two accounts."""
    run_as = RunAs(Accounts("east", SiteSettings(identity="mapped"), accounts.get), SwitchMethod.SETUID)
    clock = VirtualClock(virtual_loop)
    make_control: Any = FakeControl
    return DrmaaAccounts("/lib/libdrmaa.so", run_as, max_accounts=2, make_control=make_control, clock=clock)


def make_submission(user: str) -> LrmSubmission:
    return LrmSubmission("koala-x-1.1.0", 1, ["true"], {}, Path("/x"), Path("/x/log"), user=user)


async def submit_as(control: DrmaaAccounts, user: str) -> str:
    return await control.submit_job(Path("/x/launch"), make_submission(user), [])


async def test_each_account_has_its_own_worker(control: DrmaaAccounts, controls: list[FakeControl]) -> None:
    for user in ("ann", "ben", "ann"):
        await submit_as(control, user)
    assert [(entry.account, len(entry.jobs)) for entry in controls] == [("agent", 0), ("ann 2001", 2), ("ben 2002", 1)]
    await control.cancel_job(controls[2].jobs[0], "ben")
    assert [entry.cancelled for entry in controls] == [[], [], controls[2].jobs]
    assert await control.read_states(["7"], "ann") == {"7": "ann 2001"}


async def test_submit_as_unknown_account_is_rejected(
    control: DrmaaAccounts, controls: list[FakeControl], accounts: dict[str, Account]
) -> None:
    await submit_as(control, "ann")
    del accounts["ann"]
    with pytest.raises(SiteRejected, match="there is no account ann"):
        await submit_as(control, "ann")
    assert len(controls[1].jobs) == 1


async def test_endings_of_all_accounts_are_reported(control: DrmaaAccounts, controls: list[FakeControl]) -> None:
    calls: list[str] = []
    control.on_ended(lambda: calls.append("early"))
    job = await submit_as(control, "ann")
    control.on_ended(lambda: calls.append("late"))
    controls[1].endings[job] = DrmaaEnding(job, 3)
    for listener in controls[1].listeners:
        listener()
    assert calls == ["early", "late"]
    assert control.reported_ending(job) == DrmaaEnding(job, 3)
    assert control.reported_ending("no such job") is None


async def test_idle_worker_without_jobs_is_closed(
    control: DrmaaAccounts, controls: list[FakeControl], virtual_loop: VirtualTimeLoop
) -> None:
    first, _ = await submit_as(control, "ann"), await submit_as(control, "ben")
    controls[1].endings[first] = DrmaaEnding(first, 0)
    await control.submit_error()
    assert [entry.closed for entry in controls] == [False, False, False]
    virtual_loop.jump(IDLE_TIMEOUT_S + 1)
    await control.submit_error()
    assert [entry.closed for entry in controls] == [False, True, False]
    await submit_as(control, "ann")
    assert controls[3].account == "ann 2001"


async def test_least_recently_used_worker_is_closed(control: DrmaaAccounts, controls: list[FakeControl]) -> None:
    for user in ("ann", "ben", "ann", "cat"):
        await submit_as(control, user)
    assert [(entry.account, entry.closed) for entry in controls[1:]] == [
        ("ann 2001", False),
        ("ben 2002", True),
        ("cat 2003", False),
    ]


def test_single_account_has_one_session() -> None:
    run_as: Any = RunAs(Accounts("east", SiteSettings()))
    assert isinstance(drmaa_control("/lib/libdrmaa.so", run_as), DrmaaControl)
