"""The file by which runners find their agent may be damaged: the next agent writes it anew."""

import asyncio

import pytest

from tests.agent.conftest import FakeDaemon, Site

pytestmark = pytest.mark.processes

T = "7.1.0"


@pytest.mark.parametrize("content", [b"", b"\0" * 30, b'{"host": "\xe9\xff\xfe\x80"}', b"[]", b'{"port": 1e99}'])
async def test_runners_find_agent_after_its_address_file_is_damaged(
    daemon: FakeDaemon, site: Site, content: bytes
) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 5"], T)
    await daemon.reaches(T, "running")
    await site.stop()
    site.settings.address_file.write_bytes(content)
    await site.start()
    await asyncio.to_thread((site.settings.directory / "test" / T / "go").touch)
    assert (await daemon.reaches(T, "ended"))["program_exit"] == 5
