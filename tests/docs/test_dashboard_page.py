"""The page about the dashboard names pages and keys that there are."""

import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
DECLARED = re.compile(r"dashboard\.page\((?:[^()]|\n)*?title=\"([^\"]+)\",\s*key=\"(\w)\"")


def test_every_page_that_is_named_is_there_by_its_keys() -> None:
    sources = (ROOT / "koalapy" / "dashboard" / "pages").glob("*.py")
    there = {found for source in sources for found in DECLARED.findall(source.read_text(encoding="utf-8"))}
    told = re.findall(r"^\| (\w[^|]*) \| `g` `(\w)` \|", PAGE, re.MULTILINE)
    assert len(told) >= 3
    assert [one for one in told if one not in there] == []
