"""Rules and board queried by a real Prometheus that monitors a daemon."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

from deploy.monitoring.board import BOARD, INTERVAL, text
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until
from tests.needs import PROMETHEUS, needs

MONITORING = BOARD.parent
SCRAPE_INTERVAL = "500ms"
SHORT = "10s"
"""A value of Grafana's variable for the interval."""
NOT_PLAYED = ("koala_transferred_bytes_total",)
"""Metrics that exist only after a transfer, of which there is none here."""
EXPRESSIONS = [target["expr"] for panel in json.loads(text())["panels"] for target in panel.get("targets", ())]
METRIC = re.compile(r"\b(?:koala|process)_\w+")

pytestmark = [pytest.mark.processes, needs(PROMETHEUS)]


class Prometheus:
    """A Prometheus server that scrapes a daemon."""

    def __init__(self, directory: Path, url: str, token: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        secret = directory / "token"
        secret.write_text(token)
        configuration = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        configuration["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
        configuration["rule_files"] = [str(MONITORING / "koala.rules.yaml")]
        (scrape,) = configuration["scrape_configs"]
        scrape["authorization"]["credentials_file"] = str(secret)
        scrape["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
        file = directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(configuration))
        checked = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        options = [f"--web.listen-address={self._address}", f"--storage.tsdb.path={directory / 'data'}"]
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={file}", *options], stdout=self._log, stderr=self._log, cwd=directory
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str) -> Any:
        with urlopen(f"http://{self._address}/api/v1/{path}", timeout=30) as answer:
            response = json.load(answer)
        assert response["status"] == "success"
        return response["data"]

    def ask(self, expression: str) -> list[Any]:
        results: list[Any] = self.get(f"query?query={quote(expression.replace(INTERVAL, SHORT))}")["result"]
        return results

    def is_up(self) -> bool:
        try:
            return bool(self.ask("count_over_time(up[1m]) >= 3 and up == 1"))
        except OSError:
            return False


@contextmanager
def run_prometheus(directory: Path, grid: EmbeddedGrid) -> Iterator[Prometheus]:
    token = grid.run_koala("token", "create", "--role", "user", "--note", "prometheus", "--quiet")
    prometheus = Prometheus(directory, grid.url, token.stdout.strip())
    try:
        wait_until(prometheus.is_up, "Prometheus never got the metrics")
        yield prometheus
    finally:
        prometheus.stop()


def test_rules_and_board_query_existing_metrics(tmp_path: Path) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "prometheus").mkdir()
    grid = EmbeddedGrid(tmp_path / "grid").start()
    try:
        grid.wait_for_end(grid.submit(grid.six_nodes, "true", launcher="processes"))
        with run_prometheus(tmp_path / "prometheus", grid) as prometheus:
            for expression in EXPRESSIONS:
                if not any(name in expression for name in NOT_PLAYED):
                    wait_until(lambda e=expression: prometheus.ask(e), expression)  # type: ignore[misc]
            rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
            assert len(rules) == 13
            wait_until(
                lambda: all(r["health"] == "ok" for g in prometheus.get("rules")["groups"] for r in g["rules"]),
                "rules were not evaluated",
            )
            assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
            metrics = set(prometheus.get("label/__name__/values")) | set(NOT_PLAYED)
            queried_metrics = {name for rule in rules for name in METRIC.findall(rule["query"])}
            assert queried_metrics - metrics == set()
            assert prometheus.ask('koala_placements_total{coallocated="yes"} == 1')
    finally:
        grid.stop_daemon()


def test_board_file_is_up_to_date() -> None:
    assert BOARD.read_text(encoding="utf-8") == text()


def test_alert_rules_pass_their_rule_tests() -> None:
    for command in (["check", "rules", "koala.rules.yaml"], ["test", "rules", "koala.rules.test.yaml"]):
        result = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    rules = yaml.safe_load((MONITORING / "koala.rules.yaml").read_text())["groups"][0]["rules"]
    tried = (MONITORING / "koala.rules.test.yaml").read_text()
    assert [rule["alert"] for rule in rules if f'alertname="{rule["alert"]}"' not in tried] == []
    assert all({"summary", "action"} <= rule["annotations"].keys() for rule in rules)
