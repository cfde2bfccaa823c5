"""The units and example configurations of ``deploy/``."""

import re
from pathlib import Path

from koalapy.config.settings import load_settings
from koalapy.system.local_token import check_token

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = (DEPLOY / "systemd" / "koala-serve.service").read_text()


def read_values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def test_daemon_unit_listens_on_loopback_by_default() -> None:
    assert "KOALA_SERVE_HOST=127.0.0.1" in " ".join(read_values("Environment")).split()
    assert "--host ${KOALA_SERVE_HOST} " in read_values("ExecStart")[0]
    # A missing file is an error, and its values override those of the unit.
    assert read_values("EnvironmentFile") == ["/etc/koala/serve.env"]
    assert UNIT.index("\nEnvironment=") < UNIT.index("\nEnvironmentFile=")
    assert (read_values("StateDirectoryMode"), read_values("UMask")) == (["0700"], ["0077"])


def test_units_allow_many_open_files() -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        assert "\nLimitNOFILE=65536\n" in unit.read_text(), unit


def test_example_tokens_are_valid() -> None:
    settings = load_settings(DEPLOY / "koala.yaml")
    assert all(check_token(section.token or "") for section in settings.clusters.values())


def test_compose_file_needs_no_variable() -> None:
    """Each variable has a default."""
    text = (DEPLOY.parent / "docker-compose.yml").read_text()
    assert text.count("${") == len(re.findall(r"\$\{[A-Z_]+:-[^}]*\}", text))
