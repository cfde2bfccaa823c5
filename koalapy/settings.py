"""All configuration, typed: one YAML file, overridden by environment variables (``KOALA_RULES__CLAIM_GRACE``)."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from koalapy.model.errors import UsageError
from koalapy.scheduling.rules import QueueMode, QueueOrder, Rules


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RulesSection(Section):
    """Parameters of scheduling and claiming; see ``scheduling.rules.Rules``. Times in seconds."""

    queue: QueueMode = "scan"
    queue_order: QueueOrder = "fcfs"
    high_scans_per_low: int = 2
    scan_interval: float = 30.0
    event_driven: bool = True
    placement_queue_limit: int = 100_000
    max_placement_tries: int | None = None
    claim_grace: float = 10.0
    barrier_timeout: float = 120.0
    unreachable_after: float = 5.0
    lost_after: float = 600.0
    error_threshold: int = 3
    max_restarts: int | None = 10

    def build(self) -> Rules:
        return Rules(**self.model_dump())


class ClusterSection(Section):
    """One cluster. ``nodes`` and ``network`` are for the kind ``local``: N nodes of this machine."""

    kind: Literal["local", "slurm", "sge", "drmaa"] = "local"
    nodes: int = Field(default=4, ge=1, le=254)
    network: str | None = None
    """First three bytes of the nodes' loopback addresses; by default 127.0.K for the K-th cluster."""
    processes_per_node: int = Field(default=1, ge=1)
    speed: float = Field(default=1.0, gt=0)
    token: str | None = None
    """What the cluster's agent must show to be let in."""
    environment: dict[str, str] = {}
    """Added to the environment of every program there; ``PATH`` entries go first."""
    embedded: bool | None = None
    """Whether the daemon starts the agent itself; by default for the kind ``local``."""

    @property
    def is_embedded(self) -> bool:
        return self.kind == "local" if self.embedded is None else self.embedded


class Settings(BaseSettings):
    """Everything a daemon or an agent is told."""

    model_config = SettingsConfigDict(env_prefix="KOALA_", env_nested_delimiter="__", extra="forbid", frozen=True)

    database: str | None = None
    """Database URL; by default SQLite in the data directory."""
    tokens: list[str] = []
    """Bearer tokens of users; when empty, everybody who reaches the port may use it."""
    lease: float = Field(default=600.0, gt=0)
    """Seconds without a word from its agent after which a runner ends itself."""
    output_limit: int = Field(default=64 * 1024 * 1024, ge=0)
    """Bytes of output kept per component; the rest stays in the cluster's own files."""
    rules: RulesSection = RulesSection()
    clusters: dict[str, ClusterSection] = {
        "north": ClusterSection(network="127.0.1"),
        "south": ClusterSection(network="127.0.2"),
    }

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        return env_settings, init_settings


CLIENT_VARIABLES = ("KOALA_URL", "KOALA_TOKEN", "KOALA_DATA_DIR")


def load(path: Path | None) -> Settings:
    """Read a configuration file; a bad one is a ``UsageError`` that names the field."""
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"cannot read {path}: {error}", field="--config") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold fields and values, not a {type(values).__name__}", field="--config")
    try:
        settings = Settings(**values)
        settings.rules.build()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{field}: {first['msg']}", field=field, value=first.get("input")) from error
    return settings
