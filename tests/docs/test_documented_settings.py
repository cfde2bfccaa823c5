"""Pages list the settings and alerts that they describe, with defaults."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from koalapy.model.alert import AlertKind, AlertRules
from koalapy.model.measurement import MeasurementSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_network_page_names_every_measurement_setting() -> None:
    page = (DOCS / "network.md").read_text(encoding="utf-8")
    for setting in fields(MeasurementSettings):
        assert setting.default is not MISSING
        assert re.search(rf"\b{setting.name}\b", page), setting.name


def test_alerts_page_lists_every_setting_with_its_default() -> None:
    table = (DOCS / "alerts.md").read_text(encoding="utf-8").partition("| setting |")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE)
    assert {name: float(default) for name, default in rows} == {
        setting.name: setting.default for setting in fields(AlertRules)
    }


def test_alerts_page_lists_every_kind() -> None:
    table = (DOCS / "alerts.md").read_text(encoding="utf-8").partition("| setting |")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(AlertKind)
