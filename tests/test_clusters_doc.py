"""``docs/clusters.md`` names every parameter, with the default that it has."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from koalapy.config.settings import ClusterSection, MpiSection
from koalapy.model.alert import AlertKind, AlertRules
from koalapy.model.limits import UserLimits
from koalapy.model.measurement import Measuring
from koalapy.model.provider import Provider
from koalapy.scheduler.rules import Rules

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "clusters.md").read_text(encoding="utf-8")


def test_every_rule_stands_there_with_its_default() -> None:
    table = PAGE.partition("## The rules of scheduling and claiming")[2].partition("\n## ")[0]
    told: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, defaults, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
            told |= zip(re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", "), strict=True)
    for rule in fields(Rules):
        assert told.pop(rule.name) == f"{rule.default}".lower().removesuffix(".0"), rule.name
    assert not told


def test_every_setting_of_a_cluster_stands_there() -> None:
    table = PAGE.partition("## What a cluster's configuration says")[2].partition("\n\nOnly agents")[0]
    told = [
        name for line in table.splitlines() if "|" in line for name in re.findall(r"`([\w.]+)`", line.split("|")[1])
    ]
    known = [own.name for own in fields(ClusterSection) if own.name != "mpi"]
    assert sorted(told) == sorted(known + [f"mpi.{own.name}" for own in fields(MpiSection)])


@pytest.mark.parametrize(("section", "kind"), [("`oidc`:", Provider), ("`limits`:", UserLimits)])
def test_every_setting_of_people_stands_there(section: str, kind: type) -> None:
    table = PAGE.partition(section)[2].partition("| --- | --- |")[2].partition("\n\n")[0]
    told = [name for line in table.splitlines() if line for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(told) == sorted(own.name for own in fields(kind))


def test_how_links_are_measured_stands_in_the_page_of_the_network() -> None:
    page = (DOCS / "network.md").read_text(encoding="utf-8")
    for own in fields(Measuring):
        assert own.default is not MISSING
        assert re.search(rf"\b{own.name}\b", page), own.name


def test_every_setting_of_alerts_stands_in_their_page_with_its_default() -> None:
    table = (DOCS / "alerts.md").read_text(encoding="utf-8").partition("| setting |")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE)
    assert {name: float(default) for name, default in rows} == {own.name: own.default for own in fields(AlertRules)}


def test_every_kind_of_alert_stands_in_their_page() -> None:
    table = (DOCS / "alerts.md").read_text(encoding="utf-8").partition("| setting |")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(AlertKind)


def test_every_kind_of_alert_stands_in_the_page_of_operators_with_what_helps() -> None:
    table = (DOCS / "operating.md").read_text(encoding="utf-8").partition("## Incidents")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| [^|]+ \| `([\w-]+)` \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)) == sorted(
        AlertKind
    )
