"""Every kind of resource manager that a configuration may name has an adapter behind the port."""

import inspect
from pathlib import Path

import pytest

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.port import KINDS, Lrm
from koalapy.agent.main import make_lrm
from koalapy.model.errors import SiteRejected

PORT = [name for name, method in inspect.getmembers(Lrm, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", KINDS)
def test_make_lrm_of_each_kind_uses_settings(kind: str, tmp_path: Path) -> None:
    settings = AgentSettings("north", "http://127.0.0.1:1", "s3cret", tmp_path / "spool", kind=kind)
    lrm = make_lrm(settings)
    for name in PORT:
        method, expected = getattr(type(lrm), name), getattr(Lrm, name)
        assert inspect.signature(method).parameters.keys() == inspect.signature(expected).parameters.keys(), name


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.on_this_host])
def test_make_lrm_with_unclosed_quote_is_rejected(kind: str, tmp_path: Path) -> None:
    settings = AgentSettings("north", "http://d", "s3cret", tmp_path / "spool", kind=kind, native_specification="-l 'a")
    with pytest.raises(SiteRejected, match="native_specification"):
        make_lrm(settings)


def test_make_lrm_of_slurm_with_library_is_rejected(tmp_path: Path) -> None:
    settings = AgentSettings("north", "http://d", "s3cret", tmp_path / "spool", kind="slurm", library="/x/libdrmaa.so")
    with pytest.raises(SiteRejected, match="Slurm is driven by its commands"):
        make_lrm(settings)
