"""The tables of docs/coming-from-slurm.md, and the scripts that show that both forms of a row have the same effect."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.docs.blocks import ROOT

DATA = yaml.safe_load(Path(__file__).with_name("slurm_rows.yaml").read_text(encoding="utf-8"))
ROWS: Mapping[str, Mapping[str, str]] = DATA["commands"] | DATA["options"]


def find_commands() -> dict[str, tuple[str, str]]:
    """Return the first command or option in both columns of each row of the page, by that of the first."""
    page = (ROOT / "docs" / "coming-from-slurm.md").read_text(encoding="utf-8")
    tables = re.findall(r"^## (?:Commands|Options of a job)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    commands = {}
    for line in re.findall(r"^\| .*`.* \|$", "".join(tables), re.MULTILINE):
        slurm, koala = (re.findall(r"`([^`]*)`", cell) for cell in line.split(" | ")[:2])
        commands[slurm[0]] = (_make_smaller(slurm[0]), _make_smaller((koala or [""])[0]))
    return commands


def _make_smaller(command: str) -> str:
    for text, replacement in DATA["replacements"].items():
        command = command.replace(text, replacement)
    return re.sub(r"\bJOB(?=\b|_\[)", "${JOB}", command)
