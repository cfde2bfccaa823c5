"""The page about the dashboard names every page that its keys lead to."""

import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
DECLARED = re.compile(r"dashboard\.page\((?:[^()]|\n)*?title=\"([^\"]+)\",\s*key=\"(\w)\"")


def test_every_page_is_told_with_its_keys() -> None:
    sources = (ROOT / "koalapy" / "dashboard" / "pages").glob("*.py")
    there = sorted(found for source in sources for found in DECLARED.findall(source.read_text(encoding="utf-8")))
    told = re.findall(r"^\| (\w[^|]*) \| `g` `(\w)` \|", PAGE, re.MULTILINE)
    assert len(there) > 5
    assert sorted(told) == there
