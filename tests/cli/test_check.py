"""``koala check`` on an embedded cluster's head, which is this machine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koalapy.agent import main as agents
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.model.errors import UsageError
from tests.cli.conftest import Koala, Server
from tests.needs import RSYNC, needs

Check = Callable[..., tuple[int, list[str]]]

CONFIG = """
tokens: [{token: a-long-token-of-users, user: ada}]
clusters:
  north: {nodes: 2, token: the-secret-of-north}
  south: {nodes: 2}
  west: {nodes: 2, token: the-secret-of-west, scratch: /no/such/folder}
"""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(
        tokens=("a-long-token-of-users",), agents={"north": "the-secret-of-north", "south": "made up", "west": None}
    )
    server.start()
    yield server
    server.end()


@pytest.fixture
def check(koala: Koala, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    config = tmp_path / "koala.yaml"
    config.write_text(CONFIG)
    monkeypatch.setenv("KOALA_AGENT_TOKEN", "")

    def run(cluster: str, token: str = "", *more: str) -> tuple[int, list[str]]:
        monkeypatch.setenv("KOALA_AGENT_TOKEN", token)
        ended = koala("check", cluster, "--config", str(config), "--directory", str(tmp_path / cluster), *more)
        assert ended.err == ""
        return ended.code, ended.out.splitlines()

    yield run
    for directory in tmp_path.glob("*/lrm"):
        LocalCluster(directory, directory.parent.name, 2).stop()


@pytest.mark.processes
@needs(RSYNC)
def test_all_is_well(check: Check, server: Server) -> None:
    code, lines = check("north", "the-secret-of-north")
    assert lines[0].startswith("ok    configuration: /")
    assert lines[0].endswith("/koala.yaml")
    assert lines[1] == "ok    resource manager: embedded, 2 nodes, 2 idle"
    assert lines[-2].startswith("ok    daemon: koalapy ")
    assert lines[-2].endswith(f" at {server.url}")
    assert lines[-1] == "ok    agent's token: is accepted for an agent of north"
    assert code == 0, lines


@pytest.mark.processes
@needs(RSYNC)
def test_an_embedded_cluster_needs_no_token(check: Check) -> None:
    code, lines = check("south")
    assert (code, lines[-1]) == (0, "ok    agent's token: the daemon starts this agent itself")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("cluster", "token", "said", "hint"),
    [
        (
            "north",
            "wrong",
            "the token is not that of cluster north",
            "set KOALA_AGENT_TOKEN to clusters.north.token of the daemon's configuration",
        ),
        (
            "north",
            "",
            "KOALA_AGENT_TOKEN is not set",
            "set it to the value of clusters.north.token in the daemon's configuration",
        ),
        (
            "west",
            "the-secret-of-west",
            "clusters.west.token is not set in the daemon's configuration",
            "set KOALA_AGENT_TOKEN to clusters.west.token of the daemon's configuration",
        ),
    ],
)
def test_a_token_that_lets_nobody_in(check: Check, cluster: str, token: str, said: str, hint: str) -> None:
    code, lines = check(cluster, token)
    assert (code, lines[-2:]) == (1, [f"FAIL  agent's token: {said}", f"      {hint}"])


@pytest.mark.processes
def test_a_cluster_that_the_daemon_does_not_know(check: Check, server: Server) -> None:
    server.agents.clear()
    code, lines = check("north", "the-secret-of-north")
    assert (code, lines[-2:]) == (
        1,
        ["FAIL  agent's token: there is no cluster north", "      add it to the daemon's configuration"],
    )


@pytest.mark.processes
def test_failures_for_programs(check: Check) -> None:
    code, lines = check("west", "the-secret-of-west", "--json")
    told = json.loads("\n".join(lines))
    assert code == 1
    assert (told["cluster"], told["ok"]) == ("west", False)
    wrong = {finding["what"]: finding for finding in told["findings"] if not finding["ok"]}
    assert wrong["scratch folder"] == {
        "what": "scratch folder",
        "ok": False,
        "found": "there is no /no/such/folder here",
        "hint": "make it, or correct clusters.west.scratch",
    }


def test_a_wrong_configuration_is_one_line(koala: Koala, tmp_path: Path) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text("clusters: {north: {nodes: many}}")
    ended = koala("check", "north", "--config", str(config))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "clusters.north.nodes" in ended.err
    ended = koala("check", "nowhere")
    assert (ended.code, ended.out) == (2, "")
    assert "there is no cluster nowhere" in ended.err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without anything installed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KOALA_AGENT_DIRECTORY", str(tmp_path / "agent"))
    return tmp_path


@pytest.fixture
def places(home: Path) -> tuple[str, str]:
    """Where the configuration of this account and that of a site are looked for."""
    return "~/.config/koala/koala.yaml", f"{home}/etc/koala.yaml"


@pytest.mark.processes
def test_check_without_config_option_reads_installed_configuration(koala: Koala, home: Path) -> None:
    path = home / ".config/koala/koala.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("clusters: {north: {kind: slurm, token: the-secret-of-north}}")
    ended = koala("check", "north", "--json")
    configuration, resource_manager, *_ = json.loads(ended.out)["findings"]
    assert (configuration["ok"], configuration["found"]) == (True, str(path))
    assert "embedded" not in resource_manager["found"]
    found = [
        finding["found"] for finding in json.loads(ended.out)["findings"] if finding["what"] == "agent's directory"
    ]
    assert found[0].startswith(str(home / "agent" / "spool"))
    elsewhere = koala("check", "nowhere")
    assert elsewhere.err == (
        f"koala: there is no cluster nowhere in {path}; give one of north, or another configuration with --config\n"
    )


def test_installed_configuration_is_of_account_then_of_site(home: Path, places: tuple[str, str]) -> None:
    assert agents.installed_configuration(places) is None
    for place in reversed(places):
        path = Path(place).expanduser()
        path.parent.mkdir(parents=True)
        path.touch()
        assert agents.installed_configuration(places) == path


def test_check_with_unreadable_installed_configuration_is_refused(home: Path, places: tuple[str, str]) -> None:
    (home / "etc/koala.yaml").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"^cannot read {home}/etc/koala.yaml"):
        agents.check_host("north", "http://127.0.0.1:1", None, home / "agent", "", None, installed=places)


@pytest.mark.processes
def test_check_without_any_configuration_says_it_checks_built_in_cluster(home: Path, places: tuple[str, str]) -> None:
    first, *_ = agents.check_host("north", "http://127.0.0.1:1", None, home / "agent", "", None, installed=places)
    assert (first.ok, first.subject) == (True, "configuration")
    assert first.result == (
        f"none was given, and neither ~/.config/koala/koala.yaml nor {home}/etc/koala.yaml exists: "
        "this checks the built-in embedded cluster north"
    )
    assert first.hint == "give the cluster's configuration with --config or KOALA_CONFIG"
    LocalCluster(home / "agent" / "lrm", "north", 4).stop()
