"""``koala dashboard``: an address that logs a browser in, for nobody else to see."""

import os
import re
import stat
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
import pytest

from tests.cli.conftest import Koala, Server


def test_an_address_is_printed(koala: Koala, server: Server) -> None:
    told = koala("dashboard")
    assert (told.code, told.out.count("\n")) == (0, 1)
    assert "/login?" in told.out


@pytest.mark.evidence("A7")
def test_no_command_line_tells_others_the_code(koala: Koala, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: not started.append(url))
    assert koala("dashboard", "--open").code == 0
    (shown,) = started
    page = Path(unquote(urlsplit(shown).path))
    assert (urlsplit(shown).scheme, httpx2.URL(shown).query) == ("file", b"")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (page, page.parent)] == [0o600, 0o700]
    leads_to = re.search(r"url=([^\"]+)", page.read_text())
    assert leads_to is not None
    code = leads_to[1].rpartition("=")[2]
    assert len(code) > 20
    assert code not in shown


def test_where_others_may_write_no_browser_is_started(
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
    told = koala("dashboard", "--open")
    assert (told.code, "run it without --open" in told.err) == (1, True)
    assert list(elsewhere.iterdir()) == []
