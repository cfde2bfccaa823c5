"""docs/operating.md has a remedy for each alert and the retention times of the settings."""

import re

from deploy.documentation.settings_page import sections
from koalapy.model.alert import AlertKind
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
DEFAULTS = {setting.path.rpartition(".")[2]: setting.default for section in sections() for setting in section.settings}


def test_operating_page_lists_every_alert_with_its_remedy() -> None:
    incidents = PAGE.partition("\n## Incidents\n")[2].partition("\n## ")[0]
    alerts = re.findall(r"^\| [^|]+ \| `([\w-]+)` \| [^|]+ \| [^|]+ \|$", incidents, re.MULTILINE)
    assert sorted(alerts) == sorted(AlertKind)


def test_retention_table_gives_the_defaults_of_settings() -> None:
    table = PAGE.partition("\n## Retention\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[2:]
    assert len(rows) > 5
    for names, retention in rows:
        for name in re.findall(r"`(\w+)`", names):
            default = DEFAULTS[name]
            duration = re.search(r"\(([\d.]+ \w+)\)", default)
            assert duration is None or duration[1] in retention, name
