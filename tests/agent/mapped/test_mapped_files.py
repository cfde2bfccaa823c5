"""Stages and results of a job's owner, through an agent that runs as root."""

import hashlib
import io
import os
import tarfile

import pytest

from tests.agent.conftest import FakeDaemon
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.signals import until

from .conftest import ALICE, MappedSite
from .test_mapped_jobs import run_as

pytestmark = pytest.mark.processes

S, T = "7.1.9", "7.1.0"


def make_bundle(**files: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755 if name.endswith("run") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return target.getvalue()


def read_members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {m.name: opened.extractfile(m).read() for m in opened}  # type: ignore[union-attr]


async def stage_files(daemon: FakeDaemon, daemon_files: FakeDaemonFiles, state: str = "done", **files: str) -> None:
    content = make_bundle(**files)
    ident = hashlib.sha256(content).hexdigest()
    daemon_files.bundles[ident] = content
    await daemon.request_stage(S, bundle={"id": ident, "size": len(content)}, local_user="alice")
    await daemon.wait_for_stage(S, state)


@pytest.mark.evidence("K8")
async def test_bundle_and_results_belong_to_owner(
    daemon_files: FakeDaemonFiles, daemon: FakeDaemon, mapped: MappedSite
) -> None:
    secret = mapped.jobs.parent / "secret"
    secret.write_text("root's alone")
    secret.chmod(0o600)
    await stage_files(daemon, daemon_files, **{"in.txt": "input", "sub/run": "#!/bin/sh\nid -u\n"})
    script = (
        "stat -c '%u %a' . in.txt sub sub/run; sub/run; cp in.txt out.txt; mkdir -p deep; echo 2 > deep/two; "
        f"ln -s {secret} link; ln {secret} hard 2>/dev/null; mkfifo pipe; ln -s {secret.parent} dir; chmod 500 deep"
    )
    output = await run_as(daemon, T, ["/bin/sh", "-c", script], "alice", stage=S, collect=["**"])
    mine = str(ALICE.uid)
    assert output.splitlines() == [f"{mine} 700", f"{mine} 600", f"{mine} 700", f"{mine} 700", mine]
    results = read_members(daemon_files.results[S])
    assert results == {"in.txt": b"input", "sub/run": b"#!/bin/sh\nid -u\n", "out.txt": b"input", "deep/two": b"2\n"}
    made_ready = mapped.settings.stages / f"test-{S}"
    assert made_ready.lstat().st_uid == os.geteuid()
    await daemon.send_command("forget", T)
    await daemon.send_command("unstage", S)
    await until(lambda: not list((mapped.jobs / "alice").iterdir()))
    assert secret.read_text() == "root's alone"


@pytest.mark.evidence("K6")
async def test_results_of_replaced_folder_are_read_as_owner(
    daemon_files: FakeDaemonFiles, daemon: FakeDaemon, mapped: MappedSite
) -> None:
    """The owner may replace the folder by a link; it is then read as the owner and not as root."""
    treasure = mapped.settings.directory.parent / "treasure"
    treasure.mkdir(mode=0o700)
    (treasure / "key").write_text("root's alone")
    await stage_files(daemon, daemon_files, **{"in.txt": "input"})
    script = f"cd /; rm -rf $KOALA_STAGE; ln -s {treasure} $KOALA_STAGE"
    await run_as(daemon, T, ["/bin/sh", "-c", script], "alice", stage=S, collect=["**"])
    assert b"root's alone" not in daemon_files.results.get(S, b"")


async def test_stage_failure_names_its_cause(
    daemon_files: FakeDaemonFiles, daemon: FakeDaemon, mapped: MappedSite
) -> None:
    blocked = mapped.jobs / "alice"
    blocked.mkdir()
    blocked.chmod(0o700)
    await stage_files(daemon, daemon_files, "failed", **{"in.txt": "input"})
    status = daemon.received("stage_status", S)[-1]
    assert "belongs to another account" in status["error"]
    assert status["fault"] == "source"  # not counted as a fault of the cluster


async def test_stage_without_valid_user_is_rejected(
    daemon_files: FakeDaemonFiles, daemon: FakeDaemon, mapped: MappedSite
) -> None:
    for token, user in (("7.1.8", ""), ("7.1.7", "mallory"), ("7.1.6", "../alice")):
        await daemon.request_stage(token, local_user=user)
        assert (await daemon.wait_for_stage(token, "failed"))["fault"] == "source"
    assert not [path for path in mapped.jobs.iterdir() if path.is_dir()]
