"""Addresses of requests in the audit log of a daemon behind a proxy."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.grid]
PROXY = "127.0.0.2"


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[EmbeddedGrid]:
    clusters = {"north": {"kind": "local", "embedded": False, "token": "the-secret-of-north"}}
    behind = {"KOALA_BEHIND_PROXY": json.dumps([PROXY]), "KOALA_CLUSTERS": json.dumps(clusters)}
    grid = EmbeddedGrid(tmp_path / "data", **behind)
    grid.set_url(grid.launch_daemon())
    yield grid
    close_grid(grid)


@pytest.mark.evidence("L7")
def test_forwarded_address_of_untrusted_peer_is_ignored(grid: EmbeddedGrid) -> None:
    port = int(urlsplit(grid.url).port or 0)
    for peer, recorded_address in [
        (PROXY, "192.0.2.77"),
        ("127.0.0.1", "192.0.2.88"),
        (PROXY, "192.0.2.99, 127.0.0.3"),
    ]:
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(peer, 0))
        headers = {"Authorization": "Bearer not-the-token-there-is", "X-Forwarded-For": recorded_address}
        asking.request("GET", "/api/v1/jobs", headers=headers)
        assert asking.getresponse().status == 401
        asking.close()

    def addresses() -> set[str]:
        listed = grid.run_koala("audit-log", "--json-lines").stdout.splitlines()
        return {json.loads(line)["address"] for line in listed}

    wait_until(
        lambda: {"192.0.2.77", "127.0.0.1", "127.0.0.3"} <= addresses(), "the audit entries of rejected requests"
    )
    recorded_addresses = addresses()
    assert not {"192.0.2.88", "192.0.2.99", PROXY} & recorded_addresses
