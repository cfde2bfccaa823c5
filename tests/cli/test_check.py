"""``koala check`` on this machine, for embedded clusters."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent import main as agents
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.config.strict_yaml import installed_configuration
from koalapy.model.errors import UsageError
from tests.agent.lrm.conftest import stop_locald
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
    agents = {"north": "the-secret-of-north", "south": "made up", "west": None}
    with Server(tokens=("a-long-token-of-users",), agents=agents) as server:
        yield server


@pytest.fixture
def check_cluster(koala: Koala, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    config = tmp_path / "koala.yaml"
    config.write_text(CONFIG)
    monkeypatch.setenv("KOALA_AGENT_TOKEN", "")

    def run(cluster: str, token: str = "", *options: str) -> tuple[int, list[str]]:
        monkeypatch.setenv("KOALA_AGENT_TOKEN", token)
        ended = koala("check", cluster, "--config", str(config), "--directory", str(tmp_path / cluster), *options)
        assert ended.err == ""
        return ended.code, ended.out.splitlines()

    yield run
    for directory in tmp_path.glob("*/lrm"):
        stop_locald(LocalCluster(directory, directory.parent.name, 2))


@pytest.mark.processes
@needs(RSYNC)
def test_check_of_complete_host_exits_with_0(check_cluster: Check, server: Server) -> None:
    code, lines = check_cluster("north", "the-secret-of-north")
    assert lines[0].startswith("ok    configuration: /")
    assert lines[0].endswith("/koala.yaml")
    assert lines[1] == "ok    resource manager: embedded, 2 nodes, 2 idle"
    assert lines[-2].startswith("ok    daemon: koalapy ")
    assert lines[-2].endswith(f" at {server.url}")
    assert lines[-1] == "ok    agent's token: is accepted for an agent of north"
    assert code == 0, lines


@pytest.mark.processes
@needs(RSYNC)
def test_check_of_embedded_cluster_needs_no_token(check_cluster: Check) -> None:
    code, lines = check_cluster("south")
    assert (code, lines[-1]) == (0, "ok    agent's token: the daemon starts this agent itself")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("cluster", "token", "message", "hint"),
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
def test_check_with_wrong_token_fails_with_hint(
    check_cluster: Check, cluster: str, token: str, message: str, hint: str
) -> None:
    code, lines = check_cluster(cluster, token)
    assert (code, lines[-2:]) == (1, [f"FAIL  agent's token: {message}", f"      {hint}"])


@pytest.mark.processes
def test_check_of_cluster_unknown_to_daemon_fails(check_cluster: Check, server: Server) -> None:
    server.agents.clear()
    code, lines = check_cluster("north", "the-secret-of-north")
    assert (code, lines[-2:]) == (
        1,
        ["FAIL  agent's token: there is no cluster north", "      add it to the daemon's configuration"],
    )


@pytest.mark.processes
def test_check_json_has_failures_with_hints(check_cluster: Check) -> None:
    code, lines = check_cluster("west", "the-secret-of-west", "--json")
    answer = json.loads("\n".join(lines))
    assert code == 1
    assert (answer["cluster"], answer["ok"]) == ("west", False)
    wrong = {finding["what"]: finding for finding in answer["findings"] if not finding["ok"]}
    assert wrong["scratch folder"] == {
        "what": "scratch folder",
        "ok": False,
        "found": "there is no /no/such/folder here",
        "hint": "make it, or correct clusters.west.scratch",
    }


def test_check_with_invalid_configuration_prints_one_line(koala: Koala, tmp_path: Path) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text("clusters: {north: {nodes: many}}")
    ended = koala("check", "north", "--config", str(config))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "clusters.north.nodes" in ended.err
    ended = koala("check", "nowhere")
    assert (ended.code, ended.out) == (2, "")
    assert "there is no cluster nowhere" in ended.err


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty home; return it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KOALA_AGENT_DIRECTORY", str(tmp_path / "agent"))
    return tmp_path


@pytest.fixture
def configuration_paths(empty_home: Path) -> tuple[str, str]:
    """Return the paths of the account's and of the site's configuration."""
    return "~/.config/koala/koala.yaml", f"{empty_home}/etc/koala.yaml"


@pytest.mark.processes
def test_check_without_config_option_reads_installed_configuration(koala: Koala, empty_home: Path) -> None:
    path = empty_home / ".config/koala/koala.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("clusters: {north: {kind: slurm, token: the-secret-of-north}}")
    ended = koala("check", "north", "--json")
    configuration, resource_manager, *_ = json.loads(ended.out)["findings"]
    assert (configuration["ok"], configuration["found"]) == (True, str(path))
    assert "embedded" not in resource_manager["found"]
    directories = [
        finding["found"] for finding in json.loads(ended.out)["findings"] if finding["what"] == "agent's directory"
    ]
    assert directories[0].startswith(str(empty_home / "agent" / "spool"))
    elsewhere = koala("check", "nowhere")
    assert elsewhere.err == (
        f"koala: there is no cluster nowhere in {path}; give one of north, or another configuration with --config\n"
    )


def test_installed_configuration_is_of_account_then_of_site(
    empty_home: Path, configuration_paths: tuple[str, str]
) -> None:
    assert installed_configuration(configuration_paths) is None
    for place in reversed(configuration_paths):
        path = Path(place).expanduser()
        path.parent.mkdir(parents=True)
        path.touch()
        assert installed_configuration(configuration_paths) == path


def test_serve_reads_installed_configuration_unless_one_is_given(
    koala: Koala, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configurations: list[Path | None] = []

    def serve(host: str, port: int, data: Path, config: Path | None, options: Any, announce: Any) -> None:
        configurations.append(config)
        announce("http://127.0.0.1:1")

    monkeypatch.setattr("koalapy.daemon.main.serve", serve)
    monkeypatch.setattr("koalapy.cli.daemon.processes.scrub_environment", lambda: None)
    path = empty_home / ".config/koala/koala.yaml"
    path.parent.mkdir(parents=True)
    path.touch()
    started = koala("serve", "--data-dir", "data")
    assert started.out == f"koala serves http://127.0.0.1:1 (data in data, configuration {path})\n"
    assert (
        koala("serve", "--data-dir", "data", "--config", "other").out
        == "koala serves http://127.0.0.1:1 (data in data)\n"
    )
    assert configurations == [path, Path("other")]


def test_check_with_unreadable_installed_configuration_is_rejected(
    empty_home: Path, configuration_paths: tuple[str, str]
) -> None:
    (empty_home / "etc/koala.yaml").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"^cannot read {empty_home}/etc/koala.yaml"):
        agents.check_host(
            "north", "http://127.0.0.1:1", None, empty_home / "agent", "", None, installed=configuration_paths
        )


@pytest.mark.processes
def test_check_without_any_configuration_says_it_checks_built_in_cluster(
    empty_home: Path, configuration_paths: tuple[str, str]
) -> None:
    first, *_ = agents.check_host(
        "north", "http://127.0.0.1:1", None, empty_home / "agent", "", None, installed=configuration_paths
    )
    assert (first.ok, first.subject) == (True, "configuration")
    assert first.result == (
        f"none was given, and neither ~/.config/koala/koala.yaml nor {empty_home}/etc/koala.yaml exists: "
        "this checks the built-in embedded cluster north"
    )
    assert first.hint == "give the cluster's configuration with --config or KOALA_CONFIG"
    stop_locald(LocalCluster(empty_home / "agent" / "lrm", "north", 4))
