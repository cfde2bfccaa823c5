"""All configuration, typed: one YAML file, overridden by environment variables (``KOALA_RULES__CLAIM_GRACE``)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from koalapy.agent.core.settings import SiteSettings
from koalapy.config.errors import DELIMITER, PREFIX, refusal
from koalapy.config.notifications import NotificationSection
from koalapy.config.strict_yaml import load_yaml
from koalapy.config.types import (
    AbsolutePath,
    ClusterKey,
    CollectorUrl,
    HostName,
    Network,
    Ports,
    ProviderUri,
    Proxy,
    Secret,
    UserName,
    UserPattern,
    proxy,
)
from koalapy.model.alert import AlertRules
from koalapy.model.cluster import ClusterPair, Link, check_cluster, pair_of
from koalapy.model.disk import DiskLimits
from koalapy.model.errors import UsageError
from koalapy.model.identity import HighPriority, Provider, Role
from koalapy.model.job import DEFAULT_LEASE, MAX_DURATION, NO_LEASE
from koalapy.model.limits import LimitSettings
from koalapy.model.measurement import MeasurementSettings
from koalapy.model.profile import MAX_SETS, ClusterProfile, Mpi, find_largest_sets
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.model.wording import parse_bandwidth, parse_seconds, suggest_names
from koalapy.record.settings import Recording
from koalapy.scheduler.rules import Rules

MAX_TEXT_LENGTH = 1024 * 1024
"""Characters of any text. Pydantic refuses what UTF-8 cannot encode only where a text has a bound."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogFormat = Literal["console", "json"]


@dataclass(frozen=True)
class TokenSection:
    """A token of somebody's that holds as long as it stands here."""

    token: Secret = field(repr=False)
    """16 characters or more."""
    user: UserName
    """Who comes in by it."""
    role: Role = Role.USER
    """What they may do."""


def _lease(value: object) -> object:
    """Return ``NO_LEASE`` for ``none``, and any other value as it is."""
    if value == "none":
        return NO_LEASE
    if isinstance(value, int | float) and value <= 0:
        raise ValueError("give more than 0 seconds, or none")
    return value


LeaseSetting = Annotated[float, BeforeValidator(_lease), Field(ge=0, le=MAX_DURATION, allow_inf_nan=False)]


def _with_a_user(section: object) -> object:
    if isinstance(section, str):
        raise ValueError("say whose token it is: {token: WORD, user: NAME, role: user, operator or admin}")
    return section


@dataclass(frozen=True)
class UserSection:
    """Somebody, and what they are called on the clusters."""

    accounts: dict[str, str] = field(default_factory=dict)
    """By cluster."""
    role: Role = Role.USER
    """What they may do, where they come in by something that says no other."""
    groups: list[UserName] = field(default_factory=list)
    """For limits."""
    home: str = ""
    """The cluster whose user they count as; by default the one where they have an account, if it is one."""


@dataclass(frozen=True)
class OidcSection(Provider):
    """An OpenID provider whose bearer tokens are taken."""

    users: dict[str, UserName] = field(default_factory=dict)
    jwks_uri: ProviderUri | None = None
    jwks_file: AbsolutePath | None = None
    pattern: UserPattern | None = None
    authorization_endpoint: ProviderUri | None = None
    token_endpoint: ProviderUri | None = None
    client_secret: Secret | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.authorization_endpoint is None) != (self.token_endpoint is None):
            raise ValueError("give authorization_endpoint and token_endpoint, or neither")
        if (self.jwks_uri is None) == (self.jwks_file is None):
            raise ValueError("give jwks_uri or jwks_file: where the provider's keys are")
        if not self.users and self.pattern is None:
            raise ValueError("give users or pattern: whose a token is")
        if bool(self.roles) != (self.role_claim is not None):
            raise ValueError("give role_claim and roles, or neither")


@dataclass(frozen=True)
class MpiSection(Mpi):
    """Open MPI on one cluster: where it is, and over which of a node's networks it may speak."""

    prefix: str | None = None
    """Where it is installed, with ``bin/mpirun`` below; by default the first ``mpirun`` on the nodes' ``PATH``."""
    interface: Network | None = None
    """Network that other clusters' nodes can reach, as CIDR (``198.18.0.0/24``) or name (``ib0``)."""
    ports: Ports | None = None
    """Ports that other clusters' nodes can reach, as ``FIRST-LAST``."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Further MCA parameters of Open MPI's own (``btl_tcp_links: "2"``)."""


@dataclass(frozen=True)
class ClusterSection(ClusterProfile, SiteSettings):
    """One cluster: what the scheduler goes by, what its agent takes as it is, and what only the daemon or nobody else
    than its start needs. ``nodes`` and ``network`` are for the kind ``local``: N nodes of this machine."""

    speed: Annotated[float, Field(gt=0)] = 1.0
    """Of its nodes, as against those of the other clusters."""
    uplink_bandwidth: Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, allow_inf_nan=False)] | None = None
    """Bytes per second of its link to all other clusters together; also as ``1Gbit`` or ``100MB``. By default what was
    measured of its links."""
    token: Secret | None = field(default=None, repr=False)
    """What the cluster's agent must show to be let in."""
    user: UserName | None = None
    """Of the identity ``own``: whose jobs alone run there."""
    unmapped: bool = False
    """Whether accounts of this cluster that belong to nobody of ``users`` may come, as ``ACCOUNT@CLUSTER``."""
    refused_accounts: list[str] = field(default_factory=list)
    """Accounts of this cluster that get no login, whoever they are."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the environment of every program there; ``PATH`` entries go first."""
    embedded: bool | None = None
    """Whether the daemon starts the agent itself; by default for the kind ``local``."""
    mpi: MpiSection = MpiSection()
    python: str | None = None
    """Python 3.9 or newer that runs our runner on the nodes; by default the agent's own."""
    runner_address: str | None = None
    """Address of the head node on which the agent listens for its nodes; by default the head's own."""
    replica_directories: list[AbsolutePath] = field(default_factory=list)
    """Folders below which replicas may lie, as the head node sees them; nothing else is read for other sites.

    Of the kind ``local``, by default the folder ``replicas`` in the cluster's directory.
    """
    stage_directory: AbsolutePath | None = None
    """Where components get folders of their own for the files they need, which the nodes must see under this path.

    By default the folder ``stages`` in the agent's directory.
    """
    transfer_address: str | None = None
    """Address at which other sites' head nodes reach this one to pull files; by default the head's own."""
    lease: LeaseSetting | None = None
    """Seconds for which jobs go on there while the daemon is silent, before they end there and are tried again, or
    ``none``; by default as ``lease`` says for all clusters."""

    @property
    def is_embedded(self) -> bool:
        return self.lrm.on_this_host if self.embedded is None else self.embedded


@dataclass(frozen=True)
class TlsSection:
    """The daemon's own TLS; without it plain HTTP is spoken."""

    certificate: AbsolutePath | None = None
    """File with the daemon's certificate in PEM, and after it those that lead to its authority."""
    key: AbsolutePath | None = None
    """File with its key, which nobody else may read."""


@dataclass(frozen=True)
class TracingSection:
    """Where jobs' ways are sent as spans of OpenTelemetry's, each when it is over."""

    endpoint: CollectorUrl | None = None
    """Address of a collector that takes OTLP by HTTP, as ``http://127.0.0.1:4318/v1/traces``; needs the extra
    ``tracing``. Without it nothing is sent."""


@dataclass(frozen=True)
class LinkSection:
    """What is known of the network between two clusters, or within one (``between: [north, north]``)."""

    between: tuple[str, str]
    """The two clusters; of the network within one, it twice."""
    latency: Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds; also as ``0.5ms``."""
    bandwidth: Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, allow_inf_nan=False)] | None = None
    """Bytes per second; also as ``1Gbit`` or ``100MB``."""
    encrypted: bool | None = None
    """Whether files that go over it are encrypted; by default as ``encrypt_transfers`` says."""


class EnvironmentSource(EnvSettingsSource):
    """Variables for fields of sections that are plain dataclasses: which of them hold lists and objects, as JSON."""

    def next_field(
        self, field: FieldInfo | Any | None, key: str, case_sensitive: bool | None = None
    ) -> FieldInfo | None:
        kind = field.annotation if isinstance(field, FieldInfo) else field
        if not is_dataclass(kind):
            return super().next_field(field, key, case_sensitive)
        types: dict[str, Any] = {own.name: own.type for own in fields(kind)}
        return FieldInfo.from_annotation(types[key]) if key in types else None


class Settings(BaseSettings):
    """Everything a daemon or an agent is told."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=DELIMITER, extra="forbid", frozen=True, str_max_length=MAX_TEXT_LENGTH
    )

    database: str | None = None
    """Database URL; by default SQLite in the data directory."""
    tokens: list[Annotated[TokenSection, BeforeValidator(_with_a_user)]] = []
    """Beside the daemon's own, which this account's commands find by themselves, and those that it was asked for."""
    users: dict[UserName, UserSection] = {}
    """Who is who on which cluster."""
    login_lifetime: float = Field(default=8 * 3600.0, ge=60, le=30 * 86400)
    """Seconds for which a login holds that a cluster's agent vouched for."""
    trusted_logins: list[str] = []
    """Clusters whose agents may vouch for operators and administrators; others for users only."""
    public_url: str | None = None
    """Where users reach the daemon, if not where agents do: told to who logs in."""
    oidc: OidcSection | None = None
    """Whose bearer tokens are taken beside."""
    limits: LimitSettings = LimitSettings()
    """What users and groups may have at most."""
    limits_contact: str = ""
    """Where more is asked for, as text for people."""
    allowed_hosts: list[HostName] = []
    """Names by which the daemon may be addressed beside IP addresses, ``localhost`` and this machine's own names."""
    tls: TlsSection = TlsSection()
    behind_proxy: list[Proxy] = []
    """Addresses and networks of proxies that speak TLS for the daemon, whose word counts on who asks."""
    lease: LeaseSetting = DEFAULT_LEASE
    """Seconds for which jobs on a cluster go on while the daemon is silent, before they end there and are tried again;
    ``none``: they go on until the agent, the walltime or an operator ends them."""
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
    high_priority: HighPriority = HighPriority()
    """Who may give jobs high priority, by which they preempt others: operators, unless it is allowed to more."""
    forecast_interval: float | None = Field(default=600.0, ge=1, le=30 * 86400.0, allow_inf_nan=False)
    """Seconds after which the daemon foretells by itself, while jobs wait, when they will start, so that it is known
    how right that is; null: only when somebody asks."""
    audit_keep: float | None = Field(default=365 * 86400.0, ge=86400, allow_inf_nan=False)
    """Seconds for which it is kept who did what; null: for ever."""
    open_metrics: bool = False
    """Whether ``/metrics`` is told to who shows no token, too."""
    background_load: bool = False
    """Whether experiments may load clusters past the scheduler, as local users do."""
    log_level: LogLevel = "info"
    """What weighs less is not logged; agents that the daemon starts tell of ``warning`` and worse, unless this is
    ``debug``."""
    log_format: LogFormat = "console"
    """How a line of the log is written: for people, or as one JSON object."""
    tracing: TracingSection = TracingSection()
    rules: Rules = Rules()
    links: list[LinkSection] = []
    encrypt_transfers: bool = True
    """Whether files go from site to site by TLS; both sides must say otherwise for them to go in clear."""
    network: MeasurementSettings = MeasurementSettings()
    disks: DiskLimits = DiskLimits()
    record: Recording = Recording()
    alerts: AlertRules = AlertRules()
    notifications: NotificationSection = NotificationSection()
    clusters: dict[ClusterKey, ClusterSection] = {
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
        return EnvironmentSource(settings_cls), init_settings

    def known_users(self) -> Users:
        """``UsageError`` for unknown clusters, and for an account that is given to two people."""
        for name, section in self.users.items():
            for cluster in section.accounts.keys() - self.clusters.keys():
                raise UsageError(
                    f"users.{name}.accounts: there is no cluster {cluster}",
                    field=f"users.{name}.accounts",
                    value=cluster,
                    hint=suggest_names(cluster, self.clusters),
                )
            if section.home:
                check_cluster(section.home, self.clusters, f"users.{name}.home")
        named = {name: User(own.accounts, own.role, tuple(own.groups), own.home) for name, own in self.users.items()}
        try:
            return Users(named, [name for name, section in self.clusters.items() if section.unmapped])
        except ValueError as error:
            raise UsageError(f"users: {error}", field="users", hint="give each account to one person") from error

    def known_accounts(self) -> Accounts:
        """Where jobs of an owner may run, and as which account; ``UsageError`` as for ``known_domains``."""
        return Accounts(self.known_users(), self.known_domains())

    def known_domains(self) -> dict[str, Domain]:
        """Whose processes the clusters' jobs are; ``UsageError`` for a cluster that is nobody's own."""
        domains = {}
        for name, section in self.clusters.items():
            field = f"clusters.{name}.user"
            if section.identity == "own" and section.user is None:
                raise UsageError(
                    f"{field} is missing: of the identity own it says whose jobs run there",
                    field=field,
                    hint="name one",
                )
            if section.identity != "own" and section.user is not None:
                hint = "leave it out, or make the identity own"
                raise UsageError(f"{field} is for the identity own only", field=field, value=section.user, hint=hint)
            domains[name] = Domain(section.identity, section.user or "")
        return domains

    def check_people(self) -> None:
        """``UsageError`` for what is wrong with who is who."""
        self.known_accounts()
        for index, name in enumerate(self.trusted_logins):
            check_cluster(name, self.clusters, f"trusted_logins[{index}]")

    def check_coallocation(self) -> None:
        """Check which clusters share jobs. ``UsageError`` for unknown ones, and for too many sets of those that may."""
        for name, section in self.clusters.items():
            for index, other in enumerate(section.coallocate_with or ()):
                check_cluster(other, self.clusters, f"clusters.{name}.coallocate_with[{index}]")
        for one_series in (False, True):
            if len(list(islice(find_largest_sets(self.clusters, one_series=one_series), MAX_SETS + 1))) > MAX_SETS:
                raise UsageError(
                    f"coallocate_with makes more than {MAX_SETS} sets of clusters that may share a job",
                    field="clusters",
                    hint="let clusters that allow almost the same ones allow the same ones",
                )

    def local_networks(self) -> dict[str, str]:
        """Return the network of each cluster of this machine's nodes, by cluster.

        One that names none gets 127.0.K as the K-th cluster by name, or the first that no cluster has. ``UsageError``
        for a network that two clusters name: their nodes would be the same.
        """
        local = sorted(name for name, section in self.clusters.items() if section.lrm.on_this_host)
        networks: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name in local:
            if network := self.clusters[name].network:
                other = owners.setdefault(network, name)
                if other != name:
                    field = f"clusters.{name}.network"
                    raise UsageError(
                        f"{field} is {network}, as is that of cluster {other}: their nodes would be the same",
                        field=field,
                        value=network,
                        hint="give each cluster a network of its own, or leave it out",
                    )
                networks[name] = network
        free = (network for number in count(1) if (network := _network(number)) not in owners)
        for number, name in enumerate(sorted(self.clusters), 1):
            if name in local and name not in networks:
                default = _network(number)
                networks[name] = default if default not in owners else next(free)
                owners[networks[name]] = name
        return networks

    def encrypted_links(self, cluster: str) -> dict[str, bool]:
        """What is said of links of a cluster in particular, by the cluster at the other end."""
        told = {}
        for section in self.links:
            if section.encrypted is not None and cluster in section.between:
                one, other = section.between
                told[other if one == cluster else one] = section.encrypted
        return told

    def known_links(self) -> dict[ClusterPair, Link]:
        """The links by their clusters' names in order; ``UsageError`` for unknown clusters and for one given twice."""
        found: dict[ClusterPair, Link] = {}
        told: set[ClusterPair] = set()
        for index, section in enumerate(self.links):
            field = f"links[{index}]"
            for place, name in enumerate(section.between):
                if name not in self.clusters:
                    raise UsageError(
                        f"{field}.between[{place}]: there is no cluster {name}",
                        field=f"{field}.between[{place}]",
                        value=name,
                        hint=suggest_names(name, self.clusters),
                    )
            one, other = pair = pair_of(*section.between)
            if pair in told:
                raise UsageError(
                    f"{field}.between: the link between {one} and {other} was given before",
                    field=f"{field}.between",
                    value=list(section.between),
                    hint="leave one out",
                )
            if section.latency is None and section.bandwidth is None and section.encrypted is None:
                raise UsageError(f"{field}: neither latency nor bandwidth is given", field=field, hint="give either")
            told.add(pair)
            if (link := Link(section.latency, section.bandwidth)) != Link():
                found[pair] = link
        return found


def _network(number: int) -> str:
    return f"127.{number // 256}.{number % 256}"


def proxies(given: Sequence[str]) -> list[str]:
    """Those of the command line; ``UsageError``."""
    try:
        return [proxy(text.strip()) for text in given]
    except ValueError as error:
        raise UsageError(
            f"--behind-proxy: {error}",
            field="--behind-proxy",
            value=",".join(given),
            hint="give the addresses from which the proxies ask, with commas between",
        ) from error


OF_COMMANDS = (
    "AGENT_DIRECTORY",
    "AGENT_TOKEN",
    "CA_FILE",
    "CONFIG",
    "DATA_DIR",
    "LOGIN_SOCKET",
    "RESULTS",
    "SERVE_HOST",
    "TOKEN",
    "TRACES",
    "URL",
)
"""Variables after ``KOALA_`` that commands and units read, and no setting has."""
OF_JOBS = (
    "CLUSTER",
    "COMPONENT",
    "COMPONENT_NODES",
    "GENERATION",
    "HOST",
    "HOSTS",
    "JOB",
    "NODE",
    "NODES",
    "NODE_INDEX",
    "SCRATCH",
    "STAGE",
)
"""Variables after ``KOALA_`` that programs of jobs find, and all that they start."""
OF_LOCAL_KIND = {"nodes", "network", "start_failures"}
"""Settings of a cluster that say without ``kind`` that it is nodes of this machine."""
OF_OTHER_KINDS = {
    "account",
    "fanout",
    "library",
    "native_specification",
    "parallel_environment",
    "partition",
    "poll_interval",
    "queue",
}
"""Settings of a cluster that its nodes being of this machine has no use for."""
MIN_LIKENESS = 0.8
"""From 0 to 1: how like a setting's name a variable is that is taken for a misspelt one."""


MAX_SIZE = 16 * 1024 * 1024
"""Bytes of a configuration file."""
NOT_READ = (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError)
"""What is raised for a file that cannot be read; some by YAML's reader, of odd numbers, dates and tags."""


def _content(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_SIZE + 1)
    if len(content) > MAX_SIZE:
        raise ValueError(f"it is larger than {MAX_SIZE} bytes")
    return content.decode("utf-8")


def read_file(path: Path) -> dict[str, Any]:
    """Return what stands in a configuration file, unchecked. ``UsageError`` for a file that cannot be read."""
    try:
        values = load_yaml(_content(path)) or {}
    except NOT_READ as error:
        raise UsageError(f"cannot read {path}: {error}", field="--config") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold fields and values, not a {type(values).__name__}", field="--config")
    for key in values:
        if not isinstance(key, str) or key.startswith("_"):  # such keys would be orders to the reader itself
            raise UsageError(f"{path}: {key!r} is no field", field=str(key), hint="leave it out")
    return values


def load(path: Path | None) -> Settings:
    """Read a configuration file; a bad one is a ``UsageError`` that names the field."""
    values = {} if path is None else read_file(path)
    _refuse_misspelt_variables()
    try:
        settings = Settings(**values)
        _check_kinds(values, path)
        return settings
    except SettingsError as error:
        raise UsageError(f"{error}: lists and objects are given as JSON", field="environment") from error
    except ValidationError as error:
        raise refusal(Settings, error.errors(), path) from error


def unknown_variables() -> list[str]:
    """Return the variables of the environment that begin with ``KOALA_`` and that nothing reads."""
    known = {*OF_COMMANDS, *OF_JOBS, *map(str.upper, Settings.model_fields)}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper().removeprefix(PREFIX).partition(DELIMITER)[0] not in known
    )


def _refuse_misspelt_variables() -> None:
    settings = [name.upper() for name in Settings.model_fields]
    for name in unknown_variables():
        section, delimiter, rest = name.upper().removeprefix(PREFIX).partition(DELIMITER)
        if near := get_close_matches(section, settings, 1, MIN_LIKENESS):
            raise UsageError(
                f"{name} in the environment is no setting",
                field=name,
                hint=f"did you mean {PREFIX}{near[0]}{delimiter}{rest}? Correct it, or unset it",
            )


def _check_kinds(values: Mapping[str, Any], path: Path | None) -> None:
    """``UsageError`` for a cluster without ``kind`` that is not clearly meant to be nodes of this machine."""
    sources = [source.get("clusters") or {} for source in (values, EnvironmentSource(Settings)())]
    for name in dict.fromkeys(name for source in sources for name in source):
        given = {key for source in sources for key in source.get(name) or {}}
        if given and "kind" not in given and (given & OF_OTHER_KINDS or not given & OF_LOCAL_KIND):
            raise UsageError(
                f"{path or 'the environment'}: clusters.{name}.kind is missing",
                field=f"clusters.{name}.kind",
                hint="say which resource manager it has: slurm, sge or drmaa; or local, for nodes of this machine",
            )
