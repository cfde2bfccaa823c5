"""Limits of open files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from koalapy.agent import main as agents
from koalapy.agent.lrm.commands import run_command
from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.runners.runners import RunnerServer
from koalapy.model.errors import SiteRejected, SiteUnavailable, UsageError
from koalapy.system.process import count_open_files, raise_file_limit


@contextmanager
def limit_open_files(free_files: int = 0) -> Iterator[int]:
    """Limit the files that may still be opened; yield the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + free_files, hard))
    try:
        yield free + free_files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_raise_file_limit_up_to_hard_limit() -> None:
    with limit_open_files(free_files=10) as limit:
        assert raise_file_limit(limit + 10) == limit + 10
        assert count_open_files()[1] == limit + 10
        assert raise_file_limit(limit) == limit + 10, "it is never lowered"
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            assert raise_file_limit(hard + 1) == hard


def test_start_agent_raises_file_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configure_logging", "watch_out_for_crashes", "drop_own_variables"):
        monkeypatch.setattr(agents, name, lambda *_, **__: None)
    config = tmp_path / "koala.yaml"
    config.write_text("clusters: {north: {kind: local, nodes: 1}}\n")
    with limit_open_files(free_files=10):
        with pytest.raises(UsageError, match="there is no cluster south"):
            agents.start_agent("south", "http://127.0.0.1:1", config, tmp_path / "agent", "s3cret", None)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert count_open_files()[1] == (
            agents.MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(agents.MAX_OPEN_FILES, hard)
        )


@pytest.mark.processes
async def test_run_command_without_free_files_is_unavailable() -> None:
    """A lack of files must not count as a rejection by the site."""
    with limit_open_files(), pytest.raises(SiteUnavailable, match="cannot run true now: Too many open files"):
        await run_command("true")
    assert (await run_command("true")).code == 0
    with pytest.raises(SiteRejected, match="cannot run no-such-program: No such file"):
        await run_command("no-such-program")


async def test_drmaa_process_without_free_files_is_unavailable() -> None:
    control = DrmaaControl(None)
    with limit_open_files(), pytest.raises(SiteUnavailable, match="Too many open files"):
        await control.read_version()


def test_check_open_files_warns_once(tmp_path: Path) -> None:
    server = RunnerServer("127.0.0.1", tmp_path / "agent.json")
    with capture_logs() as logs, limit_open_files() as limit:
        for _ in range(2):
            server.check_open_files()
        raise_file_limit(2 * limit + 100)
        server.check_open_files()
    assert [entry["event"] for entry in logs] == ["the limit of open files is nearly reached"]
    assert "raise LimitNOFILE" in logs[0]["hint"]
