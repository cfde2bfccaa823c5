"""The alert about a configuration file that changed after the daemon's start."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from koalapy.config.strict_yaml import read_file
from koalapy.daemon.alerts.daemon_checks import ConfigurationCheck, describe_difference
from koalapy.model.alert import Alert, AlertKind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "koala.yaml"
    path.write_text("rules: {claim_grace: 5}\nclusters: {north: {nodes: 2}}\n")
    return path


def alerts_of(check: ConfigurationCheck) -> list[Alert]:
    async def collect() -> list[Alert]:
        return [alert async for alert in check(5.0)]

    return asyncio.run(collect())


def test_configuration_check_without_change_raises_no_alert(path: Path) -> None:
    check = ConfigurationCheck(path, read_file(path), read_file)
    assert alerts_of(check) == []
    path.write_text("# a comment\n" + path.read_text())
    assert alerts_of(check) == []


def test_configuration_check_with_new_cluster_alerts_until_reverted(path: Path) -> None:
    original = path.read_text()
    check = ConfigurationCheck(path, read_file(path), read_file)
    path.write_text("clusters: {north: {nodes: 3}, east: {kind: slurm}}\n")
    (alert,) = alerts_of(check)
    assert (alert.kind, alert.cause) == (
        AlertKind.CONFIGURATION,
        "different: rules, cluster east added, cluster north changed",
    )
    assert str(path) in alert.summary
    assert alerts_of(check) == [alert]
    path.write_text(original)
    assert alerts_of(check) == []


def test_configuration_check_of_unreadable_file_raises_alert(path: Path) -> None:
    check = ConfigurationCheck(path, read_file(path), read_file)
    path.write_text("clusters: {north: {nodes: 2}, north: {nodes: 2}}\n")
    (alert,) = alerts_of(check)
    assert "the key 'north' is given twice" in alert.cause
    path.unlink()
    (alert,) = alerts_of(check)
    assert alert.cause == "it cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("old", "now", "expected"),
    [
        ({}, {}, ""),
        ({"clusters": None}, {"clusters": {}}, ""),
        ({"clusters": {"a": {}}}, {}, "different: cluster a removed"),
        ({"clusters": {}}, {"clusters": [1]}, "different: clusters"),
        ({"clusters": {}}, {"clusters": {"a": None, 2: {}}}, "different: clusters 2, a added"),
        ({"links": []}, {}, "different: links"),
    ],
)
def test_describe_difference_names_changed_settings(
    old: Mapping[str, Any], now: Mapping[str, Any], expected: str
) -> None:
    assert describe_difference(old, now) == expected
