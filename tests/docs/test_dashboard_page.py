"""docs/dashboard.md lists every page of the dashboard."""

import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
DECLARED = re.compile(r"dashboard\.page\((?:[^()]|\n)*?title=\"([^\"]+)\",\s*key=\"(\w)\"")


def test_dashboard_page_lists_every_page_with_its_key() -> None:
    sources = (ROOT / "koalapy" / "dashboard" / "pages").glob("*.py")
    declared_pages = sorted(page for source in sources for page in DECLARED.findall(source.read_text(encoding="utf-8")))
    documented_pages = re.findall(r"^\| (\w[^|]*) \| `g` `(\w)` \|", PAGE, re.MULTILINE)
    assert len(declared_pages) > 5
    assert sorted(documented_pages) == declared_pages
