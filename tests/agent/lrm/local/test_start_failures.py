"""Injected start failures."""

from pathlib import Path

import pytest

from koalapy.agent.lrm.local.adapter import START_FAILURES_FILE, LocalLrm, StartFailures
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.config.settings import load_settings
from koalapy.model.errors import UsageError
from tests.agent.lrm.conftest import Site

RUNNER = ["python", "runner.py"]


def count_failures(failures: StartFailures, starts: int = 1000) -> int:
    return sum(failures.choose_command(RUNNER) != RUNNER for _ in range(starts))


def test_failures_are_as_often_as_configured_and_repeatable(tmp_path: Path) -> None:
    first, second = (StartFailures(tmp_path, "north", 0.3) for _ in range(2))
    draws = [first.choose_command(RUNNER) == RUNNER for _ in range(1000)]
    assert draws == [second.choose_command(RUNNER) == RUNNER for _ in range(1000)]
    assert 250 < draws.count(False) < 350
    assert draws != [StartFailures(tmp_path, "south", 0.3).choose_command(RUNNER) == RUNNER for _ in range(1000)]


def test_file_replaces_the_configured_probability(tmp_path: Path) -> None:
    failures = StartFailures(tmp_path, "north", 0.0)
    assert count_failures(failures) == 0
    (tmp_path / START_FAILURES_FILE).write_text("1\n")
    assert count_failures(failures) == 1000
    (tmp_path / START_FAILURES_FILE).write_text("soon")
    assert count_failures(failures) == 0, "not a number"
    (tmp_path / START_FAILURES_FILE).unlink()
    assert count_failures(failures) == 0


@pytest.mark.processes
async def test_failed_start_takes_its_nodes_and_ends(site: Site) -> None:
    lrm = LocalLrm(site.cluster, "koala-1-", start_failures=1.0)
    await lrm.open()
    folder = site.cluster.directory
    job = await lrm.submit_job(LrmSubmission("koala-1-a", 2, ["/bin/sleep", "60"], {}, folder, site.output()))
    ended = site.wait(job)
    assert (ended["state"], ended["exit_code"], len(ended["nodes"])) == ("ended", 1, 2)
    assert "on purpose" in site.output().read_text()
    await lrm.close()


@pytest.mark.parametrize("text", ["{kind: slurm, start_failures: 0.1}", "{start_failures: 1.5}", "{start_failures: x}"])
def test_wrong_setting_is_rejected_by_name(text: str, tmp_path: Path) -> None:
    config = tmp_path / "koala.yaml"
    config.write_text(f"clusters: {{north: {text}}}")
    with pytest.raises(UsageError) as error:
        load_settings(config)
    assert error.value.field == "clusters.north.start_failures"
