"""All configuration, typed: one YAML file, overridden by environment variables (``KOALA_RULES__CLAIM_GRACE``)."""

import re
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from koalapy.credentials import checked_token
from koalapy.model.cluster import Link
from koalapy.model.disk import DiskLimits
from koalapy.model.errors import UsageError
from koalapy.model.job import MAX_PROCESSES_PER_NODE, ClaimingMode
from koalapy.model.quantities import bytes_per_second_of, seconds_of
from koalapy.model.request import MAX_COMPONENTS
from koalapy.model.wording import known_names
from koalapy.scheduling.rules import Preemption, QueueMode, QueueOrder, Rules, faults_of
from koalapy.settings_refusal import DELIMITER, OUT_OF_RANGE, PREFIX, refusal

LONGEST_TEXT = 1024 * 1024
"""Characters of any text. Pydantic refuses what UTF-8 cannot encode only where a text has a bound."""
Secret = Annotated[str, AfterValidator(checked_token)]


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", name):
        raise ValueError(f"{name!r} is no host's name: give it without scheme and port, as grid.example.org")
    return name


HostName = Annotated[str, AfterValidator(_host_name)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=LONGEST_TEXT)


class RulesSection(Section):
    """Parameters of scheduling and claiming; see ``scheduling.rules.Rules``. Times in seconds."""

    queue: QueueMode = "scan"
    queue_order: QueueOrder = "fcfs"
    high_scans_per_low: int = 2
    scan_interval: float = 30.0
    event_driven: bool = True
    placement_queue_limit: int = 100_000
    max_components_per_job: int = Field(default=1000, le=MAX_COMPONENTS)
    max_placement_tries: int | None = None
    claim_grace: float = 10.0
    barrier_timeout: float = 120.0
    unreachable_after: float = 5.0
    lost_after: float = 600.0
    error_threshold: int = 3
    max_restarts: int | None = 10
    restart_pause: float = 1.0
    restart_pause_max: float = 60.0
    claiming: ClaimingMode = ClaimingMode.ATOMIC
    claim_threshold: float = 0.0
    claim_factor: float = 0.75
    claim_factor_step: float = 0.125
    claim_factor_min: float = 0.25
    claim_epsilon: float = 1.0
    max_claiming_tries: int | None = None
    preemption: Preemption = "placement"
    assumed_bandwidth: float = 100e6
    aging: bool = True
    aging_tries: int = 20
    probation: bool = True
    probation_pause: float = 60.0
    probation_pause_max: float = 3600.0

    def build(self) -> Rules:
        return Rules(**self.model_dump())

    def faults(self) -> Iterator[dict[str, Any]]:
        """What of it cannot be, as pydantic tells of fields."""
        for fault in faults_of(self.model_dump()):
            said = fault.message.removeprefix(f"{fault.field} ")
            yield {"loc": ("rules", fault.field), "type": OUT_OF_RANGE, "msg": said, "input": fault.value}


class MpiSection(Section):
    """Open MPI on one cluster: where it is, and over which of a node's networks it may speak."""

    series: Literal[4, 5] = 5
    """Major version; all clusters of one job must have the same."""
    prefix: str | None = None
    """Where it is installed, with ``bin/mpirun`` below; by default the first ``mpirun`` on the nodes' ``PATH``."""
    interface: str | None = None
    """Network that other clusters' nodes can reach, as CIDR (``198.18.0.0/24``) or name (``ib0``)."""
    ports: str | None = Field(default=None, pattern=r"^\d+-\d+$")
    """Ports that other clusters' nodes can reach, as ``FIRST-LAST``."""
    parameters: dict[str, str] = {}
    """Further MCA parameters of Open MPI's own (``btl_tcp_links: "2"``)."""

    @field_validator("series", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """An environment variable gives text."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("ports")
    @classmethod
    def _ordered(cls, value: str | None) -> str | None:
        if value is not None:
            first, last = map(int, value.split("-"))
            if not 1024 <= first < last <= 65535:
                raise ValueError("give FIRST-LAST with 1024 <= FIRST < LAST <= 65535")
        return value

    @field_validator("interface")
    @classmethod
    def _network(cls, value: str | None) -> str | None:
        if value is not None and "/" in value:
            ip_network(value, strict=False)
        return value


class ClusterSection(Section):
    """One cluster. ``nodes`` and ``network`` are for the kind ``local``: N nodes of this machine."""

    kind: Literal["local", "slurm", "sge", "drmaa"] = "local"
    nodes: int = Field(default=4, ge=1, le=254)
    """Of the kinds ``local`` and ``drmaa``; the others are asked how many they have."""
    network: str | None = None
    """First three bytes of the nodes' loopback addresses; by default 127.0.K for the K-th cluster."""
    processes_per_node: int = Field(default=1, ge=1, le=MAX_PROCESSES_PER_NODE)
    speed: float = Field(default=1.0, gt=0)
    token: Secret | None = None
    """What the cluster's agent must show to be let in."""
    environment: dict[str, str] = {}
    """Added to the environment of every program there; ``PATH`` entries go first."""
    embedded: bool | None = None
    """Whether the daemon starts the agent itself; by default for the kind ``local``."""

    start_failures: float = Field(default=0.0, ge=0, le=1)
    """To try out fault tolerance, of the kind ``local`` only: the probability that the start of a component fails.

    While there is a file ``lrm/start-failures`` in the cluster's directory, the number in it counts instead.
    """

    # How to ask its resource manager
    partition: str | None = None
    """Slurm: by default the default partition."""
    account: str | None = None
    """To be charged; by default the user's own."""
    queue: str | None = None
    """Grid Engine: by default any queue that the parallel environment may use."""
    parallel_environment: str = "koala"
    """Grid Engine: with whole nodes as its unit, and ``control_slaves TRUE``."""
    library: str | None = None
    """Path of the DRMAA library; Slurm is driven by its commands when there is none."""
    native_specification: str = ""
    """Further options for every job, as sbatch, qsub or the DRMAA library take them."""
    fanout: Literal["srun", "qrsh", "none"] | None = None
    """What starts the runner on each allocated node; by default what the kind has."""
    poll_interval: float = Field(default=5.0, ge=1.0)
    """Seconds between two questions to an LRM that cannot tell of changes by itself."""

    # What the programs find there
    mpi: MpiSection = MpiSection()
    modules: list[str] = []
    """Environment modules loaded before every program."""
    scratch: str | None = None
    """Folder for large files; ``{scratch}`` in commands, working directories and output files."""
    home: str | None = None
    """Home folder of the jobs' user; ``{home}`` in commands, working directories and output files."""
    paths: dict[str, str] = {}
    """Where this cluster has what the submitter calls ``/a/b``: longest match of whole folder names first."""
    python: str | None = None
    """Python 3.11 or newer that runs our runner on the nodes; by default the agent's own."""
    runner_address: str | None = None
    """Address of the head node on which the agent listens for its nodes; by default the head's own."""

    # Files
    replica_directories: list[str] = []
    """Folders below which replicas may lie, as the head node sees them; nothing else is read for other sites.

    Of the kind ``local``, by default the folder ``replicas`` in the cluster's directory.
    """
    stage_directory: str | None = None
    """Where components get folders of their own for the files they need, which the nodes must see under this path.

    By default the folder ``stages`` in the agent's directory.
    """
    transfer_address: str | None = None
    """Address at which other sites' head nodes reach this one to pull files; by default the head's own."""
    transfer_port: int | None = Field(default=None, ge=1, le=65535)
    """For that, too; by default any free one."""
    transfer_limit: int = Field(default=4, ge=1, le=64)
    """How many files and folders are pulled from other sites at once; further ones wait for their turn."""
    forget_after: float = Field(default=14 * 86400.0, gt=0, allow_inf_nan=False)
    """Seconds after which the agent removes what is left of a daemon that is not heard of any more, while there is
    another: stages and ended components, as after the database was wiped."""

    @property
    def is_embedded(self) -> bool:
        return self.kind == "local" if self.embedded is None else self.embedded

    @field_validator("start_failures")
    @classmethod
    def _embedded_only(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("kind") != "local":
            raise ValueError("only clusters of the kind local fail on purpose")
        return value

    @field_validator("replica_directories", "stage_directory")
    @classmethod
    def _absolute_folders(cls, value: list[str] | str | None) -> list[str] | str | None:
        for path in [value] if isinstance(value, str) else value or []:
            if not path.startswith("/"):
                raise ValueError(f"{path} is not an absolute path")
        return value

    @field_validator("paths")
    @classmethod
    def _absolute(cls, value: dict[str, str]) -> dict[str, str]:
        for path in (*value, *value.values()):
            if not path.startswith("/"):
                raise ValueError(f"{path} is not an absolute path")
        return value


class LinkSection(Section):
    """What is known of the network between two clusters, or within one (``between: [north, north]``)."""

    between: tuple[str, str]
    latency: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds; also as ``0.5ms``."""
    bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Bytes per second; also as ``1Gbit`` or ``100MB``."""

    @field_validator("latency", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return None if value is None else seconds_of(value)

    @field_validator("bandwidth", mode="before")
    @classmethod
    def _bytes_per_second(cls, value: Any) -> Any:
        return None if value is None else bytes_per_second_of(value)

    def build(self) -> Link:
        return Link(self.latency, self.bandwidth)


class NetworkSection(Section):
    """How links are measured: by MPI ping-pongs, which are jobs of low priority like any other. Times in seconds."""

    interval: float | None = Field(default=None, ge=60, allow_inf_nan=False)
    """How often each link is measured; never by itself when there is none."""
    stale_after: float = Field(default=7 * 86400.0, gt=0, allow_inf_nan=False)
    """From when on a measurement is shown as stale; it is used all the same."""
    parallel: int = Field(default=1, ge=1)
    """How many links are measured at once; more than one disturb each other where they share a network."""
    patience: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """How long a measurement waits for its nodes."""
    command: tuple[str, ...] = Field(default=("python", "-m", "koalapy.apps.pingpong", "--json"), min_length=1)
    """What measures, on one node each of two clusters or two of one."""


class DiskSection(Section):
    """When a disk of the daemon's or an agent's has too little room; of a small one, 5 % and 1 % if that is less."""

    low: int = Field(default=1024**3, ge=0)
    """Bytes below which that is told."""
    least: int = Field(default=64 * 1024**2, ge=0)
    """Bytes below which nothing is placed on a cluster whose agent writes there."""

    def build(self) -> DiskLimits:
        return DiskLimits(self.low, self.least)


class Settings(BaseSettings):
    """Everything a daemon or an agent is told."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=DELIMITER, extra="forbid", frozen=True, str_max_length=LONGEST_TEXT
    )

    database: str | None = None
    """Database URL; by default SQLite in the data directory."""
    tokens: list[Secret] = []
    """Bearer tokens of users; when empty, the daemon makes one, which this account's commands find by themselves."""
    allowed_hosts: list[HostName] = []
    """Names by which the daemon may be addressed beside IP addresses, ``localhost`` and this machine's own names."""
    lease: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds without a word from its agent after which a runner ends itself."""
    output_limit: int = Field(default=64 * 1024 * 1024, ge=0, le=2**53)
    """Bytes of output kept per component: of what is longer the first and the last half of that; for the rest there is
    the file that a job may name (``--output``)."""
    bundle_limit: int = Field(default=1024**3, ge=0)
    """Bytes that a submitter may send along with a job (``--stage``), as one archive."""
    collect_limit: int = Field(default=1024**3, ge=0)
    """Bytes that a component may bring back (``--collect``), as one archive."""
    bundles_quota: int = Field(default=50 * 1024**3, ge=0)
    """Bytes of all that submitters have sent along together; those that nobody needs go first."""
    results_quota: int = Field(default=200 * 1024**3, ge=0)
    """Bytes of all that components have brought back together; those of the jobs that ended first go first."""
    results_keep: float | None = Field(default=None, gt=0)
    """Seconds after a job's end for which these are kept; by default as long as there is room."""
    jobs_keep: float | None = Field(default=365 * 86400.0, ge=3600, allow_inf_nan=False)
    """Seconds after its end for which a job is kept with its output, results and history; null: for ever."""
    internal_jobs_keep: float = Field(default=7 * 86400.0, ge=3600, allow_inf_nan=False)
    """The same of the daemon's own jobs, which measure the network; what they measured is kept by itself."""
    background_load: bool = False
    """Whether experiments may load clusters past the scheduler, as local users do."""
    rules: RulesSection = RulesSection()
    links: list[LinkSection] = []
    network: NetworkSection = NetworkSection()
    disks: DiskSection = DiskSection()
    clusters: dict[str, ClusterSection] = {
        "north": ClusterSection(network="127.0.1"),
        "south": ClusterSection(network="127.0.2"),
    }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    def known_links(self) -> dict[tuple[str, str], Link]:
        """The links by their clusters' names in order; ``UsageError`` for unknown clusters and for one given twice."""
        found: dict[tuple[str, str], Link] = {}
        for index, section in enumerate(self.links):
            field = f"links[{index}]"
            for place, name in enumerate(section.between):
                if name not in self.clusters:
                    raise UsageError(
                        f"{field}.between[{place}]: there is no cluster {name}",
                        field=f"{field}.between[{place}]",
                        value=name,
                        hint=known_names(name, self.clusters),
                    )
            one, other = sorted(section.between)
            if (one, other) in found:
                raise UsageError(
                    f"{field}.between: the link between {one} and {other} was given before",
                    field=f"{field}.between",
                    value=list(section.between),
                    hint="leave one out",
                )
            if section.latency is None and section.bandwidth is None:
                raise UsageError(f"{field}: neither latency nor bandwidth is given", field=field, hint="give either")
            found[one, other] = section.build()
        return found


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
    except SettingsError as error:
        raise UsageError(f"{error}: lists and objects are given as JSON", field="environment") from error
    except ValidationError as error:
        raise refusal(Settings, error.errors(), path) from error
    faults = list(settings.rules.faults())
    if faults:
        raise refusal(Settings, faults, path)
    return settings
