"""Jobs of two people on one cluster run as their own accounts, and nobody reads, signals or is the other."""

import os
from pathlib import Path

from tests.agents.conftest import FakeDaemon

from .conftest import ALICE, MappedSite

SAY_WHO = ["/bin/sh", "-c", "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; pwd; umask"]


async def run(daemon: FakeDaemon, token: str, command: list[str], user: str, **fields: object) -> str:
    """The output of a component that has run as somebody."""
    await daemon.submit(token, local_user=user, **fields)
    await daemon.reaches(token, "claimed")
    await daemon.open(command, token)
    await daemon.reaches(token, "ended")
    return daemon.output.get(token, b"").decode()


async def test_a_job_runs_as_its_owner(daemon: FakeDaemon, mapped: MappedSite) -> None:
    said = (await run(daemon, "7.1.0", SAY_WHO, "alice")).splitlines()
    assert said[:4] == [str(ALICE.uid), str(ALICE.gid), str(ALICE.gid), "/nonexistent/alice alice alice"]
    assert daemon.status("7.1.0")["program_exit"] == 0
    work = Path(said[4])
    assert work.parent == mapped.jobs / "alice"
    assert owner_and_mode(work) == (ALICE.uid, 0o700)
    own = mapped.settings.directory / "test" / "7.1.0"
    assert owner_and_mode(own) == (os.geteuid(), 0o700)


def owner_and_mode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_mode & 0o777
