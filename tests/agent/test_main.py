"""What the configuration says of a cluster reaches its agent."""

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
    told = _settings_of_agent("north", settings, "http://d", "s3cret", Path("/agent"), "10.0.0.1", "192.0.2.1")
    assert told.replica_directories == [Path("/data")]
    assert told.stages == Path("/stages")
    assert (told.transfer_address, told.transfer_port, told.transfer_limit) == ("192.0.2.1", 8730, 7)
    assert (told.forget_after, told.poll_interval) == (60.0, 9.0)
    assert (told.modules, told.python, told.kind) == (["openmpi"], "/opt/python", "slurm")


def test_agent_settings_have_equal_defaults() -> None:
    told = _settings_of_agent("north", Settings(), "http://d", "s3cret", Path("/agent"), "10.0.0.1", "192.0.2.1")
    assert (told.transfer_limit, told.forget_after) == (4, 14 * 86400.0)


def test_transfers_are_encrypted_unless_configured_otherwise() -> None:
    links = [
        {"between": ["north", "east"], "encrypted": True},
        {"between": ["south", "north"], "encrypted": False},
        {"between": ["north", "west"], "latency": 1.0},
    ]
    clusters: dict[str, object] = {name: {} for name in ("north", "east", "south", "west")}

    def encrypted(**more: object) -> list[bool]:
        settings = Settings.model_validate({"clusters": clusters, "links": links} | more)
        told = _settings_of_agent("north", settings, "http://d", "s3cret", Path("/agent"), "10.0.0.1", "192.0.2.1")
        return [told.requires_encryption(name) for name in ("east", "south", "west", "elsewhere")]

    assert encrypted() == [True, False, True, True]
    assert encrypted(encrypt_transfers=False) == [True, False, False, False]
    known = Settings.model_validate({"clusters": clusters, "links": links}).known_links()
    assert list(known) == [("north", "west")]
