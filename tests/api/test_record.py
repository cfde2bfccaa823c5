"""The REST route of the record."""

import json
from pathlib import Path

from koalapy.simulation.record.format import FORMAT
from tests.api.test_access import open_access_api


async def test_record_is_for_operators_only(tmp_path: Path) -> None:
    async with open_access_api(tmp_path) as api:
        answer = await api.send_as("director", "GET", "/api/v1/record")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[0]["koala_export"] == FORMAT
        assert lines[0]["until"] - lines[0]["since"] == 86400
        assert lines[-1] == {"end": True}
        assert (await api.send_as("ada", "GET", "/api/v1/record")).status_code == 403
