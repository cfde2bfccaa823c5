"""The page for operators has an answer to every alert, and tells what is kept for as long as it is."""

import re

from deploy.documentation.settings_page import sections
from koalapy.model.alert import AlertKind
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
DEFAULTS = {one.path.rpartition(".")[2]: one.default for section in sections() for one in section.settings}


def test_every_alert_has_an_answer() -> None:
    incidents = PAGE.partition("\n## Incidents\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| [^|]+ \| `([\w-]+)` \| [^|]+ \| [^|]+ \|$", incidents, re.MULTILINE)
    assert sorted(told) == sorted(AlertKind)


def test_what_is_kept_is_kept_for_so_long() -> None:
    table = PAGE.partition("\n## What is kept, and for how long\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[2:]
    assert len(rows) > 5
    for names, told in rows:
        for name in re.findall(r"`(\w+)`", names):
            default = DEFAULTS[name]
            known = re.search(r"\(([\d.]+ \w+)\)", default)
            assert known is None or known[1] in told, name
