"""The units and examples of ``deploy/`` do what they say."""

import re
from pathlib import Path

from koalapy.config.settings import load_settings
from koalapy.system.local_token import check_token

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = (DEPLOY / "systemd" / "koala-serve.service").read_text()


def lines(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def test_the_daemons_unit_is_open_to_nobody_unless_it_is_told() -> None:
    assert "KOALA_SERVE_HOST=127.0.0.1" in " ".join(lines("Environment")).split()
    assert "--host ${KOALA_SERVE_HOST} " in lines("ExecStart")[0]
    # A file that is not there is an error, and what it says counts.
    assert lines("EnvironmentFile") == ["/etc/koala/serve.env"]
    assert UNIT.index("\nEnvironment=") < UNIT.index("\nEnvironmentFile=")
    assert (lines("StateDirectoryMode"), lines("UMask")) == (["0700"], ["0077"])


def test_units_let_many_runners_and_requests_in() -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        assert "\nLimitNOFILE=65536\n" in unit.read_text(), unit


def test_every_token_of_the_examples_would_be_taken() -> None:
    settings = load_settings(DEPLOY / "koala.yaml")
    assert all(check_token(section.token or "") for section in settings.clusters.values())


def test_compose_file_needs_no_variable() -> None:
    assert "${" not in (DEPLOY.parent / "docker-compose.yml").read_text()
