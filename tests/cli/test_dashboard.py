"""``koala dashboard``: the address that logs a browser in."""

import os
import re
import stat
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
import pytest

from tests.cli.conftest import Koala, Server


def test_dashboard_prints_one_login_address(koala: Koala, server: Server) -> None:
    result = koala("dashboard")
    assert (result.code, result.out.count("\n")) == (0, 1)
    assert "/login?" in result.out


@pytest.mark.evidence("A7")
def test_dashboard_open_hides_code_from_command_lines(
    koala: Koala, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: not started.append(url))
    assert koala("dashboard", "--open").code == 0
    (address,) = started
    page = Path(unquote(urlsplit(address).path))
    assert (urlsplit(address).scheme, httpx2.URL(address).query) == ("file", b"")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (page, page.parent)] == [0o600, 0o700]
    leads_to = re.search(r"url=([^\"]+)", page.read_text())
    assert leads_to is not None
    code = leads_to[1].rpartition("=")[2]
    assert len(code) > 20
    assert code not in address


def test_dashboard_open_with_folder_writable_by_others_is_rejected(
    koala: Koala, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(webbrowser, "open", pytest.fail)
    folder = tmp_path / "state" / "koala"
    folder.mkdir(parents=True)
    (folder / f"browser-{os.uname().nodename.replace('/', '_')}").symlink_to(elsewhere)
    result = koala("dashboard", "--open")
    assert (result.code, "run it without --open" in result.err) == (1, True)
    assert list(elsewhere.iterdir()) == []
