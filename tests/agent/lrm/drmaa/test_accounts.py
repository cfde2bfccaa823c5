"""One DRMAA session per account: started on demand, ended when idle or when there are too many."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.accounts import Account, Accounts, RunAs, SwitchMethod
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.drmaa.control import IDLE_TIMEOUT_S, DrmaaControl
from koalapy.agent.lrm.port import DrmaaEnding, LrmSubmission
from koalapy.model.errors import SiteRejected
from tests.virtual_time import VirtualClock, VirtualTimeLoop

Become = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]
PEOPLE = {
    name: Account(name, uid, uid, (uid,), f"/home/{name}", "/bin/sh")
    for name, uid in (("ann", 2001), ("ben", 2002), ("cat", 2003))
}


class FakeProcess:
    """A worker that only records its account and requests."""

    def __init__(self, *arguments: Any) -> None:
        self.report: Callable[[DrmaaEnding], None] = arguments[3]
        self.become: Become | None = arguments[5]
        self.jobs: list[str] = []
        self.cancelled: list[str] = []
        self.closed = False

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

    async def read_about(self) -> dict[str, str]:
        return {}

    async def request(self, operation: str, **fields: Any) -> Any:
        if operation == "submit":
            self.jobs.append(f"{self.account}{len(self.jobs)}")
            return self.jobs[-1]
        if operation == "cancel":
            self.cancelled.append(fields["job"])
        return dict.fromkeys(fields.get("jobs", ()), self.account)


@pytest.fixture
def workers() -> list[FakeProcess]:
    return []


@pytest.fixture
def accounts() -> dict[str, Account]:
    return dict(PEOPLE)


@pytest.fixture
async def control(
    workers: list[FakeProcess], accounts: dict[str, Account], virtual_loop: VirtualTimeLoop
) -> DrmaaControl:
    """Return sessions for at most two accounts."""

    def make_process(*arguments: Any) -> Any:
        workers.append(FakeProcess(*arguments))
        return workers[-1]

    run_as = RunAs(Accounts("east", SiteSettings(identity="mapped"), accounts.get), SwitchMethod.SETUID)
    clock = VirtualClock(virtual_loop)
    return DrmaaControl("/lib/libdrmaa.so", run_as, max_accounts=2, make_process=make_process, clock=clock)


def make_submission(user: str) -> LrmSubmission:
    return LrmSubmission("koala-x-1.1.0", 1, ["true"], {}, Path("/x"), Path("/x/log"), user=user)


async def submit_as(control: DrmaaControl, user: str) -> str:
    return await control.submit_job(Path("/x/launch"), make_submission(user), [])


async def test_each_account_has_its_own_worker(control: DrmaaControl, workers: list[FakeProcess]) -> None:
    for user in ("ann", "ben", "ann"):
        await submit_as(control, user)
    assert [(entry.account, len(entry.jobs)) for entry in workers] == [("agent", 0), ("ann 2001", 2), ("ben 2002", 1)]
    await control.cancel_job(workers[2].jobs[0], "ben")
    assert [entry.cancelled for entry in workers] == [[], [], workers[2].jobs]
    assert await control.read_states(["7"], "ann") == {"7": "ann 2001"}


async def test_submit_as_unknown_account_is_rejected(
    control: DrmaaControl, workers: list[FakeProcess], accounts: dict[str, Account]
) -> None:
    await submit_as(control, "ann")
    del accounts["ann"]
    with pytest.raises(SiteRejected, match="there is no account ann"):
        await submit_as(control, "ann")
    assert len(workers[1].jobs) == 1


async def test_endings_of_all_accounts_are_reported(control: DrmaaControl, workers: list[FakeProcess]) -> None:
    calls: list[str] = []
    control.on_ended(lambda: calls.append("ended"))
    job = await submit_as(control, "ann")
    workers[1].report(DrmaaEnding(job, 3))
    assert calls == ["ended"]
    assert control.reported_ending(job) == DrmaaEnding(job, 3)
    assert control.reported_ending("no such job") is None


async def test_idle_worker_without_jobs_is_closed(
    control: DrmaaControl, workers: list[FakeProcess], virtual_loop: VirtualTimeLoop
) -> None:
    first, _ = await submit_as(control, "ann"), await submit_as(control, "ben")
    workers[1].report(DrmaaEnding(first, 0))
    await control.submit_error()
    assert [entry.closed for entry in workers] == [False, False, False]
    virtual_loop.jump(IDLE_TIMEOUT_S + 1)
    await control.submit_error()
    assert [entry.closed for entry in workers] == [False, True, False]
    await submit_as(control, "ann")
    assert workers[3].account == "ann 2001"


async def test_least_recently_used_worker_is_closed(control: DrmaaControl, workers: list[FakeProcess]) -> None:
    for user in ("ann", "ben", "ann", "cat"):
        await submit_as(control, user)
    assert [(entry.account, entry.closed) for entry in workers[1:]] == [
        ("ann 2001", False),
        ("ben 2002", True),
        ("cat 2003", False),
    ]
