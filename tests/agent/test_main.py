"""Settings of an agent from the configuration of its cluster."""

from pathlib import Path

from koalapy.agent.main import _settings_of_agent
from koalapy.config.settings import ClusterSection, Settings


def test_agent_settings_follow_configuration() -> None:
    section = ClusterSection(
        kind="slurm",
        replica_directories=["/data"],
        stage_directory="/stages",
        transfer_port=8730,
        transfer_limit=7,
        forget_after=60.0,
        poll_interval=9.0,
        modules=["openmpi"],
        python="/opt/python",
    )
    settings = Settings(clusters={"north": section})
    agent_settings = _settings_of_agent(
        "north", settings, "http://d", "s3cret", Path("/agent"), "10.0.0.1", "192.0.2.1"
    )
    assert agent_settings.replica_directories == [Path("/data")]
    assert agent_settings.stages == Path("/stages")
    assert (agent_settings.transfer_address, agent_settings.transfer_port, agent_settings.transfer_limit) == (
        "192.0.2.1",
        8730,
        7,
    )
    assert (agent_settings.forget_after, agent_settings.poll_interval) == (60.0, 9.0)
    assert (agent_settings.modules, agent_settings.python, agent_settings.kind) == (["openmpi"], "/opt/python", "slurm")


def test_agent_settings_have_equal_defaults() -> None:
    agent_settings = _settings_of_agent(
        "north", Settings(), "http://d", "s3cret", Path("/agent"), "10.0.0.1", "192.0.2.1"
    )
    assert (agent_settings.transfer_limit, agent_settings.forget_after) == (4, 14 * 86400.0)
