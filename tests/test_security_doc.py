"""The threat model of docs/security.md and the tests marked as evidence agree."""

import re

import pytest

from deploy.documentation.evidence_page import ROOT, SECURITY, evidence_by_threat, page, threats


def test_threat_model_has_a_test_for_each_threat() -> None:
    assert len(threats()) > 80
    assert set(threats()) - set(evidence_by_threat()) == set()


def test_evidence_marks_name_threats_of_the_model() -> None:
    assert set(evidence_by_threat()) - set(threats()) == set()


def test_evidence_page_has_a_row_for_each_threat() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| ") and "::test_" in line]
    assert len(rows) == len(threats())


def test_security_controls_name_files_that_exist() -> None:
    controls = re.findall(r"^\| C\d+ \| ([^|]+) \| (present[^|]*) \| ([^|]+) \|$", SECURITY.read_text(), re.MULTILINE)
    assert len(controls) == 19
    for control, _, files in controls:
        assert [name for name in re.findall(r"`([^`]+)`", files) if not (ROOT / name).exists()] == [], control


@pytest.mark.evidence("C19")
def test_security_policy_says_where_to_report() -> None:
    report = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in report
    links = re.findall(r"\]\(([^)#]+)\)", report)
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / link).exists()] == []
